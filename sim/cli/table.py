"""``hedgerow table``: variants compared, in markdown."""

from __future__ import annotations

from typing import Annotated

import typer

from hedgerow.sim.cli.options import Costs, Metrics, Paths, bad_options, load_results, name_and_number

__all__ = ["table"]


def table(
    paths: Paths,
    x: Costs = None,
    y: Metrics = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="X=VALUE", help="Compare at this cost. Default: the largest that all runs reached."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Another column: a cost or a metric at that cost, 'payload-bytes client->server' for one "
            "link. Repeatable. Default: the sweep's."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="Y=VALUE", help="Compare the cost of reaching this."),
    ] = None,
) -> None:
    """Compare variants in markdown: values at a budget, cost to a target, paired differences over seeds."""
    from hedgerow.sim.runs.compare import NOTE, budget_table, common_budget, target_table

    with bad_options():
        results = load_results(paths, y)
        budgets = dict([name_and_number("--budget", budget)]) if budget else {}
        xs = x or list(budgets) or results.xs
        parts = [
            budget_table(results, a, b, budgets[a] if a in budgets else common_budget(results, a), column)
            for a in xs
            for b in y or results.ys
        ]
        if target:
            metric, value = name_and_number("--target", target)
            parts += [target_table(results, a, metric, value) for a in xs]
    typer.echo(
        "\n\n".join([f"## {results.title}", *parts, NOTE, f"Realism: {results.realism or 'not stated'}."])
    )
