"""The theory of CEPS in numbers: the gap of gossip's mixing, the least c, the bound of Theorem 1.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", eq. (12), Theorem 1,
Assumption 4 and the lemmas behind them. Settings there: W^0 = 0, one interval k_0, equal degrees, and
sigma_i = c / t_i, so that every node has the same c. Also the step of CHOCO-Gossip, from its own paper.
At the sizes of the paper's experiments the least c exceeds 10^100, hence logarithms.

A parameter out of range raises a ValueError that names it, its value and the valid range.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.checks import in_range, int_at_least, not_negative, positive

__all__ = [
    "Bound",
    "choco_step",
    "connection_probability",
    "contraction",
    "least_c",
    "log10_least_c",
    "log10_mixing_gap",
    "mixing_gap",
    "participation_matrix",
    "theorem_1",
]


def mixing_gap(num_nodes: int, window: int) -> float:
    """Return 1 - tau = 1 - (1 - m^(-m B))^(1/B), eq. (12), for m >= 2; 0 if it underflows.

    ``window`` is B >= 1 of Assumption 4: the edges used in any B + 1 consecutive communications connect all
    nodes.

    Examples
    --------
    >>> mixing_gap(4, 1)
    0.00390625
    """
    return float(10.0 ** log10_mixing_gap(num_nodes, window))


def log10_mixing_gap(num_nodes: int, window: int) -> float:
    """Return log10(1 - tau); parameters as in ``mixing_gap``."""
    int_at_least(2, num_nodes=num_nodes)
    int_at_least(1, window=window)
    exponent = -num_nodes * window * math.log(num_nodes)
    share = math.exp(exponent)
    if share < 1e-300:  # 1 - (1 - x)^(1/B) is x / B to the last digit.
        return (exponent - math.log(window)) / math.log(10)
    return math.log10(-math.expm1(math.log1p(-share) / window))


def least_c(num_nodes: int, window: int, lipschitz: float) -> float:
    """Return c_0 = (80 m sqrt(l) / (1 - tau))^2, eq. (12), the least c of Theorem 1; inf if it overflows.

    ``lipschitz`` is l > 0, the largest Lipschitz constant of the nodes' gradients.
    """
    exponent = log10_least_c(num_nodes, window, lipschitz)
    return float(10.0**exponent) if exponent < 308 else math.inf


def log10_least_c(num_nodes: int, window: int, lipschitz: float) -> float:
    """Return log10 c_0; parameters as in ``least_c``."""
    positive(lipschitz=lipschitz)
    gap = log10_mixing_gap(num_nodes, window)
    return 2 * (math.log10(80 * num_nodes) + math.log10(lipschitz) / 2 - gap)


@dataclass(frozen=True)
class Bound:
    """The three terms of Theorem 1 on the mean squared gradient norm; the last falls with neither T nor c."""

    optimisation: float
    heterogeneity: float
    projection: float

    @property
    def total(self) -> float:
        """The bound."""
        return self.optimisation + self.heterogeneity + self.projection


def theorem_1(
    num_nodes: int,
    window: int,
    lipschitz: float,
    *,
    gap: float,
    periods: int,
    dissimilarity: float,
    interval: int,
    residual: float,
    c: float | None = None,
) -> Bound:
    """Return 8 m c (f(0) - f*) / T + m^2 c_0 zeta^2 / c + 16 m k_0 e_inf, for c >= c_0; c None is c_0.

    ``num_nodes``, ``window`` and ``lipschitz`` are m, B and l of ``least_c``; ``gap`` is f(0) - f* >= 0, f
    being the sum of the nodes' objectives; ``periods`` is T >= 1 communications, every ``interval`` = k_0 >=
    1 iterations; ``dissimilarity`` is zeta^2 of Assumption 2; ``residual`` is e_inf >= 0, the largest squared
    projection residual, which with noise is finite over a finite run only.
    """
    int_at_least(1, periods=periods, interval=interval)
    not_negative(gap=gap, dissimilarity=dissimilarity, residual=residual)
    c_0 = least_c(num_nodes, window, lipschitz)
    c = c_0 if c is None else c
    if not c >= c_0:
        raise ValueError(f"c must be a number >= c_0 = {c_0:g}, got {c!r}")
    return Bound(
        optimisation=8 * num_nodes * c * gap / periods,
        heterogeneity=num_nodes**2 * (c_0 / c if math.isfinite(c) else 1.0) * dissimilarity,
        projection=16 * num_nodes * interval * residual,
    )


def contraction(num_nodes: int, window: int, steps: int) -> float:
    """Return 64 m tau^(2 (steps - 1)), which bounds ||A^(i -> a) (1/m - e_j)||^2 for a - i = ``steps`` >= 1.

    A^(i -> a) is the product of the participation matrices of these communications.
    """
    int_at_least(1, steps=steps)
    gap = mixing_gap(num_nodes, window)
    return 64 * num_nodes * math.exp(2 * (steps - 1) * math.log1p(-gap))


def participation_matrix(chosen: Mapping[int, Sequence[int]], num_nodes: int) -> NDArray[np.float64]:
    """Return A^k (m, m), A_ji = 1 / m_i^k for j in N_i^k: the means are W A, and columns sum to one.

    ``chosen`` has N_i^k of every node i, which must include i itself.
    """
    int_at_least(1, num_nodes=num_nodes)
    A = np.zeros((num_nodes, num_nodes))
    for i in range(num_nodes):
        if i not in chosen or i not in chosen[i]:
            raise ValueError(
                f"chosen of node {i} must be a set of nodes that includes {i}, got {chosen.get(i)!r}"
            )
        A[sorted(set(chosen[i])), i] = 1 / len(set(chosen[i]))
    return A


def connection_probability(num_nodes: int, window: int, participants: float) -> float:
    """Return a lower bound on the probability of Assumption 4, prod_i [1 - (1 - (t - 1)/(m - 1))^B]^(m - 1).

    It assumes a complete graph, and is only an indicator for others. m >= 2 and B >= 1; ``participants`` is t
    of a node, itself included, in [1, m], not necessarily an integer.

    Examples
    --------
    >>> round(connection_probability(32, 20, 16.5), 9)
    0.999054402
    """
    int_at_least(2, num_nodes=num_nodes)
    int_at_least(1, window=window)
    in_range("participants", participants, 1, num_nodes)
    missed = (1 - (participants - 1) / (num_nodes - 1)) ** window
    return math.exp(num_nodes * (num_nodes - 1) * math.log1p(-missed)) if missed < 1 else 0.0


def choco_step(matrix: NDArray[np.float64], delta: float) -> float:
    """Return the consensus step gamma of CHOCO-Gossip that is proved to converge.

    gamma = rho^2 delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta), rho = 1 - |lambda_2(W)|
    and beta = ||I - W||: A. Koloskova, S. Stich, M. Jaggi, "Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication", Theorem 2. It is very conservative.

    ``matrix`` is W (m, m), symmetric, with rows that sum to one, of a connected graph. ``delta`` in (0, 1] is
    the compressor's quality: E||C(x) - x||^2 <= (1 - delta) ||x||^2.

    Examples
    --------
    >>> choco_step(np.full((2, 2), 0.5), 1.0)  # rho = 1, beta = 1
    0.06666666666666667
    """
    in_range("delta", delta, 0.0, 1.0, open_below=True)
    values = np.linalg.eigvalsh(matrix)  # ascending, the last is 1
    rho = 1 - float(np.abs(values[:-1]).max(initial=0.0))
    beta = 1 - float(values[0])
    return rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)
