"""``hedgerow data``: which data sets are here."""

from __future__ import annotations

from typing import Annotated

import typer

from hedgerow.sim.cli.options import bad_options
from hedgerow.wire.printable import shown

__all__ = ["data"]

# The classes that fetch a set, by its name here.
_TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}


def data(
    data_dir: Annotated[
        str | None, typer.Option(help="Folder to look in. Default: the variable HEDGEROW_DATA_DIR.")
    ] = None,
    download: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Fetch mnist, fashion-mnist or cifar10 into --data-dir with torchvision."
        ),
    ] = None,
) -> None:
    """List the known data sets, images, tables and series: where each was found, or how to get it."""
    from hedgerow.tasks import catalogue, vertical_catalogue

    if download is not None:
        with bad_options():
            _download(download, data_dir)
        return
    with bad_options():
        entries = [*catalogue(data_dir), *vertical_catalogue(data_dir)]
    for entry in entries:
        typer.echo(f"{entry.name}: {entry.description} ({entry.size})")
        where = f"found in {entry.found_at}" if entry.found_at else f"not here: {entry.how_to_get}"
        typer.echo(f"    {where}")


def _download(name: str, data_dir: str | None) -> None:
    """Let torchvision fetch a data set; ValueError with the line to run where it cannot be loaded here."""
    from hedgerow.tasks.datasets import resolve_data_dir
    from hedgerow.wire.checks import did_you_mean, plain_name

    known = next((one for one in _TORCHVISION if plain_name(one) == plain_name(name)), None)
    if known is None:
        meant = did_you_mean(name, _TORCHVISION)
        meant = f" ({meant})" if meant else ""
        raise ValueError(f"--download must be one of {', '.join(_TORCHVISION)}, got {name!r}{meant}")
    folder = resolve_data_dir(data_dir)
    if folder is None:
        raise ValueError("--download needs --data-dir FOLDER, or the variable HEDGEROW_DATA_DIR")
    call = f"torchvision.datasets.{_TORCHVISION[known]}({str(folder)!r}, download=True)"
    try:
        import torchvision
    # Its binary may not go with the torch that is here, which is a RuntimeError or worse.
    except Exception as error:
        raise ValueError(
            f"torchvision cannot be loaded here ({type(error).__name__}: {shown(error, 120)}). In an "
            f'environment that has it, run: python -c "import torchvision; {call}"'
        ) from error
    try:
        getattr(torchvision.datasets, _TORCHVISION[known])(str(folder), download=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"torchvision could not fetch {known} ({type(error).__name__}: {shown(error, 120)}). Where there "
            f'is internet, run: python -c "import torchvision; {call}", and copy that folder here'
        ) from error
    typer.echo(f"{known} is in {folder}. Runs find it there: -c \"dataset={known} data-dir='{folder}'\"")
