"""Communication graphs by name, undirected and directed, and the mixing matrix of one gossip step.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for
Fast Convergence on Non-IID Data": the matrix P of section II and eq. (5), the graphs of Fig. 2.
Differs: the paper leaves the order of the Laplacian and the inverse sizes open; eq. (5) needs L @ Omega
(columns sum to one, the size-weighted mean is preserved). For D = 1, P = [1].
Directed graphs and their push-sum weights: M. Assran, N. Loizou, N. Ballas, M. Rabbat, "Stochastic Gradient
Push for Distributed Deep Learning".
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from hedgerow.wire.checks import at_least, did_you_mean, int_at_least
from hedgerow.wire.edge_servers import columns, gossip
from hedgerow.wire.printable import quoted
from hedgerow.wire.seeds import Purpose, generator

Array = npt.NDArray[np.float64]
Edges = Iterable[tuple[int, int]]

_MAX_DRAWS = 1000
# A mixing matrix of this many nodes takes half a gigabyte; an edge takes half a kilobyte.
_MAX_NODES = 8192
_MAX_EDGES = 2**20


def _ring(D: int) -> Edges:
    return [(d, (d + 1) % D) for d in range(D if D > 2 else D - 1)]


def _path(D: int) -> Edges:
    return [(d, d + 1) for d in range(D - 1)]


def _complete(D: int) -> Edges:
    return combinations(range(D), 2)


def _bipartite(D: int) -> Edges:
    return [(i, j) for i in range(0, D, 2) for j in range(1, D, 2)]


def _ring_chords(D: int) -> Edges:
    return [*_ring(D), *((d, d + D // 2) for d in range(D // 2))]


def _torus(D: int, *shape: float) -> Edges:
    rows = int(shape[0]) if shape else max(r for r in range(1, math.isqrt(D) + 1) if D % r == 0)
    columns = D // rows
    right = ((d, d - d % columns + (d + 1) % columns) for d in range(D))
    down = ((d, (d + columns) % D) for d in range(D))
    return {(min(e), max(e)) for e in (*right, *down) if e[0] != e[1]}


def _regular(D: int, rng: np.random.Generator, k: float) -> Edges:
    edges: Edges = nx.random_regular_graph(int(k), D, seed=int(rng.integers(2**32))).edges
    return edges


def _geometric(D: int, rng: np.random.Generator, r: float) -> Edges:
    place = rng.random((D, 2))  # (nodes, 2)
    return [(i, j) for i, j in combinations(range(D), 2) if math.dist(place[i], place[j]) <= r]


def _directed_out(D: int, rng: np.random.Generator, k: float) -> Edges:
    # The others of node d are d + 1, ..., d + D - 1.
    return [
        (d, int(d + other) % D) for d in range(D) for other in 1 + rng.choice(D - 1, int(k), replace=False)
    ]


@dataclass(frozen=True)
class _Family:
    """The graphs of one name: how to build them, and for which nodes and parameters they exist."""

    edges: Callable[..., Edges]
    needs: str = "have at least one node"
    exists: Callable[[int, tuple[float, ...]], bool] = lambda D, p: not p
    spelled: tuple[str, ...] = ("",)
    random: bool = False
    # Expected number of edges on D nodes.
    size: Callable[..., float] = lambda D, *p: 2 * D
    directed: bool = False

    def build(self, D: int, parameters: tuple[float, ...], rng: np.random.Generator) -> nx.Graph:
        kind = nx.DiGraph if self.directed else nx.Graph
        return _from_edges(D, self.edges(D, *([rng] if self.random else []), *parameters), kind)


def _even(D: int, p: tuple[float, ...]) -> bool:
    return D % 2 == 0 and not p


def _is_torus(D: int, p: tuple[float, ...]) -> bool:
    return not p or (len(p) == 2 and p[0] >= 1 and p[0] == int(p[0]) and p[0] * p[1] == D)


def _is_degree(D: int, p: tuple[float, ...]) -> bool:
    return len(p) == 1 and p[0] == int(p[0]) and 1 <= p[0] < D and (p[0] >= 2 or D == 2)


def _is_probability(D: int, p: tuple[float, ...]) -> bool:
    return len(p) == 1 and 0 < p[0] <= 1


def _all(D: int, *_: float) -> float:
    return D * (D - 1) / 2


def _fig2(edges: Callable[..., Edges]) -> _Family:
    return _Family(edges, "have six nodes", lambda D, p: D == 6 and not p)


_BIPARTITE = _Family(_bipartite, "have an even number of nodes", _even, size=lambda D: D * D / 4)
_FAMILIES = {
    "bipartite": _BIPARTITE,
    "complete": _Family(_complete, size=_all),
    "directed-erdos-renyi": _Family(
        lambda D, rng, p: [pair for pair in permutations(range(D), 2) if rng.random() < p],
        "be directed-erdos-renyi(p) with 0 < p <= 1",
        _is_probability,
        ("(p)",),
        random=True,
        size=lambda D, p: 2 * _all(D),
        directed=True,
    ),
    "directed-exponential": _Family(
        lambda D: [(d, (d + 2**h) % D) for d in range(D) for h in range((D - 1).bit_length())],
        size=lambda D: D * (D - 1).bit_length(),
        directed=True,
    ),
    "directed-out": _Family(
        _directed_out,
        "be directed-out(k) with 2 <= k < num_nodes (or k = 1 on two nodes)",
        _is_degree,
        ("(k)",),
        random=True,
        size=lambda D, k: D * k,
        directed=True,
    ),
    "directed-ring": _Family(lambda D: [(d, (d + 1) % D) for d in range(D if D > 1 else 0)], directed=True),
    "erdos-renyi": _Family(
        lambda D, rng, p: [pair for pair in combinations(range(D), 2) if rng.random() < p],
        "be erdos-renyi(p) with 0 < p <= 1",
        _is_probability,
        ("(p)",),
        random=True,
        size=_all,
    ),
    "fig2a": _fig2(_ring),
    "fig2b": _fig2(_ring_chords),
    "fig2c": _fig2(_complete),
    "geometric": _Family(
        _geometric,
        "be geometric(r) with r > 0 in the unit square",
        lambda D, p: len(p) == 1 and p[0] > 0,
        ("(r)",),
        random=True,
        size=_all,
    ),
    "line": _Family(_path),
    "partial": _BIPARTITE,
    "path": _Family(_path),
    "regular": _Family(
        _regular,
        "be regular(k) with 2 <= k < num_nodes (or k = 1 on two nodes) and k * num_nodes even",
        lambda D, p: _is_degree(D, p) and p[0] * D % 2 == 0,
        ("(k)",),
        random=True,
        size=lambda D, k: D * k / 2,
    ),
    "ring": _Family(_ring),
    "ring-chords": _Family(
        _ring_chords, "have an even number of nodes, at least four", lambda D, p: _even(D, p) and D >= 4
    ),
    "star": _Family(lambda D: [(0, d) for d in range(1, D)]),
    "torus": _Family(_torus, "be torus, or torus(R,C) with R * C = num_nodes", _is_torus, ("", "(R,C)")),
}


# The names; parameters follow in parentheses, as in "erdos-renyi(0.4)" or "torus(2,5)".
TOPOLOGIES, DIRECTED_TOPOLOGIES = (
    tuple(name + end for name, of in _FAMILIES.items() if of.directed == directed for end in of.spelled)
    for directed in (False, True)
)
# The name of the graph that changes from one communication to the next, see ``one_peer_exponential``.
ONE_PEER = "one-peer-exponential"


def _parse(name: str, num_nodes: int, *, directed: bool = False) -> tuple[_Family, tuple[float, ...]]:
    at_least(1, num_nodes=num_nodes)
    if num_nodes > _MAX_NODES:
        raise ValueError(f"num_nodes must be at most {_MAX_NODES} for a graph, got {num_nodes!r}")
    match = re.fullmatch(r"([a-z0-9-]+)(?:\(([0-9.,\s]+)\))?", name.strip())
    known = "one of " + ", ".join(TOPOLOGIES + DIRECTED_TOPOLOGIES if directed else TOPOLOGIES)
    if match is None or match[1] not in _FAMILIES:
        changes = ", whose graph changes" if name.strip() == ONE_PEER else ""
        meant = did_you_mean(name.partition("(")[0], _FAMILIES)
        raise ValueError(f"topology must be {known}, got {quoted(name)}{meant and f' ({meant})'}{changes}")
    family = _FAMILIES[match[1]]
    if family.directed and not directed:
        raise ValueError(f"topology must be an undirected graph, {known}, got {quoted(name)}, a directed one")
    if match[2] and family.spelled == ("",):
        raise ValueError(f"topology must be {match[1]!r}, which takes no parameters, got {quoted(name)}")
    try:
        parameters = tuple(float(text) for text in match[2].split(",")) if match[2] else ()
    except ValueError:
        raise ValueError(f"topology must {family.needs}, got {quoted(name)}") from None
    if not all(map(math.isfinite, parameters)) or not family.exists(num_nodes, parameters):
        raise ValueError(f"topology must {family.needs}, got {quoted(name)} on {num_nodes} nodes")
    if family.size(num_nodes, *parameters) > _MAX_EDGES:
        raise ValueError(
            f"topology must have at most {_MAX_EDGES} edges, got {quoted(name)} on {num_nodes} nodes"
        )
    return family, parameters


def _from_edges(D: int, edges: Edges, kind: type[nx.Graph] = nx.Graph) -> nx.Graph:
    result = kind()
    result.add_nodes_from(range(D))
    result.add_edges_from(edges)
    return result


def validate_topology(name: str, num_nodes: int, *, directed: bool = False) -> None:
    """Raise ValueError unless a named graph exists on ``num_nodes`` nodes; does not draw random graphs."""
    _parse(name, num_nodes, directed=directed)


def graph(name: str, num_nodes: int, seed: int = 0) -> nx.Graph:
    """Return the connected graph of a name on the nodes 0, ..., ``num_nodes`` - 1.

    Parameters
    ----------
    name : str
        One of ``TOPOLOGIES``. ``ring``, ``path`` (``line``), ``star`` (centre 0) and ``complete`` exist
        on any number of nodes; ``bipartite`` (``partial``) joins every even node to every odd one;
        ``ring-chords`` adds the opposite chords to a ring; ``torus`` takes the most square R x C, so
        that a prime number of nodes gives a ring; ``fig2a``, ``fig2b``, ``fig2c`` are the paper's graphs
        on six servers. ``regular(k)``, ``erdos-renyi(p)`` and ``geometric(r)`` (unit square) are random;
        ValueError if 1,000 draws are all disconnected.
    num_nodes : int
        D >= 1.
    seed : int (default: 0)
        Seed of the random graphs, >= 0.
    """
    return _drawn(name, num_nodes, seed)


def _drawn(name: str, num_nodes: int, seed: int, *, directed: bool = False) -> nx.Graph:
    family, parameters = _parse(name, num_nodes, directed=directed)
    rng = generator(seed, purpose=Purpose.TOPOLOGY)
    for _ in range(_MAX_DRAWS if family.random else 1):
        candidate = family.build(num_nodes, parameters, rng)
        if nx.is_strongly_connected(candidate) if family.directed else nx.is_connected(candidate):
            return candidate
    strongly = "strongly " if family.directed else ""
    raise ValueError(
        f"topology must be a denser graph, got {name!r} on {num_nodes} nodes: none of {_MAX_DRAWS} draws is "
        f"{strongly}connected"
    )


def as_digraph(topology: str | nx.Graph | Edges, num_nodes: int, seed: int = 0) -> nx.DiGraph:
    """Return a strongly connected directed graph on the nodes 0, ..., D - 1; j sends to i on an edge (j, i).

    Parameters
    ----------
    topology : str | networkx.Graph | Iterable[tuple[int, int]]
        One of ``DIRECTED_TOPOLOGIES``; a directed graph without parallel edges and self loops; or an argument
        of ``as_graph``, with every edge in both directions. In ``directed-ring`` each node sends to the next,
        in ``directed-exponential`` to those 1, 2, 4, ... further; in-degree and out-degree are equal. In the
        random ``directed-out(k)``, where each node sends to k others, and ``directed-erdos-renyi(p)`` they
        differ.
    num_nodes : int
        D >= 1.
    seed : int (default: 0)
        Seed of the named random graphs, >= 0.
    """
    if isinstance(topology, str):
        return _drawn(topology, num_nodes, seed, directed=True).to_directed()
    if not (isinstance(topology, nx.DiGraph) and not topology.is_multigraph()):
        return as_graph(topology, num_nodes, seed).to_directed()
    _check_nodes(topology, num_nodes)
    if loops := sorted(nx.selfloop_edges(topology)):
        raise ValueError(f"topology must not have self loops, got {loops[0]!r}")
    if not nx.is_strongly_connected(topology):
        parts = sorted(sorted(part) for part in nx.strongly_connected_components(topology))
        raise ValueError(f"topology must be strongly connected, got the parts {parts}")
    return _from_edges(num_nodes, topology.edges, nx.DiGraph)


def one_peer_exponential(num_nodes: int, communication: int) -> nx.DiGraph:
    """Return the one-peer exponential graph of a communication (>= 0): in-degree and out-degree are one.

    Node d sends to d + 2^h, with h cycling through 0, 1, ..., floor(log2(D - 1)) from one communication to
    the next. On D = 2^q nodes q communications in a row average exactly.

    Examples
    --------
    >>> [sorted(one_peer_exponential(4, a).edges) for a in (0, 1)]
    [[(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 2), (1, 3), (2, 0), (3, 1)]]
    """
    if not 1 <= num_nodes <= _MAX_NODES:
        raise ValueError(f"num_nodes must be from 1 to {_MAX_NODES} for a graph, got {num_nodes!r}")
    hops = (num_nodes - 1).bit_length()
    step = 2 ** (communication % hops) if hops else 0
    edges = [(d, (d + step) % num_nodes) for d in range(num_nodes)] if step else []
    return _from_edges(num_nodes, edges, nx.DiGraph)


def push_weights(graph: nx.DiGraph) -> Array:
    """Return the weights P (D, D) of push-sum: ``P[i, j]`` is the share of j's value that i gets.

    A node and each of its receivers get 1 / (out-degree + 1), so that columns sum to one.

    Parameters
    ----------
    graph : networkx.DiGraph
        On the nodes 0, ..., D - 1, without self loops; an edge (j, i) is j sending to i.
    """
    parts = _adjacency(graph).T + np.eye(len(graph))
    weights: Array = parts / parts.sum(axis=0)
    return weights


def senders(graph: nx.Graph, node: int) -> list[int]:
    """Return a node's senders, ascending: its neighbours, in a directed graph its predecessors."""
    return sorted(graph.predecessors(node) if graph.is_directed() else graph.neighbors(node))


def neighbours(graph: nx.Graph, node: int) -> list[int]:
    """Return a node's senders and receivers, ascending."""
    return sorted({*graph.neighbors(node), *senders(graph, node)})


def as_graph(topology: str | nx.Graph | Edges, num_nodes: int, seed: int = 0) -> nx.Graph:
    """Return a name, a graph or an edge list as a checked graph on the nodes 0, ..., D - 1.

    Parameters
    ----------
    topology : str | networkx.Graph | Iterable[tuple[int, int]]
        A name (see ``graph``), a connected undirected graph without parallel edges and self loops, or its
        edges, each once.
    num_nodes : int
        D >= 1.
    seed : int (default: 0)
        Seed of the named random graphs.
    """
    if isinstance(topology, str):
        return graph(topology, num_nodes, seed)
    if isinstance(topology, nx.Graph):
        return _checked_graph(topology, num_nodes)
    return _checked_edges(topology, num_nodes)


def _checked_graph(candidate: nx.Graph, D: int) -> nx.Graph:
    if candidate.is_directed() or candidate.is_multigraph():
        raise ValueError(f"topology must be an undirected simple graph, got a {type(candidate).__name__}")
    _check_nodes(candidate, D)
    return _checked_edges(candidate.edges, D)


def _check_nodes(candidate: nx.Graph, D: int) -> None:
    if set(candidate) != set(range(D)):
        raise ValueError(f"topology must have the nodes 0 to {D - 1}, got {sorted(candidate, key=str)}")


def _checked_edges(candidate: Edges, D: int) -> nx.Graph:
    at_least(1, num_nodes=D)
    edges = [_checked_edge(edge, D) for edge in candidate]
    if repeated := sorted(edge for edge, count in Counter(edges).items() if count > 1):
        raise ValueError(f"topology must have each edge once, got {repeated[0]} more than once")
    result = _from_edges(D, edges)
    if not nx.is_connected(result):
        parts = sorted(sorted(part) for part in nx.connected_components(result))
        raise ValueError(f"topology must be connected, got the parts {parts}")
    return result


def _checked_edge(edge: Any, D: int) -> tuple[int, int]:
    try:
        i, j = edge
        known = i in range(D) and j in range(D)
    except (TypeError, ValueError):
        known = False
    if not known:
        raise ValueError(f"topology must have edges between the nodes 0 to {D - 1}, got {edge!r}")
    if i == j:
        raise ValueError(f"topology must not have self loops, got {edge!r}")
    return (int(min(i, j)), int(max(i, j)))


def _adjacency(graph: nx.Graph) -> Array:
    adjacency: Array = nx.to_numpy_array(graph, nodelist=range(len(graph)), dtype=np.float64, weight=None)
    return adjacency


def laplacian(graph: nx.Graph) -> Array:
    """Return the Laplacian L, degree minus adjacency, of a graph on 0, ..., D - 1, shape (D, D)."""
    adjacency = _adjacency(graph)
    return np.diag(adjacency.sum(axis=0)) - adjacency


@dataclass(frozen=True, eq=False)
class Mixing:
    """One gossip step on a graph, eq. (5).

    Columns of the matrix sum to one (consensus is a fixed point), and it preserves the weighted mean.
    Off-diagonal entries are >= 0, self-weights can be negative: never clip or normalize them.

    Parameters
    ----------
    matrix : numpy.ndarray
        P, shape (D, D), float64, read-only. ``matrix[j, d]`` is the weight of model j at server d.
    zeta : float
        Second largest eigenvalue modulus of P, in [0, 1) on a connected graph.
    sizes : numpy.ndarray
        Cluster sizes in samples, shape (D,), read-only.
    graph : networkx.Graph
        The servers' graph.
    """

    matrix: Array
    zeta: float
    sizes: Array
    graph: nx.Graph

    def __post_init__(self) -> None:
        self.matrix.setflags(write=False)
        self.sizes.setflags(write=False)

    @property
    def weights(self) -> Array:
        """The clusters' shares of all samples, shape (D,), sum one."""
        weights: Array = self.sizes / self.sizes.sum()
        return weights

    def gossip(self, models: npt.NDArray[np.floating[Any]], alpha: int) -> npt.NDArray[np.floating[Any]]:
        """Return the models (D, ...) after ``alpha`` >= 0 synchronous gossip steps.

        Sums run over the senders in ascending order, in float64 through all steps, and are rounded once to
        the models' dtype at the end. No BLAS is called, so bits depend on neither threads nor shapes. In
        addition to the result it needs memory for 2 D * 16,384 doubles, whatever the models' size.
        """
        int_at_least(0, alpha=alpha)
        D = len(self.sizes)
        if models.ndim < 1 or models.shape[0] != D or not np.issubdtype(models.dtype, np.floating):
            raise ValueError(
                f"models must be floating-point of shape ({D}, ...), got {models.dtype} of shape "
                f"{models.shape}"
            )
        rows = models.reshape(D, math.prod(models.shape[1:]))
        return gossip(rows, columns(self.matrix), alpha).reshape(models.shape)

    def without_edge(self, i: int, j: int) -> "Mixing":
        """Return the mixing of a step in which an edge fails and both ends notice it.

        Both move the lost weight to themselves, which preserves consensus and weighted mean.
        """
        if not self.graph.has_edge(i, j):
            raise ValueError(f"edge must be one of {sorted(self.graph.edges)}, got ({i}, {j})")
        matrix = self.matrix.copy()
        matrix[i, i] += matrix[j, i]
        matrix[j, j] += matrix[i, j]
        matrix[i, j] = matrix[j, i] = 0.0
        rest = self.graph.copy()
        rest.remove_edge(i, j)
        zeta = _second_modulus(matrix, self.weights)
        return replace(self, matrix=matrix, zeta=zeta, graph=rest)


def mixing(graph: nx.Graph, sizes: npt.ArrayLike, *, exact_if_complete: bool = False) -> Mixing:
    """Return the fastest mixing of the form P = I - s L Omega for clusters of these sizes.

    With lambda_1 and lambda_{D-1} the largest and the smallest non-zero eigenvalue of L Omega,
    s = 2 / (lambda_1 + lambda_{D-1}) and zeta = (lambda_1 - lambda_{D-1}) / (lambda_1 + lambda_{D-1}).

    Parameters
    ----------
    graph : networkx.Graph
        Connected, on the nodes 0, ..., D - 1.
    sizes : array_like
        Samples of each cluster, shape (D,), finite and > 0. Only their ratios matter.
    exact_if_complete : bool (default: False)
        On a complete graph take the exact weighted mean, P = m 1^T with zeta = 0. The formula gives
        zeta = 0 there only if all sizes are equal.
    """
    return fastest(_checked_graph(graph, len(graph)), sizes, exact_if_complete)


def fastest(graph: nx.Graph, sizes: npt.ArrayLike, exact_if_complete: bool) -> Mixing:
    """Return ``mixing`` on a graph of ``as_graph``, which is not checked again."""
    sizes = np.array(sizes, dtype=np.float64)
    D = len(graph)
    if sizes.shape != (D,) or not np.all(np.isfinite(sizes)) or not np.all(sizes > 0):
        raise ValueError(f"sizes must be {D} finite numbers > 0, got {sizes.tolist()}")
    m = sizes / sizes.sum()
    if D == 1:
        return Mixing(np.ones((1, 1)), 0.0, sizes, graph)
    if exact_if_complete and graph.number_of_edges() == D * (D - 1) // 2:
        return Mixing(np.tile(m[:, None], D), 0.0, sizes, graph)
    # The symmetric matrix has the spectrum of L Omega, and a symmetric solver keeps it real.
    eigenvalues = np.linalg.eigvalsh(laplacian(graph) / np.sqrt(np.outer(m, m)))  # ascending, first is 0
    smallest, largest = float(eigenvalues[1]), float(eigenvalues[-1])
    scale = 2.0 / (largest + smallest)
    zeta = (largest - smallest) / (largest + smallest)
    return Mixing(_with_self_weights(scale * _adjacency(graph) / m), zeta, sizes, graph)


def metropolis(graph: nx.Graph) -> Mixing:
    """Return Metropolis-Hastings mixing: symmetric, non-negative, rows and columns sum to one.

    p_{i,j} = 1 / (1 + max(deg_i, deg_j)) on every edge; each node needs only its neighbors' degrees.

    Parameters
    ----------
    graph : networkx.Graph
        Connected, on the nodes 0, ..., D - 1.
    """
    graph = _checked_graph(graph, len(graph))
    adjacency = _adjacency(graph)
    degrees = adjacency.sum(axis=0)
    sizes = np.ones(len(graph))
    matrix = _with_self_weights(adjacency / (1.0 + np.maximum.outer(degrees, degrees)))
    return Mixing(matrix, _second_modulus(matrix, sizes / sizes.sum()), sizes, graph)


def _with_self_weights(edge_weights: Array) -> Array:
    # Computed from the columns' sums, so that columns sum to one up to one rounding.
    return edge_weights + np.diag(1.0 - edge_weights.sum(axis=0))


def _second_modulus(matrix: Array, weights: Array) -> float:
    if len(weights) == 1:
        return 0.0
    root = np.sqrt(weights)
    eigenvalues = np.linalg.eigvalsh(matrix * root / root[:, None])  # ascending, the last is 1
    return float(np.max(np.abs(eigenvalues[:-1])))
