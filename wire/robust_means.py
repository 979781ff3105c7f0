"""Byzantine-robust aggregation rules, in place of the weighted mean of updates.

Papers: D. Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018
(median, trimmed mean); P. Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", 2017 (Krum, Multi-Krum); K. Pillutla et al., "Robust Aggregation for Federated Learning", 2022
(geometric median by the smoothed Weiszfeld algorithm); S. P. Karimireddy et al., "Learning from History for
Byzantine Robust Optimization", 2021 (centred clipping).
Trimmed mean and the selection of Krum equal Flower's, whose functions are private, to the bit
(tests/strategies/test_robust.py). Difference: only the mean weights updates by their nodes' numbers of
examples. Pillutla et al. do so too, but nobody can verify the numbers, and a node that claims more than all
others together controls a weighted geometric median.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

# The valid values, for errors and the help of settings.
AGGREGATIONS = (
    "mean, median, trimmed-mean(b), krum(f), multi-krum(f,m), geometric-median or clipped(tau), with "
    "0 <= b < 0.5, integers f >= 0 and m >= 1, and tau > 0"
)
# The rules for few models: a node's own and its neighbours'.
NEIGHBOURHOOD_RULES = "mean, median, trimmed-mean(b) or clipped(tau), with 0 <= b < 0.5 and tau > 0"
# The smoothed Weiszfeld algorithm's most iterations, and the relative change of the objective at which it
# stops.
_ITERATIONS, _TOLERANCE = 100, 1e-10

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


def cut(vector: Vector, tau: float) -> Vector:
    """Return a vector (d,) clipped to the norm tau > 0."""
    norm = float(np.linalg.norm(vector))
    return vector if norm <= tau else vector * (tau / norm)


def _weighted_mean(updates: Matrix, weights: Vector) -> Vector:
    total = np.zeros(updates.shape[1])
    for weight, update in zip(weights, updates, strict=True):
        total += weight * update
    mean: Vector = total / weights.sum()
    return mean


def _mean(updates: Matrix) -> Vector:
    return _weighted_mean(updates, np.ones(len(updates)))


def _trimmed(updates: Matrix, share: float) -> Vector:
    off = int(share * len(updates))
    left = len(updates) - off
    mean: Vector = np.partition(updates, (off, left - 1), axis=0)[off:left].mean(axis=0)
    return mean


def _multi_krum(updates: Matrix, byzantine: float, kept: float = 1) -> Vector:
    updates = np.ascontiguousarray(updates)
    squares = np.square(updates).sum(axis=1)
    distances = squares[:, None] + squares[None, :] - 2 * updates @ updates.T  # (n, n), squared
    closest = max(1, len(updates) - int(byzantine) - 2)
    # The nearest is the update itself.
    scores = [row[np.argsort(row)[1 : closest + 1]].sum() for row in distances]
    rows = np.sort(np.argsort(scores)[: int(kept)])
    return updates[rows[0]] if len(rows) == 1 else _mean(updates[rows])


def _geometric_median(updates: Matrix) -> Vector:
    """Return the minimiser of the sum of distances, up to the smoothing of distances near zero."""
    center = np.median(updates, axis=0)
    smallest = max(1e-6 * float(np.median(np.linalg.norm(updates - center, axis=1))), 1e-300)
    before = math.inf
    for _ in range(_ITERATIONS):
        distances = np.maximum(np.linalg.norm(updates - center, axis=1), smallest)
        if (objective := float(distances.sum())) >= before * (1 - _TOLERANCE):
            break
        before = objective
        center = _weighted_mean(updates, 1 / distances)
    return center


_RULES: Mapping[str, Callable[..., Vector]] = {
    "median": partial(np.median, axis=0),
    "trimmed-mean": _trimmed,
    "krum": _multi_krum,
    "multi-krum": _multi_krum,
    "geometric-median": _geometric_median,
    "clipped": lambda updates, tau: _mean(np.stack([cut(update, tau) for update in updates])),
}
_ARGUMENTS = {"trimmed-mean": 1, "krum": 1, "multi-krum": 2, "clipped": 1}


@dataclass(frozen=True)
class Aggregation:
    """An aggregation rule, from ``parse_aggregation``.

    ``mean`` weights replies by their nodes' examples; all other rules weight replies equally. With
    heterogeneous data, a rule that excludes replies loses what only their nodes' data contain.

    Parameters
    ----------
    name : str
        The rule.
    arguments : tuple[float, ...]
        Its numbers: b of ``trimmed-mean``, the share removed at each end; f of ``krum``, the Byzantine nodes
        that it tolerates; f and m of ``multi-krum``, which averages m updates; tau of ``clipped``, the norm
        to which updates are clipped.
    """

    name: str
    arguments: tuple[float, ...] = ()

    @property
    def is_mean(self) -> bool:
        """Whether it is the plain weighted mean."""
        return self.name == "mean"

    @property
    def least(self) -> int:
        """The fewest updates that it accepts: 2 f + 3 for Krum, as its proof requires, and at least f + m."""
        if self.name not in ("krum", "multi-krum"):
            return 1
        f = int(self.arguments[0])
        return max(2 * f + 3, f + int(self.arguments[-1]) if self.name == "multi-krum" else 0)

    def for_count(self, updates: int) -> "Aggregation":
        """Return the rule for a number of updates: below ``least``, the coordinate-wise median.

        The median tolerates fewer than half of the remaining updates, and no node can stop a model from
        changing by not replying.
        """
        return self if updates >= self.least else Aggregation("median")

    def combined(self, updates: Matrix, weights: Vector) -> Vector:
        """Return the aggregate of updates, (d,) in float64.

        Parameters
        ----------
        updates : NDArray[float64]
            One per row (n, d), n >= ``least``, in a fixed order.
        weights : NDArray[float64]
            The replies' weights (n,), > 0, used only by the mean.

        Raises
        ------
        ValueError
            If there are fewer than ``least``.
        """
        if len(updates) < self.least:
            raise ValueError(f"{self} must have at least {self.least} updates, got {len(updates)}")
        if self.is_mean:
            return _weighted_mean(updates, weights)
        return _RULES[self.name](updates, *self.arguments)

    def __str__(self) -> str:
        # All digits, because a rule may be sent as its text.
        numbers = ",".join(repr(one).removesuffix(".0") for one in self.arguments)
        return f"{self.name}({numbers})" if numbers else self.name


def parse_aggregation(text: str) -> Aggregation:
    """Parse a rule, ``mean``, ``krum(2)``, ``multi-krum(2,5)``, ….

    Raises
    ------
    ValueError
        If there is no such rule, or its numbers are out of range.
    """
    found = re.fullmatch(r"([a-z-]+)(?:\(([0-9.eE+,\s-]+)\))?", text.strip())
    try:
        name = found[1] if found else ""
        numbers = tuple(float(one) for one in found[2].split(",")) if found and found[2] else ()
    except ValueError:
        name, numbers = "", ()
    known = name == "mean" or name in _RULES
    valid = known and len(numbers) == _ARGUMENTS.get(name, 0) and all(map(math.isfinite, numbers))
    if valid and name == "trimmed-mean":
        valid = 0 <= numbers[0] < 0.5
    elif valid and name == "clipped":
        valid = numbers[0] > 0
    elif valid and numbers:
        valid = (
            all(one == int(one) for one in numbers) and numbers[0] >= 0 and numbers[-1] >= len(numbers) - 1
        )
    if not valid:
        raise ValueError(f"aggregation must be {AGGREGATIONS}, got {text!r}")
    return Aggregation(name, numbers)


def neighbourhood_rule(text: str) -> Aggregation:
    """Parse a rule for neighbourhoods; ValueError if it is not one."""
    try:
        rule = parse_aggregation(text)
    except ValueError:
        rule = None
    if rule is None or rule.name not in ("mean", "median", "trimmed-mean", "clipped"):
        raise ValueError(f"aggregation must be {NEIGHBOURHOOD_RULES}, got {text!r}")
    return rule
