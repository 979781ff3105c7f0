"""A run's state on disk: one safetensors file with its own checksum, and the previous one in case of damage.

The file's metadata: ``format``; ``tree``, the state as JSON with ``{"__array__": name}`` in place of each
array; ``about``, the writer's description of the run as JSON; and ``sha256`` of these and of the arrays.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from logging import WARNING
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

import numpy as np
from flwr.common import log
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hedgerow.sim.runs.durable import make_folder, move, remove, write_aside, write_file
from hedgerow.sim.runs.folder import RunFolderError, opened, refused

LATEST, PREVIOUS, DAMAGED = "latest.safetensors", "previous.safetensors", "damaged.safetensors"
_logger = logging.getLogger("flwr")

FORMAT = 3
_ARRAY = "__array__"


class CheckpointError(ValueError):
    """A checkpoint is not there, is not one, or is not this run's."""


class DamagedCheckpointError(CheckpointError):
    """A file is no checkpoint, or no longer what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint: the state (tuples have become lists), and the writer's description."""

    state: dict[str, Any]
    about: dict[str, Any]


def save_checkpoint(path: Path, state: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """Write a nested state of JSON values and ndarrays atomically; the folder is created if missing.

    Parameters
    ----------
    path : Path
        The file.
    state : Mapping[str, Any]
        The state.
    about : Mapping[str, Any] or None (default: None)
        A description of the run, JSON values.

    Raises
    ------
    TypeError
        If a leaf has another type.
    OSError
        If the file cannot be written.
    """
    content = pack_checkpoint(state, about)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: file.write(content))


def pack_checkpoint(state: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> bytes:
    """Return the bytes of a checkpoint; TypeError as in ``save_checkpoint``."""
    arrays: dict[str, NDArray[Any]] = {}

    def packed(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"array-{len(arrays)}"
            arrays[name] = plain_array(value)
            return {_ARRAY: name}
        if isinstance(value, Mapping):
            return {str(key): packed(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [packed(item) for item in value]
        return value

    metadata = {
        "format": str(FORMAT),
        "tree": json.dumps(packed(state)),
        "about": json.dumps(dict(about or {})),
    }
    metadata["sha256"] = _digest(metadata, arrays)
    try:
        return save(arrays, metadata)
    except (KeyError, ValueError, SafetensorError) as error:
        raise TypeError(f"the state has an array that cannot be written to a checkpoint: {error}") from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint file; errors as in ``read_checkpoint``."""
    return read_checkpoint(path).state


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its checksum.

    Raises
    ------
    CheckpointError
        If the file is missing or has another format.
    DamagedCheckpointError
        If it is not a checkpoint, or its checksum does not match.
    """
    if not path.exists():
        raise CheckpointError(f"No checkpoint at {path}") from FileNotFoundError(str(path))
    try:
        arrays, metadata = load_safetensors(path)
        form, digest = int(metadata["format"]), metadata.pop("sha256")
    except Exception as error:  # A damaged file can raise anything.
        raise DamagedCheckpointError(f"{path} is not a checkpoint: {error}") from error
    if form != FORMAT:
        raise CheckpointError(f"{path} has format {form}; this version of hedgerow reads {FORMAT}")
    if digest != _digest(metadata, arrays):
        raise DamagedCheckpointError(f"{path} is damaged: its SHA-256 does not match")
    return Checkpoint(_unpacked(json.loads(metadata["tree"]), arrays), json.loads(metadata["about"]))


def load_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return arrays and metadata of a safetensors file; OSError as in ``opened``, SafetensorError."""
    # safetensors takes a path alone, and reads no array unless the file has the size that its header says.
    with opened(path), safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def plain_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in C order and native byte order, as safetensors requires."""
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _unpacked(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return arrays[value[_ARRAY]]
        return {key: _unpacked(item, arrays) for key, item in value.items()}
    return [_unpacked(item, arrays) for item in value] if isinstance(value, list) else value


def _digest(metadata: Mapping[str, str], arrays: Mapping[str, NDArray[Any]]) -> str:
    hashed = sha256()
    for key in sorted(metadata):
        hashed.update(f"{key} {len(metadata[key])} {metadata[key]}".encode())
    for name in sorted(arrays):
        array = arrays[name]
        hashed.update(f"{name} {array.dtype} {array.shape}".encode())
        hashed.update(array.data if array.size else b"")
    return hashed.hexdigest()


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


# Files of the global model: ``model.npz`` for NumPy alone, ``model.safetensors`` for everything else. Both
# hold the same arrays under the same names; neither needs unpickling.


NPZ, SAFETENSORS = "model.npz", "model.safetensors"
# Folder of the models of single rounds.
MODELS = "models"
# Folder of the nodes' own models.
NODES = "nodes"
# Reserved by the header of a safetensors file.
_RESERVED = "__metadata__"


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write an uncompressed ``.npz`` file atomically.

    ``np.savez`` takes names as keywords and thus refuses some, such as ``file``.
    """

    def fill(file: IO[bytes]) -> None:
        with ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)

    write_file(path, fill)


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an ``.npz`` file; OSError if it is missing, ValueError if it is not of arrays."""
    try:
        with opened(path) as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError:
        raise
    except Exception as error:  # A damaged archive can raise anything.
        raise ValueError(f"{path} is not a file of arrays: {error}") from error


def keep_model(folder: Path, server_round: int, arrays: Mapping[str, Any]) -> None:
    """Save a round's model in a run's folder."""
    (folder / MODELS).mkdir(exist_ok=True)
    save_arrays(folder / MODELS / f"{server_round:06d}.npz", arrays)


def save_model(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a model's arrays to the two files in a run's folder, each atomically.

    A model that safetensors cannot hold (such as text or 128-bit complex numbers) gets only ``model.npz``,
    with a warning. Without arrays, as if models stay on the nodes, there is no file.
    """
    if not arrays:
        # Files of an earlier part of a resumed run.
        remove(folder / NPZ)
        remove(folder / SAFETENSORS)
        return
    save_arrays(folder / NPZ, arrays)
    try:
        if _RESERVED in arrays:
            raise ValueError(f"an array is called {_RESERVED}")
        packed = save({name: plain_array(array) for name, array in arrays.items()})
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        log(WARNING, "No %s: %s: %s", SAFETENSORS, type(error).__name__, error)
        # A file of an earlier part of a resumed run.
        remove(folder / SAFETENSORS)
        return
    write_file(folder / SAFETENSORS, lambda file: file.write(packed))


def save_node_models(folder: Path, models: Mapping[str, Mapping[str, NDArray[np.generic]]]) -> None:
    """Write each node's model to the files of ``nodes/NAME`` in a run's folder."""
    with refused(folder):
        for name, arrays in models.items():
            (folder / NODES / name).mkdir(parents=True, exist_ok=True)
            save_model(folder / NODES / name, arrays)


def read_model(path: str | Path) -> dict[str, NDArray[Any]]:
    """Return a model's arrays by name, from either of its files or from a run folder.

    Parameters
    ----------
    path : str or Path
        A ``.npz`` or ``.safetensors`` file, or a folder with ``model.npz``, which keeps the model's order, or
        ``model.safetensors``, which does not.

    Raises
    ------
    RunFolderError
        If there is no such file, or it cannot be read.

    Examples
    --------
    ::

        model.load_state_dict({name: torch.from_numpy(a) for name, a in read_model("runs/my-app-…").items()})
    """
    file = Path(path).expanduser()
    if file.is_dir():
        found = next((file / name for name in (NPZ, SAFETENSORS) if os.path.lexists(file / name)), None)
        if found is None:
            raise RunFolderError(f"{file} has neither {NPZ} nor {SAFETENSORS}")
        file = place = found
    else:
        place = file.resolve()  # the caller may name a link, as caches of models have them
    try:
        with refused(file):
            return load_safetensors(place)[0] if file.suffix == ".safetensors" else load_arrays(place)
    except RunFolderError:
        raise
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise RunFolderError(f"{file} cannot be read as a model: {error}") from error
