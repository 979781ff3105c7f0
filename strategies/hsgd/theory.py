"""HSGD's traffic and time, and its theory: the bound, estimators of its constants, and strategies 1 to 3.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": cost (19), the round time and its rates, the set-up
of the experiments, Theorem 1 (17), (24), Propositions 1 to 3 with (20)-(26), and the halved learning rate.
Differs: (19) counts neither downlinks, nor the encoders of a global aggregation, nor an encoding's hop from
device to edge, nor a device's copy of the head; ``traffic`` counts every transfer. The paper names the parts
of its round time without defining them, and gives no cost of the baselines; both are derived here from its
message flow. Proposition 2 prints eta^2 in Q*, but the root of its own (20) has eta^3. The root is the
default; ``eta_power=2`` is as printed. A search replaces "always P = Q", which is its usual result. The paper
only says that some steps of pre-training give F(theta^0), rho and delta; the estimators are ours. They need
gradients and scalars from a node, never its data.

The theorem's proof has gaps (it exchanges stale points, and uses one block's move for both), and its
assumptions imply iid groups. Use (17) as a guide to the trade-off between P, Q and eta, not as a guarantee.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hedgerow.wire.checks import (
    at_least,
    check_ordinary,
    in_range,
    int_at_least,
    is_real,
    not_negative,
    one_of,
    positive,
    require,
)
from hedgerow.wire.clock import Rates
from hedgerow.wire.sparse_rows import row_bytes

Array = npt.NDArray[np.float64]

# Traffic and time.

_BYTES_PER_SCALAR = 4
_BITS_PER_SCALAR = 32

# kappa = log2(b) / 32 at the paper's quantisation level b = 128.
COMPRESSION_RATIO = 7 / 32

# Devices are mobile (14 Mbit/s up, 110 down); hospitals, edges and the cloud are fixed (74 up, 204 down).
# A hospital and its edge both send to each other at their uplink's rate.
PAPER_RATES = Rates(
    {
        "device->edge": 14e6,
        "edge->device": 110e6,
        "edge->hospital": 74e6,
        "hospital->edge": 74e6,
        "hospital->cloud": 74e6,
        "cloud->hospital": 204e6,
        "edge->cloud": 74e6,
        "cloud->edge": 204e6,
    }
)


class MethodName(StrEnum):
    """The methods that the paper compares; C- is with top-k compressed encodings and heads."""

    HSGD = "hsgd"
    C_HSGD = "c-hsgd"
    JFL = "jfl"
    TDCD = "tdcd"
    C_TDCD = "c-tdcd"


_MERGED = (MethodName.TDCD, MethodName.C_TDCD)
_COMPRESSED = (MethodName.C_HSGD, MethodName.C_TDCD)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one group's messages in scalars of 32 bits, and its batch; all >= 1."""

    # |theta_0|, |theta_1| and |theta_2|.
    head: int
    hospital: int
    device: int
    # Length of one sample's zeta_1 and zeta_2.
    hospital_encoding: int
    device_encoding: int
    batch: int  # |A|, devices in a local interval; each has one sample.

    def __post_init__(self) -> None:
        at_least(1, **{field.name: getattr(self, field.name) for field in fields(self)})


def paper_bytes(
    sizes: Sizes, *, P: int, Q: int, T: int, method: str = MethodName.HSGD, raw_bytes: float = 0.0
) -> float:
    """Return one group's bytes as the paper counts them: (19) / M, and its analogue for the baselines.

    The cost of a run is the sum over its groups. If T is no multiple of P, the last interval counts in part,
    as in (19).

    - ``sizes``: The group's; for TDCD, those of one group before the merger.
    - ``P``, ``Q``: Global and local interval in iterations, >= 1, Q a divisor of P. TDCD ignores P.
    - ``T``: Iterations, >= 1.
    - ``method``: A ``MethodName`` or its value.
    - ``raw_bytes``: The one-off transfer of raw features per group in TDCD and C-TDCD, >= 0.
    """
    require_intervals(P=P, Q=Q)
    at_least(1, T=T)
    one_of("method", method, MethodName)
    not_negative(raw_bytes=raw_bytes)
    if raw_bytes and method not in _MERGED:
        raise ValueError(f"raw_bytes must be 0 for {method}, which moves no raw data, got {raw_bytes!r}")
    pairs = sizes.batch if method == MethodName.JFL else 1  # JFL has a head and an encoder per device.
    exchanged = pairs * sizes.head + sizes.batch * (sizes.hospital_encoding + sizes.device_encoding)
    swapped = exchanged * (COMPRESSION_RATIO if method in _COMPRESSED else 1.0)
    if method == MethodName.JFL:
        scalars = pairs * (sizes.head + sizes.hospital + sizes.device) / P + swapped / Q
    elif method in _MERGED:
        scalars = (sizes.batch * sizes.device + swapped) / Q
    else:
        scalars = sizes.hospital / P + (sizes.batch * sizes.device + swapped) / Q  # (19)
    return _BYTES_PER_SCALAR * scalars * T + raw_bytes


def traffic(sizes: Sizes, *, P: int, Q: int, T: int, compressed: bool = False) -> dict[str, int]:
    """Return all bytes that one group of HSGD sends in T iterations, by link.

    Hospital, edge and devices exchange data in every local interval, and send models to the cloud and back
    in every global interval. TDCD is one group without its cloud links.

    - ``P``, ``Q``, ``T``: Intervals and iterations, >= 1, Q a divisor of P and P of T.
    - ``compressed``: C-HSGD: encodings (by row) and head are sent as top-k values with packed indices.
    """
    require_intervals(P=P, Q=Q, T=T)
    a, encode = sizes.batch, row_bytes if compressed else _dense_bytes
    head, zeta_1, zeta_2 = map(encode, (sizes.head, sizes.hospital_encoding, sizes.device_encoding))
    theta_2, hospital_model = _dense_bytes(sizes.device), _dense_bytes(sizes.head + sizes.hospital)
    local, whole = T // Q, T // P
    return {
        "device->edge": local * a * (zeta_2 + theta_2),
        "edge->device": local * a * (theta_2 + head + zeta_1),
        "edge->hospital": local * a * zeta_2,
        "hospital->edge": local * (head + a * zeta_1),
        "hospital->cloud": whole * hospital_model,
        "cloud->hospital": whole * hospital_model,
        "edge->cloud": whole * theta_2,
        "cloud->edge": whole * theta_2,
    }


@dataclass(frozen=True)
class RoundParts:
    """Transfer times of a global interval in seconds, >= 0: t_g once, t_l and t_e in every local interval."""

    global_aggregation: float  # t_g
    local_aggregation: float  # t_l
    exchange: float  # t_e


def round_parts(sizes: Sizes, *, rates: Rates = PAPER_RATES, method: str = MethodName.HSGD) -> RoundParts:
    """Return t_g, t_l and t_e of one group; in TDCD, of the merged group.

    All devices send at once, and no link is shared. JFL has no local aggregation, TDCD no global one.
    """
    one_of("method", method, MethodName)
    jfl, a = method == MethodName.JFL, sizes.batch
    pairs = a if jfl else 1

    def seconds(scalars: float, *links: str) -> float:
        return sum(rates.seconds(_BITS_PER_SCALAR * scalars, link) for link in links)

    kappa = COMPRESSION_RATIO if method in _COMPRESSED else 1.0
    head, zeta_1, zeta_2 = (kappa * n for n in (sizes.head, sizes.hospital_encoding, sizes.device_encoding))
    through_device = seconds(sizes.device, "device->edge", "edge->device")
    # A pair of JFL has no edge: its device sends theta_2 to the cloud over its own link.
    encoders = through_device if jfl else seconds(sizes.device, "edge->cloud", "cloud->edge")
    models = seconds(pairs * (sizes.head + sizes.hospital), "hospital->cloud", "cloud->hospital")
    at_hospital = max(
        seconds(a * zeta_2, "edge->hospital"), seconds(pairs * head + a * zeta_1, "hospital->edge")
    )
    return RoundParts(
        0.0 if method in _MERGED else max(models, encoders),
        0.0 if jfl else through_device,
        seconds(zeta_2, "device->edge") + at_hospital + seconds(head + zeta_1, "edge->device"),
    )


def round_seconds(parts: RoundParts, *, P: int, Q: int, compute_seconds: float) -> float:
    """Return the seconds of one group's global interval: t_g + P/Q (t_l + t_e) + P t_c.

    Q must be a divisor of P. ``compute_seconds`` is t_c of one iteration, >= 0, measured at the slower of
    hospital and device; a JFL hospital does the work of |A| devices in it.
    """
    require_intervals(P=P, Q=Q)
    not_negative(compute_seconds=compute_seconds)
    transfers = parts.global_aggregation + P // Q * (parts.local_aggregation + parts.exchange)
    return transfers + P * compute_seconds


def require_intervals(**counts: int) -> None:
    """Raise ValueError unless all counts are integers >= 1, and Q | P and P | T if both are given."""
    at_least(1, **counts)
    for key, divisor in (("P", "Q"), ("T", "P")):
        if key in counts and divisor in counts and counts[key] % counts[divisor] != 0:
            raise ValueError(
                f"{key} must be a multiple of {divisor} = {counts[divisor]!r}, got {counts[key]!r}"
            )


def _dense_bytes(length: int) -> int:
    return _BYTES_PER_SCALAR * length


@dataclass(frozen=True)
class ModelledSystem:
    """The modeled system: computation time, link rates, and the cost of TDCD's merger of groups.

    Parameters
    ----------
    compute_seconds : float (default: 0.0)
        t_c of one iteration, >= 0.
    rates : Rates (default: PAPER_RATES)
        Rates of the links.
    original_groups : int (default: 1)
        Number of groups that TDCD merged, >= 1; the paper states its cost per original group.
    raw_bytes, raw_seconds : float (default: 0.0)
        Bytes of raw data that TDCD transfers first, per original group, and the delay of the start; >= 0.
    """

    compute_seconds: float = 0.0
    rates: Rates = PAPER_RATES
    original_groups: int = 1
    raw_bytes: float = 0.0
    raw_seconds: float = 0.0

    def __post_init__(self) -> None:
        int_at_least(1, original_groups=self.original_groups)
        for key in ("compute_seconds", "raw_bytes", "raw_seconds"):
            in_range(key, getattr(self, key), 0.0, 1e300)


@dataclass(frozen=True)
class MethodVariant:
    """A method, and whether its groups aggregate; ValueError if it is incompatible with the system."""

    method: MethodName
    aggregate: bool = True
    system: ModelledSystem = ModelledSystem()

    def __post_init__(self) -> None:
        method, system = self.method, self.system
        if method is MethodName.JFL and not self.aggregate:
            raise ValueError("aggregate must be True in jfl, whose pairs last one round")
        if system.original_groups != 1 and not self.merged:
            raise ValueError(
                f"original_groups must be 1 unless tdcd merges groups, got {system.original_groups!r}"
            )
        for key in ("raw_bytes", "raw_seconds"):
            if (value := getattr(system, key)) and method not in _MERGED:
                raise ValueError(f"{key} must be 0 in {method}, got {value!r}: no raw data moves")

    @cached_property
    def compressed(self) -> bool:
        """Whether encodings and heads are compressed."""
        return self.method in _COMPRESSED

    @cached_property
    def merged(self) -> bool:
        """Whether all people are at one hospital."""
        return self.method in _MERGED and self.aggregate

    @cached_property
    def pairs(self) -> bool:
        """Whether every sampled pair has its own model in a round."""
        return self.method is MethodName.JFL

    @cached_property
    def has_cloud(self) -> bool:
        """Whether a cloud aggregates the groups' models."""
        return self.aggregate and not self.merged

    def seconds(self, groups: Iterable[Sizes], P: int, Q: int) -> float:
        """Return the seconds of a global interval of the slowest group; 0 without groups."""
        apart = MethodName.C_TDCD if self.compressed else MethodName.TDCD
        method, system = self.method if self.aggregate else apart, self.system
        parts = [round_parts(sizes, rates=system.rates, method=method) for sizes in set(groups)]
        seconds = (round_seconds(one, P=P, Q=Q, compute_seconds=system.compute_seconds) for one in parts)
        return max(seconds, default=0.0)


# The bound, and its constants.


@dataclass(frozen=True)
class Estimates:
    """The constants of the bound, and the gradient where they were estimated."""

    F0: float  # F of the initial global model over all training samples, finite.
    rho: float  # Lipschitz constant of the gradients, > 0.
    delta: float  # Square root of the bound on a stochastic partial gradient's variance, >= 0.
    final_loss: float = 0.0  # E[F] after T iterations, < F0. Unknown before the run; the paper uses 0.
    gradient2: float = 0.0  # ||grad F||^2 at the initial global model; 0 if it is not known.

    def __post_init__(self) -> None:
        require("F0", self.F0, "a finite number", is_real(self.F0))
        positive(rho=self.rho)
        not_negative(delta=self.delta, gradient2=self.gradient2)
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
    """Return the constants from a short run with P = Q = 1.

    rho is a lower estimate, and the groups are taken to be iid, as Theorem 1 asks.

    - ``F0``: F of the initial model over all training samples, > ``final_loss``.
    - ``points``, ``gradients``: As in ``secant_smoothness``.
    - ``variances``: ``gradient_variance`` by step, group and block, (..., 3), >= 0.
    - ``final_loss``: E[F] at the end, if known; None is 0.
    - ``aggregate``: Whether delta^2 is the maximum or the mean over steps and groups of the largest block's
      variance.
    """
    rho = secant_smoothness(points, gradients)
    worst = variances.max(axis=-1)
    delta2 = float(worst.max() if aggregate == "max" else worst.mean())
    return Estimates(F0, rho, math.sqrt(delta2), final_loss or 0.0)


def _finite(key: str, values: Array) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"{key} must have finite entries only")


# Tolerance of the cap: 1 / (8 rho eta) with eta = 1 / (8 P rho) must give P again.
_ROUNDING = 1e-12
# Largest interval in ``plans``: there are 1.6 million pairs (P, Q) up to it.
_MOST_INTERVALS = 2**17


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
    """Return eta_2, at which the bound (26) on the change of F in a global interval is least.

    Q must be a divisor of P; ``gradient2`` is ||grad F||^2 at the interval's start, >= 0. It is inf if delta
    is 0.
    """
    require_intervals(P=P, Q=Q)
    not_negative(gradient2=gradient2)
    variance = known.delta**2
    a, b = 24 * Q**2 * P * known.rho**2 * variance, 3 * P**2 * known.rho * variance  # (25)
    c = P / 4 * gradient2
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


class Pace(NamedTuple):
    """Intervals and learning rate in use: eta0 is halved every ``period`` iterations; 0 for never."""

    P: int
    Q: int
    eta0: float
    period: int

    def eta(self, t: int) -> float:
        """Return the learning rate of iteration t."""
        return halved_eta(t, eta0=self.eta0, period=self.period) if self.period else self.eta0


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
    # Each Q, with its multiples P up to the largest.
    divisors = np.arange(1, largest + 1)
    times = largest // divisors
    Q = np.repeat(divisors, times)
    P = Q * (np.arange(Q.size) - np.repeat(np.cumsum(times) - times, times) + 1)
    reaches = _floor(known, P, eta, T) + _staleness(known, eta) * Q**2 <= target  # (17)
    pairs = np.stack([P, Q], axis=1)[reaches]
    costs = (of_global / P + of_local / Q)[reaches]
    if costs.size > most:
        # Keep those that equal the last one up to rounding: the exact cost decides below.
        pairs = pairs[costs <= np.partition(costs, most - 1)[most - 1] * (1 + _ROUNDING)]
    rows = [row(P, Q) for P, Q in pairs.tolist()]
    return sorted(rows, key=lambda found: (found.bytes, found.P))[:most]
