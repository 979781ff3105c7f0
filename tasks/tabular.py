"""Tables of two parties: two halves of the same people's features, as measured.

A missing measurement is NaN; splitting, imputation and scaling come later.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .extras import needed

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Table:
    """The result of a reader: both halves of every sample, as measured.

    Parameters
    ----------
    hospital, device : ndarray of float32
        (N, F), or (N, T, F) for series; NaN if missing.
    labels : ndarray of int64
        (N,), indices into ``classes``.
    ids : ndarray of str
        (N,), the id of each sample.
    classes : tuple of str
        Names of the classes.
    hospital_features, device_features : tuple of str
        Names of the features, empty if they have none.
    test : ndarray of bool or None (default: None)
        (N,), the published test set or the reader's own; None if there is none.
    people : ndarray of str or None (default: None)
        (N,), the person of each sample; None: everyone has one sample.
    sites : ndarray of str or None (default: None)
        (N,), the person's hospital system; None if unknown.
    payoffs : ndarray of float64 or None (default: None)
        (N, classes), the utility of predicting each class; None if not defined.
    flags : frozenset of str (default: empty)
        Binary features, which are not scaled.
    masks : bool (default: False)
        Whether a series is filled forward and gets masks of what was measured.
    clip : float or None (default: None)
        Clip scaled features at this many deviations, > 0; None: no clipping.
    """

    hospital: Floats
    device: Floats
    labels: NDArray[np.int64]
    ids: NDArray[np.str_]
    classes: tuple[str, ...]
    hospital_features: tuple[str, ...] = ()
    device_features: tuple[str, ...] = ()
    test: NDArray[np.bool_] | None = None
    people: NDArray[np.str_] | None = None
    sites: NDArray[np.str_] | None = None
    payoffs: NDArray[np.float64] | None = None
    flags: frozenset[str] = frozenset()
    masks: bool = False
    clip: float | None = None


def read_breast_cancer(_folder: Path) -> Table:
    """Read scikit-learn's copy: 569 biopsies with 30 features of their cell nuclei.

    Each of ten properties has a mean, an error and a worst value. The device has the first five properties
    (the size and outline of the nuclei), the hospital the last five (their shape).
    """
    # Imported here because scikit-learn takes 1.5 seconds to import.
    bunch = needed("sklearn.datasets", "sim", "data set 'breast-cancer'").load_breast_cancer()
    features = np.asarray(bunch.feature_names)
    at_hospital = np.arange(features.size) % 10 >= 5
    return Table(
        hospital=bunch.data[:, at_hospital].astype(np.float32),
        device=bunch.data[:, ~at_hospital].astype(np.float32),
        labels=bunch.target.astype(np.int64),
        ids=np.array([str(number) for number in range(len(bunch.target))]),
        classes=tuple(map(str, bunch.target_names)),
        hospital_features=tuple(features[at_hospital].tolist()),
        device_features=tuple(features[~at_hospital].tolist()),
    )
