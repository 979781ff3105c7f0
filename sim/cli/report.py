"""``hedgerow report``: runs as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import Costs, Metrics, Paths, bad_options, load_results, name_and_number

__all__ = ["report"]


def report(
    paths: Paths,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html",
            help="Output file. Default: report.html in the folder of the run or sweep; for several, here.",
        ),
    ] = None,
    x: Costs = None,
    y: Metrics = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="Y=VALUE", help="Also compare the cost of reaching this. Repeatable."),
    ] = None,
) -> None:
    """Write one page of runs: curves, tables, traffic by link, lost replies, settings."""
    from hedgerow.wire.extras import needed

    needed("matplotlib", "plots")
    from hedgerow.sim.runs.hooks import drawn_network
    from hedgerow.sim.runs.report import write_report

    with bad_options():
        if out is not None and out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--out must be a file whose name ends with .html, got {str(out)!r}")
        targets = dict(name_and_number("--target", one) for one in target or [])
        results = load_results(paths)
        out = out or (results.folder or Path.cwd()) / "report.html"
        written = write_report(results, out, xs=x or (), ys=y or (), targets=targets, network=drawn_network)
    typer.echo(written)
