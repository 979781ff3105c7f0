"""``hedgerow data``: which data sets are here."""

from __future__ import annotations

from typing import Annotated

import typer

from hedgerow.sim.cli.options import bad_options

__all__ = ["data"]


def data(
    data_dir: Annotated[
        str | None, typer.Option(help="Folder to look in. Default: the variable HEDGEROW_DATA_DIR.")
    ] = None,
) -> None:
    """List the known data sets, images, tables and series: where each was found, or how to get it."""
    from hedgerow.tasks import catalogue, vertical_catalogue

    with bad_options():
        entries = [*catalogue(data_dir), *vertical_catalogue(data_dir)]
    for entry in entries:
        typer.echo(f"{entry.name}: {entry.description} ({entry.size})")
        where = f"found in {entry.found_at}" if entry.found_at else f"not here: {entry.how_to_get}"
        typer.echo(f"    {where}")
