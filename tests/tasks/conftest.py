"""Data files as the sets' owners publish them, a few rows long, and a user's own modules."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

_IDX_NAMES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def idx_bytes(array: np.ndarray) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, 8, array.ndim]) + lengths + array.astype(np.uint8).tobytes()


@pytest.fixture
def write_idx_set() -> Callable[..., tuple[np.ndarray, ...]]:
    """Write 20 + 10 images of 28x28 as the four IDX files; return what they hold."""

    def write(folder: Path, *, packed: bool = False, seed: int = 0) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(seed)
        arrays = []
        for count in (20, 10):
            arrays += [rng.integers(0, 256, (count, 28, 28)), rng.permutation(count) % 10]
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in zip(_IDX_NAMES, arrays, strict=True):
            raw = idx_bytes(array)
            if packed:
                (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(raw))
            else:
                (folder / f"{name}-ubyte").write_bytes(raw)
        return tuple(arrays)

    return write


@pytest.fixture
def write_cifar10() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Write six batches of 4 images each, as ``.bin`` or as Python 2 pickles; return pixels and labels."""

    def write(folder: Path, *, pickled: bool = False) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(1)
        pixels = rng.integers(0, 256, (24, 3, 32, 32)).astype(np.uint8)
        labels = rng.integers(0, 10, 24).astype(np.uint8)
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        folder.mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(names):
            rows = pixels[4 * number : 4 * number + 4].reshape(4, 3072)
            row_labels = labels[4 * number : 4 * number + 4]
            if pickled:
                (folder / name).write_bytes(python2_pickle(rows, row_labels))
            else:
                (folder / f"{name}.bin").write_bytes(np.column_stack([row_labels, rows]).tobytes())
        return pixels, labels

    return write


def python2_pickle(rows: np.ndarray, labels: np.ndarray) -> bytes:
    """Return ``{"data": rows, "labels": list}`` as Python 2 and its NumPy pickled it (protocol 2)."""
    raw = rows.tobytes()
    return b"".join(
        [
            b"\x80\x02}(U\x04data",
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
            b"(K\x01K" + bytes([len(rows)]) + b"M\x00\x0c\x86",
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",
            b"T" + len(raw).to_bytes(4, "little") + raw + b"tb",
            b"U\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
            b"u.",
        ]
    )
