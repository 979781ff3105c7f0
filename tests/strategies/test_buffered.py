"""Buffered rounds against the plain loop, and what faults, bounds, parts and a kill come to."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp import strategy as flower
from tests.exercises.test_objects_of_ones_own import Cosines, FedAdam
from tests.oracles import fedbuff as oracle
from tests.strategies.averaging import AVERAGING, NODES, OPTIONS, model, net, start, task
from tests.strategies.quadratic import Quadratics, initial, run
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.sim import Delay, FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import (
    Acknowledgements,
    Ask,
    Buffer,
    Compressed,
    Exchange,
    FedAvg,
    FedBAT,
    Feel,
    Method,
    Part,
    SDFeel,
    SecureSum,
    Stragglers,
    TooFewRepliesError,
)
from hedgerow.strategies.buffered import Held
from hedgerow.wire import HUB_TO_NODE, NODE_TO_HUB, Blocks, Layout, Purpose, generator, payload_bytes

SIZES, CENTRES, ETA = [30, 20, 10, 20, 15, 5], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.1
SECONDS = [1.0, 1.5, 2.0, 3.5, 5.0, 11.0]


def delays(seconds: Any = tuple(SECONDS)) -> dict[int, FaultModel]:
    return {i: FaultModel(delay=Delay("constant", (one,))) for i, one in enumerate(seconds)}


def buffered(
    buffer: Any,
    updates: int,
    faults: Any = None,
    *,
    problem: Quadratics | None = None,
    grid: Any = None,
    **options: Any,
) -> tuple[FedAvg, list[Any]]:
    """Return FedAvg with a buffer after a run on quadratics, and its rounds."""
    problem = problem or Quadratics(sizes=SIZES, centres=CENTRES)
    strategy = FedAvg(
        **{"num_clients": 6, "min_available_nodes": 6, "fraction_evaluate": 0.0, "local_steps": 2, **options},
        buffer=buffer,
    )
    _, ends = run(strategy, problem, updates, faults=delays() if faults is None else faults, grid=grid)
    return strategy, ends


def w(strategy: Method[Any]) -> Any:
    arrays = strategy.current_arrays()
    assert arrays is not None
    return arrays["w"].numpy()


def plain(buffer: Buffer, updates: int, **changes: Any) -> list[oracle.Update]:
    def trained(client: int, number: int, w: Any) -> Any:
        for _ in range(2):
            w = w - ETA * (w - CENTRES[client])
        return w

    def draw(free: list[int], count: int, sent: int) -> list[int]:
        stream = generator(0, round=sent, purpose=Purpose.BUFFER)
        return sorted(free[k] for k in stream.choice(len(free), count, replace=False))

    options: dict[str, Any] = {
        "weights": SIZES, "seconds": lambda client, number: SECONDS[client], "draw": draw,
        "factor": (lambda tau: 1.0) if buffer.staleness == "none" else (lambda tau: (1 + tau) ** -0.5),
        "concurrency": buffer.concurrency or 6,
    }  # fmt: skip
    return oracle.run(np.zeros(1), trained, K=buffer.size, updates=updates, **{**options, **changes})


@pytest.mark.parametrize(
    "buffer",
    [
        Buffer(1), Buffer(2), Buffer(3, staleness="none"), Buffer(6), Buffer(10), Buffer(2, 3),
        Buffer(4, 1), Buffer(3, 5),
    ],
    ids=str,
)  # fmt: skip
def test_the_updates_are_those_of_algorithm_1(buffer: Buffer) -> None:
    expected = plain(buffer, 12)
    strategy, ends = buffered(buffer, 12)
    for end, update in zip(ends[1:], expected, strict=True):
        stale = [tau for _, tau in update.taken]
        assert end.train["staleness-mean"] == pytest.approx(np.mean(stale), abs=0)
        assert end.train["staleness-max"] == max(stale)
    np.testing.assert_allclose(w(strategy), expected[-1].w, rtol=1e-12)
    # The introductions take time too.
    passed = [end.sim_seconds - ends[1].sim_seconds for end in ends[1:]]
    np.testing.assert_allclose(passed, [one.seconds - expected[0].seconds for one in expected], atol=1e-9)
    assert any(tau for one in expected for _, tau in one.taken) or buffer.concurrency == 1


def test_a_synchronous_round_lasts_on_the_same_clock_until_its_last_reply() -> None:
    for options in ({"engine_clock": True}, {}):
        _, ends = buffered(None, 4, **options)
        passed = np.diff([end.sim_seconds for end in ends[1:]])
        if options:
            np.testing.assert_allclose(passed, max(SECONDS), atol=1e-9)
        else:
            assert max(passed) < 1.0  # the paper's latency model knows no delays
    with pytest.raises(ValueError, match="stragglers must be None with engine_clock"):
        SDFeel(num_clients=6, num_servers=2, stragglers=Stragglers.parse("lasting(0.4,5)"), engine_clock=True)


def test_replies_of_one_instant_are_taken_in_the_order_of_partition_ids() -> None:
    buffer = Buffer(2)
    changes = {"seconds": lambda client, number: 1.0}
    expected = plain(buffer, 7, **changes)
    assert [one.taken for one in expected[:3]] == [[(0, 0), (1, 0)], [(2, 1), (3, 1)], [(4, 2), (5, 2)]]
    np.testing.assert_allclose(w(buffered(buffer, 7, delays([1.0] * 6))[0]), expected[-1].w, rtol=1e-12)


@pytest.mark.parametrize(
    "name", [name for name in AVERAGING if name not in ("SD-FEEL", "HierFAVG", "FedBAT")]
)
def test_every_method_with_a_lasting_model_is_synchronous_with_a_buffer_for_all(name: str) -> None:
    many = 3 if name == "FEEL" else NODES
    sync = played(name, None, rounds=3)
    same = played(name, many, rounds=3)
    # FedMUD's buffer has the mean of updates, eq. (6), and not the update of mean factors, which is equal
    # but for rounding where one factor is frozen.
    close = {"rtol": 1e-4, "atol": 1e-6} if name == "FedMUD" else {"rtol": 0, "atol": 0}
    np.testing.assert_allclose(model(same), model(sync), **close)
    stale = played(name, 2, faults=delays(), rounds=4)
    assert np.isfinite(model(stale)).all()


def played(name: str, buffer: Any, *, faults: Any = None, rounds: int = 4, **options: Any) -> Method[Any]:
    make, client = AVERAGING[name]
    if name == "FedMUD":
        options["sync"] = "dense"
    strategy = make(**{**OPTIONS, **options}, buffer=buffer)
    with InProcessGrid(client(task), NODES, faults=faults) as grid, flower_identity(1):
        start(strategy, grid, rounds)
    return strategy


# Faults


def test_a_lost_reply_costs_its_row_and_its_node_gets_new_work() -> None:
    def spoil(client: int, number: int, reply: RecordDict) -> RecordDict:
        if client == 1 and number == 2:
            raise RuntimeError("out of memory")
        if client == 2 and number == 1:
            reply["arrays"] = ArrayRecord({"w": Array(np.full(1, np.nan))})
        if client == 0 and number == 3:
            reply["arrays"] = ArrayRecord({"w": Array(np.zeros(3))})
        return reply

    buffer = Buffer(3)
    problem = Quadratics(sizes=SIZES, centres=CENTRES, sabotage=spoil)
    strategy, ends = buffered(buffer, 8, problem=problem)
    expected = plain(buffer, 8, lost=lambda client, number: (client, number) in {(1, 2), (2, 1), (0, 3)})
    np.testing.assert_allclose(w(strategy), expected[-1].w, rtol=1e-12)
    lost = sum((Counter(end.rejected) for end in ends[1:]), start=Counter[str]())
    assert lost == {"error 2": 1, "non-finite": 1, "wrong shape": 1}
    seen = [number for number, client in problem.seen if client == 1]
    assert seen == sorted(set(seen))
    assert len(seen) > 3


def test_a_node_that_never_answers_stops_no_update() -> None:
    faults = {**delays(), 5: FaultModel(dropout=1.0), 4: FaultModel(delay=Delay("constant", (1e6,)))}
    # They introduce themselves to nobody, either.
    strategy, _ = buffered(Buffer(4), 10, faults, num_clients=6, min_available_nodes=4, max_wait=20.0)
    assert strategy.completed_rounds == 10
    assert np.isfinite(w(strategy)).all()


def trains(message: Any) -> bool:
    return bool(message.metadata.message_type == "train")


class Untimed(InProcessGrid):
    """A grid with a node whose training replies never come, and, as devices, with no simulated times."""

    def timing(self, message_id: str) -> None:
        return None

    def pull_messages(self, message_ids: Any) -> Any:
        replies = super().pull_messages(message_ids)
        mute = self._all.at(2).node_id
        return [one for one in replies if not (trains(one) and one.metadata.src_node_id == mute)]


def test_a_message_that_expires_costs_its_row_where_nobody_knows_when_replies_are_due() -> None:
    strategy = FedAvg(
        num_clients=6, min_available_nodes=6, fraction_evaluate=0.0, local_steps=2, buffer=Buffer(10)
    )
    problem = Quadratics(sizes=SIZES, centres=CENTRES)
    grid = Untimed(problem.client_app(), 6, faults=delays())
    _, ends = run(strategy, problem, 6, timeout=12.0, grid=grid)
    assert strategy.completed_rounds == 6
    assert sum(end.rejected.get("no reply", 0) for end in ends) > 1


def test_an_update_to_which_nobody_replies_ends_the_run() -> None:
    def fail(client: int, number: int, reply: RecordDict) -> RecordDict:
        if number > 2:
            raise RuntimeError("gone")
        return reply

    problem = Quadratics(sizes=SIZES, centres=CENTRES, sabotage=fail)
    with pytest.raises(TooFewRepliesError, match=r"valid replies of \d+ after 3 tries \(\d+ x error 2\)"):
        buffered(Buffer(6), 9, problem=problem, quarantine_after=0)


def test_a_reply_of_an_earlier_version_than_the_bound_is_lost() -> None:
    _, free = buffered(Buffer(1), 30)
    _, bound = buffered(Buffer(1, max_staleness=4), 30)
    assert max(end.train["staleness-max"] for end in free[1:]) > 4
    assert max(end.train["staleness-max"] for end in bound[1:]) <= 4
    assert sum(end.rejected.get("too stale", 0) for end in bound) > 0
    assert not any(end.rejected for end in free)


def test_a_reply_to_another_message_than_the_last_is_stale() -> None:
    class Late(InProcessGrid):
        """Hands over each node's first reply in place of its second."""

        first: ClassVar[dict[int, Any]] = {}

        def pull_messages(self, message_ids: Any) -> Any:
            out = []
            for reply in super().pull_messages(message_ids):
                sender = reply.metadata.src_node_id
                if trains(reply) and sender in self.first and not isinstance(self.first[sender], int):
                    old, self.first[sender] = self.first[sender], 0
                    old.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
                    out.append(old)
                    continue
                if trains(reply):
                    self.first.setdefault(sender, reply)
                out.append(reply)
            return out

    problem = Quadratics(sizes=SIZES, centres=CENTRES)
    strategy = FedAvg(num_clients=6, min_available_nodes=6, fraction_evaluate=0.0, local_steps=2, buffer=2)
    _, ends = run(strategy, problem, 8, grid=Late(problem.client_app(), 6, faults=delays()))
    assert sum(end.rejected.get("stale", 0) for end in ends) >= 2


# Bounds and the ledger


def test_the_bound_on_updates_and_the_weights_hold() -> None:
    def explode(client: int, number: int, reply: RecordDict) -> RecordDict:
        if client == 3 and number > 3:
            reply["arrays"] = ArrayRecord({"w": Array(reply["arrays"]["w"].numpy() + 1e6)})
        return reply

    problem = Quadratics(sizes=SIZES, centres=CENTRES, sabotage=explode)
    strategy, ends = buffered(Buffer(3), 12, problem=problem)
    assert sum(end.rejected.get("update too large", 0) for end in ends) >= 1
    assert abs(w(strategy)[0]) < 10
    # A claim of a trillion examples counts ten medians.
    liar = Quadratics(sizes=[30, 20, 10, 20, 15, 10**6], centres=CENTRES)
    grid = liar.grid(delays())
    capped = FedAvg(num_clients=6, min_available_nodes=6, fraction_evaluate=0.0, local_steps=2, buffer=6)
    _, ends = run(capped, liar, 1, grid=grid)
    assert ends[1].train["weights-capped"] == 1


def test_the_ledger_has_the_bytes_of_each_message_once() -> None:
    problem = Quadratics(sizes=SIZES, centres=CENTRES)
    grid = RecordingGrid(problem.client_app(), 6, faults=delays())
    strategy, ends = buffered(Buffer(2), 9, problem=problem, grid=grid)
    sent, came = (
        [payload_bytes(content) for kind, _, content in passed if kind == "train"]
        for passed in (grid.sent, grid.replies)
    )
    down, up = (strategy.ledger.total(link) for link in (HUB_TO_NODE, NODE_TO_HUB))
    assert (down.messages, down.payload_bytes) == (len(sent), sum(sent))
    assert (up.messages, up.payload_bytes) == (len(came), sum(came))
    assert sum(end.sent for end in ends) == len(sent) > len(came) == sum(end.accepted for end in ends)
    modelled = strategy.ledger.by_link()
    assert modelled["cloud->client"].messages == len(sent)
    assert modelled["client->cloud"].messages == len(came)


# Evaluation


def test_nodes_that_work_are_not_asked_to_evaluate() -> None:
    _, ends = buffered(Buffer(2), 6, fraction_evaluate=1.0)
    assert all(end.evaluate["loss"] >= 0 for end in ends[1:])
    # Else each update would wait for the slowest node.
    assert ends[-1].sim_seconds - ends[1].sim_seconds < 2 * max(SECONDS)


# Parts, aggregators and server steps


def test_a_server_step_moves_by_the_mean_of_the_buffer_and_a_part_sees_its_updates() -> None:
    stepped = played("FedAvg", 2, faults=delays(), server_step=FedAdam())
    assert not np.array_equal(model(stepped), model(played("FedAvg", 2, faults=delays())))
    seen = []
    played("FedAvg", 2, faults=delays(), parts=[Cosines()], on_round_end=[seen.append])
    assert all(len(end.train["cosines"]) == 2 for end in seen[1:])


def test_a_rule_over_nodes_has_each_node_once_in_a_buffer() -> None:
    seen: list[list[int]] = []

    class Nodes(Part):
        name = "nodes"

        def learnt(self, exchange: Any, columns: Any, run: Any) -> None:
            seen.append(list(columns.nodes))

    played("FedAvg", 4, faults=delays(), rounds=6, parts=[Nodes()], aggregation="median")
    assert all(len(set(nodes)) == 4 for nodes in seen)
    seen.clear()
    played("FedAvg", 4, faults=delays(), rounds=6, parts=[Nodes()])
    assert any(len(set(nodes)) < 4 for nodes in seen)
    with pytest.raises(ValueError, match="buffer must have a size of at most 6, the nodes of a round"):
        played("FedAvg", 7, aggregation="median")


def test_error_feedback_conserves_what_it_cuts_off() -> None:
    """The sum of what nodes learnt is what the model has absorbed, and what they still keep."""
    whole = played("ef-fedavg", 3, faults=delays(), rounds=6, compressor="topk(0.1)")
    assert np.isfinite(model(whole)).all()
    (uplink,) = [part for part in whole.parts if isinstance(part, Acknowledgements)]
    assert whole.buffered is not None
    for node, last in uplink.acknowledged.items():
        flight = whole.buffered.flights.get(node)
        assert flight is None or flight.message.content["config"]["acknowledged"] == last


# Resumption


RESUMED: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"server_step": FedAdam()},
    "FEEL": {},
    "ef-fedavg": {"compressor": "topk(0.2)"},
    "FedMUD": {},
    "EF21-P": {"sync": "catchup"},
}
FAULTS: Mapping[str, Callable[[], Any]] = {
    "delays": delays,
    "none": FaultModel,
    "random": lambda: FaultModel(
        delay=Delay("exponential", (2.0,)), dropout=0.1, corrupt="nan", corrupt_rate=0.1
    ),
}


@pytest.mark.parametrize(
    ("name", "faults"),
    [*((name, "random") for name in RESUMED), ("FedAvg", "delays"), ("FedAvg", "none")],
)
def test_a_run_that_is_resumed_with_messages_in_flight_ends_as_one_that_is_not(
    name: str, faults: str
) -> None:
    make, client = AVERAGING[name]
    options = {**OPTIONS, **RESUMED[name], "max_wait": 50.0}
    if name == "FedMUD":
        options["sync"] = "dense"

    def begun(ends: list[Any]) -> tuple[Method[Any], InProcessGrid]:
        strategy = make(**options, buffer=Buffer(2), on_round_end=[ends.append])
        return strategy, InProcessGrid(client(task), NODES, faults=FAULTS[faults]())

    with flower_identity(1):
        whole: list[Any] = []
        through, grid = begun(whole)
        states = []
        through.on_round_end = [
            whole.append,
            lambda end: states.append((through.state_dict(), grid.state_dict()) if end.round else None),
        ]
        start(through, grid, 5)
        for stopped in (1, 3):
            ends: list[Any] = []
            again, grid = begun(ends)
            strategy_state, grid_state = states[stopped]
            again.load_state_dict(strategy_state)
            grid.load_state_dict(grid_state)
            start(again, grid, 5)
            np.testing.assert_array_equal(model(again), model(through))
            for one, other in zip(ends, whole[stopped + 1 :], strict=True):
                # The same messages are not booked twice.
                assert (one.train, one.sent, one.accepted, one.rejected, one.sim_seconds, one.by_link) == (
                    other.train,
                    other.sent,
                    other.accepted,
                    other.rejected,
                    other.sim_seconds,
                    other.by_link,
                )


def test_no_node_is_at_work_when_a_checkpoint_asks_for_its_state() -> None:
    at_work = []
    strategy = FedAvg(
        num_clients=6, min_available_nodes=6, fraction_evaluate=0.0, local_steps=2, buffer=Buffer(2)
    )
    strategy.idle_every = 3
    driver = strategy.buffered
    assert driver is not None
    strategy.on_round_end = [lambda end: at_work.append(len(driver.flights))]
    _, ends = run(strategy, Quadratics(sizes=SIZES, centres=CENTRES), 7, faults=delays())
    assert at_work[3] == at_work[6] == 0
    assert min(at_work[1], at_work[2]) > 0
    # Replies that came meanwhile are in the buffer, and count once.
    assert sum(end.sent for end in ends) == sum(end.accepted for end in ends) + at_work[-1]
    down, up = (strategy.ledger.total(link).messages for link in (HUB_TO_NODE, NODE_TO_HUB))
    assert (down, up) == (sum(end.sent for end in ends), sum(end.accepted for end in ends))


# Refusals


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: SDFeel(num_servers=2, num_clients=6, buffer=2), "each of its 2 edge servers has a model"),
        (lambda: FedAvg(participation=0.5, buffer=2), "participation is drawn for a round"),
        (
            lambda: FedAvg(num_clients=6, min_available_nodes=6, secure_sum=SecureSum(), buffer=2),
            "masks of a secure sum",
        ),
        (lambda: AVERAGING["FedMUD"][0](buffer=2), "its factors are drawn anew every 1 rounds"),
        (
            lambda: AVERAGING["FedMUD"][0](buffer=2, sync="dense", reset_interval=3),
            "its factors are drawn anew",
        ),
        (lambda: AVERAGING["FedLMT"][0](buffer=2, sync="broadcast"), "Downlink needs all replies of a round"),
        (
            lambda: FedBAT.for_model(net(), ratio=0.02, budget="layer", buffer=2),
            "each round draws the weights that move",
        ),
        (lambda: FedAvg(parts=[Waits()], buffer=2), "Waits needs all replies of a round at once"),
        (lambda: Handles(buffer=2), "its class handles the messages of a round itself"),
    ],
)
def test_what_cannot_have_a_buffer_is_refused_with_the_reason(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"buffer must be None with .*: {why}"):
        make()


class Waits(Part):
    name = "waits"

    def arrived(self, messages: Any, exchange: Any, run: Any) -> Any:
        return list(messages)


class Handles(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return super().aggregate_train(server_round, replies)


class Twice(FedAvg):
    """A round of two exchanges."""

    def round(self, state: Any, run: Any) -> Any:
        state = yield from super().round(state, run)
        return (yield from super().round(state, run))


class Asks(FedAvg):
    """A round that begins with an exchange that trains nothing."""

    def round(self, state: Any, run: Any) -> Any:
        from hedgerow.strategies import Ask, Exchange

        yield Exchange("query.look", [Ask([0], None)], reads=lambda node, content: 0, over_grid=True)
        return (yield from super().round(state, run))


def test_a_round_of_more_than_one_exchange_is_refused() -> None:
    problem = Quadratics(sizes=SIZES, centres=CENTRES)
    options: dict[str, Any] = {"num_clients": 6, "min_available_nodes": 6, "fraction_evaluate": 0.0}
    with pytest.raises(ValueError, match="buffer must be None with Asks: a round must begin with one train"):
        run(Asks(**options, buffer=2), problem, 2)
    assert not problem.seen
    with pytest.raises(ValueError, match="buffer must be None with Twice: a round must make one exchange"):
        run(Twice(**options, buffer=2), problem, 2)


def test_a_strategy_around_one_with_a_buffer_is_refused() -> None:
    problem = Quadratics(sizes=SIZES, centres=CENTRES)
    inner = FedAvg(num_clients=6, min_available_nodes=6, fraction_evaluate=0.0, buffer=2)
    around = flower.DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 1.0, 6)
    for strategy in (around, Compressed(inner, "topk(0.5)")):
        with flower_identity(1), pytest.raises(ValueError, match="buffer must be None for FedAvg if another"):
            strategy.start(problem.grid(), initial(), num_rounds=1)


@pytest.mark.parametrize("value", [0, -1, True, "two", 1.5])
def test_a_buffer_must_be_a_number_of_replies(value: Any) -> None:
    with pytest.raises(ValueError, match="buffer must be None, an integer >= 1, or a Buffer, got"):
        Feel(buffer=value)


@pytest.mark.parametrize("is_change", [False, True])
def test_a_statistic_of_a_stale_reply_is_its_value_and_no_update(is_change: bool) -> None:
    """A sum of updates could make a variance negative."""
    sent, start = np.array([1.0, 1.0]), np.array([5.0, 0.2])
    reply = np.array([2.0, 0.1])
    held = Held(0, 0, reply - sent if is_change else reply, sent, is_change, 1.0, None)  # type: ignore[arg-type]
    for changes in (False, True):
        moved = held.moved(start, 0.5, changes, np.array([1])) + (start if changes else 0.0)
        np.testing.assert_allclose(moved, [5.5, 0.1])


def test_the_statistics_of_a_row_are_those_of_its_model_beside_other_blocks_too() -> None:
    keys = {"a.weight": (3,), "a.running_var": (2,), "b": (2,)}
    layout = Layout(tuple(keys), tuple(keys.values()), ("float32",) * 3)
    federation = FedAvg(min_available_nodes=2).federation
    federation.layout = layout
    ask = Ask([0, 1], np.zeros(7))
    assert Exchange("train", [ask]).statistics(federation).tolist() == [3, 4]
    blocks = Blocks({"model": layout, "control": layout})
    assert Exchange("train", [ask], blocks=blocks).statistics(federation).tolist() == [3, 4]
