"""Data sets by name, read from their published files; images are standardised per channel."""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import at_least, check_inputs, check_labels, check_sources
from .images import Images, pixel_constants, scaled
from .imports import is_import_path
from .sources import DATASETS, SOURCES, find, imported, known, resolve_data_dir
from .text import Text


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification data set in memory. Loaded sets are shared: do not modify the arrays.

    Parameters
    ----------
    name : str
        The name it was loaded by.
    x_train, x_test : ndarray of float32 or integers
        Inputs, (N, C, H, W) for images, (N, ...) in general; all finite. A model gets integers, such as
        token ids, as they are.
    y_train, y_test : ndarray of int64
        Labels, (N,), each in 0..num_classes - 1.
    num_classes : int
        Number of classes, at least 2.
    sources : ndarray of str or integers, or None (default: None)
        Where each training sample comes from, such as its site, speaker or file, (N,); None if unknown. The
        partition schemes ``source`` and ``source(share)`` use it.

    Raises
    ------
    ValueError
        If a shape, dtype, length or value is not as above.
    """

    name: str
    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    num_classes: int
    sources: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        at_least(2, **{f"data set {self.name!r}: num_classes": self.num_classes})
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            check_labels(f"data set {self.name!r}: y_{part}", y, self.num_classes)
            check_inputs(f"data set {self.name!r}: x_{part}", x, len(y), integers=True)
        if self.sources is not None:
            check_sources(f"data set {self.name!r}: sources", self.sources, len(self.y_train))
        if self.x_train.dtype != self.x_test.dtype:
            raise ValueError(
                f"data set {self.name!r}: x_test must be {self.x_train.dtype}, as x_train, got "
                f"{self.x_test.dtype}"
            )
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"data set {self.name!r}: x_test must have samples of shape {self.x_train.shape[1:]}, as in "
                f"x_train, got {self.x_test.shape[1:]}"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample, (C, H, W) for images."""
        return self.x_train.shape[1:]


def load(name: str, data_dir: str | os.PathLike[str] | None = None, scaling: str = "standard") -> Dataset:
    """Return a data set by name.

    Parameters
    ----------
    name : str
        One of ``DATASETS``, or an import path ``module:function`` of a function that takes the data
        folder (a ``Path`` or None) and returns a ``Dataset``.
    data_dir : str or path or None (default: None)
        The folder with the files or their subfolder; relative, absolute or with ``~``. None or empty uses
        the environment variable HEDGEROW_DATA_DIR.
    scaling : {"standard", "unit"} (default: "standard")
        Pixels with the training set's mean 0 and deviation 1 per channel, or in [0, 1]. Token ids and the
        result of a function are not scaled.

    Raises
    ------
    DatasetNotFound
        If the files are in none of the searched folders.
    ValueError
        If the name is unknown, the function did not return a valid ``Dataset``, or a file is corrupt.
    """
    folder = resolve_data_dir(data_dir)
    if is_import_path(name):
        return imported(name, folder, Dataset)
    return _read(known(name, DATASETS), find(name, folder), scaling)


def preprocessing(
    name: str, data_dir: str | os.PathLike[str] | None = None, scaling: str = "standard"
) -> tuple[list[float], list[float]] | None:
    """Return what ``load`` subtracts from each channel's pixels (0 to 255), and divides them by.

    None for token ids and the result of a function, which are not scaled. Parameters and errors are those of
    ``load``.
    """
    if is_import_path(name):
        return None
    images = SOURCES[known(name, DATASETS)].read(find(name, resolve_data_dir(data_dir)))
    return pixel_constants(images, scaling) if isinstance(images, Images) else None


@lru_cache(maxsize=2)
def _read(name: str, folder: Path, scaling: str) -> Dataset:
    raw, num_classes = SOURCES[name].read(folder), len(SOURCES[name].classes)
    if isinstance(raw, Text):
        return Dataset(name, raw.x_train, raw.y_train, raw.x_test, raw.y_test, num_classes, raw.sources)
    assert isinstance(raw, Images)
    x_train, x_test = scaled(raw, scaling)
    y_train, y_test = raw.y_train.astype(np.int64), raw.y_test.astype(np.int64)
    return Dataset(name, x_train, y_train, x_test, y_test, num_classes)
