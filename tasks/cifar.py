"""CIFAR-10 in its two published formats: binary batches, and Python 2 pickles.

A binary record is one label byte and 3,072 pixel bytes (3 x 32 x 32, channel first). Reading a pickle runs
none of its code: every class that it names is replaced by one that records its arguments.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .images import Images

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_NUMPY = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}

_Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def missing_cifar10(folder: Path) -> list[str]:
    """Return the names of the batches missing from a folder, both as ``.bin`` and as pickle."""
    return [f"{name}[.bin]" for name in (*_TRAIN, _TEST) if _file(folder, name) is None]


def read_cifar10(folder: Path) -> Images:
    """Read the five training batches and the test batch; the pixels become (N, 3, 32, 32).

    Raises
    ------
    ValueError
        If a batch is corrupt, or a pickle has anything but pixels, labels and names.
    """
    batches = [_read(_file(folder, name) or folder / name) for name in (*_TRAIN, _TEST)]
    x_train = np.concatenate([pixels for pixels, _ in batches[:-1]])
    y_train = np.concatenate([labels for _, labels in batches[:-1]])
    return Images(x_train, y_train, *batches[-1])


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.bin", folder / name) if path.is_file()), None)


def _read(path: Path) -> _Batch:
    return _read_binary(path) if path.suffix == ".bin" else _read_pickle(path)


def _read_binary(path: Path) -> _Batch:
    raw = np.fromfile(path, np.uint8)
    if not raw.size or raw.size % (1 + _PIXELS):
        raise ValueError(f"{path}: corrupt CIFAR-10 batch: {raw.size} bytes, not records of {1 + _PIXELS}")
    records = raw.reshape(-1, 1 + _PIXELS)
    return records[:, 1:].reshape(-1, *_SHAPE), records[:, 0]


class _Recorded:
    """Replaces any object of a pickle, and records its state."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _InertUnpickler(pickle.Unpickler):
    """Builds containers, numbers and strings; runs no code named by the file."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) not in _NUMPY:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _Recorded


def _read_pickle(path: Path) -> _Batch:
    try:
        with path.open("rb") as file:
            batch = _InertUnpickler(file, encoding="bytes").load()
        _, shape, _, is_fortran, raw = batch[b"data"].state
        pixels = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if is_fortran else "C")
        labels = np.array(batch[b"labels"], np.uint8)
        return pixels.reshape(len(labels), *_SHAPE), labels
    except Exception as error:  # a corrupt pickle can fail in any way
        raise ValueError(f"{path}: not a CIFAR-10 batch ({error})") from error
