"""Algorithms 1 to 4 of Beikmohammadi et al., "On the Convergence of Federated Learning Algorithms without
Data Similarity", as one plain loop in float64.

It is the documentation and the oracle of the fast paths, and knows nothing of them. Algorithm 3 is
Algorithm 1 with the gradient operator, Algorithm 4 is Algorithm 2 with it; FedProx has the proximal one.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
# (worker, x^k, gamma^k) -> x_i^k
Operator = Callable[[int, Array, float], Array]


class Quadratic(NamedTuple):
    """f_i(x) = (x - c)^T H (x - c) / 2."""

    H: Array  # (d, d)
    c: Array  # (d,)

    def value(self, x: Array) -> float:
        return float((x - self.c) @ self.H @ (x - self.c) / 2)

    def gradient(self, x: Array) -> Array:
        return np.asarray(self.H @ (x - self.c))

    def prox(self, x: Array, gamma: float) -> Array:
        """Return the resolvent (I + gamma H)^{-1} (x + gamma H c)."""
        return np.asarray(np.linalg.solve(np.eye(len(x)) + gamma * self.H, x + gamma * self.H @ self.c))


Q2 = (
    Quadratic(np.diag([1.0, 2.0]), np.array([1.0, 0.0])),
    Quadratic(np.diag([2.0, 1.0]), np.array([-1.0, 2.0])),
)


class Round(NamedTuple):
    """Round k: what each worker computed, sent and kept, and what the server made of it."""

    local: Array  # (workers, d), x_i^k
    messages: Array  # (workers, d), m_i^k
    sent: Array  # (workers, d), q_i^k
    memories: Array  # (workers, d), e_i^{k+1}
    x: Array  # (d,), x^{k+1}
    z: Array  # (d,), z^{k+1} = x^{k+1} + mean of e_i^{k+1}


def gradient_operator(problems: Sequence[Quadratic], T: int) -> Operator:
    """Return T local gradient steps, Algorithm 3."""

    def apply(i: int, x: Array, gamma: float) -> Array:
        for _ in range(T):
            x = x - gamma * problems[i].gradient(x)
        return x

    return apply


def proximal_operator(problems: Sequence[Quadratic]) -> Operator:
    """Return the exact proximal point."""
    return lambda i, x, gamma: problems[i].prox(x, gamma)


def inner_iterates(problem: Quadratic, x: Array, gamma: float, eta: float, S: int) -> list[Array]:
    """Return y_1, ..., y_S of the inner gradient solver."""
    y, iterates = x, []
    for _ in range(S):
        y = y - eta * (problem.gradient(y) + (y - x) / gamma)
        iterates.append(y)
    return iterates


def identity(v: Array) -> Array:
    return v


def top(k: int) -> Callable[[Array], Array]:
    """Return the compressor that keeps the k largest magnitudes, ties by lower index."""

    def Q(v: Array) -> Array:
        kept = np.argsort(-np.abs(v), kind="stable")[:k]
        q = np.zeros_like(v)
        q[kept] = v[kept]
        return q

    return Q


def run(
    operator: Operator,
    x0: Array,
    workers: int,
    steps: Sequence[float],
    *,
    Q: Callable[[Array], Array] = identity,
    memory: bool = True,
    weights: Sequence[float] | None = None,
) -> list[Round]:
    """Run Algorithm 2; with the identity it is Algorithm 1, without ``memory`` FedPAQ."""
    x = np.array(x0, dtype=np.float64)
    e = [np.zeros_like(x) for _ in range(workers)]
    share = np.full(workers, 1 / workers) if weights is None else np.asarray(weights)
    rounds = []
    for gamma in steps:
        local = np.array([operator(i, x, gamma) for i in range(workers)])
        m = np.array([local[i] - x + e[i] for i in range(workers)])
        q = np.array([Q(m[i]) for i in range(workers)])
        e = [m[i] - q[i] if memory else np.zeros_like(x) for i in range(workers)]
        x = x + share @ q
        rounds.append(Round(local, m, q, np.array(e), x, x + share @ np.array(e)))
    return rounds
