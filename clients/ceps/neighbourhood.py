"""What a node of CEPS takes of its own and its neighbours' models: their mean, or what liars cannot ruin.

Papers: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", (3), the mean; L. He,
S. P. Karimireddy, M. Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022, where a
neighbour moves the mean by tau over the number of models at most; D. Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates", 2018 (median, trimmed mean), here over the node
itself and those that it heard.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from hedgerow.clients.instructions import choice, nonnegative, positive
from hedgerow.wire.robust_means import Aggregation

__all__ = ["Neighbourhood", "neighbour_mean"]

Vector = NDArray[np.float64]


def neighbour_mean(own: int, w: Vector, received: Mapping[int, Vector]) -> Vector:
    """Return the mean of a node's model and those it received, summed in the order of their ids."""
    total = np.zeros_like(w)
    for j in sorted({own, *received}):
        total += w if j == own else received[j]
    return total / (1 + len(received))


@dataclass(frozen=True)
class Neighbourhood:
    """A rule for the models of a neighbourhood.

    Parameters
    ----------
    rule : {"mean", "median", "trimmed-mean", "clipped"} (default: "mean")
        The mean; the median or the trimmed mean, entry by entry; or the mean of the own model and of the
        neighbours' ones drawn near: each differs from the own by a norm of ``number`` at most.
    number : float (default: 0.0)
        b of the trimmed mean, the share that is cut off at each end, in [0, 0.5); tau of ``clipped``, > 0.
    """

    rule: str = "mean"
    number: float = 0.0

    @classmethod
    def of(cls, config: ConfigRecord) -> "Neighbourhood":
        """Read ``aggregation`` (absent: the mean) and its number; ValueError if one is not valid."""
        if "aggregation" not in config:
            return cls()
        rule, key = (
            choice(config, "aggregation", ("mean", "median", "trimmed-mean", "clipped")),
            "aggregation-number",
        )
        if rule == "clipped":
            return cls(rule, positive(config, key))
        return cls(rule, nonnegative(config, key, below=0.5) if rule == "trimmed-mean" else 0.0)

    def combined(self, own: int, w: Vector, received: Mapping[int, Vector]) -> Vector:
        """Return what becomes of a node's model (n,) and those that it received, by sender."""
        if self.rule == "clipped":
            received = {j: w + _cut(z - w, self.number) for j, z in received.items()}
        if self.rule in ("mean", "clipped"):
            return neighbour_mean(own, w, received)
        models = np.stack([w if j == own else received[j] for j in sorted({own, *received})])
        numbers = (self.number,) if self.rule == "trimmed-mean" else ()
        return Aggregation(self.rule, numbers).combined(models, np.ones(len(models)))


def _cut(difference: Vector, tau: float) -> Vector:
    norm = float(np.linalg.norm(difference))
    return difference if norm <= tau else difference * (tau / norm)
