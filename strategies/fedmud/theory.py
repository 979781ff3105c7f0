"""FedMUD's theory: the theorem's bound, the effective step, and the true downlink.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), Theorem 1 with Lemmas 2 to 6 of its appendix. The effective step and the downlink under
partial participation are ours: the paper tunes a without a formula, and counts one update per round.

The theorem covers plain MUD with all clients in every round, a constant step and a reset every S iterations,
not BKD and AAD. Its Lemma 1 (a gradient of the factors is at least psi^2 times that of the weights) fails for
r < min(m, n): with V = U = (1, 0)^T and a gradient in the other direction it claims 0 >= 1. So a bound is a
guide to the trade-off between eta, S and the dense layers, not a guarantee. The rate O(1 / sqrt T) with
eta = 1 / sqrt T and c -> 1 needs psi^2 >= 2: below that the largest step goes to 0.

A parameter out of range raises a ValueError that names it, its value and the valid range.
"""

import math
from dataclasses import dataclass, fields

from hedgerow.wire.checks import at_least, in_range, not_negative, one_of, positive, require

__all__ = [
    "Assumptions",
    "FactorNorms",
    "expected_downlink",
    "expected_missed_merges",
    "factor_drift_bound",
    "factor_norms",
    "max_step",
    "residual",
    "step_gain",
    "theorem_bound",
    "weight_drift_bound",
]


@dataclass(frozen=True)
class Assumptions:
    """The constants of Assumptions 1 to 4."""

    num_layers: int  # L >= 1.
    num_dense_layers: int  # The leading layers that are trained densely, 0..L; with L this is FedAvg.
    smoothness: float  # L_s of the local losses, as functions of the weights and of the factors; > 0.
    gradient_bound2: float  # G^2, of each layer's stochastic gradient, > 0.
    noise2: float  # sigma^2, the stochastic gradient's variance, >= 0.
    # Bounds on ||U||_F^2 and ||V||_F^2 at any time, > 0.
    kappa_u2: float
    kappa_v2: float
    # Bounds on the same right after a reset, >= 0. MUD has epsilon_v2 = 0.
    epsilon_u2: float
    epsilon_v2: float
    psi2: float  # psi_uv^2 > 0, below the sum of the factors' least squared singular values.
    local_iters: int  # Iterations E between two aggregations, >= 1.
    num_clients: int  # N >= 1.

    def __post_init__(self) -> None:
        may_be_zero = {"num_dense_layers", "noise2", "epsilon_u2", "epsilon_v2"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in may_be_zero:
                not_negative(**{field.name: value})
            else:
                positive(**{field.name: value})
        valid = f"in 0..{self.num_layers}, the number of layers"
        require("num_dense_layers", self.num_dense_layers, valid, self.num_dense_layers <= self.num_layers)

    @property
    def num_factored_layers(self) -> int:
        """The number of layers trained as factors."""
        return self.num_layers - self.num_dense_layers


@dataclass(frozen=True)
class FactorNorms:
    """Lemma 2: E||U||_F^2 <= u2 and E||V||_F^2 <= v2 between resets, Gamma_u^2 and Gamma_v^2."""

    u2: float
    v2: float


def factor_norms(known: Assumptions, step: float, reset_iters: int) -> FactorNorms:
    """Return Gamma_u^2 and Gamma_v^2 of Lemma 2.

    ``step`` is the clients' step eta > 0; ``reset_iters`` is S >= 1, the iterations between resets: rounds
    between resets times local iterations.
    """
    positive(step=step)
    at_least(1, reset_iters=reset_iters)
    travelled = 2 * step**2 * reset_iters**2 * known.gradient_bound2
    return FactorNorms(
        u2=min(2 * known.epsilon_u2 + travelled * known.kappa_v2, known.kappa_u2),
        v2=min(2 * known.epsilon_v2 + travelled * known.kappa_u2, known.kappa_v2),
    )


def factor_drift_bound(known: Assumptions, step: float, reset_iters: int) -> float:
    """Return Lemma 3's bound on a client's squared distance from the mean, in one layer's factors."""
    norms = factor_norms(known, step, reset_iters)
    return 4 * _travelled(known, step) * (norms.u2 + norms.v2)


def weight_drift_bound(known: Assumptions, step: float, reset_iters: int) -> float:
    """Return Lambda, Lemma 4's bound on a client's squared distance from the mean, in all weights."""
    norms = factor_norms(known, step, reset_iters)
    travelled = _travelled(known, step)
    crossed = norms.u2**2 + norms.v2**2 + travelled * norms.u2 * norms.v2
    return 4 * travelled * (known.num_dense_layers + 3 * known.num_factored_layers * crossed)


def residual(known: Assumptions, step: float, reset_iters: int) -> float:
    """Return the constant C of Theorem 1: the possible loss of one iteration."""
    norms = factor_norms(known, step, reset_iters)
    L_s, E, eta = known.smoothness, known.local_iters, step
    G2, factored = known.gradient_bound2, known.num_factored_layers
    product, fourth = norms.u2 * norms.v2, norms.u2**2 + norms.v2**2
    return (
        2 * L_s**2 * known.num_dense_layers * E**2 * G2 * eta**3
        + L_s * known.noise2 / (2 * known.num_clients) * eta**2
        + 2 * factored * L_s**2 * E**2 * G2 * eta**3 * (norms.u2 + norms.v2)
        + factored * (6 * L_s**2 * E**4 * eta**3 + 1.5 * L_s * eta**2 + 0.5) * eta**2 * G2**2 * product
        + factored * (6 * L_s**2 * E**2 * eta + 1.5 * L_s) * eta**2 * G2 * fourth
    )


def max_step(known: Assumptions, c: float) -> float:
    """Return the largest step that Theorem 1 admits for its constant 1 < c < 2."""
    in_range("c", c, 1.0, 2.0, open_below=True, open_above=True)
    return min(_power(known.psi2 / 2, 1 / (c - 1)), 1 / known.smoothness, 1.0)


def theorem_bound(
    known: Assumptions, step: float, reset_iters: int, *, c: float, num_iters: int, loss_gap: float
) -> float:
    """Return Theorem 1's bound on the mean squared gradient norm, 2 (loss_gap / T + C) / eta^c.

    It is no guarantee, see the module's docstring. ``known``, ``step`` and ``reset_iters`` are as in
    ``factor_norms``, with the step at most ``max_step``; c is the theorem's constant in (1, 2), ``num_iters``
    is T >= 1, and ``loss_gap`` is f(w^0) - f(w*) >= 0.
    """
    limit = max_step(known, c)
    require("step", step, f"a number in (0, {limit}]", 0 < step <= limit)
    at_least(1, num_iters=num_iters)
    not_negative(loss_gap=loss_gap)
    return 2 * (loss_gap / num_iters + residual(known, step, reset_iters)) / math.pow(step, c)


def step_gain(variant: str, init_a: float, rank: int = 1) -> float:
    """Return gamma: the first SGD step after a reset moves the weights by -eta gamma G in expectation.

    G is the gradient of the weights; the expectation is over the random factors, drawn from U(-a, a) with a =
    ``init_a`` > 0. The gain of the matrix forms grows with the rank, r or r_F of the freezing variant, and
    differs between layers; that of the Kronecker forms does not.
    """
    known = ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+f", "mud+bkd+aad")
    one_of("variant", variant, known)
    positive(init_a=init_a)
    at_least(1, rank=rank)
    parts, variance = variant.split("+"), init_a**2 / 3
    return variance * (1 if "bkd" in parts else rank) * (2 if "aad" in parts else 1)


def expected_missed_merges(
    participation: float, *, reset_interval: int = 1, at_most: float = math.inf
) -> float:
    """Return E[min(merges missed since a node last took part, at_most)].

    ``participation`` is the probability p in (0, 1] of taking part in a round, independent of all others;
    ``reset_interval`` is s >= 1, the rounds between merges. ``at_most`` is D / C, from which on the dense
    base costs no more than the merges.
    """
    in_range("participation", participation, 0.0, 1.0, open_below=True)
    at_least(1, reset_interval=reset_interval)
    require("at_most", at_most, "a number > 0", at_most > 0)
    # The gap in rounds is geometric and its place in the interval uniform: the chance of j merges or more
    # is mean * (1 - p)^((j - 1) s).
    absent = (1 - participation) ** reset_interval
    mean = 1 / (participation * reset_interval)
    first = mean * (1 - absent)
    if math.isinf(at_most):
        return mean
    whole = math.floor(at_most)
    return mean * (1 - absent**whole) + (at_most - whole) * first * absent**whole


def expected_downlink(
    count: int, dense_count: int, uncompressed: int, *, participation: float, reset_interval: int = 1
) -> float:
    """Return the mean number of float32 parameters sent to a participant if nodes replay merges.

    These are the merges it missed, or the dense base if that is smaller; the current factors unless they are
    freshly drawn; and the uncompressed part.

    ``count``, ``dense_count`` and ``uncompressed`` are C, D and E_unc of the factorisation; the others are as
    in ``expected_missed_merges``.
    """
    at_least(1, count=count, dense_count=dense_count)
    at_least(0, uncompressed=uncompressed)
    missed = expected_missed_merges(participation, reset_interval=reset_interval, at_most=dense_count / count)
    current = 1 - 1 / reset_interval
    return (missed + current) * count + uncompressed


def _travelled(known: Assumptions, step: float) -> float:
    """Return eta^2 E^2 G^2, a bound on an uncompressed layer's squared movement in a round."""
    return step**2 * known.local_iters**2 * known.gradient_bound2


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return math.inf
