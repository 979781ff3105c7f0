"""The fewest rounds to an accuracy that ``theory.bound_any`` guarantees, over each schedule's first step.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity": the inequality inside the proof of Theorem 2, before its relaxation.
Its sums are sum_k gamma_k / P_k and sum_k gamma_k^2 / P_k with P_k = prod_{l <= k} (1 + b1 gamma_l^2). For
equal steps they are computed in closed form, for decreasing ones in short blocks, by each block's midpoint.
Parameters are as in ``theory``, with V0 > 0 in the functions ``fewest_...``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hedgerow.strategies.schedules import theory_stage_len
from hedgerow.strategies.similarity_free.theory import Constants
from hedgerow.wire.checks import positive
from hedgerow.wire.extras import needed

# Length of a block relative to the rounds before it; the error of the sums is below its square.
_BLOCK = 1e-3
# Single rounds up to the first number, blocks of rounds up to the second.
_FIRST, _LAST = 1_000, 1e21
# Smallest first step that is searched, relative to the largest.
_LEAST = 1e-12


def bound_constant_steps(constants: Constants, V0: float, stages: list[tuple[float, float]]) -> float:
    """Return ``theory.bound_any`` in closed form for (step, rounds) stages of equal steps, all > 0."""
    log_p = first = second = 0.0
    for step, rounds in stages:
        growth = math.log1p(constants.b1 * step**2)
        # sum_{k=1}^{n} q^k with q = 1 / (1 + b1 step^2).
        terms = rounds if growth == 0 else -math.expm1(-growth * rounds) / (constants.b1 * step**2)
        first += step * math.exp(-log_p) * terms
        second += step**2 * math.exp(-log_p) * terms
        log_p += growth * rounds
    # The square of a tiny step underflows to 0.
    return (V0 + constants.b3 * second) / (constants.b2 * first) if first > 0 else math.inf


def fewest_fixed(
    constants: Constants, V0: float, *, epsilon: float, max_step: float
) -> tuple[int | float, float]:
    """Return the fewest rounds of one step to ``epsilon``, and that step; inf rounds beyond float64.

    With S = V0 / (gamma (b2 epsilon - b3 gamma)) it takes K = -ln(1 - b1 gamma^2 S) / ln(1 + b1 gamma^2)
    rounds, for gamma < b2 epsilon / (b3 + b1 V0).
    """
    positive(V0=V0, epsilon=epsilon, max_step=max_step)
    b1, b2, b3 = constants.b1, constants.b2, constants.b3
    noise = b3 + b1 * V0
    most = min(max_step, b2 * epsilon / noise) if noise > 0 else max_step

    def rounds(step: float) -> float:
        left = b2 * epsilon - b3 * step
        share = b1 * step * V0 / left if left > 0 else math.inf
        if share >= 1:
            return math.inf
        growth = math.log1p(b1 * step**2)
        return V0 / (step * left) if growth == 0 else -math.log1p(-share) / growth

    step = _least(rounds, most)
    return _rounded(rounds(step)), step


def fewest_diminishing(
    constants: Constants, V0: float, *, nu: float, epsilon: float, max_step: float
) -> tuple[int | float, float]:
    """Return the fewest rounds of steps c / (k + 1)^nu to ``epsilon``, within 1 %, and c.

    nu is in (1/2, 1); inf means more than 10^21 rounds.
    """
    positive(V0=V0, epsilon=epsilon, max_step=max_step)
    blocks = int(math.log(_LAST / _FIRST) / math.log1p(_BLOCK))
    grown = np.ceil(_FIRST * np.exp(np.arange(1, blocks + 1) * math.log1p(_BLOCK)))
    # Block i covers rounds edges[i] + 1 to edges[i + 1], from 1.
    edges = np.concatenate([np.arange(_FIRST + 1.0), np.unique(grown[grown > _FIRST])])
    lengths, steps = np.diff(edges), ((edges[:-1] + 1 + edges[1:]) / 2) ** -nu

    def rounds(c: float) -> float:
        growth = np.log1p(constants.b1 * (c * steps) ** 2)
        # ln P_k in the middle of each block; P_k includes all of round k.
        log_p = np.cumsum(lengths * growth) - (lengths - 1) / 2 * growth
        weights = lengths * c * steps * np.exp(-log_p)
        first, second = np.cumsum(weights), np.cumsum(weights * c * steps)
        reached = V0 + constants.b3 * second <= epsilon * constants.b2 * first
        return float(edges[1:][reached.argmax()]) if reached.any() else math.inf

    c = _least(rounds, max_step)
    return _rounded(rounds(c)), c


def fewest_step_decay(
    constants: Constants, V0: float, *, decay_factor: float, epsilon: float, max_step: float
) -> tuple[int | float, float]:
    """Return the fewest rounds to ``epsilon`` with Theorem 3's stages, and the first step.

    ``decay_factor`` is as in ``StepDecay``; inf means 2^60 or more.
    """
    positive(V0=V0, epsilon=epsilon, max_step=max_step)

    def best(K: int) -> tuple[float, float]:
        length = theory_stage_len(K, decay_factor)
        whole, rest = divmod(K, length)
        rounds = [float(length)] * whole + ([float(rest)] if rest else [])

        def bound(step: float) -> float:
            steps = [(step / decay_factor**stage, n) for stage, n in enumerate(rounds)]
            return bound_constant_steps(constants, V0, steps)

        step = _least(bound, max_step)
        return bound(step), step

    low = high = max(2, math.ceil(decay_factor**2))
    while best(high)[0] > epsilon:
        low, high = high, 2 * high
        if high >= 2**60:
            return math.inf, max_step
    # Within 0.1 %.
    while high - low > max(1, high >> 10):
        middle = (low + high) // 2
        low, high = (low, middle) if best(middle)[0] <= epsilon else (middle, high)
    return high, best(high)[1]


def _least(cost: Callable[[float], float], most: float) -> float:
    """Return the minimiser in (0, most] of a cost that falls and then rises, on a logarithmic scale."""
    optimize = needed("scipy.optimize", "math")
    grid = np.linspace(math.log(most * _LEAST), math.log(most), 80)
    values = [cost(math.exp(at)) for at in grid]
    at = int(np.argmin(values))
    if not math.isfinite(values[at]):
        return most
    found = optimize.minimize_scalar(
        lambda x: cost(math.exp(x)), bounds=(grid[max(at - 1, 0)], grid[min(at + 1, 79)]), method="bounded"
    )
    candidates = [math.exp(grid[at]), math.exp(found.x), most]
    return float(min(candidates, key=cost))


def _rounded(rounds: float) -> int | float:
    return math.ceil(rounds * (1 - 1e-12)) if math.isfinite(rounds) else math.inf
