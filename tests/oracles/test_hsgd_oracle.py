from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tests.oracles.hsgd import Choose, Group, Run, Theta, central_sgd, draw, merged, pairs, run

Array = np.ndarray
TOLERANCE = 1.0e-9


class ScalarModel:
    """zeta_1 = u x_1, zeta_2 = v x_2, f = (a zeta_1 + b zeta_2 - y)^2 / 2, with mu / 2 (u^2 + v^2)."""

    def __init__(self, mu: float = 0.0) -> None:
        self.mu = mu

    def encode1(self, u: Array, x1: Array) -> Array:
        return x1[:, None] * u

    encode2 = encode1

    def hospital(self, head: Array, u: Array, x1: Array, Z2: Array, y: Array) -> tuple[Array, Array]:
        Z = np.hstack([self.encode1(u, x1), Z2])
        error = Z @ head - y
        return error @ Z / len(y), np.atleast_1d(np.mean(error * head[0] * x1)) + self.mu * u

    def device(self, head: Array, Z1: Array, v: Array, x2: Array, y: Array) -> Array:
        error = np.hstack([Z1, self.encode2(v, x2)]) @ head - y
        return np.atleast_1d(np.mean(error * head[1] * x2)) + self.mu * v


class TanhModel:
    """zeta_i = tanh(W_i x_i), logistic loss of a linear head with a bias: a network of the usual kind."""

    def __init__(self, e1: int, e2: int) -> None:
        self.e1, self.e2 = e1, e2

    def encode1(self, w: Array, x1: Array) -> Array:
        return np.tanh(x1 @ w.reshape(-1, self.e1))

    def encode2(self, w: Array, x2: Array) -> Array:
        return np.tanh(x2 @ w.reshape(-1, self.e2))

    def _slope(self, head: Array, Z1: Array, Z2: Array, y: Array) -> Array:
        logit = Z1 @ head[: self.e1] + Z2 @ head[self.e1 : -1] + head[-1]
        return (1 / (1 + np.exp(-logit)) - y) / len(y)

    def hospital(self, head: Array, w: Array, x1: Array, Z2: Array, y: Array) -> tuple[Array, Array]:
        Z1 = self.encode1(w, x1)
        slope = self._slope(head, Z1, Z2, y)
        back = slope[:, None] * head[: self.e1] * (1 - Z1**2)
        return np.concatenate([slope @ Z1, slope @ Z2, [slope.sum()]]), (x1.T @ back).ravel()

    def device(self, head: Array, Z1: Array, w: Array, x2: Array, y: Array) -> Array:
        Z2 = self.encode2(w, x2)
        slope = self._slope(head, Z1, Z2, y)
        return (x2.T @ (slope[:, None] * head[self.e1 : -1] * (1 - Z2**2))).ravel()


def toy_groups() -> list[Group]:
    columns = [([1, 2, -1], [1, 0.5, 2], [1, 2, 0]), ([0.5], [-1], [-1])]
    return [
        Group(w, *(np.array(c, dtype=float) for c in column))
        for w, column in zip((0.75, 0.25), columns, strict=True)
    ]


TOY = toy_groups()
START = Theta(np.array([1.0, 0.5]), np.array([0.2]), np.array([0.4]))


def tenth(_: int) -> float:
    return 0.1


def everyone(m: int, _: int) -> Sequence[int]:
    return range(len(TOY[m].y))


def toy(P: int, Q: int, T: int, *, method: str = "hsgd", mu: float = 0.0, choose: Choose = everyone) -> Run:
    if method == "jfl":
        return run(ScalarModel(mu), START, pairs(TOY, choose), P=P, Q=Q, T=T, eta=tenth)
    if method == "tdcd":
        return run(ScalarModel(mu), START, merged(TOY), P=P, Q=Q, T=T, eta=tenth)
    return run(ScalarModel(mu), START, TOY, P=P, Q=Q, T=T, eta=tenth, choose=choose)


def flat(theta: Theta) -> Array:
    return np.concatenate(theta)


CENTRAL_1 = (1.0167500000, 0.5185000000, 0.2837500000, 0.4231250000)
CENTRAL_2 = (1.0366589824, 0.5372556710, 0.3550890583, 0.4461083156)
FINALS = [
    *((method, 1, 1, 1, CENTRAL_1) for method in ("hsgd", "jfl", "tdcd")),
    *((method, 1, 1, 2, CENTRAL_2) for method in ("hsgd", "jfl", "tdcd")),
    ("hsgd", 2, 1, 2, (1.0395469921, 0.5369823825, 0.3500183284, 0.4456467079)),
    ("hsgd", 2, 2, 2, (1.0395002596, 0.5363580250, 0.3497195419, 0.4462226562)),
    ("hsgd", 4, 2, 4, (1.0833883127, 0.5720727590, 0.4368441762, 0.4890915634)),
    ("hsgd", 4, 4, 4, (1.0832911909, 0.5702643925, 0.4355519830, 0.4921889821)),
    ("jfl", 2, 1, 2, (1.0398608102, 0.5350395146, 0.3336722520, 0.4429624036)),
    ("jfl", 2, 2, 2, (1.0402711752, 0.5332404250, 0.3347838050, 0.4462226562)),
    ("jfl", 4, 2, 4, (1.0604476237, 0.5599373252, 0.3650762655, 0.4792965744)),
    ("tdcd", 2, 2, 2, (1.0366164542, 0.5369800141, 0.3549366690, 0.4462226562)),
    ("tdcd", 4, 2, 4, (1.0767278348, 0.5744152744, 0.4647929398, 0.4912722811)),
    ("tdcd", 4, 4, 4, (1.0764935692, 0.5737024217, 0.4641882833, 0.4921889821)),
]


@pytest.mark.parametrize(("method", "P", "Q", "T", "final"), FINALS)
def test_every_method_ends_at_its_golden_model(
    method: str, P: int, Q: int, T: int, final: tuple[float, ...]
) -> None:
    assert flat(toy(P, Q, T, method=method).final) == pytest.approx(final, abs=TOLERANCE, rel=0)


TRACE = {
    1: (
        [(1.0253333333, 0.5126666667, 0.3266666667), (0.991, 0.536, 0.155)],
        [(0.43, 0.4375, 0.38), (0.445,)],
    ),
    2: (
        [(1.0578948859, 0.5249786667, 0.4288700705), (0.9843163806, 0.5704961000, 0.1122679561)],
        [(0.45925, 0.474765625, 0.362), (0.488875,)],
    ),
    3: (
        [(1.0904576076, 0.5366332172, 0.5091926183), (0.9799584063, 0.6084500237, 0.0740591412)],
        [(0.4487786457, 0.4577082776, 0.4320170117), (0.5331655967,)],
    ),
}


@pytest.mark.parametrize("t", TRACE)
def test_every_step_of_the_trace_is_golden(t: int) -> None:
    state = toy(4, 2, 4).states[t]
    hospitals, devices = TRACE[t]
    for m in range(2):
        here = np.concatenate(state.groups[m][:2])
        assert here == pytest.approx(hospitals[m], abs=TOLERANCE, rel=0)
        assert np.ravel([*state.devices[m].values()]) == pytest.approx(devices[m], abs=TOLERANCE, rel=0)


# A network with random data, uneven groups, sampled devices and a schedule.

SIZES = (8, 4, 12)


def network(seed: int) -> tuple[TanhModel, Theta, list[Group]]:
    rng = np.random.default_rng(seed)
    d1, d2, e1, e2 = 4, 3, 3, 2
    start = Theta(rng.normal(size=e1 + e2 + 1), rng.normal(size=d1 * e1), rng.normal(size=d2 * e2))
    groups = [
        Group(
            K / sum(SIZES),
            rng.normal(size=(K, d1)),
            rng.normal(size=(K, d2)),
            rng.integers(0, 2, K).astype(float),
        )
        for K in SIZES
    ]
    return TanhModel(e1, e2), start, groups


def shrinking(t: int) -> float:
    return 0.5 / 2 ** (t // 4)


def differs(one: Theta, other: Theta) -> float:
    return float(np.abs(flat(one) - flat(other)).max())


Grouping = Callable[[list[Group], Choose], Sequence[Group] | Callable[[int], Sequence[Group]]]


@pytest.mark.parametrize("grouping", [lambda groups, _: groups, pairs], ids=["hsgd", "jfl"])
def test_unit_intervals_are_central_split_sgd(grouping: Grouping) -> None:
    model, start, groups = network(1)
    choose = draw(7, 0.5, SIZES)
    within = choose if grouping is not pairs else None  # a pair has no more patients to choose from
    states = run(model, start, grouping(groups, choose), P=1, Q=1, T=50, eta=shrinking, choose=within).states
    central = central_sgd(model, start, groups, T=50, eta=shrinking, choose=choose)
    assert max(differs(s.virtual, c) for s, c in zip(states, central, strict=True)) <= 1e-12
