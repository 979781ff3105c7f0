"""The mixing of edge servers' models: gossip over a graph, a cloud's mean, or none.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", eq. (5) and section V.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from logging import INFO
from typing import Any, Protocol

import networkx as nx
import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps, Vector
from hedgerow.strategies.topology import Mixing, fastest
from hedgerow.wire.compress import compressed_keys
from hedgerow.wire.edge_servers import robust_step
from hedgerow.wire.records import Layout, lazy_array, payload_bytes
from hedgerow.wire.robust_means import Aggregation


class Mixer(Protocol):
    """Mixes the edge servers' models after every tau2 rounds."""

    @property
    def steps(self) -> int:
        """Number of sequential transfers, for the simulated clock."""

    def mix(self, servers: Vector, sizes: NDArray[np.float64], run: RoundContext) -> Steps[Vector]:
        """Return the mixed models (D, M) of servers with clusters of these sizes (D,)."""

    def mean(self, servers: Vector, shares: NDArray[np.float64]) -> Vector:
        """Return the global model (M,), given the clusters' shares of all samples (D,)."""


def weighted_mean(servers: Vector, shares: NDArray[np.float64]) -> Vector:
    """Return u (M,), the mean of the models (D, M) by the clusters' shares of all samples (D,)."""
    total = np.zeros(servers.shape[1], np.float64)
    for share, model in zip(shares, servers, strict=True):
        total += share * model
    return total.astype(servers.dtype)


def robust_mean(servers: Vector, shares: NDArray[np.float64], rule: Aggregation) -> Vector:
    """Return the robust mean of models (D, M) by a rule of ``neighbourhood_rule``.

    ``clipped(tau)`` clips the differences from their coordinate-wise median, and averages them by ``shares``.
    """
    if rule.is_mean:
        return weighted_mean(servers, shares)
    models = servers.astype(np.float64)
    centre = np.median(models, axis=0)
    if rule.name == "clipped":
        u = robust_step(-1, {-1: centre, **dict(enumerate(models))}, dict(enumerate(shares)), rule)
    else:
        u = centre + rule.combined(models - centre, shares)
    return u.astype(servers.dtype)


def consensus_error(servers: Vector, shares: NDArray[np.float64]) -> float:
    """Return the weighted mean squared distance of the models to u."""
    mean = weighted_mean(servers, shares)
    squares = [float(np.sum((model - mean) ** 2, dtype=np.float64)) for model in servers]
    return float(np.dot(shares, squares))


def mixed_entries(layout: Layout) -> NDArray[np.bool_]:
    """Return which entries of a model servers mix (M,): all but running statistics.

    A mixing matrix with a negative self-weight could make a variance negative.
    """
    entries = np.zeros(layout.size, bool)
    for key in compressed_keys(layout):
        entries[layout.slices[key]] = True
    return entries


def on_mixed(servers: Vector, layout: Layout, mix: Callable[[Vector], Vector]) -> Vector:
    """Return the models (D, M) with ``mix`` applied to their mixed entries (D, m)."""
    entries = mixed_entries(layout)
    if entries.all():
        return mix(servers)
    after = servers.copy()
    after[:, entries] = mix(np.ascontiguousarray(servers[:, entries]))
    return after


@lru_cache(maxsize=4096)
def sent_bytes(server: int, size: int, dtype: np.dtype[Any]) -> int:
    """Return the bytes of a server's payload with a model of ``size`` entries."""
    record = ArrayRecord()
    record[str(server)] = lazy_array(np.empty(size, dtype))
    return payload_bytes(record)


def directed(graph: nx.Graph) -> list[tuple[int, int]]:
    """Return both directions of every edge, sorted."""
    return sorted([*graph.edges, *((j, i) for i, j in graph.edges)])


class Alone:
    """No mixing."""

    steps = 1

    def mix(self, servers: Vector, sizes: NDArray[np.float64], run: RoundContext) -> Steps[Vector]:
        """Return the models as they are."""
        yield from ()
        return servers

    def mean(self, servers: Vector, shares: NDArray[np.float64]) -> Vector:
        """Return u."""
        return weighted_mean(servers, shares)


class CloudMean(Alone):
    """HierFAVG: a cloud gives every server the exact weighted mean."""

    def mix(self, servers: Vector, sizes: NDArray[np.float64], run: RoundContext) -> Steps[Vector]:
        """Return the mean of the mixed entries for every server; book one model up and one down for each."""
        shares = sizes / sizes.sum()

        def exact(models: Vector) -> Vector:
            return np.tile(weighted_mean(models, shares), (len(models), 1))

        size = payload_bytes(run.federation.known_layout().unflatten(servers[0]))
        run.book("edge->cloud", [(d, 0) for d in range(len(servers))], [size] * len(servers))
        run.book("cloud->edge", [(0, d) for d in range(len(servers))], [size] * len(servers))
        yield from ()
        return on_mixed(servers, run.federation.known_layout(), exact)


class GossipMixer(Alone):
    """``alpha`` >= 0 gossip steps over the servers' graph; with ``exact_if_complete`` see ``mixing``.

    .. math:: w^{(d)}_l = \\sum_{j \\in N_d \\cup \\{d\\}} p_{j,d} \\, w^{(j)}_{l-1}  \\quad (5)
    """

    def __init__(self, graph: nx.Graph, alpha: int, exact_if_complete: bool) -> None:
        self.graph, self.steps, self._exact = graph, alpha, exact_if_complete
        self._mixing: Mixing | None = None

    def mixing(self, sizes: NDArray[np.float64]) -> Mixing:
        """Return the mixing matrix of clusters of these sizes (D,)."""
        if self._mixing is None or not np.array_equal(self._mixing.sizes, sizes):
            self._mixing = fastest(self.graph, sizes, self._exact)
            zeta = self._mixing.zeta
            log(INFO, "\tMixing matrix: zeta = %.6f, zeta^alpha = %.6f", zeta, zeta**self.steps)
        return self._mixing

    def mix(self, servers: Vector, sizes: NDArray[np.float64], run: RoundContext) -> Steps[Vector]:
        """Return the models after gossip; book both directions of every edge, once per step.

        From the second step on, models are sent in float64: there is no rounding between two steps.
        """
        matrix = self.mixing(sizes)
        ends, (number, size) = directed(self.graph), servers.shape
        for step in range(self.steps):
            dtype = servers.dtype if not step else np.dtype(np.float64)
            sent = [sent_bytes(d, size, dtype) for d in range(number)]
            run.book("edge->edge", ends, [sent[i] for i, _ in ends])
        yield from ()
        return on_mixed(
            servers, run.federation.known_layout(), lambda models: matrix.gossip(models, self.steps)
        )
