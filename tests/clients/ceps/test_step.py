"""One node's iteration, Sha et al., (3) and (4): goldens of three nodes on a path and closed forms."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.ceps import hard_thresholding

from hedgerow.clients import GradientPrivacy, LinearRegression
from hedgerow.clients.ceps.step import (
    Noised,
    Rules,
    State,
    advance,
    communicate,
    initial_state,
    local_step,
)

Array = npt.NDArray[np.float64]

T = np.array([[1, 0.2, 0, -0.9], [0.8, 0, 0.3, -1.1], [1.2, -0.1, 0.1, -0.7]])
PATH = ((1,), (0, 2), (1,))
SIGMA, KAPPA = (0.6, 0.5, 0.7), (2, 3, 2)
ZERO = np.zeros(4)


def plus(xi: Array) -> Noised:
    return lambda vector: vector + xi


SILENT = plus(ZERO)
# Golden trajectory, coordinates 1 and 4 of each node after each iteration.
GOLDEN = {
    1: [(0.76923077, -0.69230769), (0.5, -0.6875), (0.8, -0.46666667)],
    2: [(0.82840237, -0.74556213), (0.53125, -0.73046875), (0.85333333, -0.49777778)],
    3: [(0.94663770, -0.87300257), (0.53320312, -0.73315430), (1.05494048, -0.67546379)],
    4: [(0.94663770, -0.87300257), (0.81497570, -0.98684674), (1.05494048, -0.67546379)],
    5: [(0.98013445, -0.90498744), (0.81497570, -0.98684674), (1.12427374, -0.73747293)],
    6: [(0.98013445, -0.90498744), (0.81497570, -0.98684674), (1.12427374, -0.73747293)],
    7: [(0.98292585, -0.90765285), (0.85770932, -1.02547857), (1.13417849, -0.74633138)],
    8: [(0.98292585, -0.90765285), (0.85770932, -1.02547857), (1.13417849, -0.74633138)],
    9: [(0.98671960, -0.91109428), (0.85770932, -1.02547857), (1.14169826, -0.75311571)],
}


def quadratic(target: Sequence[float] | Array) -> LinearRegression:
    """Return ||w - t||^2 / 2."""
    n = len(target)
    return LinearRegression(np.sqrt(n) * np.eye(n), np.sqrt(n) * np.asarray(target))


def rules(i: int = 0, mode: str = "none") -> Rules:
    return Rules(2, 0.1, KAPPA[i], SIGMA[i], len(PATH[i]), privacy=GradientPrivacy(mode))


def path_trajectory(
    iterations: int, mode: str = "none", xi: Mapping[int, Array] | None = None
) -> list[Array]:
    """Return W^0, W^1, ... of the three nodes; ``xi`` is the noise of every communication of a node."""
    problems, xi = [quadratic(t) for t in T], xi or {}
    states = [initial_state(problems[i], rules(i, mode), SILENT) for i in range(3)]
    history = [np.stack([state.w for state in states])]
    for k in range(iterations):
        old = history[-1]
        states = [
            communicate(
                states[i], i, {j: old[j] for j in PATH[i]}, problems[i], rules(i, mode), plus(xi.get(i, ZERO))
            )
            if k > 0 and k % KAPPA[i] == 0
            else local_step(states[i], rules(i, mode))
            for i in range(3)
        ]
        history.append(np.stack([state.w for state in states]))
    return history


def test_three_nodes_follow_the_golden_trajectory() -> None:
    history = path_trajectory(9)
    for k, expected in GOLDEN.items():
        np.testing.assert_allclose(history[k][:, [0, 3]], expected, atol=1e-8, err_msg=f"W^{k}")
        assert not history[k][:, [1, 2]].any()


def test_the_limits_of_different_nodes_differ() -> None:
    expected = [
        (0.9878669276, -0.9121330724),
        (0.8665362035, -1.0334637965),
        (1.1444227006, -0.7555772994),
    ]
    np.testing.assert_allclose(path_trajectory(400)[-1][:, [0, 3]], expected, atol=1e-9)


XI = {1: np.array([0, 0, 1.5, 0])}


def test_noise_as_printed_is_gone_before_a_neighbour_hears_it_and_sound_noise_stays() -> None:
    printed, sound = path_trajectory(7, "paper", XI), path_trajectory(7, "sound", XI)
    np.testing.assert_allclose(printed[4][1], (0, 0, 1.2, -0.98684674), atol=1e-8)
    np.testing.assert_allclose(printed[5][1], (0.76403972, 0, 0, -0.98684674), atol=1e-8)
    np.testing.assert_allclose(printed[6][1], (0.81179220, 0, 0, -0.98684674), atol=1e-8)
    np.testing.assert_allclose(printed[7][0], (0.97700100, 0, 0, -0.90765285), atol=1e-8)
    for k in (4, 5, 6):
        np.testing.assert_allclose(sound[k][1], (0, 0, 1.2, -0.98684674), atol=1e-8)
    np.testing.assert_allclose(sound[7][1], (0, 0, 1.33333333, -1.02547857), atol=1e-8)
    np.testing.assert_allclose(sound[7][0], (0.90935165, 0, 0, -0.90765285), atol=1e-8)
    for mode in ("paper", "sound"):
        assert np.array_equal(path_trajectory(9, mode), path_trajectory(9))


def test_a_node_alone_does_iterative_hard_thresholding() -> None:
    problem, alone = quadratic(T[0]), Rules(2, 0.1, 1, 1.6, 0)
    state = advance(initial_state(problem, alone, SILENT), 1, alone)
    expected = [
        (0.625, 0, 0, -0.5625),
        (0.859375, 0, 0, -0.7734375),
        (0.947265625, 0, 0, -0.8525390625),
        (0.9802246094, 0, 0, -0.8822021484),
    ]
    state = replace(state, w=ZERO)
    found = []
    for _ in range(4):
        state = communicate(state, 0, {}, problem, alone, SILENT)
        found.append(state.w)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_allclose(hard_thresholding(problem.gradient, 4, 2, 1 / 1.6, 4), expected, atol=1e-10)


# Local steps

vectors = st.lists(st.floats(-4, 4, allow_subnormal=False).map(lambda x: round(x, 2)), min_size=1, max_size=8)


@st.composite
def states(draw: st.DrawFn) -> tuple[State, Rules]:
    u = np.array(draw(vectors))
    w = np.array([draw(st.sampled_from([0.0, 0.5, -1.25, 3.0])) for _ in u])
    drawn = Rules(
        draw(st.integers(1, 9)), draw(st.floats(0.01, 2)), draw(st.integers(1, 5)), draw(st.floats(0.1, 3)), 2
    )
    return State(w, u, draw(st.integers(0, 6)), draw(st.integers(1, 4))), drawn


@settings(deadline=None, max_examples=150)
@given(given_state=states(), steps=st.integers(0, 40))
def test_advancing_at_once_is_advancing_step_by_step_bit_for_bit(
    given_state: tuple[State, Rules], steps: int
) -> None:
    state, constants = given_state
    slow = state
    for _ in range(steps):
        slow = local_step(slow, constants)
    fast = advance(state, state.iteration + steps, constants)
    assert np.array_equal(fast.w, slow.w)
    assert fast.iteration == slow.iteration


def random_state(seed: int, c: Rules, *, communicated: bool) -> State:
    u = np.random.default_rng(seed).standard_normal(50)
    state = State(np.zeros(50), u, c.kappa, 3)
    w = np.zeros(50)
    top = np.argsort(-np.abs(u))[: c.s]
    w[top] = u[top] / c.c(3)
    return replace(state, w=w) if communicated else state


STEADY = Rules(5, 0.1, 12, 0.4, 2)


@pytest.mark.parametrize("seed", range(3))
def test_between_communications_a_noise_free_node_holds_still_and_printed_noise_shrinks(seed: int) -> None:
    state = random_state(seed, STEADY, communicated=True)
    clean, rho = state.w, 0.1 / (STEADY.c(3) + 0.1)
    for steps in range(1, 12):
        moved = advance(state, state.iteration + steps, STEADY).w
        np.testing.assert_allclose(moved, clean, rtol=1e-12, atol=1e-15)
    deviation = 0.01 * (clean != 0)
    state = replace(state, w=clean + deviation)
    for _ in range(4):
        state = local_step(state, STEADY)
        deviation = rho * deviation
        np.testing.assert_allclose(state.w - clean, deviation, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 7, 12])
def test_the_first_phase_has_its_closed_form(steps: int) -> None:
    state = replace(random_state(3, STEADY, communicated=False), iteration=0)
    c = STEADY.c(3)
    rho = 0.1 / (c + 0.1)
    expected = (1 - rho**steps) * random_state(3, STEADY, communicated=True).w
    np.testing.assert_allclose(advance(state, steps, STEADY).w, expected, rtol=1e-12)


def test_communications_that_were_passed_over_are_counted_as_missed_once_and_no_node_goes_back() -> None:
    start = State(ZERO, np.ones(4), 0, 3)
    assert [advance(start, k, STEADY).missed for k in (1, 12, 13, 24, 25, 37)] == [0, 0, 1, 1, 2, 3]
    halfway = advance(start, 12, STEADY)
    assert advance(halfway, 25, STEADY).missed == 2
    with pytest.raises(ValueError, match=r"iteration must be at least 12, .*got 11"):
        advance(halfway, 11, STEADY)


# Communication


def test_participants_are_those_that_were_heard_and_without_any_it_is_a_local_step_that_is_counted() -> None:
    problem, constants = quadratic(T[1]), rules(1)
    state = replace(initial_state(problem, constants, SILENT), w=T[2], iteration=3)
    after = communicate(state, 1, {0: T[0]}, problem, constants, SILENT)
    mean, c = (T[2] + T[0]) / 2, 0.5 * 2
    assert after.participants == 2
    np.testing.assert_allclose(after.u, c * mean - (mean - T[1]), atol=1e-14)
    after = communicate(state, 1, {}, problem, constants, SILENT)
    assert np.array_equal(after.w, local_step(state, constants).w)
    assert (after.missed, after.gradients, after.iteration, after.participants) == (1, 1, 4, 3)
    # A fixed c does not depend on who was heard.
    fixed = replace(constants, fixed_c=True, sigma=1.3)
    assert {fixed.c(participants) for participants in (1, 2, 7)} == {1.3}
    assert constants.c(3) == 1.5


def test_sound_noise_is_in_the_first_release_too() -> None:
    problem, xi = quadratic(T[0]), np.array([0.3, -0.2, 0.1, 0.4])
    noisy = initial_state(problem, rules(0, "sound"), plus(xi))
    np.testing.assert_allclose(noisy.u, T[0] + xi, atol=1e-14)
    np.testing.assert_allclose(initial_state(problem, rules(0, "paper"), plus(xi)).u, T[0], atol=1e-14)


def test_an_update_that_is_not_finite_is_refused() -> None:
    problem, constants = quadratic(T[0]), rules(0)
    state = initial_state(problem, constants, SILENT)
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=r"sigma must be larger: .* not finite"):
        communicate(state, 0, {1: np.full(4, 1.7e308)}, problem, constants, plus(np.full(4, np.inf)))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), s=st.integers(1, 6), mode=st.sampled_from(["none", "paper", "sound"]))
def test_no_model_has_more_than_s_nonzeros(seed: int, s: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    problem, constants = (
        quadratic(rng.standard_normal(6)),
        Rules(s, 0.1, 2, 0.7, 2, privacy=GradientPrivacy(mode)),
    )
    state = advance(initial_state(problem, constants, plus(rng.standard_normal(6))), 2, constants)
    received = {1: rng.standard_normal(6), 2: rng.standard_normal(6)}
    state = communicate(state, 0, received, problem, constants, plus(rng.standard_normal(6)))
    for k in range(3, 8):
        state = advance(state, k, constants)
        assert np.count_nonzero(state.w) <= s
