"""Means that some lying nodes cannot ruin: what a server may take instead of the weighted mean.

Papers: D. Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018
(median, trimmed mean); P. Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", 2017 (Krum, Multi-Krum); K. Pillutla et al., "Robust Aggregation for Federated Learning", 2022
(geometric median by the smoothed Weiszfeld algorithm); S. P. Karimireddy et al., "Learning from History for
Byzantine Robust Optimization", 2021 (centred clipping).
Trimmed mean and the selection of Krum are Flower's own functions.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum
from numpy.typing import NDArray

from hedgerow.strategies.vectors import weighted_mean
from hedgerow.wire.records import lazy_array

__all__ = ["AGGREGATIONS", "Aggregation", "parse_aggregation"]

# As an error or a setting's help says what is valid.
AGGREGATIONS = (
    "mean, median, trimmed-mean(b), krum(f), multi-krum(f,m), geometric-median or clipped(tau), with "
    "0 <= b < 0.5, integers f >= 0 and m >= 1, and tau > 0"
)
# Of the smoothed Weiszfeld algorithm: iterations at most, and the relative change of the objective at which
# it stops.
_ITERATIONS, _TOLERANCE = 100, 1e-10

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


def _median(updates: Matrix, weights: Vector) -> Vector:
    return np.median(updates, axis=0)


def _trimmed(updates: Matrix, weights: Vector, share: float) -> Vector:
    return np.asarray(trim_mean(updates, share), np.float64)


def _multi_krum(updates: Matrix, weights: Vector, liars: float, kept: float = 1) -> Vector:
    contents = [RecordDict({"updates": ArrayRecord({"update": lazy_array(row)})}) for row in updates]
    chosen = {id(content) for content in select_multikrum(contents, int(liars), int(kept))}
    rows = [i for i, content in enumerate(contents) if id(content) in chosen]
    return updates[rows[0]] if len(rows) == 1 else _mean(updates[rows], weights[rows])


def _geometric_median(updates: Matrix, weights: Vector) -> Vector:
    """Return where the weighted sum of distances is least, up to the smoothing of distances near zero."""
    shares = weights / weights.sum()
    center = np.median(updates, axis=0)
    smallest = max(1e-6 * float(np.median(np.linalg.norm(updates - center, axis=1))), 1e-300)
    before = math.inf
    for _ in range(_ITERATIONS):
        distances = np.maximum(np.linalg.norm(updates - center, axis=1), smallest)
        if (objective := float(shares @ distances)) >= before * (1 - _TOLERANCE):
            break
        before = objective
        center = _mean(updates, shares / distances)
    return center


def _clipped(updates: Matrix, weights: Vector, tau: float) -> Vector:
    norms = np.linalg.norm(updates, axis=1)
    factors = np.minimum(1.0, tau / np.maximum(norms, np.finfo(np.float64).tiny))
    return _mean(updates * factors[:, None], weights)


def _mean(updates: Matrix, weights: Vector) -> Vector:
    mean = weighted_mean(zip(weights, updates, strict=True))
    assert mean is not None
    return mean


_RULES: Mapping[str, Callable[..., Vector]] = {
    "mean": _mean,
    "median": _median,
    "trimmed-mean": _trimmed,
    "krum": _multi_krum,
    "multi-krum": _multi_krum,
    "geometric-median": _geometric_median,
    "clipped": _clipped,
}
_ARGUMENTS = {"trimmed-mean": 1, "krum": 1, "multi-krum": 2, "clipped": 1}


@dataclass(frozen=True)
class Aggregation:
    """One of the rules: ``parse_aggregation`` makes them.

    ``mean`` weighs replies by their nodes' examples, as ``geometric-median``, ``clipped`` and what Multi-Krum
    keeps do; for ``median``, ``trimmed-mean`` and the choice of Krum each reply is one. Where nodes' data
    differ much, rules that leave replies out leave out what those nodes alone know.

    Parameters
    ----------
    name : str
        The rule.
    arguments : tuple[float, ...]
        Its numbers: b of ``trimmed-mean``, the share that is cut off at each end; f of ``krum``, the liars
        that it withstands; f and m of ``multi-krum``, which averages m updates; tau of ``clipped``, to which
        norm an update is cut.
    """

    name: str
    arguments: tuple[float, ...] = ()

    @property
    def is_mean(self) -> bool:
        """Whether it is the plain weighted mean."""
        return self.name == "mean"

    @property
    def least(self) -> int:
        """Fewest updates that it works on: 2 f + 3 for Krum, as its proof wants, and m of them to keep."""
        if self.name not in ("krum", "multi-krum"):
            return 1
        liars = int(self.arguments[0])
        return max(2 * liars + 3, liars + int(self.arguments[-1]) if self.name == "multi-krum" else 0)

    def combined(self, updates: Matrix, weights: Vector) -> Vector:
        """Return what becomes of some updates, (d,) in float64.

        Parameters
        ----------
        updates : NDArray[float64]
            One a row (n, d), n >= ``least``, in a fixed order.
        weights : NDArray[float64]
            The replies' weights (n,), > 0.

        Raises
        ------
        ValueError
            If there are fewer than ``least``.
        """
        if len(updates) < self.least:
            raise ValueError(f"{len(updates)} updates for {self}; valid is at least {self.least}")
        return _RULES[self.name](updates, weights, *self.arguments)

    def __str__(self) -> str:
        return (
            f"{self.name}({','.join(f'{one:g}' for one in self.arguments)})" if self.arguments else self.name
        )


def parse_aggregation(text: str) -> Aggregation:
    """Return the rule of a text, ``mean``, ``krum(2)``, ``multi-krum(2,5)``, ….

    Raises
    ------
    ValueError
        If it is none, or its numbers are out of range.
    """
    found = re.fullmatch(r"([a-z-]+)(?:\(([0-9.eE+,\s-]+)\))?", text.strip())
    try:
        name = found[1] if found else ""
        numbers = tuple(float(one) for one in found[2].split(",")) if found and found[2] else ()
    except ValueError:
        name, numbers = "", ()
    valid = name in _RULES and len(numbers) == _ARGUMENTS.get(name, 0) and all(map(math.isfinite, numbers))
    if valid and name == "trimmed-mean":
        valid = 0 <= numbers[0] < 0.5
    elif valid and name == "clipped":
        valid = numbers[0] > 0
    elif valid and numbers:
        valid = (
            all(one == int(one) for one in numbers) and numbers[0] >= 0 and numbers[-1] >= len(numbers) - 1
        )
    if not valid:
        raise ValueError(f"aggregation is {text!r}; valid is {AGGREGATIONS}")
    return Aggregation(name, numbers)
