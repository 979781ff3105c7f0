"""The two newest checkpoints of a run; if the latest is damaged, the previous one is used."""

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

__all__ = ["LATEST", "PREVIOUS", "drop_damaged", "has_checkpoint", "load_newest", "save_newest"]

LATEST, PREVIOUS, DAMAGED = "latest.safetensors", "previous.safetensors", "damaged.safetensors"
_logger = logging.getLogger("flwr")


def save_newest(folder: Path, state: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write a folder's latest checkpoint; the one before becomes the previous one.

    Errors as in ``save_checkpoint``; after an OSError the newest checkpoint is unchanged.
    """
    make_folder(folder)
    latest, content = folder / LATEST, pack_checkpoint(state, about)
    aside = write_aside(latest, lambda file: file.write(content))
    if latest.exists():
        # A run that is killed here resumes from the previous checkpoint.
        move(latest, folder / PREVIOUS)
    move(aside, latest)


def has_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a checkpoint, intact or not; on a full disk it may have none yet."""
    return any((folder / name).is_file() for name in (LATEST, PREVIOUS))


def load_newest(folder: Path) -> tuple[Path, Checkpoint]:
    """Return the newest intact checkpoint and its file.

    Raises CheckpointError if there is none, or the newest has a later format.
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
        _logger.warning("%s; using the previous checkpoint, %s.", error, previous)
        return previous, found


def drop_damaged(folder: Path, taken: Path) -> None:
    """Make the used checkpoint the latest; a damaged one is kept under another name for inspection."""
    latest = folder / LATEST
    if taken == latest:
        return
    if latest.exists():
        move(latest, folder / DAMAGED)
    move(taken, latest)
