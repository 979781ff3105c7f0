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
    from hedgerow.sim.runs.measured import groups, measured

    with bad_options():
        results = load_results(paths, y)
        budgets = dict([name_and_number("--budget", budget)]) if budget else {}
        xs = x or list(budgets) or results.xs
        ys, parts = y or results.ys, []
        for group in groups(results, ys):
            parts += [f"## {group.title}"] + [
                budget_table(group, a, b, budgets[a] if a in budgets else common_budget(group, a), column)
                for a in xs
                for b in ys
            ]
            if target:
                metric, value = name_and_number("--target", target)
                parts += [target_table(group, a, metric, value) for a in xs]
            parts += [" ".join(measured(group, ys))]
    parts += [NOTE, f"Realism: {results.realism or 'not stated'}."]
    typer.echo("\n\n".join(filter(None, parts)))
