"""The command line: ``hedgerow run <app>``, and the instruments for many runs. One file a command.

Each command imports what it needs when it runs, so that ``hedgerow --help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hedgerow.sim.cli.check import check
from hedgerow.sim.cli.data import data
from hedgerow.sim.cli.deploy import deploy_keys, deploy_local, deploy_split
from hedgerow.sim.cli.export import export
from hedgerow.sim.cli.mistakes import Command, Group
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

__all__ = ["app"]

app = typer.Typer(
    cls=Group,
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


for command in (run, new, check, settings, data, predict, sweep, plot, table, report, watch, export):
    app.command(cls=Command)(command)

# What it does not know is flower-supernode's.
app.command(cls=Command, context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})(
    node
)

deploy = typer.Typer(
    cls=Group, no_args_is_help=True, help="Run an app on SuperNodes instead of simulating them."
)
deploy.command("local", cls=Command)(deploy_local)
deploy.command("keys", cls=Command)(deploy_keys)
deploy.command("split", cls=Command)(deploy_split)
app.add_typer(deploy, name="deploy")

plans = typer.Typer(
    cls=Group, no_args_is_help=True, help="Plan a run by a paper's formulas, before it starts."
)
plans.command("sd-feel", cls=Command)(plan_sd_feel)
plans.command("similarity-free", cls=Command)(plan_similarity_free)
plans.command("hsgd", cls=Command)(plan_hsgd)
app.add_typer(plans, name="plan")
