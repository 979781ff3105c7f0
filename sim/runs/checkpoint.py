"""A run's state on disk: one file that can tell whether it is whole, read without unpickling anything.

A checkpoint is an uncompressed ``.npz`` of three kinds of arrays: ``tree.json`` (UTF-8 bytes), the state with
``{"__array__": name}`` in place of each array; those arrays; and ``manifest.json``, the format, what the
writer said of the run, and the SHA-256 of every other member. Format 1, of before, has no manifest.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from hedgerow.sim.runs.durable import move, open_file, write_aside, write_file

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpointError",
    "load_arrays",
    "load_checkpoint",
    "read_checkpoint",
    "save_arrays",
    "save_checkpoint",
    "write_checkpoint",
]

FORMAT = 2
_MANIFEST = "manifest.json"
_TREE = "tree.json"
_ARRAY = "__array__"


class CheckpointError(ValueError):
    """A checkpoint is not there, is not one, or is not this run's."""


class DamagedCheckpointError(CheckpointError):
    """A file is no checkpoint, or no longer what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Parameters
    ----------
    state : dict[str, Any]
        The state; lists for tuples.
    about : dict[str, Any]
        What its writer said of the run; empty in format 1.
    """

    state: dict[str, Any]
    about: dict[str, Any]


def save_checkpoint(path: Path, state: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
    """Write a nested state of JSON values and ndarrays; a reader sees the old file or the new one.

    Parameters
    ----------
    path : Path
        The file; its folder is made if it is not there.
    state : Mapping[str, Any]
        The state.
    about : Mapping[str, Any] or None (default: None)
        What to say of the run, JSON values.

    Raises
    ------
    TypeError
        If a leaf is neither.
    OSError
        If the disk takes no more.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    move(write_checkpoint(path, state, about), path)


def write_checkpoint(path: Path, state: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint beside ``path``, for ``durable.move``, and return where; as ``save_checkpoint``."""
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

    tree = _text(packed(state))

    def fill(file: IO[bytes]) -> None:
        with ZipFile(file, "w") as archive:
            digests = {
                name: _write_array(archive, name, array) for name, array in {_TREE: tree, **arrays}.items()
            }
            manifest = {"format": FORMAT, "about": dict(about or {}), "sha256": digests}
            _write_array(archive, _MANIFEST, _text(manifest))

    return write_aside(path, fill)


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an ``.npz`` file, uncompressed, whatever the arrays are called; a reader sees the old or the new.

    ``np.savez`` takes names as keywords and so refuses some, ``file`` for one.
    """

    def fill(file: IO[bytes]) -> None:
        with ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                _write_array(archive, name, array)

    write_file(path, fill)


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return what ``save_arrays`` wrote; no more is allocated than the file holds.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is not one of arrays, uncompressed.
    """
    with open_file(path) as file:
        try:
            with ZipFile(file) as archive:
                members = _Members(archive, os.fstat(file.fileno()).st_size)
                names = [name.removesuffix(".npy") for name in archive.namelist()]
                return {name: members.array(name) for name in names}
        except OSError:
            raise
        except Exception as error:  # An archive of arrays that is damaged fails in countless ways.
            raise ValueError(f"{path} is no file of arrays: {error}") from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state that ``save_checkpoint`` wrote; lists for tuples. Raises as ``read_checkpoint``."""
    return read_checkpoint(path).state


def read_checkpoint(path: Path) -> Checkpoint:
    """Return what ``save_checkpoint`` wrote, after a check of every checksum.

    Only arrays that the tree names are read, and no more is allocated for them than the file holds.

    Raises
    ------
    CheckpointError
        If there is no such file, or one of a later format.
    DamagedCheckpointError
        If it is not a checkpoint, or not as it was written.
    """
    try:
        with open_file(path) as file, ZipFile(file) as archive:
            return _read(_Members(archive, os.fstat(file.fileno()).st_size), path)
    except FileNotFoundError as error:
        raise CheckpointError(f"No checkpoint at {path}") from error
    except CheckpointError:
        raise
    except Exception as error:  # An archive of arrays that is damaged fails in countless ways.
        raise DamagedCheckpointError(f"{path} is not a checkpoint: {error}") from error


def _read(members: "_Members", path: Path) -> Checkpoint:
    about: dict[str, Any] = {}
    if members.have(_MANIFEST):
        manifest = json.loads(members.array(_MANIFEST).tobytes())
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']!r}; this version of hedgerow reads 1 and {FORMAT}"
            )
        about, members.digests = manifest["about"], manifest["sha256"]
    state = _unpacked(json.loads(members.array(_TREE).tobytes()), members)
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}")
    return Checkpoint(state, about)


def _unpacked(value: Any, members: "_Members") -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return members.array(value[_ARRAY])
        return {key: _unpacked(item, members) for key, item in value.items()}
    return [_unpacked(item, members) for item in value] if isinstance(value, list) else value


class _Members:
    """The arrays of an archive of ``size`` bytes, each read once, and against its checksum if it has one."""

    def __init__(self, archive: ZipFile, size: int) -> None:
        self.digests: Mapping[str, str] | None = None
        self._archive, self._left = archive, size
        self._read: dict[str, NDArray[Any]] = {}

    def have(self, name: str) -> bool:
        return f"{name}.npy" in self._archive.NameToInfo

    def array(self, name: str) -> NDArray[Any]:
        if name not in self._read:
            self._read[name] = self._array(name)
        return self._read[name]

    def _array(self, name: str) -> NDArray[Any]:
        member = self._archive.getinfo(f"{name}.npy")
        self._left -= member.file_size
        if member.compress_type != ZIP_STORED or self._left < 0:
            raise ValueError(f"{name} claims more bytes than the file has")
        with self._archive.open(member) as stored:
            _check_claim(stored, member.file_size, name)
        with self._archive.open(member) as stored:
            hashed = _Hashed(stored)
            array: NDArray[Any] = npy.read_array(hashed, allow_pickle=False)
        if self.digests is not None and self.digests[name] != hashed.sha256.hexdigest():
            raise ValueError(f"{name} is not what was written (SHA-256)")
        return array


def _check_claim(stored: IO[bytes], size: int, name: str) -> None:
    """Hold an array's header to the bytes that follow it, before anything is allocated for them."""
    version = npy.read_magic(stored)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stored)
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{name} is an array of {dtype}, {shape}")
    if stored.tell() + prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{name} claims a shape {shape} of {dtype} in {size} bytes")


@dataclass
class _Hashed:
    """A file that is hashed as it is read or written."""

    file: IO[bytes]
    sha256: Any = field(default_factory=sha256)

    def read(self, size: int = -1) -> bytes:
        piece = self.file.read(size)
        self.sha256.update(piece)
        return piece

    def write(self, piece: bytes) -> int:
        self.sha256.update(piece)
        return self.file.write(piece)


def _write_array(archive: ZipFile, name: str, array: NDArray[Any]) -> str:
    """Add an array to an archive and return the SHA-256 of its ``.npy`` bytes."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        hashed = _Hashed(member)
        npy.write_array(hashed, np.asanyarray(array), allow_pickle=False)
    digest: str = hashed.sha256.hexdigest()
    return digest


def _text(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
