"""``hedgerow plot``: curves of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import Costs, Metrics, Paths, bad_options, load_results

__all__ = ["plot"]


def plot(
    paths: Paths,
    x: Costs = None,
    y: Metrics = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="FILE.png, FILE.svg or FILE.pdf; without a suffix all three. Default: in the folder of "
            "the run or sweep; for several, here."
        ),
    ] = None,
    log_x: Annotated[bool, typer.Option("--log-x", help="Draw x on a logarithmic scale.")] = False,
    log_y: Annotated[bool, typer.Option("--log-y", help="Draw y on a logarithmic scale.")] = False,
    by: Annotated[
        str | None, typer.Option(metavar="KEY", help="One column of panels for each value of this setting.")
    ] = None,
    differences: Annotated[
        bool | None,
        typer.Option(
            "--differences/--no-differences",
            help="Also plot paired differences from the first variant. Default: the sweep's setting.",
        ),
    ] = None,
) -> None:
    """Draw each variant's mean and band over its seeds: a panel for each pair of x and y."""
    from hedgerow.wire.extras import needed

    needed("matplotlib", "plots")
    from hedgerow.sim.runs.plot import default_path, draw, save

    with bad_options():
        results = load_results(paths, y)
        xs, ys = x or results.xs, y or results.ys
        by = results.by if by is None else by
        differences = results.differences if differences is None else differences
        figure = draw(results, xs, ys, log_x=log_x, log_y=log_y, by=by, differences=differences)
        written = save(figure, out or default_path(results, xs, ys))
    for path in written:
        typer.echo(path)
