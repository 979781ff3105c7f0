"""Algorithm 1 of Yu et al., "Communication-Efficient Hybrid Federated Learning for E-health", plainly.

It is the documentation and the oracle of the fast strategy, and knows nothing of it. The order is the one
that the text forces: devices are averaged over the set that just trained, before the cloud averages, and T
iterations make T updates. The baselines are groupings: TDCD is one merged group, JFL a group for every
chosen pair, centralised split SGD is P = Q = 1.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Choose = Callable[[int, int], Sequence[int]]


class Theta(NamedTuple):
    """Head, hospital's encoder and devices' encoder, each a flat vector."""

    head: Array
    hospital: Array
    device: Array


class Group(NamedTuple):
    """One hospital's patients, first axis = patient, and the group's weight K_m / K."""

    weight: float
    x1: Array
    x2: Array
    y: Array


class Model(Protocol):
    """A split network: encoders h_1 and h_2 of a batch, and the gradients of its mean loss."""

    def encode1(self, theta1: Array, x1: Array) -> Array: ...  # (batch, e_1)

    def encode2(self, theta2: Array, x2: Array) -> Array: ...  # (batch, e_2)

    def hospital(
        self, theta0: Array, theta1: Array, x1: Array, Z2: Array, y: Array
    ) -> tuple[Array, Array]: ...

    def device(self, theta0: Array, Z1: Array, theta2: Array, x2: Array, y: Array) -> Array: ...


class State(NamedTuple):
    """Everything before the update of iteration t (and at t = T)."""

    t: int
    virtual: Theta  # the weighted mean of the groups, the global model where P | t
    groups: list[Theta]
    devices: list[dict[int, Array]]  # theta_{2,m,n} of the last interval's devices, by n
    Z1: list[Array]  # of the current interval; (|A_m|, e_1)
    Z2: list[Array]


class Run(NamedTuple):
    """The states of t = 0, ..., T, and the scalars that were sent, by link."""

    states: list[State]
    sent: Counter[str]

    @property
    def final(self) -> Theta:
        return self.states[-1].virtual


def run(
    model: Model,
    start: Theta,
    groups: Sequence[Group] | Callable[[int], Sequence[Group]],
    *,
    P: int,
    Q: int,
    T: int,
    eta: Callable[[int], float],
    choose: Choose | None = None,
    squeeze: Callable[[Array], Array] = lambda vector: vector,
) -> Run:
    """Run Algorithm 1: ``choose(m, t)`` is A_m of the interval that starts at t (None: all patients).

    ``groups`` may be drawn anew at every t that P divides, where all groups hold the global model.
    ``squeeze`` is what a compressed variant does to each encoding's row and to the head that devices get.
    """
    if P % Q or T % P:
        raise ValueError(f"P, Q and T must be Q | P | T, got {P}, {Q} and {T}")
    grouping = groups if callable(groups) else lambda _: groups
    G = list(grouping(0))
    theta = [start for _ in G]
    v: list[dict[int, Array]] = [{} for _ in G]
    A: list[list[int]] = [[] for _ in G]
    frozen: list[Array] = []
    Z1: list[Array] = []
    Z2: list[Array] = []
    states, sent = [], Counter[str]()
    for t in range(T + 1):
        if t > 0 and t % Q == 0:  # the edges: the set that just trained
            for m in range(len(G)):
                sent["device->edge"] += sum(map(len, v[m].values()))
                theta[m] = theta[m]._replace(device=_edge_mean(v[m]))  # (1)
        latest = [x._replace(device=_edge_mean(d, x.device)) for x, d in zip(theta, v, strict=True)]
        virtual = _weighted(G, latest) if t > 0 else start
        if t % P == 0:  # the cloud
            sent += _global_transfers(theta, up=t > 0, down=t < T)
            G = list(grouping(t)) if t < T else G
            theta = [virtual for _ in G]
        states.append(State(t, virtual, list(theta), [dict(d) for d in v], list(Z1), list(Z2)))
        if t == T:
            break
        if t % Q == 0:  # a new set, and the swap
            A = [list(range(len(g.y)) if choose is None else choose(m, t)) for m, g in enumerate(G)]
            v = [{n: theta[m].device for n in A[m]} for m in range(len(G))]
            frozen = [squeeze(x.head) for x in theta]
            Z1 = [_rows(squeeze, model.encode1(theta[m].hospital, g.x1[A[m]])) for m, g in enumerate(G)]
            Z2 = [_rows(squeeze, model.encode2(theta[m].device, g.x2[A[m]])) for m, g in enumerate(G)]
            sent += _exchange_transfers(theta, Z1, Z2)
        for m, g in enumerate(G):
            x = theta[m]
            g0, g1 = model.hospital(x.head, x.hospital, g.x1[A[m]], Z2[m], g.y[A[m]])  # one common point
            theta[m] = x._replace(head=x.head - eta(t) * g0, hospital=x.hospital - eta(t) * g1)  # (5), (6)
            for i, n in enumerate(A[m]):
                g2 = model.device(frozen[m], Z1[m][[i]], v[m][n], g.x2[[n]], g.y[[n]])
                v[m][n] = v[m][n] - eta(t) * g2  # (7)
    return Run(states, sent)


def merged(groups: Sequence[Group]) -> list[Group]:
    """Return TDCD's grouping: everybody's patients at one hospital."""
    return [Group(1.0, *(np.concatenate([g[i] for g in groups]) for i in (1, 2, 3)))]


def pairs(groups: Sequence[Group], choose: Choose) -> Callable[[int], list[Group]]:
    """Return JFL's grouping: a group for every chosen pair, drawn anew at every global aggregation."""
    return lambda t: [
        Group(g.weight / len(A), g.x1[[n]], g.x2[[n]], g.y[[n]])
        for m, g in enumerate(groups)
        for A in [choose(m, t)]
        for n in A
    ]


def draw(seed: int, alpha: float, sizes: Sequence[int]) -> Choose:
    """Return the draw of max(1, floor(alpha K_m)) patients, a function of seed, m and t alone."""
    return lambda m, t: sorted(
        np.random.default_rng([seed, m, t]).permutation(sizes[m])[: max(1, int(alpha * sizes[m]))].tolist()
    )


def top_k(vector: Array) -> Array:
    """Keep the floor(7/32 n) largest entries of a vector, at least one; ties go to the lower index."""
    k = max(1, 7 * vector.size // 32)
    kept = np.argsort(-np.abs(vector), kind="stable")[:k]
    sparse = np.zeros_like(vector)
    sparse[kept] = vector[kept]
    return sparse


def central_sgd(
    model: Model,
    start: Theta,
    groups: Sequence[Group],
    *,
    T: int,
    eta: Callable[[int], float],
    choose: Choose | None = None,
) -> list[Theta]:
    """Return theta^0, ..., theta^T of split SGD on one machine: batch = union of the A_m, weights K_m / K."""
    path = [start]
    for t in range(T):
        x = path[-1]
        total = [np.zeros_like(block) for block in x]
        for m, g in enumerate(groups):
            A = list(range(len(g.y)) if choose is None else choose(m, t))
            Z1, Z2 = model.encode1(x.hospital, g.x1[A]), model.encode2(x.device, g.x2[A])
            g0, g1 = model.hospital(x.head, x.hospital, g.x1[A], Z2, g.y[A])
            g2 = model.device(x.head, Z1, x.device, g.x2[A], g.y[A])
            total = [s + g.weight * block for s, block in zip(total, (g0, g1, g2), strict=True)]
        path.append(Theta(*(block - eta(t) * s for block, s in zip(x, total, strict=True))))
    return path


def _edge_mean(devices: dict[int, Array], otherwise: Array | None = None) -> Array:
    if not devices:
        assert otherwise is not None
        return otherwise
    mean: Array = np.mean(list(devices.values()), axis=0)
    return mean


def _weighted(groups: Sequence[Group], theta: Sequence[Theta]) -> Theta:
    blocks = zip(*theta, strict=True)
    return Theta(
        *(np.sum([g.weight * b for g, b in zip(groups, block, strict=True)], axis=0) for block in blocks)
    )  # (2)


def _global_transfers(theta: Sequence[Theta], *, up: bool, down: bool) -> Counter[str]:
    hospital = sum(len(x.head) + len(x.hospital) for x in theta)
    edge = sum(len(x.device) for x in theta)
    uplinks = {"hospital->cloud": up * hospital, "edge->cloud": up * edge}
    return Counter(uplinks | {"cloud->hospital": down * hospital, "cloud->edge": down * edge})


def _exchange_transfers(theta: Sequence[Theta], Z1: Sequence[Array], Z2: Sequence[Array]) -> Counter[str]:
    zeta1, zeta2 = sum(Z.size for Z in Z1), sum(Z.size for Z in Z2)
    copies = sum(len(Z) * (len(x.device) + len(x.head)) for x, Z in zip(theta, Z1, strict=True))
    to_hospital = {"device->edge": zeta2, "edge->hospital": zeta2}
    heads = sum(len(x.head) for x in theta)
    return Counter(to_hospital | {"hospital->edge": heads + zeta1, "edge->device": copies + zeta1})


def _rows(squeeze: Callable[[Array], Array], Z: Array) -> Array:
    return np.array([squeeze(row) for row in Z])
