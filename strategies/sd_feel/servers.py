"""The models of the edge servers: their mean, how far they are apart, and what of them servers exchange.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", section III.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from hedgerow.wire.compress import compressed_keys
from hedgerow.wire.edge_servers import robust_step
from hedgerow.wire.records import Layout, payload_bytes
from hedgerow.wire.robust_means import Aggregation

__all__ = ["ServerModels", "ServerTransfer"]


class ServerTransfer(NamedTuple):
    """A model on its way between two servers: over which link, from whom to whom, and its bytes."""

    link: str
    source: int
    target: int
    payload_bytes: int


@dataclass(frozen=True)
class ServerModels:
    """One model for each edge server.

    Parameters
    ----------
    layout : Layout
        Where a model's arrays stand in its vector.
    vectors : numpy.ndarray
        The models, (D, M).
    """

    layout: Layout
    vectors: NDArray[Any]

    def records(self) -> list[ArrayRecord]:
        """Return the models as records."""
        return [self.layout.unflatten(model) for model in self.vectors]

    @property
    def payload_bytes(self) -> int:
        """The bytes of one of the models as a record."""
        return payload_bytes(self.layout.unflatten(self.vectors[0]))

    def mean(self, weights: NDArray[np.float64]) -> NDArray[Any]:
        """Return u (M,), the mean by the clusters' shares of all samples (D,)."""
        total = np.zeros(self.vectors.shape[1], np.float64)
        for weight, model in zip(weights, self.vectors, strict=True):
            total += weight * model
        return total.astype(self.vectors.dtype)

    def robust_mean(self, weights: NDArray[np.float64], rule: Aggregation) -> NDArray[Any]:
        """Return what a rule of ``neighbourhood_rule`` takes of the models (M,), some of which may be lies.

        ``clipped(tau)`` cuts what differs from their median, entry by entry, and weighs the rest as the mean.
        """
        models = {d: vector.astype(np.float64) for d, vector in enumerate(self.vectors)}
        if rule.name == "clipped":
            centre = {-1: np.median(self.vectors.astype(np.float64), axis=0)}
            u = robust_step(-1, {**centre, **models}, dict(enumerate(weights)), rule)
        else:
            u = rule.combined(np.stack(list(models.values())), weights)
        return u.astype(self.vectors.dtype)

    def consensus_error(self, weights: NDArray[np.float64]) -> float:
        """Return the weighted mean squared distance of the models to u."""
        mean = self.mean(weights)
        squares = [float(np.sum((model - mean) ** 2, dtype=np.float64)) for model in self.vectors]
        return float(np.dot(weights, squares))

    @property
    def exchanged(self) -> NDArray[np.bool_]:
        """Which entries of a vector servers exchange (M,): running statistics stay out of it.

        A mixing matrix with a negative self-weight could make a variance negative.
        """
        columns = np.zeros(self.vectors.shape[1], bool)
        for key in compressed_keys(self.layout):
            columns[self.layout.slices[key]] = True
        return columns

    def after(self, exchange: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
        """Return the models after an exchange, which maps (D, entries exchanged) to the same."""
        columns = self.exchanged
        if columns.all():
            return exchange(self.vectors)
        mixed = self.vectors.copy()
        mixed[:, columns] = exchange(np.ascontiguousarray(self.vectors[:, columns]))
        return mixed
