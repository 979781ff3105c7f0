"""Sparse regression problems partitioned among nodes: a synthetic linear one, and binary classification.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Section V, Examples 1
and 2. Our choices: node i's samples of Example 1 are a function of (seed, i), so that a device can make its
own; and images of two classes, because the paper's data, qot and real-sim, must be downloaded by hand. (The
paper swaps their sizes: qot has 8,992 samples of 1,024 features, real-sim 72,309 of 20,958.)
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import at_least, is_number
from .datasets import load
from .extras import needed
from .permissions import check_file

# ``tasks`` may not import ``wire``; this is wire's number of the purpose "data".
_PURPOSE = 14

Vector = NDArray[np.float64]
# (samples, features), dense or scipy.sparse.csr_matrix; (samples,) of 0.0 and 1.0.
BinaryPart = tuple[Any, Vector]


@dataclass(frozen=True)
class LinearData:
    """Example 1: b_i = A_i w* + noise e_i, with independent standard normal A_i and e_i.

    Parameters
    ----------
    n : int (default: 1000)
        Features, >= 1.
    s : int (default: 10)
        Nonzeros of w*, 1 to n.
    noise : float (default: 0.5)
        Standard deviation of the noise, >= 0. The objective's floor is noise^2 / 2.
    samples : tuple[int, int] (default: (250, 750))
        The least and the largest number of samples of a node, which is uniform between them, inclusive.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    n: int = 1000
    s: int = 10
    noise: float = 0.5
    samples: tuple[int, int] = (250, 750)

    def __post_init__(self) -> None:
        at_least(1, n=self.n, s=self.s)
        if self.s > self.n:
            raise ValueError(f"s must be an integer from 1 to n = {self.n}, got {self.s!r}")
        if not is_number(self.noise) or self.noise < 0:
            raise ValueError(f"noise must be a finite number >= 0, got {self.noise!r}")
        if not 1 <= self.samples[0] <= self.samples[1]:
            raise ValueError(f"samples must be (least, largest), 1 <= least <= largest, got {self.samples!r}")


def sparse_truth(data: LinearData, seed: int) -> Vector:
    """Return w* (n,): s nonzeros at random places, uniform on [-2, -0.5] and [0.5, 2]."""
    rng = _stream(seed, 0)
    truth = np.zeros(data.n)
    places = rng.choice(data.n, data.s, replace=False)
    truth[places] = rng.uniform(0.5, 2.0, data.s) * rng.choice([-1.0, 1.0], data.s)
    return truth


def linear_part(data: LinearData, node: int, seed: int) -> tuple[Vector, Vector]:
    """Return A_i (m_i, n) and b_i (m_i,) of one node; w* is the same at all nodes.

    Parameters
    ----------
    data : LinearData
        The sizes.
    node : int
        i, >= 0.
    seed : int
        The run's seed, >= 0.
    """
    at_least(0, node=node)
    rng = _stream(seed, 1 + node)
    samples = int(rng.integers(data.samples[0], data.samples[1] + 1))
    A = rng.standard_normal((samples, data.n))
    return A, A @ sparse_truth(data, seed) + data.noise * rng.standard_normal(samples)


def binary_images(
    dataset: str,
    classes: tuple[int, int],
    num_nodes: int,
    seed: int,
    data_dir: str | os.PathLike[str] | None = None,
) -> list[BinaryPart]:
    """Return the training images of two classes, split at random into groups of equal size.

    Parameters
    ----------
    dataset : str
        A data set's name (``load``), ``mnist`` or ``fashion-mnist`` for example.
    classes : tuple[int, int]
        The class of label 0 and that of label 1.
    num_nodes : int
        Groups, 1 to the number of images.
    seed : int
        The seed of the split, >= 0.
    data_dir : path or None (default: None)
        The data folder, as for ``load``.

    Returns
    -------
    list[tuple[NDArray, NDArray]]
        For each node, float64 features (samples, pixels) in [0, 1], and labels (samples,), 0 or 1.

    Raises
    ------
    ValueError
        If the classes are not two of the data set's, or there are more nodes than images.
    """
    data = load(dataset, data_dir, "unit")
    if classes[0] == classes[1] or not all(0 <= label < data.num_classes for label in classes):
        raise ValueError(f"classes must be two of 0 to {data.num_classes - 1}, got {classes!r}")
    chosen = np.isin(data.y_train, classes)
    x = data.x_train[chosen].reshape(int(chosen.sum()), -1).astype(np.float64)
    return _split(x, (data.y_train[chosen] == classes[1]).astype(np.float64), num_nodes, seed)


def binary_libsvm(
    path: str | os.PathLike[str], num_nodes: int, seed: int, n_features: int | None = None
) -> list[BinaryPart]:
    """Return a LIBSVM file of two classes, split at random into groups of equal size.

    Parameters
    ----------
    path : path
        The file, also compressed (.gz, .bz2); its larger label becomes 1, the other 0.
    num_nodes : int
        Groups, 1 to the number of samples.
    seed : int
        The seed of the split, >= 0.
    n_features : int or None (default: None)
        Features; None is the largest index in the file.

    Returns
    -------
    list[tuple[csr_matrix, NDArray]]
        For each node, float64 features (samples, features), and labels (samples,), 0 or 1.

    Raises
    ------
    ValueError
        If there is no such file, it does not have two labels, or there are more nodes than samples.
    """
    check_file("libsvm", Path(path))
    if not Path(path).is_file():
        raise ValueError(f"path must be an existing file in LIBSVM's format, got {os.fspath(path)!r}")
    # Imported here because scikit-learn takes 1.5 seconds to import.
    load_svmlight_file = needed("sklearn.datasets", "sim", os.fspath(path)).load_svmlight_file
    x, y = load_svmlight_file(os.fspath(path), n_features=n_features, dtype=np.float64)
    labels = np.unique(y)
    if labels.size != 2:
        raise ValueError(
            f"path must be a file with two labels, got {os.fspath(path)!r} with {labels.tolist()[:5]}"
        )
    return _split(x, (y == labels[1]).astype(np.float64), num_nodes, seed)


def _split(x: Any, y: Vector, num_nodes: int, seed: int) -> list[BinaryPart]:
    if not 1 <= num_nodes <= len(y):
        raise ValueError(f"num_nodes must be an integer from 1 to {len(y)} samples, got {num_nodes!r}")
    order = _stream(seed, 0).permutation(len(y))
    return [(x[group], y[group]) for group in map(np.sort, np.array_split(order, num_nodes))]


def _stream(seed: int, part: int) -> np.random.Generator:
    at_least(0, seed=seed)
    return np.random.default_rng(np.random.SeedSequence([seed, 0, part, _PURPOSE]))
