"""IDX, the file format of MNIST and Fashion-MNIST.

Four big-endian header bytes (0, 0, element type, number of axes), one 32-bit length per axis, then the
elements in row-major order. Only unsigned bytes (type 8) occur in these sets.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .images import Images

__all__ = ["missing_idx", "read_idx", "read_idx_set"]

_UNSIGNED_BYTE = 8
_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def missing_idx(folder: Path) -> list[str]:
    """Return the names of the set's files missing from a folder, both plain and as ``.gz``."""
    return [f"{name}[.gz]" for name in _NAMES if _file(folder, name) is None]


def read_idx_set(folder: Path) -> Images:
    """Read the four files of an MNIST-like set; the pixels become (N, 1, H, W).

    Raises
    ------
    ValueError
        If a file is corrupt, or images and labels differ in number.
    """
    train_images, train_labels, test_images, test_labels = (_file(folder, name) or folder for name in _NAMES)
    x_train, y_train = _pair(train_images, train_labels)
    x_test, y_test = _pair(test_images, test_labels)
    return Images(x_train, y_train, x_test, y_test)


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes with the given number of axes; ``.gz`` is unpacked.

    Raises
    ------
    ValueError
        If the magic number is wrong, or the size does not match the header.
    """
    raw = _bytes(path)
    magic = bytes([0, 0, _UNSIGNED_BYTE, axes])
    if raw[:4] != magic:
        raise ValueError(f"{path}: not an IDX file: it begins with {raw[:4].hex()}, not {magic.hex()}")
    start = 4 + 4 * axes
    if len(raw) < start:
        raise ValueError(f"{path}: corrupt IDX file: {len(raw)} bytes, the header alone has {start}")
    shape = tuple(int(length) for length in np.frombuffer(raw, ">u4", axes, 4))
    expected = start + math.prod(shape)
    if len(raw) != expected:
        raise ValueError(f"{path}: corrupt IDX file: {len(raw)} bytes, its header says {expected}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _pair(images: Path, labels: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    x, y = read_idx(images, axes=3), read_idx(labels, axes=1)
    if len(x) != len(y):
        raise ValueError(f"{images}: {len(x)} images, but {len(y)} labels in {labels}")
    return x[:, None], y  # (N, 1, H, W), (N,)


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _bytes(path: Path) -> bytes:
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: corrupt gzip file ({error})") from error
