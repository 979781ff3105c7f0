import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.oracles.similarity_free import Q2, gradient_operator, identity, proximal_operator, run, top

from hedgerow.strategies import Diminishing, Fixed, Schedule, StepDecay
from hedgerow.strategies.schedules import theory_stage_len
from hedgerow.strategies.similarity_free.theory import (
    AlgorithmName,
    Constants,
    Mode,
    best_c_fixed,
    bound_any,
    bound_diminishing,
    bound_fixed,
    bound_step_decay,
    max_step,
    omega,
    rounds_diminishing,
    rounds_fixed,
    rounds_step_decay,
    square_sum_bound,
    step_decay_stage_bounds,
    system_constants,
    uplink_bits_to_accuracy,
)

Vector = NDArray[np.float64]

GOLDEN = Constants(2, 0.5, 3)  # golden values are for V0 = 1.5
CONSTANTS = st.builds(Constants, st.floats(0.01, 20), st.floats(0.1, 1), st.floats(0.0, 20))
V0S = st.floats(0.01, 10)


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


# Admissible steps and constants


@pytest.mark.parametrize(
    ("contraction", "w", "limit"),
    [
        (1, 0, 1 / 6),
        (0.75, 0.916667, 1 / 6),
        (0.5, 2.5, 0.0968245837),
        (0.25, 6.75, 1 / 24),
        (0.1, 18.9, 0.0157485197),
        (0.05, 38.95, 0.0077571450),
        (0.01, 198.99, 0.0015348114),
        (4310 / 431080, 199.027125, 0.0015345258),
        (0.001, 1998.999, 0.0001531314),
    ],
)
def test_compression_sets_the_step_of_error_feedback(contraction: float, w: float, limit: float) -> None:
    assert omega(contraction) == pytest.approx(w, rel=0, abs=5e-7)
    for algorithm in (AlgorithmName.EF_FEDAVG, AlgorithmName.EF_FEDPROX):
        assert max_step(algorithm, 1, contraction=contraction) == pytest.approx(limit, rel=0, abs=5e-11)


# L = 2, T = 30, delta_inf = 0.5, sigma2 = 0.25, contraction 0.1; A, coefficients 2 and 3 of error feedback
TABLE = {
    ("fedavg", "printed"): (0.2041241452, None, 293.9387691340, 165.8405576379),
    ("fedavg", "corrected"): (0.2041241452, None, 9.7979589711, 6.0113519213),
    ("fedprox", "printed"): (0.2041241452, None, 9.7979589711, 6.0113519213),
    ("fedprox", "corrected"): (0.2041241452, None, 9.7979589711, 6.0113519213),
    ("ef-fedavg", "printed"): (
        0.0078742599,
        (5.0395263068, 510.9842517244, 447.7362202589),
        2043.9370068976,
        1133.9025585136,
    ),
    ("ef-fedavg", "corrected"): (
        0.0078742599,
        (0.9449111825, 98.2470471983, 87.8411662985),
        392.9881887933,
        218.4543859713,
    ),
    ("ef-fedprox", "corrected"): (
        0.0078742599,
        (0.9449111825, 98.2470471983, 87.8411662985),
        392.9881887933,
        218.4543859713,
    ),
    ("ef-fedprox", "printed"): (
        0.0119047619,
        (1.4285714286, 3 + 1.4285714286 * 100.8, 4.5 + 1.4285714286 * 88.2),
        588.0,
        326.625,
    ),
}


@pytest.mark.parametrize(("algorithm", "mode"), TABLE)
def test_the_constants_are_those_of_the_golden_table(algorithm: str, mode: str) -> None:
    L, delta_inf, sigma2 = 2.0, 0.5, 0.25
    limit, inner, b1, b3 = TABLE[algorithm, mode]
    step = max_step(algorithm, L, contraction=0.1, mode=mode)
    found = system_constants(
        algorithm,
        L,
        sigma2=sigma2,
        delta_inf=delta_inf,
        contraction=0.1,
        local_iters=1 if "prox" in algorithm else 30,
        mode=mode,
    )
    assert step == pytest.approx(limit, rel=0, abs=5e-11)
    assert (found.b1, found.b3) == (close(b1), close(b3))
    assert found.b2 == (0.5 if inner is None else 0.25)
    if inner is None:
        assert found.error_weight == 0
    else:
        coefficient3 = (found.b3 - found.b1 * delta_inf) / sigma2
        assert (found.error_weight * step, found.b1 / (2 * L), coefficient3) == pytest.approx(inner, rel=1e-9)


def test_the_superfluous_local_iterations_cost_five_orders_of_magnitude() -> None:
    # Theorem 1 with c = 1 / (sqrt(6) L), V0 = 1, K = 1000.
    bounds = []
    for mode in Mode:
        constants = system_constants("fedavg", 2, sigma2=0.25, delta_inf=0.5, local_iters=30, mode=mode)
        bounds.append(bound_fixed(constants, 1, Fixed(max_step("fedavg", 2), 1000)))
    assert bounds == pytest.approx([0.5436595291, 64587.63865], rel=1e-9)


# Bounds


def test_the_bounds_have_their_golden_values() -> None:
    fixed, diminishing = Fixed(0.4, 100), Diminishing(0.2, 0.75)
    assert bound_fixed(GOLDEN, 1.5, fixed) == close(1.2728458233)
    assert bound_any(GOLDEN, 1.5, fixed.values(100)) == close(1.1175782987)
    assert bound_diminishing(GOLDEN, 1.5, diminishing, 100) == close(7.4772795867)
    assert bound_any(GOLDEN, 1.5, diminishing.values(100)) == close(2.2201694902)


def test_the_step_decay_bounds_have_their_golden_values() -> None:
    steps = StepDecay(0.25, 2, 64)
    assert bound_step_decay(GOLDEN, 2, steps, 256, printed=True) == close(9.9881779168)
    assert step_decay_stage_bounds(GOLDEN, 2, steps, 256).tolist() == [3.75, 2.25, 1.875, 2.4375]
    assert bound_step_decay(GOLDEN, 2, steps, 256) == 1.875
    assert bound_any(GOLDEN, 1.5, steps.values(256)) == close(2.9983127615)


def test_the_squares_of_the_experiments_diminishing_steps_stay_below_lemma_2() -> None:
    steps = Diminishing(0.8, 0.51)
    assert np.sum(steps.values(400) ** 2) == close(3.98475882)
    assert square_sum_bound(steps) == close(32.64)


@settings(deadline=None)
@given(CONSTANTS, V0S, st.floats(0.01, 2), st.integers(1, 300))
def test_the_bound_for_any_steps_is_never_larger_than_theorem_1(
    constants: Constants, V0: float, c: float, num_rounds: int
) -> None:
    steps = Fixed(c, num_rounds)
    theorem = bound_fixed(constants, V0, steps)
    assert bound_any(constants, V0, steps.values(num_rounds)) <= theorem * (1 + 1e-12)


@settings(deadline=None)
@given(CONSTANTS, V0S, st.floats(0.01, 2), st.floats(0.51, 0.99), st.integers(1, 300))
def test_the_bound_for_any_steps_is_never_larger_than_theorem_2(
    constants: Constants, V0: float, c: float, nu: float, num_rounds: int
) -> None:
    steps = Diminishing(c, nu)
    theorem = bound_diminishing(constants, V0, steps, num_rounds)
    assert bound_any(constants, V0, steps.values(num_rounds)) <= theorem * (1 + 1e-12)


def progress(constants: Constants, V0: float, steps: Vector, W: float) -> list[float]:
    """V_0, ..., V_K of recursion (1) with equality and constant W."""
    V = [V0]
    for gamma in steps:
        V.append((1 + constants.b1 * gamma**2) * V[-1] - constants.b2 * gamma * W + constants.b3 * gamma**2)
    return V


@settings(deadline=None)
@given(CONSTANTS, V0S, st.floats(0.01, 2), st.integers(1, 100))
def test_a_constant_W_attains_the_bound(constants: Constants, V0: float, c: float, num_rounds: int) -> None:
    steps = Fixed(c, num_rounds).values(num_rounds)
    V = progress(constants, V0, steps, bound_any(constants, V0, steps))
    rounding = 1e-12 * (V0 + constants.b3) * math.exp(constants.b1 * c**2)
    assert min(V) >= -rounding  # a sequence that (1) allows ...
    assert abs(V[-1]) <= rounding  # ... until V is used up


@settings(deadline=None)
@given(CONSTANTS, V0S, st.lists(st.floats(0.01, 0.5), min_size=1, max_size=30))
def test_nothing_above_the_bound_satisfies_the_recursion(
    constants: Constants, V0: float, steps: list[float]
) -> None:
    values = np.array(steps)
    V = progress(constants, V0, values, bound_any(constants, V0, values) * 1.001)
    assert min(V) < 0


def test_the_bound_for_any_steps_takes_exponents_beyond_float64() -> None:
    assert math.isfinite(bound_any(Constants(100, 0.5, 1), 1, np.ones(100_000)))
    assert bound_fixed(Constants(100, 0.5, 1), 1, Fixed(100, 4)) == math.inf


def largest_W(constants: Constants, R: float, steps: Vector) -> float:
    """By brute force, the largest constant W for which (1) has V_k in [0, R] throughout."""

    def possible(W: float) -> bool:
        V = R
        for gamma in steps:
            step = (1 + constants.b1 * gamma**2) * V - constants.b2 * gamma * W + constants.b3 * gamma**2
            V = min(R, step)
            if V < 0:
                return False
        return True

    low, high = 0.0, 1.0
    while possible(high):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if possible(middle) else (low, middle)
    return low


@settings(deadline=None, max_examples=50)
@given(CONSTANTS, V0S, st.floats(0.01, 1), st.floats(1.1, 20), st.integers(1, 20), st.integers(1, 60))
def test_the_corrected_step_decay_bound_holds_against_brute_force(
    constants: Constants, R: float, gamma0: float, decay_factor: float, stage_len: int, num_rounds: int
) -> None:
    assume(stage_len <= num_rounds)
    steps = StepDecay(gamma0, decay_factor, stage_len)
    worst = largest_W(constants, R, steps.values(num_rounds))
    assert worst <= bound_step_decay(constants, R, steps, num_rounds) * (1 + 1e-9)


# (decay factor, K) for which theory's stage length and number of stages are integers
EXACT = ((2, 16), (2, 256), (2, 65536), (3, 729), (4, 256), (5, 9765625), (8, 64))


@settings(deadline=None)
@given(CONSTANTS, V0S, st.floats(0.001, 1), st.sampled_from(EXACT))
def test_the_printed_step_decay_bound_follows_where_stages_suffice(
    constants: Constants, R: float, gamma0: float, exact: tuple[int, int]
) -> None:
    decay_factor, num_rounds = exact
    assume(decay_factor <= 2 or num_rounds >= 2**decay_factor)
    steps = StepDecay(gamma0, decay_factor, theory_stage_len(num_rounds, decay_factor))
    corrected, printed = (
        bound_step_decay(constants, R, steps, num_rounds, printed=printed) for printed in (False, True)
    )
    assert corrected <= printed * (1 + 1e-9)


def test_theorem_3_as_printed_is_false() -> None:
    # One stage of 10^4 rounds in which V and W stay where they are.
    constants, R, steps = Constants(1, 1, 1), 0.1, StepDecay(math.sqrt(0.0752575), 100, 10_000)
    W = (constants.b1 * R + constants.b3) * steps(0) / constants.b2
    assert [W, steps(0)] == pytest.approx([0.3017641, 0.2743310], abs=5e-8)
    assert steps.values(10_000).tolist() == [steps(0)] * 10_000
    assert progress(constants, R, np.array([steps(0)]), W)[1] == close(R)
    assert bound_step_decay(constants, R, steps, 10_000, printed=True) == pytest.approx(0.1126417, abs=5e-8)
    assert bound_step_decay(constants, R, steps, 10_000) >= W


def test_theorem_3_covers_its_own_stage_length_only() -> None:
    with pytest.raises(ValueError, match="stage_len must be 93 for Theorem 3, got 50"):
        bound_step_decay(GOLDEN, 2, StepDecay(0.25, 2, 50), 400, printed=True)
    assert bound_step_decay(replace(GOLDEN, b1=0.0), 2, StepDecay(0.25, 2, 64), 256, printed=True) == math.inf


# Best c, rounds, traffic


def test_the_best_c_has_its_golden_value() -> None:
    c = best_c_fixed(GOLDEN, 1.5)
    assert c == close(0.4311723818)
    assert bound_fixed(GOLDEN, 1.5, Fixed(c, 100)) == close(1.2678386553)


@settings(deadline=None)
@given(
    st.builds(Constants, st.floats(1e-6, 1e6), st.floats(0.1, 1), st.floats(0, 1e6)),
    st.floats(1e-6, 1e6),
    st.floats(0.5, 1.5),
)
def test_no_c_beats_the_best(constants: Constants, V0: float, factor: float) -> None:
    c = best_c_fixed(constants, V0)
    best, other = (bound_fixed(constants, V0, Fixed(x, 100)) for x in (c, factor * c))
    assert best <= other * (1 + 1e-9)


def test_the_best_c_is_explicit_without_growth_or_without_noise() -> None:
    assert best_c_fixed(Constants(0, 0.5, 3), 12) == 2
    assert best_c_fixed(Constants(2, 0.5, 0), 12) == 0.5
    with pytest.raises(ValueError, match="where b1 and b3 are 0"):
        best_c_fixed(Constants(0, 0.5, 0), 12)


def test_the_best_c_is_clipped_to_the_admissible_step() -> None:
    assert best_c_fixed(GOLDEN, 1.5, max_step=0.01, num_rounds=100) == close(0.1)


def test_rounds_have_their_golden_values() -> None:
    assert rounds_fixed(GOLDEN, 1.5, c=0.4, epsilon=0.1) == 16202
    assert rounds_diminishing(GOLDEN, 1.5, Diminishing(0.2, 0.75), epsilon=0.1) == close(3.1258956743e9)


@settings(deadline=None)
@given(CONSTANTS, V0S, st.floats(0.05, 1), st.floats(0.1, 10))
def test_the_planned_rounds_of_a_fixed_schedule_reach_the_accuracy(
    constants: Constants, V0: float, c: float, epsilon: float
) -> None:
    K = rounds_fixed(constants, V0, c=c, epsilon=epsilon)
    assume(isinstance(K, int) and K < 10**12)
    assert bound_fixed(constants, V0, Fixed(c, int(K))) <= epsilon * (1 + 1e-9)
    if K > 1:
        assert bound_fixed(constants, V0, Fixed(c, int(K) - 1)) > epsilon * (1 - 1e-9)


def test_planned_rounds_bring_a_fixed_step_below_its_limit() -> None:
    K = rounds_fixed(GOLDEN, 1.5, c=0.4, epsilon=100, max_step=0.01)
    assert K == 1600
    assert Fixed(0.4, int(K))(0) <= 0.01


def test_a_schedule_that_starts_too_large_is_not_planned() -> None:
    with pytest.raises(ValueError, match=r"c must be at most max_step, 0\.1, got 0\.2"):
        rounds_diminishing(GOLDEN, 1.5, Diminishing(0.2, 0.75), epsilon=0.1, max_step=0.1)
    with pytest.raises(ValueError, match=r"gamma0 must be at most max_step, 0\.1, got 0\.2"):
        rounds_step_decay(GOLDEN, 2, gamma0=0.2, decay_factor=2, epsilon=0.1, max_step=0.1)


def test_rounds_beyond_float64_are_infinite() -> None:
    assert rounds_diminishing(Constants(100, 0.5, 1), 1, Diminishing(1, 0.99), epsilon=1e-6) == math.inf
    assert rounds_fixed(Constants(100, 0.5, 1), 1, c=100, epsilon=1) == math.inf
    assert rounds_step_decay(GOLDEN, 2, gamma0=0.2, decay_factor=2, epsilon=1e-12) == math.inf


def test_the_planned_rounds_of_step_decay_reach_the_accuracy() -> None:
    K = rounds_step_decay(GOLDEN, 2, gamma0=0.25, decay_factor=2, epsilon=0.5)

    def bound(num_rounds: int) -> float:
        return bound_step_decay(GOLDEN, 2, StepDecay(0.25, 2, theory_stage_len(num_rounds, 2)), num_rounds)

    assert bound(int(K)) <= 0.5 < bound(int(K) - 1)


def test_uplink_is_rounds_times_nodes_times_message() -> None:
    assert uplink_bits_to_accuracy(16202, 10, 64 * 4310) == 16202 * 10 * 64 * 4310
    assert uplink_bits_to_accuracy(math.inf, 10, 32) == math.inf


# The oracle's problem: two quadratics in the plane, L = 2, exact gradients

L, DELTA_INF, F_INF = 2.0, 4 / 3, 4 / 3
STEP = 0.1
TOP1 = 0.5  # contraction of top-1 in two dimensions


def value(x: Vector) -> float:
    return float(np.mean([problem.value(x) for problem in Q2]))


def gradients(x: Vector) -> Vector:
    return np.stack([problem.gradient(x) for problem in Q2])  # (nodes, dims)


def gradient_norm2(x: Vector) -> float:
    return float(np.sum(gradients(x).mean(axis=0) ** 2))


@dataclass
class State:
    x: Vector
    e: Vector  # error memories (nodes, dims)
    drift: Vector  # x_i - x of the round that led here (nodes, dims)

    def potential(self, weight: float) -> float:
        z = self.x + self.e.mean(axis=0)
        return value(z) - F_INF + weight * float(np.mean(np.sum(self.e**2, axis=1)))


def federation(algorithm: AlgorithmName, steps: Vector, local_iters: int = 2) -> list[State]:
    operator = proximal_operator(Q2) if algorithm.proximal else gradient_operator(Q2, local_iters)
    own = steps if algorithm.proximal else steps / local_iters
    states = [State(np.zeros(2), np.zeros((2, 2)), np.zeros((2, 2)))]
    for one in run(operator, np.zeros(2), 2, own, Q=top(1) if algorithm.error_feedback else identity):
        states.append(State(one.x, one.memories, one.local - states[-1].x))
    return states


def q2_constants(algorithm: AlgorithmName, mode: str = "corrected") -> Constants:
    return system_constants(
        algorithm,
        L,
        sigma2=0,
        delta_inf=DELTA_INF,
        contraction=TOP1,
        local_iters=1 if algorithm.proximal else 2,
        mode=mode,
    )


@pytest.mark.parametrize(
    ("algorithm", "mode", "step", "V1", "right"),
    [
        (AlgorithmName.FEDAVG, "corrected", 0.2, 0.2166604167, 0.9775237946),
        (AlgorithmName.FEDAVG, "printed", 0.2, 0.2166604167, 1.6633809226),
        (AlgorithmName.FEDPROX, "corrected", 0.1, 0.3140926309, 0.5256309487),
    ],
)
def test_the_first_round_of_the_reference_problem_obeys_the_recursion(
    algorithm: AlgorithmName, mode: str, step: float, V1: float, right: float
) -> None:
    constants = q2_constants(algorithm, mode)
    V = [state.potential(0) for state in federation(algorithm, np.array([step]))]
    assert V[0] == close(0.4166666667)
    assert V[1] == pytest.approx(V1, abs=5e-11)
    assert progress(constants, V[0], np.array([step]), 1.25)[1] == pytest.approx(right, abs=5e-11)
    assert V[1] <= right


def schedules_of(limit: float) -> list[Schedule]:
    return [Fixed(limit * 10, 100), Diminishing(limit, 0.6), StepDecay(limit, 2, 30)]


@pytest.mark.parametrize("algorithm", list(AlgorithmName))
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("kind", range(3))
def test_every_round_obeys_the_recursion_and_the_run_its_bound(
    algorithm: AlgorithmName, mode: Mode, kind: int
) -> None:
    constants = q2_constants(algorithm, mode)
    steps = schedules_of(max_step(algorithm, L, contraction=TOP1, mode=mode))[kind].values(100)
    states = federation(algorithm, steps)
    for gamma, after, (state, following) in zip(
        steps, [*steps[1:], steps[-1]], pairwise(states), strict=True
    ):
        V = state.potential(constants.error_weight * gamma)
        right = progress(constants, V, np.array([gamma]), gradient_norm2(state.x))[1]
        assert following.potential(constants.error_weight * after) <= right + 1e-12
    best = min(gradient_norm2(state.x) for state in states[:-1])
    assert best <= bound_any(constants, states[0].potential(0), steps)


# The similarity-based condition
