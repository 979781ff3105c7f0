"""The constants of bound (15) from a run's own nodes, for the planner.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Assumption 1, whose constants the paper does not give. Ours: before a round each
client tells grad F_i(u), and of its samples curvature and mini-batch variance. What is found holds at the
models that a run visits: estimates from below. Nothing of it enters the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import numpy as np
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.strategies.exchange import checked_metrics
from hedgerow.wire.records import PayloadError

__all__ = ["CURVATURE", "VARIANCE", "Seen", "Told", "seen", "told"]

CURVATURE, VARIANCE = "curvature", "gradient-variance"


@dataclass(frozen=True)
class Told:
    """What one client tells of its loss at u.

    Parameters
    ----------
    gradient : NDArray
        grad F_i(u), (M,).
    curvature : float
        Of its loss, an estimate of L from below, >= 0.
    variance : float
        Of a mini-batch gradient, an estimate of sigma^2, >= 0.
    """

    gradient: NDArray[np.float64]
    curvature: float
    variance: float


@dataclass(frozen=True)
class Seen:
    """What the clients that answered show of the constants at u.

    Parameters
    ----------
    curvature, variance : float
        The largest of the clients', for L and sigma^2.
    dissimilarity : float
        The largest ||grad F_i(u) - grad F(u)||^2, for kappa^2.
    gradient2 : float
        ||grad F(u)||^2, what (15) bounds the mean of.
    clients : int
        How many answered, >= 1.
    """

    curvature: float
    variance: float
    dissimilarity: float
    gradient2: float
    clients: int

    def metrics(self) -> MetricRecord:
        """Return the figures by the names of a round's record."""
        return MetricRecord(
            {
                CURVATURE: self.curvature,
                VARIANCE: self.variance,
                "gradient-dissimilarity": self.dissimilarity,
                "gradient2": self.gradient2,
                "probed-clients": self.clients,
            }
        )


def told(content: RecordDict, gradient: NDArray[np.float64], weighted_by_key: str) -> Told:
    """Return what a valid reply tells beside its gradient (M,).

    Raises
    ------
    PayloadError
        If a metric is missing, not finite or negative.
    """
    metrics = checked_metrics(content, weighted_by_key)
    estimates = []
    for key in (CURVATURE, VARIANCE):
        value = metrics.get(key)
        if not (isinstance(value, int | float) and isfinite(value) and value >= 0):
            raise PayloadError("bad metrics", f"{key} is {value!r}; valid is a number >= 0")
        estimates.append(float(value))
    return Told(gradient, *estimates)


def seen(replies: Iterable[tuple[float, Told]]) -> Seen | None:
    """Return what clients of weights |S_i| show together; None of none of them."""
    pairs = list(replies)
    if not pairs:
        return None
    weights = np.array([weight for weight, _ in pairs])
    gradients = np.stack([one.gradient for _, one in pairs])  # (clients, M)
    mean = (weights / weights.sum()) @ gradients
    apart = gradients - mean
    return Seen(
        max(one.curvature for _, one in pairs),
        max(one.variance for _, one in pairs),
        float(np.einsum("ij,ij->i", apart, apart).max()),
        float(mean @ mean),
        len(pairs),
    )
