"""Algorithm 1 of Sun et al., "Semi-Decentralized Federated Edge Learning", as one plain loop.

It is the documentation and the oracle of the fast strategy, and knows nothing of it. The baselines are
its special cases: FedAvg is one cluster, HierFAVG the exact mean between clusters, FEEL one cluster
whose active clients are the scheduled ones.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class State(NamedTuple):
    """All models at the end of iteration k."""

    k: int
    clients: Array  # (clients, params)
    servers: Array  # (servers, params)
    u: Array  # (params,), the weighted mean of the clients' models


class Run(NamedTuple):
    """The states of k = 0, ..., K, and the models that were sent, by link."""

    states: list[State]
    sent: Counter[str]


def mixing_matrix(sizes: Array, edges: Sequence[tuple[int, int]]) -> Array:
    """Return P = I - s L Omega, the eigenvalues taken from the unsymmetric product itself."""
    D = len(sizes)
    if D == 1:
        return np.ones((1, 1))
    L = np.zeros((D, D))
    for i, j in edges:
        L[i, i] += 1
        L[j, j] += 1
        L[i, j] -= 1
        L[j, i] -= 1
    Omega = np.diag(sizes.sum() / sizes)
    eigenvalues = sorted(np.linalg.eigvals(L @ Omega).real, reverse=True)
    s = 2 / (eigenvalues[0] + eigenvalues[-2])
    P: Array = np.eye(D) - s * L @ Omega
    return P


def run(
    w0: Array,
    gradient: Callable[[int, int, Array], Array],
    *,
    sizes: Sequence[float],
    clusters: Sequence[Sequence[int]],
    edges: Sequence[tuple[int, int]] = (),
    tau1: int,
    tau2: int = 1,
    alpha: int = 1,
    eta: float,
    K: int,
    active: Callable[[int], Sequence[bool]] | None = None,
    inter: str = "gossip",
) -> Run:
    """Run Algorithm 1: ``gradient(i, k, w)`` is client i's in iteration k, ``active(r)`` round r's draw.

    ``inter`` is what servers do together every tau1 * tau2 iterations: "gossip", "exact" or "none".
    """
    n = np.asarray(sizes, dtype=np.float64)
    C, D = len(n), len(clusters)
    server_sizes = np.array([sum(n[i] for i in cluster) for cluster in clusters])
    P = mixing_matrix(server_sizes, edges) if inter == "gossip" else np.eye(D)
    neighbours = [sorted({i + j - d for i, j in edges if d in (i, j)}) for d in range(D)]
    w = [np.array(w0, dtype=np.float64) for _ in range(C)]
    wt = [np.array(w0, dtype=np.float64) for _ in range(D)]
    present = [True] * C
    states, sent = [], Counter[str]()

    def record(k: int) -> None:
        u = sum(n[i] * w[i] for i in range(C)) / n.sum()
        states.append(State(k, np.array(w), np.array(wt), np.asarray(u)))

    record(0)
    for k in range(1, K + 1):
        if (k - 1) % tau1 == 0 and active is not None:
            present = list(active((k - 1) // tau1 + 1))
        for i in range(C):
            if present[i]:
                w[i] = w[i] - eta * gradient(i, k, w[i])  # (2)
        if k % tau1 == 0:
            for d in range(D):
                here = [i for i in clusters[d] if present[i]]
                sent["client->edge"] += len(here)
                if here:  # an empty cluster's server keeps its model
                    wt[d] = sum(n[i] * w[i] for i in here) / sum(n[i] for i in here)  # (3)
            if k % (tau1 * tau2) == 0 and inter == "gossip":
                for _ in range(alpha):
                    sent["edge->edge"] += sum(map(len, neighbours))
                    wt = [sum(P[j, d] * wt[j] for j in [*neighbours[d], d]) for d in range(D)]  # (5)
            if k % (tau1 * tau2) == 0 and inter == "exact":
                sent["edge->cloud"] += D
                sent["cloud->edge"] += D
                wt = [sum(server_sizes[j] * wt[j] for j in range(D)) / n.sum() for _ in range(D)]
            for d in range(D):
                for i in clusters[d]:
                    w[i] = wt[d].copy()  # (4); an absent client would start from this model anyway
                    sent["edge->client"] += present[i]
        record(k)
    return Run(states, sent)
