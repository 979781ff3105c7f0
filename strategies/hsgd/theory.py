"""What HSGD's theorem says before a run: the bound, strategies 1 to 3 for P, Q and eta, and a plan.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": Theorem 1 (17), (24), Propositions 1 to 3 with
(20)-(26), and the halved learning rate of the experiments.
Differs: Proposition 2 prints eta^2 in Q* where the root of its own (20) has eta^3; the root is the default,
the print ``eta_power=2``. "Always P = Q" is replaced by a search, of which it is the usual result.

The theorem's proof has gaps (stale points are exchanged, one block's move stands for both) and its
assumptions mean iid groups: take (17) for a guide to how P, Q and eta trade, not for a guarantee.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.hsgd.costs import (
    PAPER_RATES,
    Sizes,
    paper_bytes,
    require_intervals,
    round_parts,
    round_seconds,
)
from hedgerow.strategies.hsgd.estimates import Estimates
from hedgerow.wire.checks import at_least, is_real, not_negative, positive, require
from hedgerow.wire.clock import Rates
from hedgerow.wire.ordinary import check_ordinary

__all__ = [
    "IntervalPlan",
    "bound",
    "broken_conditions",
    "choose_eta",
    "choose_local_interval",
    "choose_same_interval",
    "descent",
    "eta_2",
    "eta_max",
    "halved_eta",
    "interval_max",
    "iterations",
    "lambda_min",
    "plan",
    "plans",
    "q_star",
]

# A cap that is met up to rounding is met: 1 / (8 rho eta) of eta = 1 / (8 P rho) must give P again.
_ROUNDING = 1e-12
# The largest interval that ``plans`` looks at: there are 15 million pairs with a multiple up to it.
_MOST_INTERVALS = 2**20
# Pairs that are looked at together: 8 MB a number.
_BLOCK = 2**20


def eta_max(rho: float, P: float) -> float:
    """Return Theorem 1's cap 1 / (8 P rho) on eta; it implies the lemmas' 1 / (2 P rho) and 1 / (2 Q rho)."""
    positive(rho=rho)
    require("P", P, "a finite number >= 1", is_real(P) and P >= 1)
    return 1 / (8 * P * rho)


def interval_max(rho: float, eta: float) -> int:
    """Return the largest P that the cap admits at a learning rate, 0 where it admits none."""
    positive(rho=rho, eta=eta)
    return math.floor(1 / (8 * rho * eta) * (1 + _ROUNDING))


def bound(known: Estimates, *, P: float, Q: float, eta: float, T: int) -> float:
    """Return Gamma(P, Q), the right side of (17): a bound on the mean of ||grad F||^2 over the rounds.

    It holds for eta <= ``eta_max``, and is evaluated beyond as well.

    Parameters
    ----------
    known : Estimates
        Delta F, rho and delta.
    P, Q : float
        Global and local interval in iterations, > 0; between integers (17) is still a formula.
    eta : float
        Learning rate, > 0.
    T : int
        Iterations, >= 1.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    positive(P=P, Q=Q, eta=eta)
    require_intervals(T=T)
    return float(_floor(known, P, eta, T) + _staleness(known, eta) * Q**2)  # (17)


def _floor(known: Estimates, P: Any, eta: float, T: int) -> Any:
    """Return the terms of (17) without Q, of one P or of an array of them."""
    return 4 * known.loss_gap / (eta * T) + 12 * P * known.rho * eta * known.delta**2


def _staleness(known: Estimates, eta: float) -> float:
    return 96 * (known.rho * eta * known.delta) ** 2


def descent(known: Estimates, *, P: int, Q: int, eta: float, gradient2: float) -> float:
    """Return the most that F changes in one global interval, (24): negative where it must fall.

    As a function of eta it is (26).

    Parameters
    ----------
    known : Estimates
        rho and delta.
    P, Q : int
        Intervals, >= 1, Q a divisor of P.
    eta : float
        Learning rate, > 0.
    gradient2 : float
        ||grad F||^2 at the interval's start, >= 0.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    positive(eta=eta)
    a, b, c = _cubic(known, P, Q, gradient2)
    return a * eta**3 + b * eta**2 - c * eta  # (26)


def _cubic(known: Estimates, P: int, Q: int, gradient2: float) -> tuple[float, float, float]:
    require_intervals(P=P, Q=Q)
    not_negative(gradient2=gradient2)
    variance = known.delta**2
    return 24 * Q**2 * P * known.rho**2 * variance, 3 * P**2 * known.rho * variance, P / 4 * gradient2  # (25)


def broken_conditions(known: Estimates, *, P: int, Q: int, eta: float, T: int) -> tuple[str, ...]:
    """Return a sentence for each of Q | P, P | T and eta <= 1 / (8 P rho) that a choice breaks.

    They are what Theorem 1 asks; ``lambda_min`` is what a target asks on top.

    Raises
    ------
    ValueError
        If P, Q or T is not an integer >= 1, or eta not > 0.
    """
    for name, count in (("P", P), ("Q", Q), ("T", T)):
        require_intervals(**{name: count})
    positive(eta=eta)
    cap = eta_max(known.rho, P)
    conditions = (
        (P % Q == 0, f"P must be a multiple of Q = {Q}, got {P}"),
        (T % P == 0, f"T must be a multiple of P = {P}, got {T}"),
        (eta <= cap * (1 + _ROUNDING), f"eta must be at most 1 / (8 P rho) = {cap!r}, got {eta!r}"),
    )
    return tuple(message for holds, message in conditions if not holds)


def iterations(T: int, P: int) -> int:
    """Return T (>= 1) rounded up to a multiple of P (>= 1)."""
    require_intervals(T=T)
    require_intervals(P=P)
    return -(-T // P) * P


def lambda_min(known: Estimates, *, P: float, eta: float, T: int, target: float) -> float:
    """Return the least Lambda = P / Q whose bound reaches a target (Strategy 1), inf where none does.

    ``target`` is Xi, the value that Gamma(P, P / Lambda) may take, > 0. Other parameters and errors as in
    ``bound``.
    """
    positive(P=P, eta=eta, target=target)
    require_intervals(T=T)
    left = target - float(_floor(known, P, eta, T))
    return P * math.sqrt(_staleness(known, eta) / left) if left > 0 else math.inf


def choose_local_interval(known: Estimates, *, P: int, eta: float, T: int, target: float) -> int | None:
    """Return the cheapest Q at a given P, Strategy 1: the largest divisor of P whose bound reaches a target.

    It is P wherever ``lambda_min`` <= 1; None where no Q reaches the target at this P. The cap on eta is not
    looked at: see ``broken_conditions``. Parameters and errors as in ``lambda_min``, P an integer.
    """
    require_intervals(P=P)
    least = lambda_min(known, P=P, eta=eta, T=T, target=target)
    reaching = (P // ratio for ratio in range(1, P + 1) if P % ratio == 0 and ratio >= least)
    return next(reaching, None)


def q_star(known: Estimates, *, eta: float, T: int, eta_power: Literal[2, 3] = 3) -> float:
    """Return Q* of Strategy 2, the real P = Q that minimises bound times cost.

    ``eta_power`` 3 is the root of (20); 2 is Proposition 2 as printed, smaller by sqrt(eta) and no minimum.
    delta must be > 0; other parameters and errors as in ``bound``.
    """
    positive(eta=eta, delta=known.delta)
    require_intervals(T=T)
    if eta_power not in (2, 3):
        raise ValueError(f"eta_power must be 3 (the root of (20)) or 2 (as printed), got {eta_power!r}")
    return math.sqrt(known.loss_gap / (24 * (known.rho * known.delta) ** 2 * eta**eta_power * T))


def choose_same_interval(known: Estimates, *, eta: float, T: int, eta_power: Literal[2, 3] = 3) -> int:
    """Return the integer P = Q of Strategy 2: Q* rounded to the better side, at least 1, within cap and T.

    ``iterations`` gives the T to run with. Parameters and errors as in ``q_star``; ValueError, too, if eta is
    too large for any P.
    """
    star = q_star(known, eta=eta, T=T, eta_power=eta_power)
    largest = min(interval_max(known.rho, eta), T)
    if largest < 1:
        raise ValueError(f"eta must be at most 1 / (8 rho) = {eta_max(known.rho, 1)!r}, got {eta!r}")
    # At P = Q the cost (19) is inversely proportional to Q, whatever the sizes.
    sides = {min(max(side, 1), largest) for side in (math.floor(star), math.ceil(star))}
    return min(sorted(sides), key=lambda Q: bound(known, P=Q, Q=Q, eta=eta, T=T) / Q)


def eta_2(known: Estimates, *, P: int, Q: int, gradient2: float) -> float:
    """Return eta_2, the positive minimum of (26) over eta; inf where delta is 0 and nothing stops it.

    Parameters as in ``descent``; ValueError if a number is out of range.
    """
    a, b, c = _cubic(known, P, Q, gradient2)
    # The paper's fraction, multiplied out, so that it neither cancels nor divides by a = 0.
    denominator = b + math.sqrt(b**2 + 3 * a * c)
    return c / denominator if denominator > 0 else math.inf


def choose_eta(known: Estimates, *, P: int, Q: int, gradient2: float) -> float:
    """Return eta* of Strategy 3: ``eta_2``, or the cap of Theorem 1 where that is less.

    Longer intervals ask for a smaller eta: at fixed P / Q it is inversely proportional to Q.

    Parameters and errors as in ``descent``, ``gradient2`` > 0.
    """
    positive(gradient2=gradient2)
    return min(eta_2(known, P=P, Q=Q, gradient2=gradient2), eta_max(known.rho, P))


def halved_eta(t: int, *, eta0: float, period: int) -> float:
    """Return the paper's learning rate of iteration t >= 0: eta0 (> 0) halved every ``period`` (>= 1)."""
    positive(eta0=eta0)
    require_intervals(period=period)
    at_least(0, t=t)
    return math.ldexp(eta0, -(t // period))


@dataclass(frozen=True)
class IntervalPlan:
    """A choice of intervals whose bound reaches a target, and what it costs."""

    # Global and local interval in iterations.
    P: int
    Q: int
    bound: float  # Gamma(P, Q), at most the target.
    bytes: float  # The paper's cost (19) of T iterations over all groups.
    seconds: float  # The slowest group's, for T iterations.
    iterations: int  # T rounded up to a multiple of P: what to run. Cost and bound are those of T itself.


def plans(
    target: float,
    known: Estimates,
    groups: Sequence[Sizes],
    *,
    eta: float,
    T: int,
    compute_seconds: float = 0.0,
    rates: Rates = PAPER_RATES,
    most: int = 1000,
) -> list[IntervalPlan]:
    """Return the pairs (P, Q) within the cap whose bound reaches the target, the cheapest by (19) first.

    Every pair is looked at; the cheapest ``most`` are returned.

    P = Q comes first wherever a local interval costs far more than the hospital's encoder; where that
    encoder is large, P > Q does. Ties go to the smaller P.

    Parameters
    ----------
    target : float
        Xi, the mean squared gradient norm to reach, > 0.
    known : Estimates
        Delta F, rho and delta.
    groups : Sequence[Sizes]
        One entry a group, at least one.
    eta : float
        Learning rate, > 0.
    T : int
        Iterations, >= 1.
    compute_seconds : float (default: 0)
        t_c of one iteration, >= 0.
    rates : Rates (default: PAPER_RATES)
        Of the links.
    most : int (default: 1000)
        How many to return, >= 1.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    require("most", most, "an integer >= 1", isinstance(most, int) and most >= 1)
    if not groups:
        raise ValueError(f"groups must hold the sizes of at least one group, got {groups!r}")
    positive(target=target, eta=eta)
    check_ordinary(target=target, eta=eta, rho=known.rho, delta=known.delta, compute_seconds=compute_seconds)
    alike = Counter(groups)  # a run's groups are mostly of one size
    parts = [round_parts(sizes, rates=rates) for sizes in alike]

    def row(P: int, Q: int) -> IntervalPlan:
        slowest = max(round_seconds(part, P=P, Q=Q, compute_seconds=compute_seconds) for part in parts)
        cost = sum(count * paper_bytes(sizes, P=P, Q=Q, T=T) for sizes, count in alike.items())
        gamma = bound(known, P=P, Q=Q, eta=eta, T=T)
        return IntervalPlan(P, Q, gamma, cost, slowest * T / P, iterations(T, P))

    largest = min(interval_max(known.rho, eta), T)
    if largest > _MOST_INTERVALS:
        raise ValueError(
            f"T or 1 / (8 rho eta) must be at most {_MOST_INTERVALS}, as every pair of intervals up to it "
            f"is tried, got T {T!r} and eta {eta!r}"
        )
    # (19) is linear in 1 / P and 1 / Q; its slopes, from two pairs.
    once, twice = (sum(n * paper_bytes(s, P=2, Q=Q, T=2) for s, n in alike.items()) for Q in (1, 2))
    of_local = 2 * (once - twice)
    of_global = 2 * (once - of_local)
    pairs, costs = np.empty((0, 2), np.int64), np.empty(0)
    for P, Q in _pairs(largest):
        reaches = _floor(known, P, eta, T) + _staleness(known, eta) * Q**2 <= target  # (17)
        P, Q = P[reaches], Q[reaches]  # noqa: PLW2901
        pairs = np.concatenate([pairs, np.stack([P, Q], axis=1)])
        costs = np.concatenate([costs, of_global / P + of_local / Q])
        if costs.size > most:
            # Those that equal the last one up to rounding stay: the exact cost decides below.
            kept = costs <= np.partition(costs, most - 1)[most - 1] * (1 + _ROUNDING)
            pairs, costs = pairs[kept], costs[kept]
    rows = [row(P, Q) for P, Q in pairs.tolist()]
    return sorted(rows, key=lambda found: (found.bytes, found.P))[:most]


def _pairs(largest: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return all (P, Q) with Q a divisor of P <= ``largest``, block by block."""
    first = 1
    while first <= largest:
        # At least one Q, and as many more as a block takes.
        Q = np.arange(first, min(first + max(_BLOCK // (largest // first), 1), largest + 1))
        multiples = largest // Q
        starts = np.repeat(np.cumsum(multiples) - multiples, multiples)
        Q = np.repeat(Q, multiples)
        yield Q * (np.arange(Q.size) - starts + 1), Q
        first = int(Q[-1]) + 1


def plan(
    target: float,
    known: Estimates,
    groups: Sequence[Sizes],
    *,
    eta: float,
    T: int,
    compute_seconds: float = 0.0,
    rates: Rates = PAPER_RATES,
) -> IntervalPlan:
    """Return the first of ``plans``, the cheapest pair; ValueError, too, if none reaches the target."""
    found = plans(target, known, groups, eta=eta, T=T, compute_seconds=compute_seconds, rates=rates)
    if not found:
        raise ValueError(
            f"target must be one that a pair within P <= {interval_max(known.rho, eta)} reaches, got "
            f"{target!r} at eta {eta!r} and T {T!r}: take a larger target, a smaller eta or a larger T"
        )
    return found[0]
