from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.hsgd import Choose, Group, Run, Theta, central_sgd, draw, merged, pairs, run, top_k

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

    def loss(self, theta: Theta, g: Group) -> float:
        Z = np.hstack([self.encode1(theta.hospital, g.x1), self.encode2(theta.device, g.x2)])
        return float(np.mean((Z @ theta.head - g.y) ** 2) / 2)


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

    def loss(self, theta: Theta, g: Group) -> float:
        head, Z1, Z2 = theta.head, self.encode1(theta.hospital, g.x1), self.encode2(theta.device, g.x2)
        logit = Z1 @ head[: self.e1] + Z2 @ head[self.e1 : -1] + head[-1]
        return float(np.mean(np.logaddexp(0, logit) - g.y * logit))


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


def subsets(m: int, t: int) -> Sequence[int]:
    return [0] if m == 1 else [[0, 1], [1, 2]][t // 2]


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


def test_the_regulariser_pulls_both_encoders_and_not_the_head() -> None:
    golden = (1.0394740651, 0.5363481150, 0.3452297105, 0.4381876563)
    assert flat(toy(2, 2, 2, mu=0.1).final) == pytest.approx(golden, abs=TOLERANCE, rel=0)


def test_the_edge_averages_the_devices_that_trained() -> None:
    golden = (1.1072338670, 0.5887990870, 0.4940853733, 0.5134378075)
    assert flat(toy(4, 2, 4, choose=subsets).final) == pytest.approx(golden, abs=TOLERANCE, rel=0)


def test_a_compressed_head_stops_the_devices_that_lost_their_weight() -> None:
    final = run(ScalarModel(), START, TOY, P=1, Q=1, T=1, eta=tenth, squeeze=top_k).final
    assert flat(final) == pytest.approx((*CENTRAL_1[:3], 0.4), abs=TOLERANCE, rel=0)


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
LAST_DEVICES = [(0.4650898027, 0.4832342510, 0.4320275139), (0.5760146859,)]


@pytest.mark.parametrize("t", TRACE)
def test_every_step_of_the_trace_is_golden(t: int) -> None:
    state = toy(4, 2, 4).states[t]
    hospitals, devices = TRACE[t]
    for m in range(2):
        here = np.concatenate(state.groups[m][:2])
        assert here == pytest.approx(hospitals[m], abs=TOLERANCE, rel=0)
        assert np.ravel([*state.devices[m].values()]) == pytest.approx(devices[m], abs=TOLERANCE, rel=0)


def test_the_last_step_of_the_trace_is_golden() -> None:
    # The cloud has overwritten the groups by then: the devices and the weighted mean are left.
    state = toy(4, 2, 4).states[4]
    hospitals = np.array(
        [(1.1187769018, 0.5479071302, 0.5698395891), (0.9772225452, 0.6445696454, 0.0378579375)]
    )
    for m in range(2):
        assert np.ravel([*state.devices[m].values()]) == pytest.approx(LAST_DEVICES[m], abs=TOLERANCE, rel=0)
    assert flat(state.virtual)[:3] == pytest.approx(
        0.75 * hospitals[0] + 0.25 * hospitals[1], abs=TOLERANCE, rel=0
    )


def test_the_edge_average_of_the_trace_is_golden() -> None:
    groups = toy(4, 2, 4).states[2].groups
    devices = [float(g.device[0]) for g in groups]
    assert devices == pytest.approx([0.4320052083, 0.488875], abs=TOLERANCE, rel=0)


EXCHANGES = {
    1: [((0.2, 0.4, -0.2), (0.4, 0.2, 0.8)), ((0.1,), (-0.4,))],
    3: [
        (
            (0.4288700705, 0.8577401410, -0.4288700705),
            (0.4320052083, 0.2160026042, 0.8640104167),
        ),
        ((0.0561339781,), (-0.488875,)),
    ],
}


@pytest.mark.parametrize("t", EXCHANGES)
def test_the_exchanged_encodings_are_golden(t: int) -> None:
    state = toy(4, 2, 4).states[t]
    for m, (Z1, Z2) in enumerate(EXCHANGES[t]):
        assert state.Z1[m].ravel() == pytest.approx(Z1, abs=TOLERANCE, rel=0)
        assert state.Z2[m].ravel() == pytest.approx(Z2, abs=TOLERANCE, rel=0)


def test_the_loss_falls_as_golden_along_central_sgd() -> None:
    path = central_sgd(ScalarModel(), START, TOY, T=2, eta=tenth)
    losses = [sum(g.weight * ScalarModel().loss(theta, g) for g in TOY) for theta in path]
    assert losses == pytest.approx([0.4325, 0.3556094348, 0.2958356165], abs=TOLERANCE, rel=0)


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


def test_the_networks_gradients_are_those_of_its_loss() -> None:
    model, start, groups = network(0)
    g = groups[0]
    Z1, Z2 = model.encode1(start.hospital, g.x1), model.encode2(start.device, g.x2)
    exact = np.concatenate(
        [
            *model.hospital(start.head, start.hospital, g.x1, Z2, g.y),
            model.device(start.head, Z1, start.device, g.x2, g.y),
        ]
    )
    sides = np.cumsum([len(block) for block in start])[:-1]
    point, numeric = flat(start), []
    for step in 1e-6 * np.eye(len(point)):
        up, down = (model.loss(Theta(*np.split(point + s, sides)), g) for s in (step, -step))
        numeric.append((up - down) / 2e-6)
    assert numeric == pytest.approx(exact, abs=1e-8)


Grouping = Callable[[list[Group], Choose], Sequence[Group] | Callable[[int], Sequence[Group]]]


@pytest.mark.parametrize("grouping", [lambda groups, _: groups, pairs], ids=["hsgd", "jfl"])
def test_unit_intervals_are_central_split_sgd(grouping: Grouping) -> None:
    model, start, groups = network(1)
    choose = draw(7, 0.5, SIZES)
    within = choose if grouping is not pairs else None  # a pair has no more patients to choose from
    states = run(model, start, grouping(groups, choose), P=1, Q=1, T=50, eta=shrinking, choose=within).states
    central = central_sgd(model, start, groups, T=50, eta=shrinking, choose=choose)
    assert max(differs(s.virtual, c) for s, c in zip(states, central, strict=True)) <= 1e-12


def test_unit_intervals_make_the_merged_group_central_where_batches_are_proportional() -> None:
    model, start, groups = network(2)
    choose = draw(3, 0.5, SIZES)
    offsets = np.concatenate([[0], np.cumsum(SIZES)])

    def same(_: int, t: int) -> list[int]:
        return [int(offsets[m]) + n for m in range(len(SIZES)) for n in choose(m, t)]

    final = run(model, start, merged(groups), P=1, Q=1, T=50, eta=shrinking, choose=same).final
    central = central_sgd(model, start, groups, T=50, eta=shrinking, choose=choose)[-1]
    assert differs(final, central) <= 1e-12


def jfl_by_hand(
    model: TanhModel,
    start: Theta,
    groups: list[Group],
    *,
    P: int,
    Q: int,
    T: int,
    eta: Callable[[int], float],
    choose: Choose,
) -> Theta:
    """Train each pair for itself between two global averages, which weigh groups by K_m and pairs alike."""
    theta = start
    for t0 in range(0, T, P):
        total = [np.zeros_like(block) for block in theta]
        for m, g in enumerate(groups):
            for n in choose(m, t0):
                head, w1, w2 = theta
                for t in range(t0, t0 + P):
                    if (t - t0) % Q == 0:
                        old, Z1 = head, model.encode1(w1, g.x1[[n]])
                        Z2 = model.encode2(w2, g.x2[[n]])
                    g0, g1 = model.hospital(head, w1, g.x1[[n]], Z2, g.y[[n]])
                    w2 = w2 - eta(t) * model.device(old, Z1, w2, g.x2[[n]], g.y[[n]])
                    head, w1 = head - eta(t) * g0, w1 - eta(t) * g1
                weight = g.weight / len(choose(m, t0))
                total = [s + weight * block for s, block in zip(total, (head, w1, w2), strict=True)]
        theta = Theta(*total)
    return theta


def test_singleton_groups_are_jfl() -> None:
    model, start, groups = network(3)
    choose = draw(5, 0.5, SIZES)
    final = run(model, start, pairs(groups, choose), P=4, Q=2, T=12, eta=shrinking).final
    by_hand = jfl_by_hand(model, start, groups, P=4, Q=2, T=12, eta=shrinking, choose=choose)
    assert differs(final, by_hand) <= 1e-12


def test_one_group_does_not_notice_the_cloud() -> None:
    model, start, groups = network(4)
    one = merged(groups)
    choose = draw(1, 0.3, [sum(SIZES)])
    finals = [run(model, start, one, P=P, Q=2, T=12, eta=shrinking, choose=choose).final for P in (2, 4, 12)]
    assert max(differs(finals[0], other) for other in finals[1:]) <= 1e-14


def test_groups_are_bit_identical_after_a_global_aggregation() -> None:
    model, start, groups = network(5)
    states = run(model, start, groups, P=4, Q=2, T=8, eta=shrinking).states
    for t in (0, 4, 8):
        flattened = [flat(theta) for theta in states[t].groups]
        assert all(np.array_equal(flattened[0], other) for other in flattened)


def test_the_virtual_average_does_not_depend_on_a_later_aggregation() -> None:
    model, start, groups = network(6)
    choose = draw(2, 0.5, SIZES)
    short, long = (run(model, start, groups, P=P, Q=2, T=12, eta=shrinking, choose=choose) for P in (4, 12))
    assert all(differs(short.states[t].virtual, long.states[t].virtual) <= 1e-14 for t in range(5))


def test_the_toys_virtual_average_after_one_interval_is_the_shorter_runs_end() -> None:
    assert differs(toy(4, 2, 4).states[2].virtual, toy(2, 2, 2).final) <= 1e-15


def test_the_first_intervals_device_encoder_is_the_same_in_every_method() -> None:
    devices = [toy(4, 2, 4, method=method).states[2].virtual.device for method in ("hsgd", "jfl", "tdcd")]
    assert devices[1] == pytest.approx(devices[0], rel=1e-14)
    assert devices[2] == pytest.approx(devices[0], rel=1e-14)


def test_a_devices_model_does_not_depend_on_the_other_patients() -> None:
    model, start, groups = network(7)

    def devices(groups: list[Group], chosen: list[int]) -> list[dict[int, Array]]:
        return (
            run(model, start, groups, P=4, Q=4, T=4, eta=shrinking, choose=lambda m, t: chosen)
            .states[4]
            .devices
        )

    others = [
        Group(g.weight, *(np.where(np.isin(np.arange(len(x)), [0, 2]), x.T, 1.0).T for x in g[1:]))
        for g in groups
    ]
    with_all, with_others = devices(groups, [0, 1, 2]), devices(others, [2, 1, 0])
    for one, other in zip(with_all, with_others, strict=True):
        assert all(np.array_equal(one[n], other[n]) for n in (0, 2))
        assert not np.array_equal(one[1], other[1])


def test_patients_who_are_not_chosen_train_no_device() -> None:
    model, start, groups = network(7)
    states = run(model, start, groups, P=2, Q=2, T=2, eta=shrinking, choose=lambda m, t: [1, 3]).states
    assert [set(d) for d in states[1].devices] == [{1, 3}] * 3


def test_devices_of_unit_local_intervals_take_the_mean_gradient() -> None:
    model, start, groups = network(8)
    g = groups[0]
    after = run(model, start, groups, P=2, Q=1, T=2, eta=shrinking).states[1].groups[0].device
    mean = model.device(start.head, model.encode1(start.hospital, g.x1), start.device, g.x2, g.y)
    assert after == pytest.approx(start.device - shrinking(0) * mean, rel=1e-13)


def test_nothing_moves_without_a_learning_rate() -> None:
    model, start, groups = network(9)
    final = run(model, start, groups, P=4, Q=2, T=8, eta=lambda _: 0.0).final
    assert differs(final, start) <= 1e-15


def test_a_head_blind_to_devices_gives_them_no_gradient() -> None:
    model, start, groups = network(10)
    blind = start.head.copy()
    blind[model.e1 : -1] = 0.0
    start = start._replace(head=blind)
    states = run(model, start, groups, P=2, Q=2, T=2, eta=shrinking).states
    assert all(np.array_equal(v, start.device) for v in states[1].devices[0].values())


def test_the_batch_changes_at_local_intervals_only() -> None:
    model, start, groups = network(11)
    asked: list[int] = []

    def choose(m: int, t: int) -> Sequence[int]:
        asked.append(t)
        return draw(1, 0.5, SIZES)(m, t)

    run(model, start, groups, P=6, Q=3, T=12, eta=shrinking, choose=choose)
    assert asked == [t for t in (0, 3, 6, 9) for _ in SIZES]


@pytest.mark.parametrize(("P", "Q", "T"), [(3, 2, 6), (4, 2, 6)])
def test_intervals_that_do_not_divide_are_refused(P: int, Q: int, T: int) -> None:
    with pytest.raises(ValueError, match="valid is"):
        toy(P, Q, T)


@given(st.integers(0, 2**32), st.floats(0.01, 1), st.integers(0, 2), st.integers(0, 100))
@settings(deadline=None, max_examples=30)
def test_a_draw_has_no_duplicates_and_its_seed_alone_decides_it(
    seed: int, alpha: float, m: int, t: int
) -> None:
    chosen = draw(seed, alpha, SIZES)(m, t)
    assert len(set(chosen)) == len(chosen) == max(1, int(alpha * SIZES[m]))
    assert chosen == draw(seed, alpha, SIZES)(m, t)


def test_top_k_keeps_the_golden_entry() -> None:
    kept = top_k(np.array([0.5, -3, 0.1, 2, -0.05, 1, -0.7, 0.2]))
    assert kept.tolist() == [0, -3, 0, 0, 0, 0, 0, 0]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=70).map(np.array))
@settings(deadline=None, max_examples=50)
def test_top_k_is_idempotent(vector: Array) -> None:
    once = top_k(vector)
    assert np.array_equal(top_k(once), once)
    assert np.count_nonzero(once) <= max(1, 7 * len(vector) // 32)


# What single mistakes would give at P = Q = T = 2: the oracle must not agree with any of them.
BUGS = {
    "equal group weights": (1.0211056333, 0.5477373833, 0.2705690133, 0.4604401042),
    "head updated first": (1.0395390718, 0.5363637882, 0.3522631872, 0.4462226562),
    "fresh zeta_2 at the hospital": (1.0390969135, 0.5382272297, 0.3486056327, 0.4462226562),
    "stale zeta_1 at the hospital": (1.0333862500, 0.5365810000, 0.3694181921, 0.4462226562),
    "fresh head at the devices": (1.0395002596, 0.5363580250, 0.3497195419, 0.4464598293),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_final_model_is_none_of_the_typical_mistakes(bug: str) -> None:
    assert np.abs(flat(toy(2, 2, 2).final) - BUGS[bug]).max() > 1e-5


def test_equal_weights_give_the_golden_mistake() -> None:
    equal = [g._replace(weight=0.5) for g in TOY]
    final = run(ScalarModel(), START, equal, P=2, Q=2, T=2, eta=tenth).final
    assert flat(final) == pytest.approx(BUGS["equal group weights"], abs=TOLERANCE, rel=0)
