"""One node's iteration, Sha et al., (3) and (4): goldens of three nodes on a path and closed forms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.ceps import hard_thresholding, keep_largest

from hedgerow.clients import GossipNode, GossipPlace, LinearRegression, Memory
from hedgerow.clients.ceps.algorithm import Algorithm1

Array = npt.NDArray[np.float64]

T = np.array([[1, 0.2, 0, -0.9], [0.8, 0, 0.3, -1.1], [1.2, -0.1, 0.1, -0.7]])
PATH = ((1,), (0, 2), (1,))
SIGMA, KAPPA = (0.6, 0.5, 0.7), (2, 3, 2)
ZERO = np.zeros(4)
CEPS = Algorithm1()
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


@dataclass(frozen=True)
class Node(GossipNode):
    """A node with the noise ``xi`` in every communication, and ``first`` at the start."""

    xi: Any = 0.0
    first: Any = 0.0

    def noised(self, vector: Array, index: int) -> Array:
        return vector + (self.xi if index else self.first)


def node(
    problem: Any,
    neighbours: Sequence[int] = (1, 2),
    own: int = 0,
    xi: Any = 0.0,
    first: Any = 0.0,
    **changes: Any,
) -> Node:
    told: dict[str, Any] = {
        "num-nodes": 9, "run-seed": 0, "neighbours": list(neighbours), "r": 1.0, "codec": "dense64", "s": 2,
        "mu": 0.1, "sigma-rule": "paper", "privacy": "none", "epsilon": 0.5, "delta": 0.5, "sens": 0.1,
        "clip": 1e9,
    }  # fmt: skip
    told |= {key.replace("_", "-"): value for key, value in changes.items()}
    kappa = told.pop("kappa", 2)
    config = ConfigRecord({**told, "kappa-low": kappa, "kappa-high": kappa})
    return Node(GossipPlace.of(config, own), problem, config, 0, None, xi, first)


def memory(w: Array, u: Array, k: int, participants: int, sigma: float) -> Memory:
    counts = {"participants": participants, "gradients": 1, "missed": 0, "sigma": sigma}
    return Memory({"w": w, "u": u}, k, counts)


def begun(one: Node, sigma: float) -> Memory:
    """Return the memory at k = 0 with a given sigma."""
    w = np.zeros(one.problem.n)
    return memory(w, -one.problem.gradient(w), 0, len(one.place.neighbours) + 1, sigma)


def moved(before: Memory, w: Array, **more: Any) -> Memory:
    return replace(before, arrays={**before.arrays, "w": w}, **more)


def local_step(one: Node, before: Memory) -> Memory:
    """(4), as it is printed."""
    c, mu = before.counts["sigma"] * before.counts["participants"], float(one.config["mu"])  # type: ignore[arg-type]
    w = keep_largest((before.arrays["u"] + mu * before.arrays["w"]) / (c + mu), int(one.config["s"]))  # type: ignore[arg-type]
    return moved(before, w, iteration=before.iteration + 1)


def on_path(i: int, mode: str = "none", xi: Any = 0.0) -> Node:
    return node(quadratic(T[i]), PATH[i], i, xi, kappa=KAPPA[i], privacy=mode)


def path_trajectory(
    iterations: int, mode: str = "none", xi: Mapping[int, Array] | None = None
) -> list[Array]:
    """Return W^0, W^1, ... of the three nodes; ``xi`` is the noise of every communication of a node."""
    nodes = [on_path(i, mode, (xi or {}).get(i, ZERO)) for i in range(3)]
    states = [begun(nodes[i], SIGMA[i]) for i in range(3)]
    history = [np.stack([state.arrays["w"] for state in states])]
    for k in range(iterations):
        old = history[-1]
        states = [
            CEPS.update(nodes[i], states[i], {j: old[j] for j in PATH[i]}, None)[0]
            if k > 0 and k % KAPPA[i] == 0
            else local_step(nodes[i], states[i])
            for i in range(3)
        ]
        history.append(np.stack([state.arrays["w"] for state in states]))
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
    problem = quadratic(T[0])
    alone = node(problem, (), kappa=1)
    state = begun(alone, 1.6)
    expected = [
        (0.625, 0, 0, -0.5625),
        (0.859375, 0, 0, -0.7734375),
        (0.947265625, 0, 0, -0.8525390625),
        (0.9802246094, 0, 0, -0.8822021484),
    ]
    found = []
    for _ in range(4):
        state, _ = CEPS.update(alone, state, {}, None)
        found.append(state.arrays["w"])
    np.testing.assert_allclose(found, expected, atol=1e-10)
    np.testing.assert_allclose(hard_thresholding(problem.gradient, 4, 2, 1 / 1.6, 4), expected, atol=1e-10)


# Local steps

vectors = st.lists(st.floats(-4, 4, allow_subnormal=False).map(lambda x: round(x, 2)), min_size=1, max_size=8)


@st.composite
def states(draw: st.DrawFn) -> tuple[Node, Memory]:
    u = np.array(draw(vectors))
    w = np.array([draw(st.sampled_from([0.0, 0.5, -1.25, 3.0])) for _ in u])
    drawn = node(
        None, s=draw(st.integers(1, 9)), mu=draw(st.floats(0.01, 2)), kappa=draw(st.integers(1, 5)),
    )  # fmt: skip
    return drawn, memory(w, u, draw(st.integers(0, 6)), draw(st.integers(1, 4)), draw(st.floats(0.1, 3)))


@settings(deadline=None, max_examples=150)
@given(given_state=states(), steps=st.integers(0, 40))
def test_advancing_at_once_is_advancing_step_by_step_bit_for_bit(
    given_state: tuple[Node, Memory], steps: int
) -> None:
    one, state = given_state
    slow = state
    for _ in range(steps):
        slow = local_step(one, slow)
    fast = CEPS.prepare(one, state, state.iteration + steps)
    assert np.array_equal(fast.arrays["w"], slow.arrays["w"])
    assert fast.iteration == slow.iteration


STEADY, C = node(None, s=5, kappa=12), 0.4 * 3


def random_state(seed: int, *, communicated: bool) -> Memory:
    u, w = np.random.default_rng(seed).standard_normal(50), np.zeros(50)
    top = np.argsort(-np.abs(u))[:5]
    if communicated:
        w[top] = u[top] / C
    return memory(w, u, 12, 3, 0.4)


@pytest.mark.parametrize("seed", range(3))
def test_between_communications_a_noise_free_node_holds_still_and_printed_noise_shrinks(seed: int) -> None:
    state = random_state(seed, communicated=True)
    clean, rho = state.arrays["w"], 0.1 / (C + 0.1)
    for steps in range(1, 12):
        after = CEPS.prepare(STEADY, state, state.iteration + steps).arrays["w"]
        np.testing.assert_allclose(after, clean, rtol=1e-12, atol=1e-15)
    deviation = 0.01 * (clean != 0)
    state = moved(state, clean + deviation)
    for _ in range(4):
        state = local_step(STEADY, state)
        deviation = rho * deviation
        np.testing.assert_allclose(state.arrays["w"] - clean, deviation, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 7, 12])
def test_the_first_phase_has_its_closed_form(steps: int) -> None:
    state = replace(random_state(3, communicated=False), iteration=0)
    rho = 0.1 / (C + 0.1)
    expected = (1 - rho**steps) * random_state(3, communicated=True).arrays["w"]
    np.testing.assert_allclose(CEPS.prepare(STEADY, state, steps).arrays["w"], expected, rtol=1e-12)


def test_communications_that_were_passed_over_are_counted_as_missed_once() -> None:
    start = memory(ZERO, np.ones(4), 0, 3, 0.4)
    assert [CEPS.prepare(STEADY, start, k).counts["missed"] for k in (1, 12, 13, 24, 25, 37)] == [
        0,
        0,
        1,
        1,
        2,
        3,
    ]
    assert CEPS.prepare(STEADY, CEPS.prepare(STEADY, start, 12), 25).counts["missed"] == 2


# Communication


def test_participants_are_those_that_were_heard_and_without_any_it_is_a_local_step_that_is_counted() -> None:
    one = on_path(1)
    state = moved(begun(one, 0.5), T[2], iteration=3)
    after, _ = CEPS.update(one, state, {0: T[0]}, None)
    mean, c = (T[2] + T[0]) / 2, 0.5 * 2
    assert after.counts["participants"] == 2
    np.testing.assert_allclose(after.arrays["u"], c * mean - (mean - T[1]), atol=1e-14)
    after, _ = CEPS.update(one, state, {}, None)
    assert np.array_equal(after.arrays["w"], local_step(one, state).arrays["w"])
    assert after.counts == {**state.counts, "missed": 1, "gradients": 1, "participants": 3}
    assert after.iteration == 4


def test_a_fixed_c_does_not_depend_on_who_was_heard() -> None:
    one = node(quadratic(T[1]), (0, 2), 1, kappa=3, sigma_rule="fixed_c", c=1.3)
    state = moved(CEPS.begin(one), T[2], iteration=3)
    for heard in ({0: T[0]}, {0: T[0], 2: T[0]}):
        mean = (T[2] + sum(heard.values())) / (1 + len(heard))
        after, _ = CEPS.update(one, state, heard, None)
        np.testing.assert_allclose(after.arrays["u"], 1.3 * mean - (mean - T[1]), atol=1e-14)


def test_sound_noise_is_in_the_first_release_too() -> None:
    problem, xi = quadratic(T[0]), np.array([0.3, -0.2, 0.1, 0.4])
    fixed: dict[str, Any] = {"sigma_rule": "fixed_c", "c": 1.0}
    for mode, noise in (("sound", xi), ("paper", ZERO)):
        start = CEPS.begin(node(problem, first=xi, privacy=mode, **fixed))
        np.testing.assert_allclose(start.arrays["u"], T[0] + noise, atol=1e-14)


def test_an_update_that_is_not_finite_is_refused() -> None:
    one = node(quadratic(T[0]), xi=np.full(4, np.inf), privacy="paper")
    state = replace(begun(one, 0.6), iteration=2)
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=r"sigma must be larger: .* not finite"):
        CEPS.update(one, state, {1: np.full(4, 1.7e308)}, None)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), s=st.integers(1, 6), mode=st.sampled_from(["none", "paper", "sound"]))
def test_no_model_has_more_than_s_nonzeros(seed: int, s: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    first, xi = rng.standard_normal(6), rng.standard_normal(6)
    one = node(
        quadratic(rng.standard_normal(6)), xi=xi, first=first, s=s, privacy=mode, sigma_rule="fixed_c", c=2.1
    )
    state = CEPS.prepare(one, CEPS.begin(one), 2)
    received = {1: rng.standard_normal(6), 2: rng.standard_normal(6)}
    state, _ = CEPS.update(one, state, received, None)
    for k in range(3, 8):
        state = CEPS.prepare(one, state, k)
        assert np.count_nonzero(state.arrays["w"]) <= s
