"""The baselines' server: whom nodes hear, with what weights, how large messages are; and whole runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from numpy.typing import NDArray
from tests.oracles import decentralised as oracle
from tests.strategies.changing_grid import ChangingGrid
from tests.strategies.gossip.nodes import DIM, Nodes, run

from hedgerow.clients import LinearRegression, ceps_client
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import (
    BEER,
    DCDPSGD,
    DPDSGT,
    DPSGD,
    NODE_TO_NODE,
    SGP,
    ChocoSGD,
    DFedAvgM,
    DFedSAM,
    EvaluateFn,
    Gossip,
    Matcha,
    Monitor,
    Privacy,
    RoundEnd,
)
from hedgerow.wire import parse_codec, view

M, N = 8, 5
GRAPH = nx.cycle_graph(M)
GRAPH.add_edges_from([(0, 4), (1, 6)])
# Edges lead from sender to receiver; node 0 sends to three, and hears one.
DIRECTED = nx.DiGraph([(i, (i + 1) % M) for i in range(M)] + [(0, 2), (0, 5), (3, 7), (4, 1)])
ARROWS = sorted(DIRECTED.edges)

STRATEGIES: dict[str, Callable[..., Gossip]] = {
    "d-psgd": DPSGD,
    "d-psgd-dn": partial(DPSGD, dynamic=True),
    "d-psgd-pc": partial(DPSGD, participation=0.5),
    "dfedavgm": DFedAvgM,
    "dfedsam": DFedSAM,
    "dcd-psgd": DCDPSGD,
    "choco-sgd": ChocoSGD,
    "beer": BEER,
    "sgp": SGP,
    "sgp-dn": partial(SGP, dynamic=True),
    "dp-dsgt": partial(DPDSGT, privacy=Privacy()),
    "matcha": Matcha,
}


def make(name: str, **parameters: Any) -> Gossip:
    known: dict[str, Any] = {"dim": N, "min_available_nodes": M}
    if not name.endswith("-dn"):
        known["topology"] = GRAPH
    return STRATEGIES[name](**{**known, **parameters})


def fakes(kappa: int = 1, want: Callable[[int, int], list[int]] = lambda i, k: []) -> Nodes:
    return Nodes([kappa] * M, want)


Gradients = Callable[[NDArray[np.float64]], NDArray[np.float64]]
Loop = Callable[[Gradients, Any], NDArray[np.float64]]


def matrix_of(configs: dict[int, dict[str, Any]]) -> NDArray[np.float64]:
    """Return the mixing matrix whose rows the nodes were told."""
    W = np.zeros((M, M))
    for i, config in configs.items():
        W[i, [*config["neighbours"], i]] = config["weights"]
    return W


# What nodes are told


@pytest.mark.parametrize(
    "name",
    ["d-psgd", "d-psgd-dn", "dfedavgm", "dfedsam", "dcd-psgd", "choco-sgd", "beer", "dp-dsgt", "matcha"],
)
def test_the_rows_that_nodes_are_told_make_a_doubly_stochastic_matrix(name: str) -> None:
    fake = fakes()
    run(make(name, local_steps=1) if name.startswith(("d-psgd", "dfed", "choco")) else make(name), fake, 3)
    W = matrix_of({event.node: event.config for event in fake.events("hello")})
    np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(W, W.T, atol=1e-12)


def test_fixed_graphs_mix_by_metropolis_weights() -> None:
    fake = fakes()
    run(make("d-psgd", local_steps=1), fake, 1)
    W = matrix_of({event.node: event.config for event in fake.events("hello")})
    np.testing.assert_allclose(W, oracle.metropolis(list(GRAPH.edges), M), atol=1e-12)
    assert all("weights" not in event.config for event in fake.events("update"))


@pytest.mark.parametrize("name", ["d-psgd-dn", "matcha"])
def test_a_changing_network_tells_each_communication_its_own_row(name: str) -> None:
    fake = fakes()
    strategy = make(name, local_steps=1) if name == "d-psgd-dn" else make(name)
    _, ends, _ = run(strategy, fake, 6)
    matrices = []
    for k in range(1, 7):
        events = {event.node: event for event in fake.events("update") if event.k == k}
        assert len(events) == M
        assert all(sorted(event.received) == event.config["neighbours"] for event in events.values())
        matrices.append(matrix_of({i: event.config for i, event in events.items()}))
        np.testing.assert_allclose(matrices[-1].sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(matrices[-1], matrices[-1].T, atol=1e-12)
    assert len({matrix.tobytes() for matrix in matrices}) > 1
    assert ends[-1].train["missed"] == 0


def test_a_dynamic_network_keeps_its_degree_and_stays_connected() -> None:
    strategy = make("d-psgd-dn", topology="regular(4)")
    drawn = [strategy.method.graph(k) for k in range(10, 60, 10)]
    assert all({degree for _, degree in one.degree} == {4} and nx.is_connected(one) for one in drawn)
    assert len({frozenset(one.edges) for one in drawn}) == len(drawn)


def sent(fake: Nodes, k: int) -> list[tuple[int, int]]:
    """Return (sender, receiver) of each payload of iteration k."""
    events = [event for event in fake.events("update") if event.k == k]
    return sorted((j, event.node) for event in events for j in event.received)


def test_payloads_follow_the_edges_of_a_directed_graph_and_their_weights_columns_sum_to_one() -> None:
    fake = fakes()
    strategy = make("sgp", topology=DIRECTED, local_steps=1)
    run(strategy, fake, 2)
    P = matrix_of({event.node: event.config for event in fake.events("hello")})
    np.testing.assert_allclose(P, oracle.push_matrix(ARROWS, M), atol=1e-15)
    assert sent(fake, 1) == sent(fake, 2) == ARROWS
    assert strategy.ledger.total(NODE_TO_NODE).messages == 2 * len(ARROWS)
    assert all("weights" not in event.config for event in fake.events("update"))


def test_one_peer_exponential_sends_each_node_to_one_other_and_doubles_the_hop() -> None:
    fake = fakes(kappa=3)
    run(make("sgp", topology="one-peer-exponential", local_steps=3), fake, 4)
    for k, hop in ((3, 1), (6, 2), (9, 4), (12, 1)):
        assert sent(fake, k) == sorted((i, (i + hop) % M) for i in range(M))
        events = [event for event in fake.events("update") if event.k == k]
        assert all(event.config["weights"] == [0.5, 0.5] for event in events)


@pytest.mark.parametrize("topology", [None, "regular(4)", "directed-out(2)", "directed-erdos-renyi(0.4)"])
def test_a_dynamic_push_network_deals_all_that_nodes_have_at_each_communication(topology: Any) -> None:
    fake = fakes()
    run(make("sgp-dn", topology=topology, local_steps=1), fake, 4)
    drawn = set()
    for k in range(1, 5):
        configs = {event.node: event.config for event in fake.events("update") if event.k == k}
        P = matrix_of(configs)
        np.testing.assert_allclose(P.sum(axis=0), 1, atol=1e-15)
        edges = sorted((j, i) for i, j in zip(*np.nonzero(P), strict=True) if i != j)
        assert edges == sent(fake, k)
        assert nx.is_strongly_connected(nx.DiGraph(edges))
        drawn.add(tuple(edges))
    assert len(drawn) == 4


@pytest.mark.parametrize("topology", [DIRECTED, "one-peer-exponential"])
def test_what_a_node_could_not_hand_on_it_keeps(topology: Any) -> None:
    away, method = 2, make("sgp", topology=topology, local_steps=1).method
    for k in (1, 2, 3):
        assert all(method.event(i, k, [])["weights"][-1] == 1 for i in range(M))  # type: ignore[index]
        P = np.zeros((M, M))
        for i in set(range(M)) - {away}:
            readers = sorted(set(method.graph(k).neighbors(i)) - {away})
            place = {**method.instructions(i), **method.event(i, k, readers)}
            P[i, [*place["neighbours"], i]] = place["weights"]  # type: ignore[index,misc]
        P[:, away] = 0
        np.testing.assert_allclose(np.delete(P, away, axis=1).sum(axis=0), 1, atol=1e-15)


def test_partial_communication_leaves_the_choice_to_nodes_and_tells_no_weights() -> None:
    fake = fakes(want=lambda i, k: [(i + 1) % M])
    run(make("d-psgd-pc", local_steps=1), fake, 2)
    assert all(list(event.received) == [(event.node + 1) % M] for event in fake.events("update"))
    hello = fake.events("hello")[0].config
    assert hello["r"] == 0.5
    assert "weights" not in hello


@pytest.mark.parametrize(
    ("name", "parameters", "told"),
    [
        ("d-psgd", {"learning_rate": 0.3, "local_steps": 7}, {"eta": 0.3, "local-steps": 7, "kappa-low": 7}),
        ("d-psgd", {"sparsity": 2}, {"threshold": True, "s": 2}),
        ("dfedavgm", {"momentum": 0.8}, {"theta": 0.8, "eta": 0.02, "codec": "dense64"}),
        ("dfedavgm", {"bits": 4}, {"codec": "quantised4"}),
        ("dfedsam", {"rho": 0.2}, {"rho-sam": 0.2}),
        ("dcd-psgd", {"bits": 6}, {"codec": "quantised6", "kappa-high": 1}),
        ("dp-dsgt", {"privacy": Privacy("sound", 0.7, 1e-6)}, {"privacy": "sound", "epsilon": 0.7}),
    ],
)
def test_settings_reach_the_nodes(name: str, parameters: dict[str, Any], told: dict[str, Any]) -> None:
    fake = fakes()
    run(make(name, **parameters), fake, 1)
    for event in fake.events("hello"):
        assert told.items() <= event.config.items()
        assert event.config["method"] == name


# Counts


@pytest.mark.parametrize(
    ("name", "parameters", "bits"),
    [
        ("d-psgd", {}, 64 * N),
        ("dfedavgm", {}, 64 * N),
        ("dfedavgm", {"bits": 8}, 32 + 8 * N),
        ("dcd-psgd", {"bits": 4}, 32 + 4 * N),
        ("choco-sgd", {}, 32 + 8 * N),
        ("choco-sgd", {"bits": None, "top_k": 2}, 2 * (32 + 3)),
        ("beer", {}, 2 * (32 + 8 * N)),
        ("beer", {"bits": None, "top_k": 2}, 4 * (32 + 4)),
        ("beer", {"bits": None}, 2 * 64 * N),
        ("dp-dsgt", {}, 2 * 64 * N),
        ("matcha", {}, 64 * N),
        ("sgp", {}, 64 * (N + 1)),
    ],
)
def test_bits_of_a_message(name: str, parameters: dict[str, Any], bits: int) -> None:
    assert make(name, **parameters).method.sizes.message_bits == bits


def test_matcha_sends_as_much_as_its_matchings_say() -> None:
    strategy = Matcha(dim=N, min_available_nodes=M, topology=GRAPH, budget=0.5)
    run(strategy, fakes(), 60)
    messages = strategy.ledger.total(NODE_TO_NODE).messages
    assert messages / 60 == pytest.approx(strategy.activation.messages, rel=0.15)


# Privacy


def test_noisy_baselines_account_for_every_gradient() -> None:
    privacy = Privacy("sound", 0.5, 1e-5)
    _, ends, _ = run(make("d-psgd", privacy=privacy, local_steps=1), fakes(), 3)
    assert ends[-1].train["epsilon"] == privacy.report(4).epsilon
    _, ends, _ = run(make("dfedsam", privacy=privacy, local_steps=1), fakes(), 3)
    assert ends[-1].train["epsilon"] == privacy.report(8).epsilon
    _, ends, _ = run(make("d-psgd", local_steps=1), fakes(), 1)
    assert "epsilon" not in ends[-1].train


def test_noisy_baselines_account_for_the_steps_that_a_node_takes_again() -> None:
    noisy = Privacy("paper", 0.5, 0.5)
    for name, gradients in (("d-psgd", 1), ("dfedsam", 2)):
        exposure = make(name, local_steps=1, privacy=noisy).exposure
        assert exposure is not None
        assert exposure.count(2, 3, 4 + 4) == 8 * gradients


# Parameters


@pytest.mark.parametrize(
    ("compressor", "delta"),
    [({"bits": None, "top_k": 2}, 2 / N), ({"bits": None}, 1.0), ({"delta": 0.3}, 0.3)],
)
def test_the_consensus_step_is_the_theorys_unless_given(compressor: dict[str, Any], delta: float) -> None:
    values = np.linalg.eigvalsh(oracle.metropolis(list(GRAPH.edges), M))
    gap, beta = 1 - max(abs(values[0]), values[-2]), 1 - values[0]
    gamma = gap**2 * delta / (16 * gap + gap**2 + 4 * beta**2 + 2 * gap * beta**2 - 8 * gap * delta)
    for parameters, expected in ((compressor, gamma), ({**compressor, "step_gamma": 0.5}, 0.5)):
        fake = fakes()
        run(make("beer", **parameters), fake, 1)
        assert fake.events("hello")[0].config["step-gamma"] == pytest.approx(expected)


@pytest.mark.parametrize("bits", [3, 8])
def test_what_the_quantiser_guarantees_holds(bits: int) -> None:
    n, rng, codec = 4, np.random.default_rng(0), parse_codec(f"quantised{bits}")
    worst = 0.0
    for draw in range(200):
        # A large entry, and others half a step off its multiples: the worst there is.
        w = np.array([1.0, *rng.choice([-0.5, 0.5], n - 1) / (2 ** (bits - 1) - 1)])
        errors = [codec.decode(codec.encode(w, (draw, i)), n, ()) - w for i in range(20)]
        worst = max(worst, float(np.mean([e @ e for e in errors]) / (w @ w)))
    assert 0.5 * n / (2 * (2 ** (bits - 1) - 1)) ** 2 < worst <= n / (2 * (2 ** (bits - 1) - 1)) ** 2


# Whole runs with the nodes that learn, against plain loops


class Regressions:
    """A linear regression a node."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        truth = rng.standard_normal(N)
        self.A = rng.standard_normal((M, 12, N))
        self.b = self.A @ truth + 0.3 * rng.standard_normal((M, 12))
        self.problems = [LinearRegression(A, b) for A, b in zip(self.A, self.b, strict=True)]

    def gradients(self, X: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.stack([problem.gradient(x) for problem, x in zip(self.problems, X, strict=True)])

    def problem(self, context: Context) -> LinearRegression:
        return self.problems[int(context.node_config["partition-id"])]

    def learn(
        self, strategy: Gossip, rounds: int, evaluate_fn: EvaluateFn | None = None
    ) -> NDArray[np.float64]:
        grid = InProcessGrid(ceps_client(self.problem), M, strict=True)
        with flower_identity(1):
            strategy.start(grid, ArrayRecord(), num_rounds=rounds, evaluate_fn=evaluate_fn)
        assert strategy.monitor is not None
        (last,) = [look for look in strategy.monitor.history if look.iteration == strategy.iterations]
        assert last.nodes == M
        assert strategy.monitor.models is not None
        return strategy.monitor.models


def start() -> NDArray[np.float64]:
    return np.zeros((M, N))


W = oracle.metropolis(list(GRAPH.edges), M)


def averaged(pushed: tuple[NDArray[np.float64], NDArray[np.float64]]) -> NDArray[np.float64]:
    return pushed[0] / pushed[1]


FOUR, TWO = {"local_steps": 4, "num_iterations": 13}, {"local_steps": 2, "num_iterations": 13}
DENSE = {"bits": None, "step_gamma": 0.7, "num_iterations": 5}
HOPS = [[(i, (i + 2 ** (a % 3)) % M) for i in range(M)] for a in range(6)]
# fmt: off
LOOPS: list[tuple[str, dict[str, Any], Loop]] = [
    ("d-psgd", FOUR, lambda g, s: oracle.d_psgd(g, start(), [W] * 3, 0.1, 4)),
    ("d-psgd-dn", FOUR, lambda g, s: oracle.d_psgd(g, start(),
        [oracle.metropolis(list(s.method.graph(k).edges), M) for k in (4, 8, 12)], 0.1, 4)),
    ("dfedavgm", FOUR, lambda g, s: oracle.dfedavg(
        partial(oracle.local_momentum, g, eta=0.02, theta=0.9, K=4), start(), [W] * 3)),
    ("dfedsam", FOUR, lambda g, s: oracle.dfedavg(
        partial(oracle.local_ascent, g, eta=0.1, rho=0.05, K=4), start(), [W] * 3)),
    ("matcha", {"num_iterations": 11, "seed": 4}, lambda g, s: oracle.dfedavg(
        lambda X: X - 0.1 * g(X), start(),
        [s.activation.matrix(s.activation.active(4, k)) for k in range(1, 11)])),
    ("dp-dsgt", {"num_iterations": 13},
        lambda g, s: oracle.dp_dsgt(g, start(), W, 0.1, 12, lambda a, x: x)[0]),
    ("choco-sgd", {"local_steps": 1, **DENSE}, lambda g, s: oracle.choco(
        lambda X: X - 0.1 * g(X), start(), W, 0.7, 4, lambda sent, a: sent)),
    ("beer", DENSE, lambda g, s: oracle.beer(g, start(), W, 0.1, 0.7, 4, lambda x, v, a: (x, v))[0]),
    ("sgp", {"topology": DIRECTED, **FOUR}, lambda g, s: averaged(
        oracle.sgp(g, start(), [oracle.push_matrix(ARROWS, M)] * 3, 0.1, 4))),
    ("sgp", {"topology": "one-peer-exponential", **TWO}, lambda g, s: averaged(
        oracle.sgp(g, start(), [oracle.push_matrix(one, M) for one in HOPS], 0.1, 2))),
    ("sgp-dn", {"topology": "directed-out(2)", **TWO}, lambda g, s: averaged(oracle.sgp(g, start(),
        [oracle.push_matrix(sorted(s.method.graph(k).edges), M) for k in range(2, 13, 2)], 0.1, 2))),
]
# fmt: on


@pytest.mark.parametrize(("name", "parameters", "loop"), LOOPS)
def test_a_baseline_is_its_plain_loop(name: str, parameters: dict[str, Any], loop: Loop) -> None:
    data, strategy = Regressions(), make(name, monitor=Monitor(1), **parameters)
    found, expected = data.learn(strategy, 99), loop(data.gradients, strategy)
    if name.startswith("sgp"):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_a_rounds_record_is_one_look_at_the_iteration_that_it_is_labelled_with() -> None:
    data, ends, models = Regressions(), list[RoundEnd](), list[NDArray[np.float64]]()
    monitor = Monitor(1)

    def measure(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if monitor.after_event is None:
            return MetricRecord()
        look, W = monitor.after_event
        models.append(W)
        return look.metrics()

    # Models move at every iteration, nodes communicate at every fourth.
    strategy = make("d-psgd", monitor=monitor, local_steps=4, num_iterations=15, on_round_end=[ends.append])
    data.learn(strategy, 99, measure)
    assert [end.iterations for end in ends] == [0, 5, 9, 13]
    assert ends[0].central == {}
    losses = {look.iteration: look.loss for look in monitor.history}
    assert len(set(losses.values())) == len(losses) == 16
    for end, W in zip(ends[1:], models, strict=True):
        assert end.central == end.evaluate
        assert end.central["iteration"] == end.iterations
        assert end.central["loss"] == losses[end.iterations]
        mean = W.mean(axis=0)
        assert end.central["loss"] == pytest.approx(np.mean([p.value(mean) for p in data.problems]))


def test_no_look_of_an_earlier_event_stands_for_one_that_nobody_answered() -> None:
    fake, monitor, seen = fakes(), Monitor(3), list[tuple[int, bool]]()

    def silent(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "monitor" and len(seen) == 2:
            raise RuntimeError("no answer in round 2")
        return reply

    fake.sabotage = silent
    strategy = make("d-psgd", monitor=monitor, local_steps=1, dim=DIM)
    strategy.on_round_end = [lambda end: seen.append((end.round, monitor.after_event is not None))]
    run(strategy, fake, 3)
    assert seen == [(0, False), (1, True), (2, False), (3, True)]


def test_a_record_has_the_gradients_and_communications_of_a_node() -> None:
    data, ends = Regressions(), list[RoundEnd]()
    strategy = make(
        "d-psgd", local_steps=4, num_iterations=13, on_round_end=[ends.append], monitor=Monitor(1)
    )
    data.learn(strategy, 99)
    told = [(end.train["gradients"], end.train["communications"]) for end in ends[1:]]
    assert told == [(5.0, 1.0), (9.0, 2.0), (13.0, 3.0)]


def test_nodes_that_are_away_take_no_weight_with_them() -> None:
    data, ends, away = Regressions(), list[RoundEnd](), {3}
    # Without node 3 the others still reach each other.
    strategy = make(
        "sgp", topology="directed-exponential", local_steps=2, num_iterations=60, num_clients=M,
        min_available_nodes=M - 1,
    )  # fmt: skip
    grid = ChangingGrid(ceps_client(data.problem), M, away=away, strict=True)
    strategy.on_round_end = [ends.append]
    with flower_identity(1):
        strategy.start(grid, ArrayRecord(), num_rounds=99, timeout=60.0)
    states = {node.partition_id: node.state for node in grid._nodes.values() if node.partition_id not in away}
    weights = {i: state.config_records["ceps-state"]["push-weight"] for i, state in states.items()}
    assert sum(weights.values()) == pytest.approx(M - 1, abs=1e-12)
    assert min(weights.values()) > 0.3
    assert sum(end.train.get("lost-payloads", 0) for end in ends) > 0
    models = np.stack([view(s.array_records["ceps"]["x"]) / weights[i] for i, s in sorted(states.items())])
    there = [i for i in range(M) if i not in away]
    best, *_ = np.linalg.lstsq(data.A[there].reshape(-1, N), data.b[there].ravel(), rcond=None)
    assert np.linalg.norm(models.mean(axis=0) - best) < 0.05 * np.linalg.norm(best)
