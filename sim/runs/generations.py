"""The two newest checkpoints of a run: where the newer one is damaged, the one before it is read."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hedgerow.sim.runs.checkpoint import (
    Checkpoint,
    CheckpointError,
    DamagedCheckpointError,
    pack_checkpoint,
    read_checkpoint,
)
from hedgerow.sim.runs.durable import make_folder, move, write_aside

__all__ = ["LATEST", "PREVIOUS", "drop_damaged", "load_newest", "save_newest"]

LATEST, PREVIOUS, DAMAGED = "latest.safetensors", "previous.safetensors", "damaged.safetensors"
_logger = logging.getLogger("flwr")


def save_newest(folder: Path, state: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write a checkpoint that becomes the latest of a folder; the latest becomes the previous one.

    Raises
    ------
    TypeError
        If the state is not one for ``save_checkpoint``.
    OSError
        If the disk takes no more; the newest checkpoint is then what it was.
    """
    make_folder(folder)
    latest, content = folder / LATEST, pack_checkpoint(state, about)
    aside = write_aside(latest, lambda file: file.write(content))
    if latest.exists():
        # A run that is stopped here resumes from the previous one.
        move(latest, folder / PREVIOUS)
    move(aside, latest)


def load_newest(folder: Path) -> tuple[Path, Checkpoint]:
    """Return the newest checkpoint that is whole, and its file.

    Raises
    ------
    CheckpointError
        If there is none, or the newest is of a later format.
    """
    latest, previous = folder / LATEST, folder / PREVIOUS
    try:
        return latest, read_checkpoint(latest)
    except CheckpointError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        if not (missing or isinstance(error, DamagedCheckpointError)):
            raise
        try:
            found = read_checkpoint(previous)
        except CheckpointError as other:
            if isinstance(other.__cause__, FileNotFoundError):
                raise error from None
            raise type(other)(f"{error}; {other}") from other
        _logger.warning("%s; the checkpoint before it is taken, %s.", error, previous)
        return previous, found


def drop_damaged(folder: Path, taken: Path) -> None:
    """Make the checkpoint that was taken the latest; a damaged one is kept aside, for people to look at."""
    latest = folder / LATEST
    if taken == latest:
        return
    if latest.exists():
        move(latest, folder / DAMAGED)
    move(taken, latest)
