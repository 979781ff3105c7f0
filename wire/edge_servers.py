"""The computations of edge servers, and the format of requests to edge servers that are nodes.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", eqs. (3) and (5). A strategy that emulates edge servers and a node that is one
compute the same sums, in the same order and in float64, with the same bits. An edge server that is a node may
lie to its neighbours: L. He, S. P. Karimireddy, M. Jaggi, "Byzantine-Robust Decentralized Learning via
ClippedGossip", 2022, Algorithm 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.robust_means import Aggregation, cut

# The roles of a node, in its config and in ``query.whoami``.
CLIENT, EDGE = "client", "edge"
# The records sent to an edge server: models as vectors and their weights under the same keys, and its own
# model.
MODELS, WEIGHTS, OWN = "models", "weights", "own"
# The key of the only vector of a reply or of ``OWN``, and a reply's key that says that its state is missing.
MODEL, LACKS = "model", "lacks"
# The key of the rule in a config, in the form of ``parse_aggregation``; absent for the paper's sums.
RULE = "aggregation"

# Gossip mixes each coordinate separately: 16k doubles per node stay in the cache over all steps.
_CHUNK = 1 << 14

# A receiver's terms: (sender, p_{sender, receiver}), senders ascending, including itself.
Column = Sequence[tuple[int, float]]


def cluster_means(replies: Iterable[tuple[int, float, NDArray[Any]]], previous: NDArray[Any]) -> NDArray[Any]:
    """Return each server's weighted mean of the models that it received, eq. (3), renormalised over them.

    - ``replies``: (server, weight |S_i|, model (M,)) in a fixed order; sums are float64 in that order.
    - ``previous``: The servers' models so far (D, M); a server that received nothing keeps its own.
    """
    totals: dict[int, NDArray[np.float64]] = {}
    weights: dict[int, float] = {}
    term = np.empty(previous.shape[1], np.float64)
    for server, weight, model in replies:
        np.multiply(model, weight, out=term, dtype=np.float64)
        if server in totals:
            totals[server] += term
            weights[server] += weight
        else:
            totals[server], weights[server] = term.copy(), weight
    models = previous.copy()
    for server, total in totals.items():
        models[server] = total / weights[server]
    return models


def robust_mean(own: NDArray[Any], models: Sequence[NDArray[Any]], rule: Aggregation) -> NDArray[Any]:
    """Return an edge server's new model by a rule over models (M,) that were trained from its own (M,)."""
    before = own.astype(np.float64)
    updates = np.stack([model - before for model in models])
    mean: NDArray[Any] = (before + rule.combined(updates, np.ones(len(updates)))).astype(own.dtype)
    return mean


def robust_step(
    server: int, models: Mapping[int, NDArray[np.float64]], weights: Mapping[int, float], rule: Aggregation
) -> NDArray[np.float64]:
    """Return one server's model after a gossip step in which neighbours may lie (M,).

    ``clipped(tau)`` is w_d + sum_j p_{j,d} clip(w_j - w_d, tau) over its neighbours j, which is eq. (5) for
    large tau: a lying neighbour moves it by at most p_{j,d} tau. The median and the trimmed mean are those of
    its own and its neighbours' models, entry by entry, and ignore p.

    - ``models``: Its own and its neighbours', by server, ascending.
    - ``weights``: p_{j,d}, by server.
    - ``rule``: From ``neighbourhood_rule``, other than the mean.
    """
    own = models[server]
    if rule.name != "clipped":
        return own + rule.combined(np.stack([model - own for model in models.values()]), np.ones(len(models)))
    (tau,) = rule.arguments
    step = np.zeros_like(own)
    for j, model in models.items():
        if j != server:
            step += weights[j] * cut(model - own, tau)
    return own + step


def columns(matrix: NDArray[np.float64]) -> list[Column]:
    """Return the columns of a mixing matrix P (D, D), without pairs that are not edges of the graph."""
    nodes = range(len(matrix))
    return [[(j, float(matrix[j, d])) for j in nodes if j == d or matrix[j, d] != 0.0] for d in nodes]


def weighted_sum(
    terms: Iterable[tuple[float, NDArray[Any]]], out: NDArray[np.float64], term: NDArray[np.float64]
) -> None:
    """Write sum_j p_j w_j, one server's gossip step of eq. (5), to ``out``, in the order of the terms.

    Weights can be negative, and their sum is not normalised.

    - ``terms``: (p_j, w_j (M,)).
    - ``out``, ``term``: The sum and room for one term (M,); neither may overlap a w_j.
    """
    out[:] = 0.0
    for weight, model in terms:
        out += np.multiply(model, weight, out=term, dtype=np.float64)


def gossip(
    models: NDArray[Any], receivers: Sequence[Column], steps: int, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Return the servers' models (D, M) after ``steps`` steps of eq. (5).

    Intermediate results are float64, and the result is rounded once to the models' dtype.

    - ``models``: One model per server (D, M), floating.
    - ``receivers``: Each server's terms, from ``columns``.
    - ``steps``: alpha, >= 0; 0 returns the models unchanged.
    - ``out``: The result's array (D, M), floating, which may be ``models``; None for a new one.
    """
    results = np.empty_like(models) if out is None else out
    for start in range(0, models.shape[1], _CHUNK):
        here = slice(start, start + _CHUNK)
        now = models[:, here].astype(np.float64)  # (D, chunk)
        new, term = np.empty_like(now), np.empty_like(now[0])
        for _ in range(steps):
            for d, column in enumerate(receivers):
                weighted_sum(((weight, now[j]) for j, weight in column), new[d], term)  # (5)
            now, new = new, now
        results[:, here] = now
    return results
