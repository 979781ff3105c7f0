"""HSGD's theory: the bound and estimators of its constants, strategies 1 to 3 for P, Q and eta, and plans.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": Theorem 1 (17), (24), Propositions 1 to 3 with
(20)-(26), and the halved learning rate of the experiments.
Differs: Proposition 2 prints eta^2 in Q*, but the root of its own (20) has eta^3. The root is the default;
``eta_power=2`` is as printed. A search replaces "always P = Q", which is its usual result. The paper only
says that some steps of pre-training give F(theta^0), rho and delta; the estimators are ours. They need
gradients and scalars from a node, never its data.

The theorem's proof has gaps (it exchanges stale points, and uses one block's move for both), and its
assumptions imply iid groups. Use (17) as a guide to the trade-off between P, Q and eta, not as a guarantee.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from hedgerow.strategies.hsgd.costs import (
    PAPER_RATES,
    Sizes,
    paper_bytes,
    require_intervals,
    round_parts,
    round_seconds,
)
from hedgerow.wire.checks import (
    at_least,
    check_ordinary,
    int_at_least,
    is_real,
    not_negative,
    positive,
    require,
)
from hedgerow.wire.clock import Rates

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimates:
    """The constants of the bound, and their assumptions."""

    F0: float  # F of the initial global model over all training samples, finite.
    rho: float  # Lipschitz constant of the gradients, > 0.
    delta: float  # Square root of the bound on a stochastic partial gradient's variance, >= 0.
    final_loss: float = 0.0  # E[F] after T iterations, < F0. Unknown before the run; the paper uses 0.
    # The assumptions, one sentence each, for the user who reads the plan.
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require("F0", self.F0, "a finite number", is_real(self.F0))
        positive(rho=self.rho)
        not_negative(delta=self.delta)
        below = is_real(self.final_loss) and self.final_loss < self.F0
        require("final_loss", self.final_loss, f"a number < F0 = {self.F0!r}", below)

    @property
    def loss_gap(self) -> float:
        """Delta F = F0 - final_loss."""
        return self.F0 - self.final_loss


def secant_smoothness(points: Array, gradients: Array) -> float:
    """Return the largest slope of a gradient between consecutive points: a lower estimate of rho.

    - ``points``: Global models of a short run, (steps + 1, params); consecutive ones must differ.
    - ``gradients``: Each group's full gradient at them, (steps + 1, groups, params).
    """
    if points.ndim != 2 or len(points) < 2:
        raise ValueError(
            f"points must have the shape (steps + 1, params) with steps >= 1, got {points.shape}"
        )
    if gradients.ndim != 3 or gradients.shape[::2] != points.shape or gradients.shape[1] < 1:
        raise ValueError(
            f"gradients must have the shape (steps + 1, groups, params) for points {points.shape}, got "
            f"{gradients.shape}"
        )
    moves = np.linalg.norm(np.diff(points, axis=0), axis=-1)  # (steps,)
    _finite("points", moves)
    if not moves.all():
        raise ValueError("points must change at every step, got two consecutive equal rows")
    slopes = np.linalg.norm(np.diff(gradients, axis=0), axis=-1) / moves[:, None]  # (steps, groups)
    _finite("gradients", slopes)
    return float(slopes.max())


def gradient_variance(draws: Array, gradient: Array) -> float:
    """Return the mean of ||g - gradient||^2 over draws of a stochastic partial gradient, V of one block.

    - ``draws``: (draws, params), over batches for the head and the hospital, over single devices for devices.
    - ``gradient``: (params,), of the *global* objective, so that differences between groups add variance.
    """
    if draws.ndim != 2 or len(draws) < 1 or draws.shape[1:] != gradient.shape:
        raise ValueError(
            f"draws must have the shape (draws, params) for gradient {gradient.shape}, got {draws.shape}"
        )
    squares = ((draws - gradient) ** 2).sum(axis=-1)
    _finite("draws", squares)
    return float(squares.mean())


def estimate(
    F0: float,
    points: Array,
    gradients: Array,
    variances: Array,
    *,
    final_loss: float | None = None,
    aggregate: Literal["max", "mean"] = "max",
) -> Estimates:
    """Return the constants from a short run with P = Q = 1, with their assumptions.

    - ``F0``: F of the initial model over all training samples, > ``final_loss``.
    - ``points``, ``gradients``: As in ``secant_smoothness``.
    - ``variances``: ``gradient_variance`` by step, group and block, (..., 3), >= 0.
    - ``final_loss``: E[F] at the end, if known; None is 0.
    - ``aggregate``: Whether delta^2 is the maximum or the mean over steps and groups of the largest block's
      variance.
    """
    if aggregate not in ("max", "mean"):
        raise ValueError(f"aggregate must be 'max' or 'mean', got {aggregate!r}")
    if variances.ndim < 1 or variances.shape[-1] != 3 or variances.size == 0:
        raise ValueError(
            f"variances must have the shape (..., 3), one a block of the model, got {variances.shape}"
        )
    if not (np.isfinite(variances).all() and (variances >= 0).all()):
        raise ValueError("variances must be finite and >= 0")
    rho = secant_smoothness(points, gradients)
    worst = variances.max(axis=-1)
    delta2 = float(worst.max() if aggregate == "max" else worst.mean())
    assumed = (
        f"rho is the largest of {len(points) - 1} secants of {gradients.shape[1]} groups: a lower estimate",
        f"delta^2 is the {aggregate} over steps and groups, against the global gradient",
        "the groups are iid, as the theorem asks",
        *(("E[F] after the run is 0",) if final_loss is None else ()),
    )
    return Estimates(F0, rho, math.sqrt(delta2), final_loss or 0.0, assumed)


def _finite(key: str, values: Array) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"{key} must have finite entries only")


# Tolerance of the cap: 1 / (8 rho eta) with eta = 1 / (8 P rho) must give P again.
_ROUNDING = 1e-12
# Largest interval in ``plans``: there are 15 million pairs (P, Q) up to it.
_MOST_INTERVALS = 2**20
# Number of pairs per block; an array of them takes 8 MB.
_BLOCK = 2**20


def eta_max(rho: float, P: float) -> float:
    """Return Theorem 1's cap 1 / (8 P rho) on eta; it implies the lemmas' 1 / (2 P rho) and 1 / (2 Q rho)."""
    positive(rho=rho)
    require("P", P, "a finite number >= 1", is_real(P) and P >= 1)
    return 1 / (8 * P * rho)


def interval_max(rho: float, eta: float) -> int:
    """Return the largest P that the cap allows at a learning rate; 0 if none."""
    positive(rho=rho, eta=eta)
    return math.floor(1 / (8 * rho * eta) * (1 + _ROUNDING))


def bound(known: Estimates, *, P: float, Q: float, eta: float, T: int) -> float:
    """Return Gamma(P, Q), the right side of (17): a bound on the mean of ||grad F||^2 over the rounds.

    P and Q are the global and local interval in iterations, > 0 and not necessarily integers; eta is the
    learning rate, > 0; T is the number of iterations, >= 1. The bound holds for eta <= ``eta_max``, and is
    also computed beyond.
    """
    positive(P=P, Q=Q, eta=eta)
    at_least(1, T=T)
    return float(_floor(known, P, eta, T) + _staleness(known, eta) * Q**2)  # (17)


def _floor(known: Estimates, P: Any, eta: float, T: int) -> Any:
    """Return the terms of (17) without Q, for one P or an array."""
    return 4 * known.loss_gap / (eta * T) + 12 * P * known.rho * eta * known.delta**2


def _staleness(known: Estimates, eta: float) -> float:
    return 96 * (known.rho * eta * known.delta) ** 2


def descent(known: Estimates, *, P: int, Q: int, eta: float, gradient2: float) -> float:
    """Return an upper bound on the change of F in one global interval, (24); as a function of eta, (26).

    Q must be a divisor of P; ``gradient2`` is ||grad F||^2 at the interval's start, >= 0.
    """
    positive(eta=eta)
    a, b, c = _cubic(known, P, Q, gradient2)
    return a * eta**3 + b * eta**2 - c * eta  # (26)


def _cubic(known: Estimates, P: int, Q: int, gradient2: float) -> tuple[float, float, float]:
    require_intervals(P=P, Q=Q)
    not_negative(gradient2=gradient2)
    variance = known.delta**2
    return 24 * Q**2 * P * known.rho**2 * variance, 3 * P**2 * known.rho * variance, P / 4 * gradient2  # (25)


def iterations(T: int, P: int) -> int:
    """Return T (>= 1) rounded up to a multiple of P (>= 1)."""
    at_least(1, T=T, P=P)
    return -(-T // P) * P


def lambda_min(known: Estimates, *, P: float, eta: float, T: int, target: float) -> float:
    """Return the smallest Lambda = P / Q whose bound reaches a target (Strategy 1); inf if none does.

    ``target`` is Xi, the largest allowed Gamma(P, P / Lambda), > 0.
    """
    positive(P=P, eta=eta, target=target)
    at_least(1, T=T)
    left = target - float(_floor(known, P, eta, T))
    return P * math.sqrt(_staleness(known, eta) / left) if left > 0 else math.inf


def choose_local_interval(known: Estimates, *, P: int, eta: float, T: int, target: float) -> int | None:
    """Return the cheapest Q at a given P, Strategy 1: the largest divisor of P whose bound reaches a target.

    None if no Q reaches it. The cap on eta is not checked, see ``eta_max``.
    """
    at_least(1, P=P)
    least = lambda_min(known, P=P, eta=eta, T=T, target=target)
    reaching = (P // ratio for ratio in range(1, P + 1) if P % ratio == 0 and ratio >= least)
    return next(reaching, None)


def q_star(known: Estimates, *, eta: float, T: int, eta_power: Literal[2, 3] = 3) -> float:
    """Return Q* of Strategy 2, the real P = Q that minimises bound times cost; delta must be > 0.

    ``eta_power`` 3 is the root of (20); 2 is Proposition 2 as printed, smaller by sqrt(eta) and no minimum.
    """
    positive(eta=eta, delta=known.delta)
    at_least(1, T=T)
    if eta_power not in (2, 3):
        raise ValueError(f"eta_power must be 3 (the root of (20)) or 2 (as printed), got {eta_power!r}")
    return math.sqrt(known.loss_gap / (24 * (known.rho * known.delta) ** 2 * eta**eta_power * T))


def choose_same_interval(known: Estimates, *, eta: float, T: int, eta_power: Literal[2, 3] = 3) -> int:
    """Return the integer P = Q of Strategy 2: Q* rounded to the better side, at least 1, within cap and T.

    ValueError if eta is too large for any P.
    """
    star = q_star(known, eta=eta, T=T, eta_power=eta_power)
    largest = min(interval_max(known.rho, eta), T)
    if largest < 1:
        raise ValueError(f"eta must be at most 1 / (8 rho) = {eta_max(known.rho, 1)!r}, got {eta!r}")
    # At P = Q the cost (19) is inversely proportional to Q, whatever the sizes.
    sides = {min(max(side, 1), largest) for side in (math.floor(star), math.ceil(star))}
    return min(sorted(sides), key=lambda Q: bound(known, P=Q, Q=Q, eta=eta, T=T) / Q)


def eta_2(known: Estimates, *, P: int, Q: int, gradient2: float) -> float:
    """Return eta_2, the positive minimum of (26) over eta; inf if delta is 0."""
    a, b, c = _cubic(known, P, Q, gradient2)
    # The paper's fraction, rearranged to avoid cancellation and division by a = 0.
    denominator = b + math.sqrt(b**2 + 3 * a * c)
    return c / denominator if denominator > 0 else math.inf


def choose_eta(known: Estimates, *, P: int, Q: int, gradient2: float) -> float:
    """Return eta* of Strategy 3: ``eta_2``, or the cap of Theorem 1 if that is smaller.

    At fixed P / Q it is inversely proportional to Q. ``gradient2`` must be > 0.
    """
    positive(gradient2=gradient2)
    return min(eta_2(known, P=P, Q=Q, gradient2=gradient2), eta_max(known.rho, P))


def halved_eta(t: int, *, eta0: float, period: int) -> float:
    """Return the paper's learning rate of iteration t >= 0: eta0 (> 0) halved every ``period`` (>= 1)."""
    positive(eta0=eta0)
    at_least(1, period=period)
    at_least(0, t=t)
    return math.ldexp(eta0, -(t // period))


@dataclass(frozen=True)
class IntervalPlan:
    """Intervals whose bound reaches a target, and their cost."""

    P: int  # Global interval in iterations.
    Q: int  # Local interval in iterations.
    bound: float  # Gamma(P, Q), at most the target.
    bytes: float  # The paper's cost (19) of T iterations over all groups.
    seconds: float  # The slowest group's, for T iterations.
    iterations: int  # T rounded up to a multiple of P, to run with. Cost and bound are for T itself.


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

    Searches all pairs and returns the cheapest ``most``; ties go to the smaller P. P = Q comes first if a
    local interval costs far more than the hospital's encoder, P > Q if that encoder is large.

    - ``target``: Xi, the mean squared gradient norm to reach, > 0.
    - ``groups``: The sizes of each group, at least one.
    - ``compute_seconds``: t_c of one iteration, >= 0.
    """
    int_at_least(1, most=most)
    if not groups:
        raise ValueError(f"groups must hold the sizes of at least one group, got {groups!r}")
    positive(target=target, eta=eta)
    check_ordinary(target=target, eta=eta, rho=known.rho, delta=known.delta, compute_seconds=compute_seconds)
    alike = Counter(groups)  # Most groups of a run have the same sizes.
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
            # Keep those that equal the last one up to rounding: the exact cost decides below.
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
