"""A run's state on disk: one file, written aside and renamed, read without unpickling anything."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

__all__ = ["CheckpointError", "load_checkpoint", "save_arrays", "save_checkpoint"]

_TREE = "tree.json"
_ARRAY = "__array__"


class CheckpointError(ValueError):
    """A checkpoint is not there, or is not one."""


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a nested state of JSON values and ndarrays; a reader sees the old file or the new one.

    Raises
    ------
    TypeError
        If a leaf is neither.
    """
    arrays: dict[str, NDArray[Any]] = {}

    def packed(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"array-{len(arrays)}"
            arrays[name] = value
            return {_ARRAY: name}
        if isinstance(value, Mapping):
            return {str(key): packed(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [packed(item) for item in value]
        return value

    tree = np.frombuffer(json.dumps(packed(state)).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".partial")
    save_arrays(aside, {_TREE: tree, **arrays})
    aside.replace(path)


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an ``.npz`` file, uncompressed, whatever the arrays are called.

    ``np.savez`` takes names as keywords and so refuses some, ``file`` for one.
    """
    with ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return what ``save_checkpoint`` wrote; lists for tuples.

    Raises
    ------
    CheckpointError
        If there is no such file, or it is not a checkpoint.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files if name != _TREE}
            tree = json.loads(stored[_TREE].tobytes())
        state = _unpacked(tree, arrays)
    except FileNotFoundError as error:
        raise CheckpointError(f"No checkpoint at {path}") from error
    except Exception as error:  # An archive of arrays that is damaged fails in countless ways.
        raise CheckpointError(f"{path} is not a checkpoint: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a checkpoint: it holds a {type(state).__name__}")
    return state


def _unpacked(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return arrays[value[_ARRAY]]
        return {key: _unpacked(item, arrays) for key, item in value.items()}
    return [_unpacked(item, arrays) for item in value] if isinstance(value, list) else value
