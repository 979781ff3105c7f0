"""MATCHA: the matchings of a graph, their activation probabilities, and their mixing weight.

Paper: J. Wang, A. K. Sahu, Z. Yang, G. Joshi, S. Kar, "MATCHA: Speeding Up Decentralized SGD via Matching
Decomposition Sampling", 2019: matchings with Laplacians L_j, probabilities p_j that maximise
lambda_2(sum_j p_j L_j) under a budget, and the weight alpha that mixes fastest in expectation.
Differs: the concave maximisation uses projected supergradient ascent and keeps the best iterate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.topology import laplacian
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.extras import needed
from hedgerow.wire.seeds import Purpose, generator

Array = NDArray[np.float64]
Matching = list[tuple[int, int]]

_ASCENT_STEPS = 500


def matchings(graph: nx.Graph) -> list[Matching]:
    """Return the edges as disjoint matchings, at most one more than the largest degree (Vizing's theorem).

    Edges are coloured by Misra and Gries's fans.
    """
    coloured = _EdgeColouring(graph)
    classes: dict[int, Matching] = {}
    for i, j in sorted((min(edge), max(edge)) for edge in graph.edges):
        classes.setdefault(coloured.colour[i][j], []).append((i, j))
    return [classes[c] for c in sorted(classes)]


class _EdgeColouring:
    """Colours edges so that those at a node differ; ``colour[i][j]`` is the colour of edge (i, j)."""

    def __init__(self, graph: nx.Graph) -> None:
        self.colours = range(1 + max((degree for _, degree in graph.degree), default=0))
        self.colour: dict[int, dict[int, int]] = {node: {} for node in graph}
        for i, j in sorted((min(edge), max(edge)) for edge in graph.edges):
            self._add(i, j)

    def _free(self, node: int) -> int:
        used = set(self.colour[node].values())
        return next(c for c in self.colours if c not in used)

    def _is_free(self, node: int, colour: int) -> bool:
        return colour not in self.colour[node].values()

    def _add(self, u: int, v: int) -> None:
        """Colour the edge (u, v); this may recolour a fan of u and a path of two colours."""
        fan = self._fan(u, v)
        c, d = self._free(u), self._free(fan[-1])
        self._swap_along(u, c, d)
        last = next(
            index for index, w in enumerate(fan) if self._is_free(w, d) and self._is_fan(u, fan[: index + 1])
        )
        for here, after in pairwise(fan[: last + 1]):
            self._set(u, here, self.colour[u][after])
        self._set(u, fan[last], d)

    def _fan(self, u: int, v: int) -> list[int]:
        """Return a fan: neighbours of u from v on, the colour of each edge being free at the one before."""
        fan, rest = [v], sorted(self.colour[u])
        while (
            after := next((w for w in rest if self._is_free(fan[-1], self.colour[u][w])), None)
        ) is not None:
            fan.append(after)
            rest.remove(after)
        return fan

    def _is_fan(self, u: int, fan: Sequence[int]) -> bool:
        return all(self._is_free(w, self.colour[u][x]) for w, x in pairwise(fan))

    def _swap_along(self, u: int, c: int, d: int) -> None:
        """Exchange the colours of the path from u with edges d, c, d, …, so that d is free at u."""
        path, colour, node = [], d, u
        while (after := next((w for w, x in self.colour[node].items() if x == colour), None)) is not None:
            path.append((node, after, c if colour == d else d))
            node, colour = after, c if colour == d else d
        for i, j, _ in path:
            del self.colour[i][j], self.colour[j][i]
        for i, j, new in path:
            self._set(i, j, new)

    def _set(self, i: int, j: int, colour: int) -> None:
        self.colour[i][j] = self.colour[j][i] = colour


def activation_probabilities(laplacians: Array, budget: float) -> Array:
    """Return p (q,) that maximises lambda_2(sum_j p_j L_j) subject to sum_j p_j <= C_b q, 0 <= p_j <= 1.

    The L_j are the matchings' Laplacians (q, m, m); the budget C_b in (0, 1] is the share of the base graph's
    communication.
    """
    in_range("budget", budget, 0.0, 1.0, open_below=True)
    q = len(laplacians)
    p = best = np.full(q, budget)
    best_value = -math.inf
    for step in range(_ASCENT_STEPS):
        values, vectors = np.linalg.eigh(np.tensordot(p, laplacians, axes=1))  # ascending, the first is 0
        if values[1] > best_value:
            best_value, best = float(values[1]), p
        supergradient = np.einsum("i,jik,k->j", vectors[:, 1], laplacians, vectors[:, 1])
        p = _onto_budget(
            p + supergradient / (np.linalg.norm(supergradient) + 1e-30) / math.sqrt(step + 1), budget
        )
    return best


def _onto_budget(p: Array, budget: float) -> Array:
    """Return the nearest point of the box with a sum of at most the budget."""
    inside = np.clip(p, 0.0, 1.0)
    if inside.sum() <= budget * len(p):
        return inside
    low, high = 0.0, float(p.max())
    for _ in range(60):
        shift = (low + high) / 2
        low, high = (shift, high) if np.clip(p - shift, 0, 1).sum() > budget * len(p) else (low, shift)
    return np.clip(p - high, 0.0, 1.0)


@dataclass(frozen=True)
class Activation:
    """Random mixing matrices W = I - alpha sum_j B_j L_j, B_j ~ Bernoulli(p_j).

    They are symmetric, with rows and columns that sum to one; entries of the diagonal can be negative.
    ``graph`` is the base graph, connected, on the nodes 0, ..., m - 1 with m >= 2, and ``budget`` is C_b in
    (0, 1].
    """

    graph: nx.Graph
    budget: float = 0.5

    def __post_init__(self) -> None:
        int_at_least(2, num_nodes=len(self.graph))
        in_range("budget", self.budget, 0.0, 1.0, open_below=True)

    @cached_property
    def matchings(self) -> list[Matching]:
        """The matchings M_j."""
        return matchings(self.graph)

    @cached_property
    def laplacians(self) -> Array:
        """The matchings' Laplacians L_j, (q, m, m)."""
        empty = nx.create_empty_copy(self.graph)
        graphs = []
        for matching in self.matchings:
            graphs.append(empty.copy())
            graphs[-1].add_edges_from(matching)
        m = len(self.graph)
        return np.array([laplacian(one) for one in graphs]).reshape(len(graphs), m, m)

    @cached_property
    def probabilities(self) -> Array:
        """The activation probabilities p_j, (q,)."""
        return activation_probabilities(self.laplacians, self.budget)

    @cached_property
    def alpha(self) -> float:
        """The weight that minimises ``second_moment``."""
        # Convex in alpha, and increasing beyond 2 / lambda_2 of the mean Laplacian.
        upper = 2 / np.linalg.eigvalsh(self._mean)[1]
        found = needed("scipy.optimize", "math").minimize_scalar(
            self.second_moment, bounds=(0.0, upper), method="bounded", options={"xatol": 1e-10}
        )
        return float(found.x)

    def second_moment(self, alpha: float) -> float:
        """Return ||E[W^T W] - 1 1^T / m||; gossip converges in expectation if it is below 1."""
        m = len(self.graph)
        p = self.probabilities
        variance = np.tensordot(p * (1 - p), self.laplacians, axes=1)
        expected = np.eye(m) - 2 * alpha * self._mean + alpha**2 * (self._mean @ self._mean + 2 * variance)
        return float(np.linalg.norm(expected - 1 / m, 2))

    @cached_property
    def _mean(self) -> Array:
        mean: Array = np.tensordot(self.probabilities, self.laplacians, axes=1)
        return mean

    @property
    def messages(self) -> float:
        """Expected directed messages per iteration, 2 sum_j p_j |M_j|."""
        return 2 * float(self.probabilities @ np.array([len(matching) for matching in self.matchings]))

    def active(self, seed: int, k: int) -> nx.Graph:
        """Return the graph of iteration k: the edges of the matchings drawn for it."""
        draws = generator(seed, round=k, purpose=Purpose.SCHEDULE).random(len(self.matchings))
        result = nx.create_empty_copy(self.graph)
        for matching, draw, p in zip(self.matchings, draws, self.probabilities, strict=True):
            if draw < p:
                result.add_edges_from(matching)
        return result

    def matrix(self, active: nx.Graph) -> Array:
        """Return W (m, m) of an active graph."""
        return np.eye(len(self.graph)) - self.alpha * laplacian(active)
