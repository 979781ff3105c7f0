"""The command line: ``hedgerow run <app>``, and the instruments for many runs. One file a command.

Each command imports what it needs when it runs, so that ``hedgerow --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from hedgerow.sim.cli.check import check
from hedgerow.sim.cli.data import data
from hedgerow.sim.cli.deploy import deploy_keys, deploy_local, deploy_split
from hedgerow.sim.cli.evaluate import evaluate
from hedgerow.sim.cli.export import export
from hedgerow.sim.cli.mistakes import Command, CommandGroup
from hedgerow.sim.cli.new import new
from hedgerow.sim.cli.node import node
from hedgerow.sim.cli.plan_hsgd import plan_hsgd
from hedgerow.sim.cli.plan_sd_feel import plan_sd_feel
from hedgerow.sim.cli.plan_similarity_free import plan_similarity_free
from hedgerow.sim.cli.plot import plot
from hedgerow.sim.cli.predict import predict
from hedgerow.sim.cli.report import report
from hedgerow.sim.cli.run import run
from hedgerow.sim.cli.settings import settings
from hedgerow.sim.cli.sweep import sweep
from hedgerow.sim.cli.table import table
from hedgerow.sim.cli.watch import watch

__all__ = ["APPS", "app"]

# The suite's apps and what each is for.
APPS = {
    "sd-feel": "edge servers that average their clients and gossip with their neighbours",
    "similarity-free": "compressed updates with error feedback, on data of any heterogeneity",
    "fedmud": "updates as low-rank factors, for slow uplinks",
    "ceps": "gossip without a server, by one-bit compressed sensing",
    "hsgd": "hospitals and devices that hold different features of the same people",
}
_EXAMPLES = """Apps:
{apps}

Examples:
  hedgerow run sd-feel                              the app as it comes
  hedgerow run sd-feel -c "tau1=10 iterations=100"  with other settings
  hedgerow settings sd-feel                         all settings and what is valid
  hedgerow report runs                              all runs so far as one page
  hedgerow new sd-feel my-app                       an app with your model and data"""

app = typer.Typer(
    cls=CommandGroup,
    epilog=_EXAMPLES.format(apps="\n".join(f"  {name:17}{words}" for name, words in APPS.items())),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"hedgerow {version('hedgerow')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated-learning methods as Flower apps."""


_PANELS: dict[str, Sequence[Callable[..., None]]] = {
    "Run": (run, sweep, predict),
    "Look at runs": (report, watch, plot, table, evaluate, export),
    "Apps and data": (new, settings, data, check),
}
_DEPLOY = "Deploy and plan"
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=panel)(command)

# What it does not know is flower-supernode's.
app.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    rich_help_panel=_DEPLOY,
)(node)

deploy = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Run an app on SuperNodes instead of simulating them."
)
deploy.command("local", cls=Command)(deploy_local)
deploy.command("keys", cls=Command)(deploy_keys)
deploy.command("split", cls=Command)(deploy_split)
app.add_typer(deploy, name="deploy", rich_help_panel=_DEPLOY)

plans = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Plan a run by a paper's formulas, before it starts."
)
plans.command("sd-feel", cls=Command)(plan_sd_feel)
plans.command("similarity-free", cls=Command)(plan_similarity_free)
plans.command("hsgd", cls=Command)(plan_hsgd)
app.add_typer(plans, name="plan", rich_help_panel=_DEPLOY)
