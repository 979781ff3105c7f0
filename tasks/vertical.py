"""Data sets with features at two parties: row i of both is the same person.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", system model and experiments. Our choices where the
paper is silent: 300 and 484 pixels are the frame and the 22x22 centre; each party scales its own features by
the training set; no person has samples in both training and test set.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from .checks import check_inputs, check_labels, described
from .images import Images, scaled
from .imports import is_import_path
from .sources import SOURCES, DataSource, find, imported, known, resolve_data_dir, vertical_datasets
from .tabular import Table

Floats = NDArray[np.float32]
Ids = NDArray[np.str_]

_BLANK = np.float32(0)
_TEST_SHARE = 0.2
_SIDE, _CENTRE = 28, slice(3, 25)
_SPLIT_SEED = 5_000


@dataclass(frozen=True, eq=False)
class VerticalDataset:
    """A classification data set of two parties: row i of both is the same person. Shared: do not modify it.

    Parameters
    ----------
    name : str
        The name it was loaded by.
    hospital_train, device_train : ndarray of float32
        X_1 and X_2 of the training samples, (N, ...) each, all finite.
    y_train : ndarray of int64
        Labels, (N,), indices into ``classes``; both parties may read them.
    ids_train : ndarray of str
        One id per sample, (N,), unique over training and test set.
    hospital_test, device_test, y_test, ids_test : ndarray
        The same for the test samples.
    classes : tuple of str
        Names of the classes, at least 2.
    hospital_features, device_features : tuple of str (default: empty)
        Names along a party's last axis; empty if there are none.
    people_train : ndarray of str or None (default: None)
        The person of each training sample, (N,); None: everyone has one sample.
    sites_train : ndarray of str or None (default: None)
        The hospital system of each training sample, (N,); None if unknown. A person is at one site.
    payoffs_test : ndarray of float64 or None (default: None)
        The utility of predicting each class for a test sample, (N, classes), finite; None if not defined.

    Raises
    ------
    ValueError
        If a shape, dtype, length or value is not as above.
    """

    name: str
    hospital_train: Floats
    device_train: Floats
    y_train: NDArray[np.int64]
    ids_train: Ids
    hospital_test: Floats
    device_test: Floats
    y_test: NDArray[np.int64]
    ids_test: Ids
    classes: tuple[str, ...]
    hospital_features: tuple[str, ...] = ()
    device_features: tuple[str, ...] = ()
    people_train: Ids | None = None
    sites_train: Ids | None = None
    payoffs_test: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise self._error("classes", repr(self.classes), "at least 2 different names")
        for part in ("train", "test"):
            y, set_ = getattr(self, f"y_{part}"), f"data set {self.name!r}: "
            check_labels(f"{set_}y_{part}", y, self.num_classes)
            for party in ("hospital", "device"):
                check_inputs(f"{set_}{party}_{part}", getattr(self, f"{party}_{part}"), len(y))
            self._check_ids(f"ids_{part}", getattr(self, f"ids_{part}"), len(y))
        for party in ("hospital", "device"):
            self._check_party(party)
        for key in ("people_train", "sites_train"):
            self._check_names(key, getattr(self, key), len(self.y_train))
        self._check_payoffs()
        shared = np.intersect1d(self.ids_train, self.ids_test)
        if shared.size:
            raise self._error("ids_test", f"{str(shared[0])!r}", "ids that are not in ids_train")

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def _check_names(self, key: str, names: Ids | None, count: int) -> None:
        if names is None:
            return
        if not isinstance(names, np.ndarray) or names.dtype.kind != "U" or names.shape != (count,):
            raise self._error(key, described(names), f"a str array of shape ({count},)")

    def _check_payoffs(self) -> None:
        payoffs, due = self.payoffs_test, (len(self.y_test), self.num_classes)
        if payoffs is None:
            return
        if not isinstance(payoffs, np.ndarray) or payoffs.dtype != np.float64 or payoffs.shape != due:
            raise self._error("payoffs_test", described(payoffs), f"a float64 array of shape {due}")
        if not np.isfinite(payoffs).all():
            raise self._error("payoffs_test", "NaN or infinity", "finite")

    def _check_ids(self, key: str, ids: Ids, count: int) -> None:
        self._check_names(key, ids, count)
        names, times = np.unique(ids, return_counts=True)
        if times.max() > 1:
            raise self._error(key, f"{str(names[times.argmax()])!r} {times.max()} times", "different ids")

    def _check_party(self, party: str) -> None:
        train, test = (getattr(self, f"{party}_{part}").shape[1:] for part in ("train", "test"))
        if train != test:
            raise self._error(f"{party}_test", f"{test}", f"samples of shape {train}, as in {party}_train")
        names = getattr(self, f"{party}_features")
        if names and len(names) != train[-1]:
            raise self._error(f"{party}_features", f"{len(names)} names", f"{train[-1]} names, or none")

    def _error(self, key: str, value: str, valid: str) -> ValueError:
        return ValueError(f"data set {self.name!r}: {key} must be {valid}, got {value}")


def load_vertical(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    more: Mapping[str, DataSource] = MappingProxyType({}),
) -> VerticalDataset:
    """Return a data set of two parties by name, cached.

    Each party's features of tables and series are scaled to the training set's mean 0 and deviation 1 over
    the measured values. A missing value is, in a table, the training set's median; in a series, the last
    value before it, or else the mean, 0, and features named "... measured" are 1 or 0. Images are in [-1, 1]:
    the hospital has the 22x22 center of 28x28 pixels, the device the frame around it, and a party's missing
    pixels are 0.
    The test set is the published one or else a fifth of each class, the same everywhere. A table may say
    at how many deviations its features are clipped.

    Parameters
    ----------
    name : str
        One of ``VERTICAL_DATASETS`` or of ``more``, or an import path ``module:function`` of a function that
        takes the data folder (a ``Path`` or None) and returns a ``VerticalDataset``.
    data_dir : str or path or None (default: None)
        The folder with the files or with a subfolder of the set's name; None or empty uses the environment
        variable HEDGEROW_DATA_DIR.
    more : Mapping[str, DataSource] (default: none)
        Sources in addition to the known ones, by name.

    Raises
    ------
    DatasetNotFound
        If the files are in none of the searched folders.
    ValueError
        If the name is unknown, the function did not return a ``VerticalDataset``, or a file is corrupt.
    """
    folder = resolve_data_dir(data_dir)
    if is_import_path(name):
        return imported(name, folder, VerticalDataset)
    source = {**SOURCES, **more}[known(name, vertical_datasets(more))]
    return _load(name, source, folder)


@lru_cache(maxsize=2)
def _load(name: str, source: DataSource, folder: Path | None) -> VerticalDataset:
    raw = source.read(find(name, folder, source))
    if isinstance(raw, Table):
        return _from_table(name, raw)
    assert isinstance(raw, Images)
    x_train, x_test = scaled(raw, "unit")
    y_train, y_test = raw.y_train.astype(np.int64), raw.y_test.astype(np.int64)
    return _from_images(name, x_train, y_train, x_test, y_test, source.classes)


def _from_table(name: str, table: Table) -> VerticalDataset:
    people = table.ids if table.people is None else table.people
    test = _test_samples(table.labels, people) if table.test is None else table.test
    both = np.intersect1d(people[test], people[~test])
    if both.size:
        raise ValueError(
            f"data set {name!r}: a person must be in training or test set, got {str(both[0])!r} in both"
        )
    hospital, hospital_features = _prepared(table.hospital, ~test, table.hospital_features, table)
    device, device_features = _prepared(table.device, ~test, table.device_features, table)
    return VerticalDataset(
        name,
        hospital[~test],
        device[~test],
        table.labels[~test],
        table.ids[~test],
        hospital[test],
        device[test],
        table.labels[test],
        table.ids[test],
        table.classes,
        hospital_features,
        device_features,
        None if table.people is None else table.people[~test],
        None if table.sites is None else table.sites[~test],
        None if table.payoffs is None else table.payoffs[test],
    )


def _test_samples(labels: NDArray[np.int64], people: Ids) -> NDArray[np.bool_]:
    """Choose people of each class at random, with all their samples, up to a fifth of the class's samples."""
    rng = np.random.default_rng(_SPLIT_SEED)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        names, person = np.unique(people[members], return_inverse=True)
        order = rng.permutation(len(names))
        samples = np.bincount(person)[order].cumsum()
        chosen = order[: np.searchsorted(samples, round(_TEST_SHARE * len(members)), side="right")]
        test[members[np.isin(person, chosen)]] = True
    return test


def _prepared(
    x: Floats, train: NDArray[np.bool_], features: tuple[str, ...], table: Table
) -> tuple[Floats, tuple[str, ...]]:
    """Scale and impute one party's features by the training samples."""
    measured = ~np.isnan(x)
    flags = np.array([feature in table.flags for feature in features] or [False])
    scaled_x = _standardised(x, train)
    if table.clip is not None:
        scaled_x = np.clip(scaled_x, -table.clip, table.clip)
    values = np.where(flags, x, scaled_x).astype(np.float32)
    if measured.all() and not table.masks:
        return values, features
    if not table.masks:
        return np.where(measured, values, _medians(values[train])), features
    filled = np.concatenate([_filled_forward(values, measured), measured], axis=-1, dtype=np.float32)
    return filled, (*features, *(f"{feature} measured" for feature in features))


def _standardised(x: Floats, train: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return x scaled to the training samples' mean 0 and deviation 1 per feature, over measured values."""
    seen = x[train].reshape(-1, x.shape[-1]).astype(np.float64)
    count = np.maximum((~np.isnan(seen)).sum(axis=0), 1)
    mean = np.nansum(seen, axis=0) / count
    deviation = np.sqrt(np.nansum((seen - mean) ** 2, axis=0) / count)
    # A constant feature becomes zeros.
    standardised: NDArray[np.float64] = (x - mean) / np.where(deviation > 0, deviation, 1.0)
    return standardised


def _medians(x: Floats) -> Floats:
    """Return each feature's median, (features,); 0, the mean, for a feature without measurements."""
    rows = x.reshape(-1, x.shape[-1])
    return np.array(
        [np.median(column[~np.isnan(column)]) if not np.isnan(column).all() else 0.0 for column in rows.T],
        np.float32,
    )


def _filled_forward(series: Floats, measured: NDArray[np.bool_]) -> Floats:
    """Return (N, T, F) with the last value measured up to each hour; 0 before the first."""
    hours = np.arange(series.shape[1])[:, None]
    last = np.maximum.accumulate(np.where(measured, hours, -1), axis=1)
    values = np.take_along_axis(series, np.maximum(last, 0), axis=1)
    return np.where(last >= 0, values, _BLANK)


def _from_images(
    name: str,
    x_train: Floats,
    y_train: NDArray[np.int64],
    x_test: Floats,
    y_test: NDArray[np.int64],
    classes: tuple[str, ...],
) -> VerticalDataset:
    if x_train.shape[-2:] != (_SIDE, _SIDE):
        raise ValueError(f"data set {name!r}: images must be {_SIDE}x{_SIDE}, got {x_train.shape[-2:]}")
    # 484 and 300 pixels, as in the paper.
    hospital = np.zeros((_SIDE, _SIDE), bool)
    hospital[_CENTRE, _CENTRE] = True
    device = ~hospital
    # MedMNIST's scaling, which needs no statistics and so no exchange between the parties.
    train, test = 2 * x_train - 1, 2 * x_test - 1
    return VerticalDataset(
        name,
        np.where(hospital, train, _BLANK),
        np.where(device, train, _BLANK),
        y_train,
        np.array([f"train-{number}" for number in range(len(y_train))]),
        np.where(hospital, test, _BLANK),
        np.where(device, test, _BLANK),
        y_test,
        np.array([f"test-{number}" for number in range(len(y_test))]),
        classes,
    )
