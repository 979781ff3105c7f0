"""Data sets by name: found on this machine, read from their owners' files, standardised per channel."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .cifar import missing_cifar10, read_cifar10
from .idx import missing_idx, read_idx_set
from .images import Images, scaled
from .imports import call_imported, is_import_path
from .mnist5k import MNIST_5K_FOLDER, missing_mnist_5k, read_mnist_5k
from .permissions import check_file

__all__ = [
    "DATASETS",
    "DATA_DIR_VARIABLE",
    "CatalogueEntry",
    "Dataset",
    "DatasetNotFound",
    "catalogue",
    "load",
    "resolve_data_dir",
]

DATA_DIR_VARIABLE = "HEDGEROW_DATA_DIR"


class DatasetNotFound(FileNotFoundError):  # noqa: N818
    """A data set's files are nowhere that was looked at; the message lists the places and the remedy."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification data set in memory. Loaded sets are shared: read the arrays, never change them.

    Parameters
    ----------
    name : str
        The name it was loaded by.
    x_train, x_test : ndarray of float32
        Inputs, (N, C, H, W) for images, (N, ...) in general; all finite.
    y_train, y_test : ndarray of int64
        Labels, (N,), each in 0..num_classes - 1.
    num_classes : int
        Number of classes, at least 2.

    Raises
    ------
    ValueError
        A shape, dtype, length or value is not as above.
    """

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    num_classes: int

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise ValueError(f"data set {self.name!r}: num_classes = {self.num_classes}, must be at least 2")
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            self._check_inputs(f"data set {self.name!r}: x_{part}", x)
            self._check_labels(f"data set {self.name!r}: y_{part}", y, len(x))
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"data set {self.name!r}: x_train has samples of shape {self.x_train.shape[1:]}, "
                f"x_test of {self.x_test.shape[1:]}; they must be the same"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, (C, H, W) for images."""
        return self.x_train.shape[1:]

    @staticmethod
    def _check_inputs(key: str, x: NDArray[np.float32]) -> None:
        if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.ndim < 2 or not x.size:
            raise ValueError(f"{key} is {_describe(x)}, must be a non-empty float32 array (N, ...)")
        if not np.isfinite(x.sum(dtype=np.float64)):
            raise ValueError(f"{key} holds NaN or infinite values, all must be finite")

    def _check_labels(self, key: str, y: NDArray[np.int64], count: int) -> None:
        if not isinstance(y, np.ndarray) or y.dtype != np.int64 or y.shape != (count,):
            raise ValueError(f"{key} is {_describe(y)}, must be an int64 array of shape ({count},)")
        if y.min() < 0 or y.max() >= self.num_classes:
            raise ValueError(f"{key} spans {y.min()}..{y.max()}, must lie in 0..{self.num_classes - 1}")


@dataclass(frozen=True)
class CatalogueEntry:
    """One known data set and whether this machine has it.

    Parameters
    ----------
    name : str
        The name to load it by.
    description, size : str
        What it is, for people.
    found_at : str or None
        The folder that holds its files, or the package that brings it; None where it was not found.
    how_to_get : str
        What to do to have it.
    """

    name: str
    description: str
    size: str
    found_at: str | None
    how_to_get: str


@dataclass(frozen=True)
class _Source:
    """Where a set may lie and how to read it there."""

    description: str
    size: str
    how_to_get: str
    missing: Callable[[Path], list[str]]
    read: Callable[[Path], Images]
    subfolders: tuple[str, ...] = ()
    standard_folders: tuple[Path, ...] = ()

    def folders(self, data_dir: Path | None) -> list[Path]:
        """Return every folder to look in, in order."""
        named = [data_dir / subfolder for subfolder in self.subfolders] if data_dir else []
        # The data folder itself comes last: MNIST and Fashion-MNIST use the same file names, so a
        # folder that bears the set's name is the better witness, and one named for another set is none.
        itself = [data_dir] if data_dir and self.subfolders and not self._is_of_another(data_dir) else []
        return [*named, *itself, *self.standard_folders]

    def _is_of_another(self, folder: Path) -> bool:
        others = {name for source in _SOURCES.values() for name in source.subfolders} - {*self.subfolders}
        return folder.name in others or "/".join(folder.parts[-2:]) in others


_SOURCES = {
    "mnist-5k": _Source(
        description="a tenth of MNIST: 500 images of each handwritten digit",
        size="4,000 + 1,000 images 1x28x28, 1 MB",
        how_to_get="comes with Hedgerow; install it again",
        missing=missing_mnist_5k,
        read=read_mnist_5k,
        standard_folders=(MNIST_5K_FOLDER,),
    ),
    "mnist": _Source(
        description="handwritten digits",
        size="60,000 + 10,000 images 1x28x28, 11 MB",
        how_to_get="put the four IDX files, plain or .gz, into DATA_DIR/mnist; or let torchvision fetch "
        "them: torchvision.datasets.MNIST(DATA_DIR, download=True)",
        missing=missing_idx,
        read=read_idx_set,
        subfolders=("mnist", "MNIST/raw"),
    ),
    "fashion-mnist": _Source(
        description="articles of clothing, drop-in for MNIST",
        size="60,000 + 10,000 images 1x28x28, 31 MB",
        how_to_get="on Debian: apt install dataset-fashion-mnist; or put the four IDX files, plain or .gz, "
        "into DATA_DIR/fashion-mnist; or torchvision.datasets.FashionMNIST(DATA_DIR, download=True)",
        missing=missing_idx,
        read=read_idx_set,
        subfolders=("fashion-mnist", "FashionMNIST/raw"),
        standard_folders=(Path("/usr/share/datasets/fashion-mnist"),),
    ),
    "cifar10": _Source(
        description="small colour photographs of ten kinds of things",
        size="50,000 + 10,000 images 3x32x32, 170 MB",
        how_to_get="unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz in DATA_DIR; or "
        "torchvision.datasets.CIFAR10(DATA_DIR, download=True)",
        missing=missing_cifar10,
        read=read_cifar10,
        subfolders=("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10"),
    ),
}

DATASETS = tuple(_SOURCES)


def load(name: str, data_dir: str | os.PathLike[str] | None = None, scaling: str = "standard") -> Dataset:
    """Return a data set by name.

    Parameters
    ----------
    name : str
        One of ``DATASETS``, or an import path ``module:function`` of a function that takes the data
        folder (a ``Path`` or None) and returns a ``Dataset``.
    data_dir : str or path or None (default: None)
        The folder that holds the files or a subfolder of them; relative, absolute or with ``~``. None
        or empty takes the environment variable HEDGEROW_DATA_DIR.
    scaling : {"standard", "unit"} (default: "standard")
        Pixels with the training set's mean 0 and deviation 1 a channel, or in [0, 1]. What a function
        returns is taken as it is.

    Raises
    ------
    DatasetNotFound
        The files are in none of the places where they may lie.
    ValueError
        The name is unknown, the function returned no valid ``Dataset``, or a file is corrupt.
    """
    folder = resolve_data_dir(data_dir)
    if is_import_path(name):
        return _load_own(name, folder)
    if name not in _SOURCES:
        known = ", ".join(DATASETS)
        raise ValueError(f"dataset = {name!r}: must be one of {known}, or an import path module:function")
    return _read(name, _find(name, folder), scaling)


def catalogue(data_dir: str | os.PathLike[str] | None = None) -> list[CatalogueEntry]:
    """Return what is known by name, and where this machine has it; reads no data.

    Parameters
    ----------
    data_dir : str or path or None (default: None)
        As for ``load``.
    """
    folder = resolve_data_dir(data_dir)
    return [
        CatalogueEntry(name, source.description, source.size, _found_at(source, folder), source.how_to_get)
        for name, source in _SOURCES.items()
    ]


def resolve_data_dir(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the data folder as an absolute path, or None where neither argument nor environment has one."""
    given = os.fspath(data_dir or "") or os.environ.get(DATA_DIR_VARIABLE, "")
    try:
        folder = Path(given).expanduser().absolute() if given else None
    except RuntimeError as error:
        raise ValueError(f"data-dir must be a folder, got {given!r} (there is no such user)") from error
    if folder is not None and data_dir:
        check_file("data-dir", folder)
    return folder


def _find(name: str, data_dir: Path | None) -> Path:
    source = _SOURCES[name]
    looked_at = []
    for folder in source.folders(data_dir):
        missing = source.missing(folder)
        if not missing:
            return folder
        looked_at.append(f"  {folder}: no {', '.join(missing) if folder.is_dir() else 'such folder'}")
    if data_dir is None and source.subfolders:
        looked_at.append(f"  no data folder was given: set data-dir or the variable {DATA_DIR_VARIABLE}")
    places = "\n".join(looked_at)
    raise DatasetNotFound(
        f"data set {name!r} was not found. Looked at:\n{places}\nTo get it: {source.how_to_get}"
    )


def _found_at(source: _Source, data_dir: Path | None) -> str | None:
    return next((str(folder) for folder in source.folders(data_dir) if not source.missing(folder)), None)


@lru_cache(maxsize=2)
def _read(name: str, folder: Path, scaling: str) -> Dataset:
    images = _SOURCES[name].read(folder)
    x_train, x_test = scaled(images, scaling)
    return Dataset(
        name, x_train, images.y_train.astype(np.int64), x_test, images.y_test.astype(np.int64), num_classes=10
    )


def _load_own(path: str, data_dir: Path | None) -> Dataset:
    dataset = call_imported("dataset", path, data_dir)
    if not isinstance(dataset, Dataset):
        raise ValueError(f"dataset = {path!r}: returned a {type(dataset).__name__}, must return a Dataset")
    return dataset


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"
