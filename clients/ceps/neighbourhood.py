"""How a node of CEPS combines its own and its neighbours' models: by their mean, or a Byzantine-robust rule.

Papers: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", (3), the mean; L. He,
S. P. Karimireddy, M. Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022, where a
neighbour moves the mean by tau over the number of models at most; D. Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates", 2018 (median, trimmed mean), here over the node
itself and those that it heard.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from hedgerow.clients.instructions import choice, nonnegative, positive
from hedgerow.wire.robust_means import Aggregation, cut

__all__ = ["combined", "neighbour_mean", "neighbourhood_of"]

Vector = NDArray[np.float64]


def neighbour_mean(own: int, w: Vector, received: Mapping[int, Vector]) -> Vector:
    """Return the mean of a node's model and those it received, summed in the order of their ids."""
    total = np.zeros_like(w)
    for j in sorted({own, *received}):
        total += w if j == own else received[j]
    return total / (1 + len(received))


def neighbourhood_of(config: ConfigRecord) -> Aggregation:
    """Read ``aggregation`` (absent: the mean) and its ``aggregation-number``; ValueError if one is not valid.

    The rules are the mean; the median or ``trimmed-mean``, entry by entry, whose number b in [0, 0.5) is the
    share that is cut off at each end; and ``clipped``, with tau > 0, of ``combined``.
    """
    if "aggregation" not in config:
        return Aggregation("mean")
    rule = choice(config, "aggregation", ("mean", "median", "trimmed-mean", "clipped"))
    if rule == "clipped":
        return Aggregation(rule, (positive(config, "aggregation-number"),))
    if rule == "trimmed-mean":
        return Aggregation(rule, (nonnegative(config, "aggregation-number", below=0.5),))
    return Aggregation(rule)


def combined(rule: Aggregation, own: int, w: Vector, received: Mapping[int, Vector]) -> Vector:
    """Return what becomes of a node's model (n,) and those that it received, by sender.

    ``clipped`` is the mean of its own model and of the neighbours' ones drawn near: each differs from its own
    by a norm of tau at most.
    """
    if rule.name == "clipped":
        received = {j: w + cut(z - w, *rule.arguments) for j, z in received.items()}
    if rule.name in ("mean", "clipped"):
        return neighbour_mean(own, w, received)
    models = np.stack([w if j == own else received[j] for j in sorted({own, *received})])
    return rule.combined(models, np.ones(len(models)))
