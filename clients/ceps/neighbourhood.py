"""The mean or Byzantine-robust rule by which a CEPS node combines its own and its neighbours' models.

Papers: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", (3), the mean; L. He,
S. P. Karimireddy, M. Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022, in which a
neighbour moves the mean by at most tau over the number of models; D. Yin et al., "Byzantine-Robust
Distributed Learning: Towards Optimal Statistical Rates", 2018 (median, trimmed mean), here over the node
itself and the neighbours that it heard.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from hedgerow.clients.instructions import choice, nonnegative, positive
from hedgerow.wire.robust_means import Aggregation, cut

Vector = NDArray[np.float64]


def neighbour_mean(own: int, w: Vector, received: Mapping[int, Vector]) -> Vector:
    """Return the mean of a node's and the received models, summed in the order of their ids."""
    total = np.zeros_like(w)
    for j in sorted({own, *received}):
        total += w if j == own else received[j]
    return total / (1 + len(received))


def neighbourhood_of(config: ConfigRecord) -> Aggregation:
    """Read ``aggregation`` (absent: the mean) and its ``aggregation-number``; ValueError if one is invalid.

    The number is b of ``trimmed-mean`` in [0, 0.5), the share cut off at each end, or tau > 0 of ``clipped``.
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
    """Return the combination of a node's model (n,) and the received ones, by sender.

    ``clipped`` is the mean of its own model and the neighbours', each moved to within tau of its own in norm.
    """
    if rule.name == "clipped":
        received = {j: w + cut(z - w, *rule.arguments) for j, z in received.items()}
    if rule.name in ("mean", "clipped"):
        return neighbour_mean(own, w, received)
    models = np.stack([w if j == own else received[j] for j in sorted({own, *received})])
    return rule.combined(models, np.ones(len(models)))
