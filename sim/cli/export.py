"""``hedgerow export``: runs for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import Paths, bad_options, load_results

__all__ = ["export"]


def export(
    paths: Paths,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="One row for every measured value.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="All runs in one file that `plot` and `table` read."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="A TensorBoard log per run (an extra)."),
    ] = None,
) -> None:
    """Write runs for other tools: a CSV file, one JSON file, or TensorBoard logs."""
    from hedgerow.sim.runs.collected import write_collected
    from hedgerow.sim.runs.export import write_csv, write_tensorboard

    with bad_options():
        if csv is None and json is None and tensorboard is None:
            raise ValueError("nothing to write: give --csv FILE, --json FILE or --tensorboard FOLDER")
        results = load_results(paths)
        if csv is not None:
            typer.echo(f"{csv}: {write_csv(results, csv)} rows")
        if json is not None:
            typer.echo(f"{json}: {write_collected(results, json)} runs")
        if tensorboard is not None:
            typer.echo(f"{tensorboard}: {write_tensorboard(results, tensorboard)} logs")
