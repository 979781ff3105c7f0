"""The command line: ``hedgerow run <app>``, and the instruments for many runs. One file a command.

Each command imports what it needs when it runs, so that ``hedgerow --help`` answers at once.
"""

from __future__ import annotations

import typer

from hedgerow.sim.cli.data import data
from hedgerow.sim.cli.deploy import deploy_keys, deploy_local
from hedgerow.sim.cli.export import export
from hedgerow.sim.cli.plan_hsgd import plan_hsgd
from hedgerow.sim.cli.plan_sd_feel import plan_sd_feel
from hedgerow.sim.cli.plan_similarity_free import plan_similarity_free
from hedgerow.sim.cli.plot import plot
from hedgerow.sim.cli.run import run
from hedgerow.sim.cli.settings import settings
from hedgerow.sim.cli.sweep import sweep
from hedgerow.sim.cli.table import table

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def main() -> None:
    """Federated-learning methods as Flower apps."""


for command in (run, settings, data, sweep, plot, table, export):
    app.command()(command)

deploy = typer.Typer(no_args_is_help=True, help="Run an app on SuperNodes instead of simulating them.")
deploy.command("local")(deploy_local)
deploy.command("keys")(deploy_keys)
app.add_typer(deploy, name="deploy")

plans = typer.Typer(no_args_is_help=True, help="Plan a run by a paper's formulas, before it starts.")
plans.command("sd-feel")(plan_sd_feel)
plans.command("similarity-free")(plan_similarity_free)
plans.command("hsgd")(plan_hsgd)
app.add_typer(plans, name="plan")
