"""The command line: a command has the file of its name, or shares one with its like.

Each command imports its dependencies when it runs, so that ``hedgerow --help`` is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import click
import typer

from hedgerow.sim.cli.check import check
from hedgerow.sim.cli.data import data
from hedgerow.sim.cli.deploy import deploy_keys, deploy_local, deploy_split
from hedgerow.sim.cli.export import export
from hedgerow.sim.cli.mistakes import Command, CommandGroup
from hedgerow.sim.cli.new import new
from hedgerow.sim.cli.node import node
from hedgerow.sim.cli.plan import PlanGroup
from hedgerow.sim.cli.predict import evaluate, predict
from hedgerow.sim.cli.run import run
from hedgerow.sim.cli.settings import settings
from hedgerow.sim.cli.sweep import sweep
from hedgerow.sim.cli.views import plot, report, runs, table, watch
from hedgerow.sim.runs.hooks import descriptions

_EXAMPLES = """Apps:
{apps}

Examples:
  hedgerow run APP                     the app as it comes
  hedgerow run APP -c "seed=1"         with other settings
  hedgerow settings APP                all settings and what is valid
  hedgerow runs                        a list of all runs so far
  hedgerow report runs                 all runs so far as one page
  hedgerow new APP my-app              an app with your model and data"""


class _Main(CommandGroup):
    """The commands; their help ends with the suite's apps and examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog."""
        apps = (f"  {name:17}{words}" for name, words in descriptions().items())
        self.epilog = _EXAMPLES.format(apps="\n".join(apps))
        super().format_epilog(ctx, formatter)


app = typer.Typer(
    cls=_Main,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    "Look at runs": (runs, report, watch, plot, table, evaluate, export),
    "Apps and data": (new, settings, data, check),
}
_DEPLOY = "Deploy and plan"
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(cls=Command, rich_help_panel=panel)(command)

# Unknown options are passed to flower-supernode.
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
    cls=PlanGroup, no_args_is_help=True, help="Plan a run by a paper's formulas, before it starts."
)
app.add_typer(plans, name="plan", rich_help_panel=_DEPLOY)
