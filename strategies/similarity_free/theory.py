"""Bounds that are known before a run: admissible steps, constants, rounds and uplink to an accuracy.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity": recursion (1), Theorems 1-3, Propositions 1-4, Lemmas 1-4, Appendix E.
Differs: the constants and the step-decay bound are corrected by default; the printed versions are available.
Proposition 1 prints a superfluous T. The variance coefficient of Proposition 3 is too small. Proposition 4
loses an L^2, which admits too large steps if L > 1. The proof of Theorem 3 bounds the largest of its stages'
terms by the smallest, and its statement is false in general. With noisy gradients the bounds of the proximal
algorithms are heuristic: the paper assumes unbiased gradients, and those at a proximal point are biased.

Recurring parameters, finite unless stated otherwise; a value out of range raises a ValueError that names it:

- ``algorithm``, ``mode``: an ``AlgorithmName`` and a ``Mode``, or their values;
- ``L`` > 0: smoothness of every f_i;
- ``contraction``: alpha in (0, 1], ||Q(v) - v||^2 <= (1 - alpha) ||v||^2; 1 is no compression;
- ``sigma2`` >= 0: bound on the variance of a mini-batch gradient;
- ``delta_inf`` >= 0: Delta^inf, the mean over nodes of f^inf - f_i^inf; 0 iff all share a minimiser;
- ``local_iters``: T >= 1; 1 for the proximal algorithms;
- ``V0`` >= 0: V_0, which is f(x^0) - f^inf, as all error memories start at zero;
- ``R`` >= 0: upper bound on every V_k, unknown before a run;
- ``num_rounds``: K >= 1;
- ``max_step`` > 0: the largest admissible step, possibly infinite;
- ``epsilon`` > 0: accuracy on min W_k, the squared norm of a gradient.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hedgerow.strategies.schedules import Diminishing, Fixed, StepDecay, theory_stage_len
from hedgerow.wire.checks import at_least, in_range, not_negative, one_of, positive, require
from hedgerow.wire.extras import needed

_SQRT6 = math.sqrt(6)


class AlgorithmName(StrEnum):
    """The paper's four algorithms."""

    FEDAVG = "fedavg"
    FEDPROX = "fedprox"
    EF_FEDAVG = "ef-fedavg"
    EF_FEDPROX = "ef-fedprox"

    @property
    def proximal(self) -> bool:
        """Whether a local iteration is a proximal step; a round then takes one."""
        return self in (AlgorithmName.FEDPROX, AlgorithmName.EF_FEDPROX)

    @property
    def error_feedback(self) -> bool:
        """Whether updates are compressed and nodes keep what compression drops."""
        return self in (AlgorithmName.EF_FEDAVG, AlgorithmName.EF_FEDPROX)


class Mode(StrEnum):
    """Which constants: corrected, or as printed in the paper."""

    CORRECTED = "corrected"
    PRINTED = "printed"


# Propositions 1-4: admissible steps and the constants of recursion (1)


def omega(contraction: float) -> float:
    """Return omega = (1 - alpha)(1 + 2 / alpha), the weight of an update's norm in the error memory."""
    _contraction(contraction)
    return (1 - contraction) * (1 + 2 / contraction)


def max_step(algorithm: str, L: float, *, contraction: float = 1.0, mode: str = "corrected") -> float:
    """Return the largest step of recursion (1): alpha^k = T gamma^k of FedAvg, gamma^k of FedProx."""
    algorithm, mode = _algorithm(algorithm), _mode(mode)
    positive(L=L)
    w = omega(contraction)
    if not algorithm.error_feedback:
        return 1 / (_SQRT6 * L)
    if w == 0:
        return 1 / (6 * L)
    if mode is Mode.PRINTED and algorithm is AlgorithmName.EF_FEDPROX:
        return min(1 / (6 * L), math.sqrt(contraction / (w * (4 + 4 * L**2 / 3))) / 2)
    return min(1 / 6, math.sqrt(3 * contraction / (64 * w))) / L


@dataclass(frozen=True)
class Constants:
    """The constants of V_{k+1} <= (1 + b1 gamma_k^2) V_k - b2 gamma_k W_k + b3 gamma_k^2, eq. (1).

    W_k is E||grad f(x^k)||^2. V_k is E[f(z^k)] - f^inf + error_weight gamma_k (1/n) sum_i E||e_i^k||^2,
    where z^k is x^k plus the mean of the error memories e_i^k.

    All are finite and >= 0, b2 > 0; b1 is in units of curvature^2 and b3 of loss curvature^2.
    """

    b1: float
    b2: float
    b3: float
    error_weight: float = 0.0  # 0 without error feedback.

    def __post_init__(self) -> None:
        positive(b2=self.b2)
        not_negative(b1=self.b1, b3=self.b3, error_weight=self.error_weight)


def system_constants(
    algorithm: str,
    L: float,
    *,
    sigma2: float,
    delta_inf: float,
    contraction: float = 1.0,
    local_iters: int = 1,
    mode: str = "corrected",
) -> Constants:
    """Return the constants of Propositions 1-4, valid for steps up to ``max_step``.

    Only FedAvg's printed constants depend on ``local_iters``.
    """
    algorithm, mode = _algorithm(algorithm), _mode(mode)
    not_negative(sigma2=sigma2, delta_inf=delta_inf)
    _local_iters(algorithm, local_iters)
    limit = max_step(algorithm, L, contraction=contraction, mode=mode)
    if not algorithm.error_feedback:
        T = local_iters if mode is Mode.PRINTED else 1
        b1 = _SQRT6 * L**2 * T
        return Constants(b1, 1 / 2, b1 * delta_inf + L * (1 + 3 / _SQRT6 * T) * sigma2)
    error_weight, variance_weight = 3 * L**2 / contraction, 9 * L / 4
    if mode is Mode.PRINTED and algorithm is AlgorithmName.EF_FEDAVG:
        error_weight, variance_weight = 4 * (1 + 1.5 * L) * L**2 / contraction, 13 * L / 8
    A = error_weight * limit
    C2 = 16 / 3 * omega(contraction) * A + 3 * L / 2
    C3 = 14 / 3 * omega(contraction) * A + variance_weight
    return Constants(2 * L * C2, 1 / 4, 2 * L * C2 * delta_inf + C3 * sigma2, error_weight)


# Bounds on min_{k < K} W_k


def bound_any(constants: Constants, V0: float, steps: ArrayLike) -> float:
    """Return the bound for any positive steps, the inequality inside the proof of Theorem 2.

    With P_k = prod_{l <= k} (1 + b1 gamma_l^2) it is
    (V0 + b3 sum_k gamma_k^2 / P_k) / (b2 sum_k gamma_k / P_k). It never exceeds Theorems 1 and 2, a constant
    W_k attains it, and it needs no bound on later V_k. ``steps`` are gamma_0, ..., gamma_{K-1} of the system,
    (rounds,), > 0: ``schedule.values(K)``.
    """
    not_negative(V0=V0)
    first, second = _discounted_sums(constants, steps)
    return float((V0 + constants.b3 * second[-1]) / (constants.b2 * first[-1]))


def _discounted_sums(
    constants: Constants, steps: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return sum_k gamma_k / P_k and sum_k gamma_k^2 / P_k up to each round, both (rounds,)."""
    gamma = np.asarray(steps, dtype=np.float64)
    valid = gamma.ndim == 1 and gamma.size > 0 and bool(np.all(np.isfinite(gamma) & (gamma > 0)))
    require("steps", steps, "a list of finite numbers > 0", valid)
    # P_k may overflow float64; its logarithm does not.
    weights = np.exp(-np.cumsum(np.log1p(constants.b1 * gamma**2)))  # 1 / P_k
    return np.cumsum(gamma * weights), np.cumsum(gamma**2 * weights)


def bound_fixed(constants: Constants, V0: float, schedule: Fixed) -> float:
    """Return the bound of Theorem 1: (e^{b1 c^2} V0 / (b2 c) + b3 c / b2) / sqrt(K).

    The schedule is admissible if c <= ``max_step`` sqrt(K).
    """
    return _fixed_numerator(constants, V0, schedule.c) / math.sqrt(schedule.num_rounds)


def _fixed_numerator(constants: Constants, V0: float, c: float) -> float:
    not_negative(V0=V0)
    return (_times_exp(V0, constants.b1 * c**2) / c + constants.b3 * c) / constants.b2


def bound_diminishing(constants: Constants, V0: float, schedule: Diminishing, num_rounds: int) -> float:
    """Return the bound of Theorem 2: (V0 + b3 s) e^{b1 s} / (b2 c K^{1 - nu}), s of ``square_sum_bound``.

    The schedule is admissible if c <= ``max_step``.
    """
    at_least(1, num_rounds=num_rounds)
    return _diminishing_numerator(constants, V0, schedule) / _power(num_rounds, 1 - schedule.nu)


def _diminishing_numerator(constants: Constants, V0: float, schedule: Diminishing) -> float:
    not_negative(V0=V0)
    s = square_sum_bound(schedule)
    return _times_exp(V0 + constants.b3 * s, constants.b1 * s) / (constants.b2 * schedule.c)


def bound_step_decay(
    constants: Constants, R: float, schedule: StepDecay, num_rounds: int, *, printed: bool = False
) -> float:
    """Return the bound for step-decay: the best complete stage, or Theorem 3 as the paper prints it.

    Theorem 3, ``printed``, is false in general; it follows from the corrected bound if decay_factor <= 2 or
    K >= 2^decay_factor. Its stage_len must be ``theory_stage_len``. K must be at least stage_len, and the
    schedule is admissible if gamma0 <= ``max_step``.
    """
    if not printed:
        return float(step_decay_stage_bounds(constants, R, schedule, num_rounds).min())
    not_negative(R=R)
    wanted = theory_stage_len(num_rounds, schedule.decay_factor)
    require("stage_len", schedule.stage_len, f"{wanted} for Theorem 3", schedule.stage_len == wanted)
    if constants.b1 == 0:
        return math.inf
    log_K = math.log2(num_rounds) / math.log2(schedule.decay_factor)
    C = (R + constants.b3 / constants.b1) / constants.b2
    exponent = 2 * constants.b1 * schedule.gamma0**2 / min(1 / math.log2(schedule.decay_factor), 1.0)
    noise = _times_exp(C, exponent) * log_K / 2
    return (R / constants.b2 + noise) / (schedule.gamma0 * math.sqrt(num_rounds))


def step_decay_stage_bounds(
    constants: Constants, R: float, schedule: StepDecay, num_rounds: int
) -> NDArray[np.float64]:
    """Return, for each complete stage m, (R / (gamma_m T_s) + (b1 R + b3) gamma_m) / b2, (stages,).

    Each is a bound on its own: recursion (1) summed over the T_s rounds of a stage, with 0 <= V_k <= R.
    """
    not_negative(R=R)
    at_least(1, num_rounds=num_rounds)
    stages = num_rounds // schedule.stage_len
    valid = f"at least stage_len = {schedule.stage_len}, one complete stage"
    require("num_rounds", num_rounds, valid, stages >= 1)
    gamma = StepDecay(schedule.gamma0, schedule.decay_factor, stage_len=1).values(stages)
    with np.errstate(divide="ignore"):
        start = R / (gamma * schedule.stage_len) if R > 0 else np.zeros_like(gamma)
    return np.asarray((start + (constants.b1 * R + constants.b3) * gamma) / constants.b2)


def best_c_fixed(
    constants: Constants, V0: float, *, max_step: float = math.inf, num_rounds: int = 1
) -> float:
    """Return the c that minimises Theorem 1's bound, clipped to ``max_step`` sqrt(K).

    It is the root in (0, 1 / sqrt(2 b1)) of V0 e^{b1 c^2} (1 - 2 b1 c^2) = b3 c^2, for V0 > 0. If
    ``max_step`` is infinite, b1 or b3 must be > 0.
    """
    positive(V0=V0)
    at_least(1, num_rounds=num_rounds)
    require("max_step", max_step, "a number > 0", max_step > 0)
    c = min(_stationary_c(constants, V0), max_step * math.sqrt(num_rounds))
    require("max_step", max_step, "a finite number > 0 where b1 and b3 are 0", math.isfinite(c))
    return c


def _stationary_c(constants: Constants, V0: float) -> float:
    if constants.b1 == 0:
        return math.sqrt(V0 / constants.b3) if constants.b3 > 0 else math.inf
    if constants.b3 == 0:
        return 1 / math.sqrt(2 * constants.b1)
    # With u = b1 c^2, solve e^u (1 - 2 u) = u / r on a logarithmic scale, which works for any r.
    r = constants.b1 * V0 / constants.b3
    low, high = math.log(min(0.25, r / 2)), math.log(min(0.5 * (1 - 2**-50), r))

    def excess(log_u: float) -> float:
        u = math.exp(log_u)
        return u + math.log1p(-2 * u) - log_u + math.log(r)

    # If r or 1 / r is so small that float64 loses the sign at an end, that end is the root.
    if excess(low) <= 0 or excess(high) >= 0:
        log_u = low if excess(low) <= 0 else high
    else:
        brentq = needed("scipy.optimize", "math").brentq
        log_u = float(brentq(excess, low, high, xtol=1e-15))
    return math.sqrt(math.exp(log_u) / constants.b1)


# Rounds and traffic to an accuracy


def rounds_fixed(
    constants: Constants, V0: float, *, c: float, epsilon: float, max_step: float = math.inf
) -> int | float:
    """Return the smallest K with Theorem 1's bound <= epsilon and c / sqrt(K) admissible; inf at overflow."""
    positive(c=c, epsilon=epsilon)
    require("max_step", max_step, "a number > 0", max_step > 0)
    return _round_up(
        max(_power(_fixed_numerator(constants, V0, c) / epsilon, 2), _power(c / max_step, 2), 1.0)
    )


def rounds_diminishing(
    constants: Constants, V0: float, schedule: Diminishing, *, epsilon: float, max_step: float = math.inf
) -> int | float:
    """Return the smallest K with Theorem 2's bound at most epsilon, for ``schedule.c`` <= ``max_step``."""
    positive(epsilon=epsilon)
    require("c", schedule.c, f"at most max_step, {max_step!r}", schedule.c <= max_step)
    numerator = _diminishing_numerator(constants, V0, schedule)
    return _round_up(max(_power(numerator / epsilon, 1 / (1 - schedule.nu)), 1.0))


def rounds_step_decay(
    constants: Constants,
    R: float,
    *,
    gamma0: float,
    decay_factor: float,
    epsilon: float,
    max_step: float = math.inf,
) -> int | float:
    """Return a K at which the corrected step-decay bound, with theory's stage length, is at most epsilon.

    The paper gives the order only. K is found by doubling and bisection; inf means 2^60 or more. gamma0 must
    not exceed ``max_step``.
    """
    positive(epsilon=epsilon)
    require("gamma0", gamma0, f"at most max_step, {max_step!r}", gamma0 <= max_step)

    def reached(K: int) -> bool:
        schedule = StepDecay(gamma0, decay_factor, theory_stage_len(K, decay_factor))
        return bound_step_decay(constants, R, schedule, K) <= epsilon

    # From K = decay_factor^2 on, a stage is no longer than the run.
    low = high = max(2, math.ceil(decay_factor**2))
    while not reached(high):
        low, high = high, 2 * high
        if high >= 2**60:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def uplink_bits_to_accuracy(rounds: int | float, num_nodes: int, message_bits: int) -> int | float:
    """Return rounds x nodes x bits per message, the uplink of all nodes; inf for infinitely many rounds.

    ``num_nodes`` >= 1 nodes take part in every round, and ``message_bits`` >= 1 is for one node.
    """
    at_least(1, num_nodes=num_nodes, message_bits=message_bits)
    require("rounds", rounds, "a number >= 0", rounds >= 0)
    return rounds * (num_nodes * message_bits)


# Lemmas 1-4 and the other inequalities that can be checked in a run


def square_sum_bound(schedule: Diminishing) -> float:
    """Return 2 nu c^2 / (2 nu - 1), a bound on the sum of squares of a diminishing schedule (Lemma 2)."""
    return 2 * schedule.nu * schedule.c**2 / (2 * schedule.nu - 1)


def _times_exp(value: float, exponent: float) -> float:
    """Return value e^exponent for value >= 0; inf if it exceeds float64."""
    with np.errstate(over="ignore"):
        return 0.0 if value == 0 else float(value * np.exp(exponent))


def _power(base: float, exponent: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.power(base, exponent))


def _round_up(rounds: float) -> int | float:
    return math.ceil(rounds) if math.isfinite(rounds) else math.inf


def _algorithm(name: str) -> AlgorithmName:
    one_of("algorithm", name, AlgorithmName)
    return AlgorithmName(name)


def _mode(name: str) -> Mode:
    one_of("mode", name, Mode)
    return Mode(name)


def _local_iters(algorithm: AlgorithmName, local_iters: int) -> None:
    at_least(1, local_iters=local_iters)
    valid = f"1 for {algorithm}, whose rounds take one proximal step"
    require("local_iters", local_iters, valid, local_iters == 1 or not algorithm.proximal)


def _contraction(contraction: float) -> None:
    in_range("contraction", contraction, 0.0, 1.0, open_below=True)
