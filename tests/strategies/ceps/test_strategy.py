"""CEPS's server: events, isolation, counts, failures, the monitor and its end, resume."""

import math
from collections.abc import Iterator
from typing import Any

import networkx as nx
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.ceps import Setting, trajectory
from tests.strategies.gossip.nodes import DIM, Nodes, Spy, payloads_within, run

from hedgerow.clients import LinearRegression, ceps_client
from hedgerow.sim import Delay, FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import (
    CEPS,
    DivergenceError,
    Monitor,
    OneBitCode,
    Privacy,
    TooFewRepliesError,
)
from hedgerow.strategies.ceps.strategy import neighbourhood_graph, participants
from hedgerow.strategies.gossip import SET_UP
from hedgerow.strategies.gossip.method import coded_sizes
from hedgerow.wire import Purpose, generator, parse_codec

M = 6
RING = nx.cycle_graph(M)
KAPPAS = [2, 3, 2, 4, 3, 5]


def both(i: int, k: int) -> list[int]:
    return sorted([(i - 1) % M, (i + 1) % M])


def alternating(i: int, k: int) -> list[int]:
    return [(i + (1 if k % 2 else -1)) % M]


def ceps(**parameters: Any) -> CEPS:
    defaults: dict[str, Any] = {"dim": DIM, "sparsity": 3, "topology": RING, "min_available_nodes": M}
    # 64 signs take the 16 bytes of these nodes' payloads.
    return CEPS(**{**defaults, "measurements": 64, "interval": (1, 6), **parameters})


def nodes(**parameters: Any) -> Nodes:
    return Nodes(**{"kappas": KAPPAS, "want": alternating, **parameters})


# Events


def test_events_are_the_iterations_at_which_a_node_is_due() -> None:
    _, ends, _ = run(ceps(num_iterations=11), nodes(), 100)
    assert [end.train["iteration"] for end in ends[1:]] == [2, 3, 4, 5, 6, 8, 9, 10]
    assert [end.train["receivers"] for end in ends[1:]] == [2, 2, 3, 1, 4, 3, 2, 3]
    assert [end.iterations for end in ends] == [0, 3, 4, 5, 6, 7, 9, 10, 11]


@settings(max_examples=10, deadline=None)
@given(kappas=st.lists(st.integers(1, 6), min_size=3, max_size=5))
def test_all_publishing_of_an_iteration_comes_before_any_update_of_it(kappas: list[int]) -> None:
    size = len(kappas)
    fake = Nodes(kappas, lambda i, k: [(i + 1) % size])
    strategy = ceps(topology=nx.complete_graph(size), min_available_nodes=size, num_iterations=13)
    run(strategy, fake, 100)
    order = [(event.k, event.kind) for event in fake.trace if event.kind != "hello"]
    assert order == sorted(order)


def test_num_rounds_limits_the_events_and_num_iterations_the_run() -> None:
    assert len(run(ceps(), nodes(), 4)[1]) == 1 + 4
    strategy = ceps(num_iterations=3)
    assert [end.train["iteration"] for end in run(strategy, nodes(), 50)[1][1:]] == [2]
    assert strategy.finished


def test_a_round_tells_the_iterations_at_which_the_run_ends() -> None:
    assert {end.total_iterations for end in run(ceps(num_iterations=11), nodes(), 100)[1]} == {11}
    assert {end.total_iterations for end in run(ceps(), nodes(), 4)[1]} == {None}


def test_a_run_that_ends_before_anybody_is_due_has_no_event() -> None:
    strategy = ceps(num_iterations=min(KAPPAS))
    assert [end.round for end in run(strategy, nodes(), 50)[1]] == [0]
    assert (strategy.finished, strategy.completed_rounds) == (True, 0)


@pytest.mark.parametrize(("codec", "participation"), [("dense64", 1.0), ("sparse64", 1.0), ("dense64", 0.5)])
def test_with_nodes_that_learn_it_is_the_papers_loop_bit_for_bit(codec: str, participation: float) -> None:
    rng = np.random.default_rng(3)
    truth = np.array([1.5, 0, 0, -0.8, 0, 0, 0, 0.6, 0, 0])
    problems = []
    for _ in range(M):
        A = rng.standard_normal((25, 10))
        problems.append(LinearRegression(A, A @ truth + 0.2 * rng.standard_normal(25)))
    monitor = Monitor(3)
    strategy = ceps(
        dim=10, codec=codec, participation=participation, interval=(2, 5), sigma_rule="fixed_c", c=1.5,
        monitor=monitor, num_iterations=30, seed=8,
    )  # fmt: skip
    client = ceps_client(lambda context: problems[int(context.node_config["partition-id"])])
    grid = InProcessGrid(client, M, strict=True)
    with flower_identity(1):
        strategy.start(grid, ArrayRecord(), num_rounds=999)

    def select(i: int, k: int) -> list[int]:
        stream = generator(8, round=k, partition_id=i, purpose=Purpose.SUBSET)
        drawn = stream.choice(both(i, k), participants(participation, 2), replace=False)
        return both(i, k) if participation == 1 else drawn.tolist()

    setting = Setting(
        gradients=[problem.gradient for problem in problems],
        n=10,
        s=3,
        mu=0.1,
        kappa=[int(generator(8, partition_id=i, purpose=Purpose.SCHEDULE).integers(2, 6)) for i in range(M)],
        sigma=[1.5] * M,
        neighbours=[both(i, 0) for i in range(M)],
        select=select,
        fixed_c=True,
    )
    history = trajectory(setting, 30)
    assert monitor.models is not None
    assert np.array_equal(monitor.models, history[30])
    for look in (monitor.history[7], monitor.history[30]):
        stack = history[look.iteration]
        mean = stack.mean(axis=0)
        assert look.consensus == pytest.approx(np.sum((stack - mean) ** 2) / (3 * M), rel=1e-12)
        assert look.loss == pytest.approx(np.mean([problem.value(mean) for problem in problems]), rel=1e-12)


# Isolation


def test_a_node_gets_exactly_what_its_chosen_neighbours_sent_for_this_iteration() -> None:
    fake = nodes()
    run(ceps(), fake, 30)
    states: dict[tuple[int, int], float] = {}
    for event in fake.events("update"):
        assert sorted(event.received) == alternating(event.node, event.k)
        for sender, (tag, k, x) in event.received.items():
            assert (tag, k) == (sender, event.k)
            assert states.setdefault((sender, k), x) == x


def test_no_message_holds_an_array_or_a_list_as_long_as_a_model() -> None:
    _, _, grid = run(ceps(), nodes(), 20)
    contents = [content for _, _, content in grid.sent + grid.replies]
    assert len(contents) > 100
    for content in contents:
        assert not content.array_records
        values = [
            v
            for r in (content.config_records, content.metric_records)
            for c in r.values()
            for v in c.values()
        ]
        assert all(len(value) < DIM for value in values if isinstance(value, list | bytes | str))


def test_the_strategy_keeps_no_payload_after_an_event() -> None:
    strategy = ceps()
    run(strategy, nodes(), 5)
    strategy.on_round_end = []
    assert payloads_within(strategy) == []


def test_a_checkpoint_holds_no_payload_and_no_model() -> None:
    strategy = ceps(monitor=Monitor(3))
    run(strategy, nodes(), 5)

    def leaves(value: Any) -> Iterator[Any]:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        if parts is None:
            yield value
        else:
            for part in parts:
                yield from leaves(part)

    kinds = {type(leaf) for leaf in leaves(strategy.state_dict())}
    assert kinds <= {int, float, str, bool, type(None)}


def test_a_reply_with_arrays_is_not_used() -> None:
    def leak(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "update" and i == 0:
            reply["model"] = ArrayRecord({"w": Array(np.zeros(DIM))})
        return reply

    _, ends, _ = run(ceps(), nodes(sabotage=leak), 1)
    assert ends[1].rejected == {"bad arrays": 1}


def test_settings_are_told_once_and_updates_carry_the_iteration_alone() -> None:
    fake = nodes()
    run(ceps(participation=0.5, interval=(2, 5), seed=7), fake, 12)
    hellos = {event.node: event.config for event in fake.events("hello")}
    assert len(fake.events("hello")) == M
    assert hellos[2]["neighbours"] == [1, 3]
    told = {"method": "ceps", "run-seed": 7, "num-nodes": M, "r": 0.5, "kappa-low": 2, "kappa-high": 5}
    assert told.items() <= hellos[2].items()
    assert {tuple(event.config) for event in fake.events("update")} == {("iteration",)}


def test_the_noise_seed_is_told_to_nobody() -> None:
    fake = nodes()
    privacy = Privacy("sound", 1.0, 1e-6, clip=2.0)
    run(ceps(sigma_rule="fixed_c", privacy=privacy), fake, 1)
    (hello, *_) = fake.events("hello")
    assert not [key for key in hello.config if "noise" in key]
    assert {"privacy": "sound", "epsilon": 1.0, "delta": 1e-6, "clip": 2.0}.items() <= hello.config.items()


# Counts


def test_seeds_are_counted_once_for_each_directed_edge() -> None:
    one_bit, literal, sparse = ceps(), ceps(code=OneBitCode(expand="literal")), ceps(codec="sparse64")
    for strategy in (one_bit, literal, sparse):
        run(strategy, nodes(), 3)
    assert one_bit.ledger.by_link()[SET_UP].payload_bytes == 8 * 2 * M
    assert literal.ledger.by_link()[SET_UP].payload_bytes == 16 * 2 * M
    assert one_bit.ledger.by_link()[SET_UP].nominal_bits == 0
    assert SET_UP not in sparse.ledger.by_link()


def test_what_nodes_tell_is_averaged_by_examples() -> None:
    fake = nodes()
    _, ends, _ = run(ceps(), fake, 1)
    told = {0: 10, 2: 12}
    xs = {i: float(np.mean([i, alternating(i, 2)[0]])) + i / 1000 for i in told}
    expected = sum(told[i] * xs[i] for i in told) / sum(told.values())
    assert ends[1].train["x"] == pytest.approx(expected, rel=1e-12)


# Messages' sizes


@pytest.mark.parametrize(
    "codec", ["1bcs", "dense64", "dense32", "sparse64", "sparse32", "sparse16", "quantised5"]
)
@pytest.mark.parametrize("n", [1, 2, 37, 1000])
def test_sizes_are_those_of_the_codec_that_the_relay_does_not_have(codec: str, n: int) -> None:
    s, d = min(n, 7), 33
    sizes, real = coded_sizes(codec, n, s, d), parse_codec(codec, s=s, d=d)
    assert sizes.message_bits == real.bits(n)
    largest = np.where(np.arange(n) < s, 1.0, 0.0)
    assert sizes.max_bytes == len(real.encode(largest, (1,)))


# Failures


def test_a_lost_update_is_a_missed_communication_and_no_event_is_repeated() -> None:
    def fail(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "update" and i == 0:
            raise RuntimeError("no")
        return reply

    fake = nodes(kappas=[2] * M, want=both, sabotage=fail)
    _, ends, _ = run(ceps(quarantine_after=0), fake, 4)
    assert [end.train["missed"] for end in ends[1:]] == [1, 2, 3, 4]
    assert [event.k for event in fake.events("update") if event.node == 0] == [2, 4, 6, 8]


def test_a_node_whose_neighbours_all_fail_has_missed_a_communication() -> None:
    def fail(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "publish" and i in (1, 5):
            raise RuntimeError("no")
        return reply

    fake = nodes(kappas=[2] * M, want=both, sabotage=fail)
    _, ends, _ = run(ceps(), fake, 2)
    assert [end.train["missed"] for end in ends[1:]] == [1, 2]
    assert [end.train["lost-payloads"] for end in ends[1:]] == [2, 2]
    assert all(event.received == {} for event in fake.events("update") if event.node == 0)


def test_events_without_any_update_end_the_run() -> None:
    def fail(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "update":
            raise RuntimeError("no")
        return reply

    with pytest.raises(TooFewRepliesError, match="Event 4: 0 valid updates"):
        run(ceps(max_repeats=3), nodes(sabotage=fail), 50)


@pytest.mark.parametrize("quarantine_after", [0, 3])
def test_a_node_that_fails_alone_at_most_events_does_not_end_the_run(quarantine_after: int) -> None:
    """It is due at every iteration, the others at every twelfth: eleven of its failures are in a row."""

    def fail(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "update" and i == 2:
            raise RuntimeError("no")
        return reply

    fake = nodes(kappas=[12, 12, 1, 12, 12, 12], want=both, sabotage=fail)
    strategy = ceps(interval=(1, 12), num_iterations=40, quarantine_after=quarantine_after)
    run(strategy, fake, 100)
    assert [event.k for event in fake.events("update") if event.node == 0] == [12, 24, 36]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"kappa": 1}, "bad hello"),
        ({"kappa": 7, "next": 7}, "bad hello"),
        ({"next": 0}, "bad next"),
        ({"next": 3}, "bad next"),
        ({"want": [1, 1]}, "bad next"),
        ({"want": [3]}, "bad next"),
        ({"want": ["1"]}, "bad next"),
    ],
)
def test_a_hello_is_held_against_the_settings(told: dict[str, Any], reason: str, caplog: Any) -> None:
    def lie(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "hello" and i == 0:
            reply["hello"] = ConfigRecord({**reply["hello"], **told})  # type: ignore[dict-item]
        return reply

    fake = nodes(kappas=[2] * M, want=both, sabotage=lie)
    _, ends, _ = run(ceps(interval=(2, 6)), fake, 3)
    assert len(ends) == 4
    assert not [event for event in fake.events("update") if event.node == 0]
    assert reason in caplog.text


def test_a_single_lost_event_does_not_count_for_long() -> None:
    lost = iter([True, False] * 50)

    def fail(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "update" and next(lost):
            raise RuntimeError("no")
        return reply

    fake = Nodes([1, 50], lambda i, k: [1 - i], sabotage=fail)
    strategy = CEPS(dim=DIM, sparsity=3, min_available_nodes=2, max_repeats=1)
    assert len(run(strategy, fake, 20)[1]) == 21


def test_nodes_that_do_not_know_the_method_are_named() -> None:
    def fail(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "hello":
            raise RuntimeError("no")
        return reply

    with pytest.raises(TooFewRepliesError, match=r"query\.hello"):
        run(ceps(), nodes(sabotage=fail), 5)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (ConfigRecord({"next": 1, "want": [1]}), "bad next"),
        (ConfigRecord({"next": "soon", "want": [1]}), "bad next"),
        (ConfigRecord({"next": 9, "want": 1}), "bad next"),
        (ConfigRecord(), "bad next"),
    ],
)
def test_an_update_without_a_next_communication_is_not_used(record: ConfigRecord, reason: str) -> None:
    def other(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "update" and i == 0:
            reply["next"] = record
        return reply

    _, ends, _ = run(ceps(), nodes(sabotage=other), 2)
    assert ends[1].rejected == {reason: 1}


def test_a_node_that_greets_late_joins_in() -> None:
    refusals = iter([True, True])

    def late(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "hello" and i == 4 and next(refusals, False):
            raise RuntimeError("not yet")
        return reply

    fake = nodes(kappas=[2] * M, want=both, sabotage=late)
    run(ceps(), fake, 4)
    assert [event.k for event in fake.events("update") if event.node == 4] == [6, 8]


def test_a_node_that_is_new_is_told_its_settings_and_joins_at_its_next_communication() -> None:
    first, fake = ceps(), nodes(kappas=[2] * M, want=both)
    _, before, grid = run(first, fake, 3)
    state = first.state_dict()
    state["method"]["appointments"]["3"]["node_id"] = 1
    second = ceps()
    second.load_state_dict(state)
    fake.trace.clear()
    _, after, _ = run(second, fake, 5, grid=grid)
    assert [event.node for event in fake.events("hello")] == [3]
    assert [event.k for event in fake.events("update") if event.node == 3] == [8, 10]
    assert [end.train["missed"] for end in before[1:] + after] == [0] * 5


def test_a_node_that_lost_its_state_under_its_old_id_is_told_its_settings_again_and_counted() -> None:
    fake, strategy = nodes(kappas=[2] * M, want=both), ceps()
    grid = Spy(fake)
    (restarted,) = (node for node in grid._nodes.values() if node.partition_id == 3)
    strategy.on_round_end = [lambda end: restarted.state.clear() if end.round == 2 else None]
    _, ends, _ = run(strategy, fake, 5, grid=grid)
    assert [event.node for event in fake.events("hello")] == [*range(M), 3]
    assert [event.k for event in fake.events("update") if event.node == 3] == [2, 4, 8, 10]
    assert [end.rejected for end in ends[1:]] == [{}, {}, {"error 2": 1}, {}, {}]
    assert [end.train["restarted"] for end in ends[1:]] == [0, 0, 0, 1, 1]


def test_a_node_hears_the_first_that_reply_where_stragglers_are_left_out() -> None:
    star = nx.star_graph(4)
    fake = Nodes([2, 50, 50, 50, 50], lambda i, k: [])
    delays = {i: FaultModel(delay=Delay("constant", (2.0 * i,))) for i in range(1, 5)}
    strategy = ceps(topology=star, participation=0.5, stragglers=True, min_available_nodes=5)
    _, ends, _ = run(strategy, fake, 1, faults=delays, timeout=1000.0)
    (event,) = fake.events("update")
    assert sorted(event.received) == [1, 2]
    assert ends[1].train["missed"] == 0
    assert fake.events("hello")[0].config["ask"] == "all"


# Monitor


def test_the_monitor_sees_every_iteration_and_changes_nothing() -> None:
    plain, seen = nodes(), nodes()
    run(ceps(num_iterations=13), plain, 100)
    strategy = ceps(num_iterations=13, monitor=Monitor(3))
    _, ends, _ = run(strategy, seen, 100)
    assert strategy.monitor is not None
    assert [look.iteration for look in strategy.monitor.history] == list(range(14))
    updates = [[vars(e) for e in one.events("update")] for one in (plain, seen)]
    assert updates[0] == updates[1]
    assert ends[1].evaluate["iteration"] == ends[1].iterations == 3


def test_the_monitor_measures_consensus_and_both_objectives() -> None:
    monitor = Monitor(3)
    strategy = ceps(monitor=monitor)
    run(strategy, nodes(), 1)
    x = np.arange(M, dtype=float)
    first = monitor.history[0]
    assert first.consensus == pytest.approx(DIM * np.sum((x - x.mean()) ** 2) / (3 * M), rel=1e-12)
    assert first.local_loss == pytest.approx(np.mean(x**2))
    assert first.loss == pytest.approx(np.mean(x) ** 2)


def test_the_run_stops_when_the_rule_holds_and_everybody_has_communicated() -> None:
    strategy = ceps(monitor=Monitor(3, tol=1e9))
    _, ends, _ = run(strategy, nodes(), 100)
    assert strategy.monitor is not None
    # The slowest node communicates first at iteration 5; the rule held all along.
    assert strategy.monitor.stopped_at == 6
    assert ends[-1].train["iteration"] == 5
    assert strategy.finished


def test_a_diverging_run_ends_with_an_error() -> None:
    def grow(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "monitor":
            reply["arrays"] = ArrayRecord({"w": Array(np.full(DIM, 100.0 * i))})
        return reply

    with pytest.raises(DivergenceError, match="larger c"):
        run(ceps(monitor=Monitor(3)), nodes(sabotage=grow), 5)


@pytest.mark.parametrize("liars", range(1, M))
def test_a_reply_that_is_not_finite_costs_the_monitor_its_own_row(liars: int) -> None:
    def told(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "monitor" and i < liars:
            reply["arrays"] = ArrayRecord({"w": Array(np.full(DIM, math.nan))})
        return reply

    honest, lied_to = Monitor(3), Monitor(3)
    run(ceps(monitor=honest), nodes(), 5)
    _, rounds, _ = run(ceps(monitor=lied_to), nodes(sabotage=told), 5)
    assert [look.nodes for look in lied_to.history] == [look.nodes - liars for look in honest.history]
    assert all(math.isfinite(look.loss) for look in lied_to.history)
    counted = sum(end.evaluate.get("left-out", 0) for end in rounds)
    assert counted == liars * len(lied_to.history)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e200])
def test_it_takes_most_models_out_of_bounds_to_be_divergence(value: float) -> None:
    def grow(liars: int) -> Any:
        def told(kind: str, i: int, reply: RecordDict) -> RecordDict:
            if kind == "monitor" and i < liars:
                reply["arrays"] = ArrayRecord({"w": Array(np.full(DIM, value))})
                reply["metrics"] = MetricRecord(
                    {"num-examples": 1, "objective": value, "mean-objective": value}
                )
            return reply

        return told

    with pytest.raises(DivergenceError):
        run(ceps(monitor=Monitor(3)), nodes(sabotage=grow(M)), 5)
    honest, lied_to = Monitor(3), Monitor(3)
    run(ceps(monitor=honest), nodes(), 5)
    run(ceps(monitor=lied_to), nodes(sabotage=grow(1)), 5)
    assert [look.nodes for look in lied_to.history] == [look.nodes - 1 for look in honest.history]
    assert all(math.isfinite(look.loss) and look.consensus < 1e3 for look in lied_to.history)


def test_the_nodes_own_disagreement_guards_a_run_without_monitor() -> None:
    def told(value: float, count: int) -> Any:
        def tell(kind: str, i: int, reply: RecordDict) -> RecordDict:
            if kind == "update" and i < count:
                reply["metrics"] = MetricRecord({"num-examples": 1, "disagreement": value})
            return reply

        return tell

    with pytest.raises(DivergenceError, match="disagreement"):
        run(ceps(), nodes(kappas=[2] * M, sabotage=told(1e4, M)), 5)
    assert len(run(ceps(), nodes(kappas=[2] * M, sabotage=told(1e4, 1)), 5)[1]) == 6


# Privacy


def test_the_accountant_counts_the_node_that_communicates_most() -> None:
    privacy = Privacy("sound", 0.5, 1e-5)
    strategy = ceps(sigma_rule="fixed_c", privacy=privacy, interval=(2, 5))
    _, ends, _ = run(strategy, nodes(), 5)
    assert strategy.iterations == 7
    assert strategy.privacy_report() == privacy.report(4, numerical=True)
    assert ends[-1].train["epsilon"] == privacy.report(4).epsilon


def test_a_node_releases_a_gradient_whenever_it_begins_and_one_an_update() -> None:
    assert ceps(privacy=Privacy("paper", 0.5, 0.5)).exposure.count(3, 4, 100) == 7


def test_the_papers_noise_is_reported_as_no_guarantee() -> None:
    strategy = ceps(privacy=Privacy("paper", 0.5, 0.5))
    _, ends, _ = run(strategy, nodes(), 3)
    assert ends[-1].train["epsilon"] == math.inf
    assert ends[-1].train["unprotected-kept-gradients"] == 1
    assert str(strategy.privacy_report()).startswith("no guarantee")


# Parameters


def test_a_global_model_is_refused() -> None:
    arrays = ArrayRecord({"w": Array(np.zeros(3))})
    with flower_identity(1), pytest.raises(ValueError, match="models live on the nodes"):
        ceps().start(Spy(nodes()), arrays, num_rounds=1)


@pytest.mark.parametrize(
    ("share", "degree", "count"), [(0.2, 8, 2), (0.2, 16, 3), (0.01, 5, 1), (1.0, 7, 7), (0.5, 0, 0)]
)
def test_self_counts_in_addition_to_the_participants(share: float, degree: int, count: int) -> None:
    assert participants(share, degree) == count


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 11, 32, 64])
def test_the_default_graph_is_regular_of_a_quarter_of_the_nodes(size: int) -> None:
    graph = neighbourhood_graph(None, size, seed=1)
    degrees = {degree for _, degree in graph.degree}
    assert len(degrees) == 1
    assert nx.is_connected(graph)
    if size >= 8:
        assert abs(degrees.pop() - size / 4) < 1.3


def test_a_second_start_begins_anew() -> None:
    strategy = ceps()
    run(strategy, nodes(), 5)
    bits = strategy.progress().bits
    run(strategy, nodes(), 5)
    assert strategy.progress().bits == bits
    assert strategy.completed_rounds == 5
