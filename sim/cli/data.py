"""``hedgerow data``: lists the known data sets, and downloads those that a package provides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import bad_options
from hedgerow.wire.printable import shown

if TYPE_CHECKING:
    from hedgerow.tasks import CatalogueEntry

# The extra that installs a package.
_EXTRAS = {"torchvision": "vision", "scikit-learn": "sim"}


def data(
    data_dir: Annotated[
        str | None, typer.Option(help="Folder to look in. Default: the variable HEDGEROW_DATA_DIR.")
    ] = None,
    download: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Fetch this set into --data-dir with the package that provides it."
        ),
    ] = None,
) -> None:
    """List the known data sets (images, tables, series): where each was found, or how to get it."""
    from hedgerow.sim.runs.hooks import data_sets
    from hedgerow.tasks import catalogue

    with bad_options():
        entries = catalogue(data_dir, data_sets())
        if download is not None:
            _download(_named(download, entries), data_dir)
            return
    for entry in entries:
        typer.echo(f"{entry.name}: {entry.description} ({entry.size})")
        where = f"found in {entry.found_at}" if entry.found_at else f"not here: {entry.how_to_get}"
        typer.echo(f"    {where}")


def _named(name: str, entries: list[CatalogueEntry]) -> CatalogueEntry:
    from hedgerow.wire.checks import did_you_mean, plain_name

    for entry in entries:
        if plain_name(entry.name) == plain_name(name):
            return entry
    names = [entry.name for entry in entries]
    meant = did_you_mean(name, names)
    meant = f" ({meant})" if meant else ""
    raise ValueError(f"--download must be one of {', '.join(names)}, got {name!r}{meant}")


def _download(entry: CatalogueEntry, data_dir: str | None) -> None:
    """Download a data set with its package; ValueError with instructions if that is not possible."""
    from hedgerow.tasks.sources import resolve_data_dir

    name, fetch = entry.name, entry.fetch
    if fetch is None:
        if entry.found_at is None:
            raise ValueError(f"{name} cannot be downloaded automatically: {entry.how_to_get}")
        typer.echo(f"{name} was found in {entry.found_at}")
        return
    folder = resolve_data_dir(data_dir)
    if folder is None:
        raise ValueError("--download requires --data-dir FOLDER or the variable HEDGEROW_DATA_DIR")
    try:
        fetch(folder)
    except ModuleNotFoundError as error:
        wanted = f"'hedgerow[{_EXTRAS[fetch.package]}]'" if fetch.package in _EXTRAS else fetch.package
        raise ValueError(
            f"{name} is fetched with {fetch.package}, which is not installed ({error}): pip install {wanted} "
            f'here; or on a machine with it: python -c "{fetch.line(folder)}", then copy that folder here'
        ) from error
    # A torchvision that does not match the installed torch raises RuntimeError or worse.
    except Exception as error:
        raise ValueError(
            f"{fetch.package} could not fetch {name} ({type(error).__name__}: {shown(error, 120)}). On a "
            f'machine with this package and internet access, run: python -c "{fetch.line(folder)}", then '
            "copy that folder here"
        ) from error
    typer.echo(f"{name} is in {folder}. To use it: -c \"dataset={name} data-dir='{folder}'\"")
