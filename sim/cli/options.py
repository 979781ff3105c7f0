"""What several commands share: options, exit codes of bad input and of interruptions, reading of results."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.wire.ordinary import ORDINARY, is_ordinary

if TYPE_CHECKING:
    from hedgerow.sim.runs.results import Results

__all__ = [
    "AppPath",
    "Costs",
    "Metrics",
    "Paths",
    "RunConfig",
    "Track",
    "bad_options",
    "check_ordinary",
    "interruptible",
    "load_results",
]

AppPath = Annotated[
    str,
    typer.Argument(
        metavar="APP", help="Folder of a Flower App, a module inside one, or one of ours by name: sd-feel."
    ),
]
RunConfig = Annotated[
    list[str] | None,
    typer.Option("--run-config", "-c", help="'key=value key=value', or a .toml file. Repeatable."),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", help="mlflow, tensorboard or wandb: follow the run there, live. Each an extra. Repeatable."
    ),
]
Paths = Annotated[list[Path], typer.Argument(metavar="RUN...|SWEEP", help="Folders of runs or sweeps.")]
Costs = Annotated[
    list[str] | None,
    typer.Option(
        "--x",
        help="rounds, iterations, sim-seconds, bits, payload-bytes or wall-seconds. Repeatable. "
        "Default: what the sweep says, else rounds.",
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--y",
        help="A recorded metric: loss, accuracy, test-loss, consensus-error, ... Repeatable. "
        "Default: what the sweep says, else loss.",
    ),
]


@contextmanager
def bad_options(*kinds: type[Exception]) -> Iterator[None]:
    """Turn what the library says of bad input, ``kinds`` or else OSError and ValueError, into exit code 2."""
    caught = kinds or (OSError, ValueError)
    try:
        yield
    except caught as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except RuntimeError as error:
        # What pathlib says of "~nosuchuser".
        if "home directory" not in str(error):
            raise
        typer.echo(f"Error: {error} Valid after ~ in a path is / or a user's name.", err=True)
        raise typer.Exit(2) from error


@contextmanager
def interruptible(message: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a message and exit code 130 or 143."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        if isinstance(stop, SystemExit) and stop.code != 128 + signal.SIGTERM:
            raise
        typer.echo(message(), err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else 143) from None


def check_ordinary(**numbers: float | None) -> None:
    """Raise ValueError, one for all, where a formula's input is so large or small that the formula overflows.

    The names are those of the options, with ``_`` for ``-``; what is None was not given.
    """
    wrong = [
        f"--{key.replace('_', '-')} {value!r}; valid is {ORDINARY}"
        for key, value in numbers.items()
        if value is not None and not is_ordinary(value)
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def load_results(paths: list[Path]) -> Results:
    """Read runs and sweeps; say on stderr what a reader should know of them."""
    from hedgerow.sim.runs.results import load

    results = load(paths)
    for warning in results.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    return results
