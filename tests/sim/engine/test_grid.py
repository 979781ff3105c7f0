"""The in-process engine does what Flower's engines do, only sooner."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.sim import Delay, FaultModel, InProcessGrid
from hedgerow.sim import flower_identity as identity
from hedgerow.sim.engine import grid as engine
from hedgerow.sim.engine._compat import SUPERLINK_NODE_ID
from hedgerow.wire import Call

pytestmark = pytest.mark.usefixtures("flower_identity")

Handler = Callable[[Message, Context], Any]


def content(value: float = 0.0, **config: Any) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord([np.full(3, value)]), "config": ConfigRecord(config)})


def messages(grid: Grid, message_type: str = "train", records: RecordDict | None = None) -> list[Message]:
    records = records or content()
    return [Message(records, node_id, message_type) for node_id in grid.get_node_ids()]


def app_of(handler: Handler) -> ClientApp:
    app = ClientApp()
    app.train()(handler)
    return app


def answer_with(context: Context, message: Message, **metrics: float) -> Message:
    record = MetricRecord({"partition-id": int(context.node_config["partition-id"]), **metrics})
    return Message(RecordDict({"metrics": record}), reply_to=message)


def by_partition(replies: Sequence[Message], key: str) -> dict[int, Any]:
    metrics = [reply.content["metrics"] for reply in replies if reply.has_content()]
    return {int(m["partition-id"]): m[key] for m in sorted(metrics, key=lambda m: m["partition-id"])}


def count(message: Message, context: Context) -> Message:
    """Count this node's messages in its state."""
    calls = int(context.state["count"]["calls"]) + 1 if "count" in context.state else 1
    context.state["count"] = MetricRecord({"calls": calls})
    return answer_with(context, message, calls=calls)


class BatchedApp(ClientApp):
    """Counts its batches; the one-by-one path does the same arithmetic."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batches: list[list[int]] = []
        self.bad: dict[int, Exception] = {}
        self.explodes = False
        self.train()(self._one)
        self.evaluate()(self._one)

    def batch_handler(self, message_type: str) -> Any:
        return self._many if message_type in ("train", "evaluate") else None

    def _one(self, message: Message, context: Context) -> Message:
        answer = self._work(Call(message.content, context, message.metadata.message_type))
        if isinstance(answer, Exception):
            raise answer
        return Message(answer, reply_to=message)

    def _many(self, calls: Sequence[Call]) -> list[RecordDict | Exception]:
        self.batches.append([call.partition_id for call in calls])
        answers = [self._work(call) for call in calls]
        if self.explodes:
            raise RuntimeError("the whole batch")
        return answers

    def _work(self, call: Call) -> RecordDict | Exception:
        calls = call.context.state.get("count", MetricRecord({"calls": 0}))["calls"] + 1
        call.context.state["count"] = MetricRecord({"calls": calls})
        if call.partition_id in self.bad:
            return self.bad[call.partition_id]
        arrays = call.content["arrays"].to_numpy_ndarrays()
        return RecordDict(
            {
                "arrays": ArrayRecord([array * calls + call.partition_id for array in arrays]),
                "metrics": MetricRecord({"partition-id": call.partition_id, "calls": calls}),
            }
        )


# Flower's own apps


def test_a_legacy_client_fn_runs() -> None:
    from flwr.client import NumPyClient

    class Client(NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            return [array + 1 for array in parameters], 1, {}

    def client_fn(context: Context) -> Any:
        return Client().to_client()

    app = ClientApp(client_fn=client_fn)
    records = RecordDict({"fitins.parameters": ArrayRecord([np.zeros(2)]), "fitins.config": ConfigRecord({})})
    grid = InProcessGrid(app, 2)
    replies = grid.send_and_receive(messages(grid, records=records))
    for reply in replies:
        np.testing.assert_array_equal(reply.content["fitres.parameters"].to_numpy_ndarrays()[0], [1, 1])


# Nodes


def test_node_config_carries_the_partition_and_what_is_given() -> None:
    seen: dict[int, Any] = {}

    def look(message: Message, context: Context) -> Message:
        seen[int(context.node_config["partition-id"])] = dict(context.node_config)
        assert context.node_id == message.metadata.dst_node_id
        return answer_with(context, message)

    grid = InProcessGrid(app_of(look), 2, node_configs=[{"role": "edge"}, {"role": "leaf"}])
    grid.send_and_receive(messages(grid))
    assert seen == {
        0: {"role": "edge", "partition-id": 0, "num-partitions": 2},
        1: {"role": "leaf", "partition-id": 1, "num-partitions": 2},
    }


@pytest.mark.parametrize(("num_nodes", "seed"), [(2, 0), (2, 1), (10, 2)])
def test_node_ids_do_not_give_the_partitions_away(num_nodes: int, seed: int) -> None:
    grid = InProcessGrid(app_of(lambda m, c: answer_with(c, m)), num_nodes, seed=seed)
    replies = grid.send_and_receive(messages(grid))
    partitions = [int(r.content["metrics"]["partition-id"]) for r in replies]
    assert sorted(partitions) == list(range(num_nodes))
    assert partitions != sorted(partitions)
    assert all(1 < node_id < 2**64 for node_id in grid.get_node_ids())
    assert [node.node_id for node in grid.get_nodes()] == grid.get_node_ids()


# Errors


def test_an_exception_rolls_the_state_back() -> None:
    def write_then_fail(message: Message, context: Context) -> Message:
        reply = count(message, context)
        if "history" not in context.state:
            context.state["history"] = MetricRecord({"seen": [1, 2]})
        context.state["history"]["seen"].append(3)
        context.state["more"] = ConfigRecord({})
        if message.content["config"].get("fail"):
            raise RuntimeError
        assert context.state["history"]["seen"] == [1, 2, *[3] * int(context.state["count"]["calls"])]
        return reply

    grid = InProcessGrid(app_of(write_then_fail), 1)
    for fail, calls in ((False, 1), (True, None), (False, 2)):
        (reply,) = grid.send_and_receive(messages(grid, records=content(fail=fail)))
        assert reply.has_error() if fail else reply.content["metrics"]["calls"] == calls


def test_an_unknown_node_is_answered_with_code_3() -> None:
    grid = InProcessGrid(app_of(count), 1)
    (reply,) = grid.send_and_receive([Message(content(), 12345, "train")])
    assert reply.error.code == 3
    assert reply.metadata.src_node_id == 12345


def test_a_generator_is_refused() -> None:
    grid = InProcessGrid(app_of(count), 1)
    with pytest.raises(TypeError, match="messages must be a list, got a generator"):
        grid.push_messages(m for m in messages(grid))


# Push and pull


def test_each_reply_is_pulled_once() -> None:
    grid = InProcessGrid(app_of(count), 3)
    ids = grid.push_messages(messages(grid))
    assert len(set(ids)) == 3
    first = grid.pull_messages(ids[:1])
    rest = grid.pull_messages(ids)
    assert [r.metadata.reply_to_message_id for r in [*first, *rest]] == ids
    assert grid.pull_messages(ids) == []
    assert grid.pull_messages(["never heard of"]) == []


def test_no_work_is_done_before_replies_are_pulled() -> None:
    seen: list[int] = []

    def note(message: Message, context: Context) -> Message:
        seen.append(1)
        return answer_with(context, message)

    grid = InProcessGrid(app_of(note), 5, max_in_flight=2)
    ids = grid.push_messages(messages(grid))
    assert seen == []
    sizes = [len(grid.pull_messages(ids)) for _ in range(4)]
    assert sizes == [2, 2, 1, 0]


def test_metadata_lead_from_reply_to_message() -> None:
    grid = InProcessGrid(app_of(count), 1)
    (message,) = [Message(content(), node_id, "train", group_id="7") for node_id in grid.get_node_ids()]
    (reply,) = grid.send_and_receive([message])
    assert reply.metadata.reply_to_message_id == message.metadata.message_id != ""
    assert reply.metadata.src_node_id == message.metadata.dst_node_id
    assert reply.metadata.dst_node_id == SUPERLINK_NODE_ID
    assert (reply.metadata.group_id, reply.metadata.message_type) == ("7", "train")
    assert reply.metadata.message_id not in ("", message.metadata.message_id)


@pytest.mark.parametrize("batched", [True, False])
def test_two_messages_to_a_node_are_handled_in_order(batched: bool) -> None:
    app = BatchedApp() if batched else app_of(count)
    grid = InProcessGrid(app, 2)
    ids = grid.push_messages([m for _ in range(3) for m in messages(grid)])
    replies: list[Message] = []
    while pulled := grid.pull_messages(ids):
        replies += pulled
    assert [r.content["metrics"]["calls"] for r in replies] == [1, 1, 2, 2, 3, 3]
    if batched:
        assert [len(batch) for batch in app.batches] == [2, 2, 2]


# Batches


def test_an_exception_in_place_of_an_answer_fails_that_node_alone() -> None:
    app = BatchedApp()
    grid = InProcessGrid(app, 4)
    app.bad = {2: RuntimeError("out of memory")}
    replies = grid.send_and_receive(messages(grid))
    assert [r.error.code for r in replies if r.has_error()] == [2]
    app.bad = {}
    replies = grid.send_and_receive(messages(grid))
    assert by_partition(replies, "calls") == {0: 2, 1: 2, 2: 1, 3: 2}
    assert [len(batch) for batch in app.batches] == [4, 4]


def test_when_the_batch_itself_fails_only_the_guilty_do() -> None:
    app = BatchedApp()
    app.explodes, app.bad = True, {1: ValueError("mine")}
    grid = InProcessGrid(app, 3)
    replies = grid.send_and_receive(messages(grid))
    # The states that the failed batch had written to are gone: every count is 1.
    assert by_partition(replies, "calls") == {0: 1, 2: 1}
    assert [r.error.reason for r in replies if r.has_error()] == ["ValueError: mine"]


@pytest.mark.parametrize("wrapper", ["app mod", "function mod", "lifespan"])
def test_mods_and_lifespans_are_never_bypassed(wrapper: str) -> None:
    seen: list[int] = []

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(1)
        return call_next(message, context)

    app = BatchedApp(mods=[mod] if wrapper == "app mod" else [])
    if wrapper == "function mod":
        app._registered_funcs.clear()
        app.train(mods=[mod])(app._one)
    if wrapper == "lifespan":

        @app.lifespan()
        def life(context: Context) -> Iterator[None]:
            seen.append(1)
            yield

    grid = InProcessGrid(app, 3)
    assert all(r.has_content() for r in grid.send_and_receive(messages(grid)))
    assert (len(seen), app.batches) == (3, [])


@settings(deadline=None, max_examples=30)
@given(
    num_nodes=st.integers(1, 8),
    max_in_flight=st.one_of(st.none(), st.integers(1, 4)),
    targets=st.lists(st.integers(0, 7), max_size=20),
    delays=st.booleans(),
)
def test_every_message_is_answered_once_and_in_order(
    num_nodes: int, max_in_flight: int | None, targets: list[int], delays: bool
) -> None:
    with identity(1):
        faults = FaultModel(delay=Delay("exponential", (1.0,))) if delays else None
        grid = InProcessGrid(app_of(count), num_nodes, max_in_flight=max_in_flight, faults=faults)
        ids = grid.get_node_ids()
        sent = [Message(content(), ids[target % num_nodes], "train") for target in targets]
        replies = grid.send_and_receive(sent)
    assert sorted(r.metadata.reply_to_message_id for r in replies) == sorted(
        m.metadata.message_id for m in sent
    )
    number: dict[int, int] = {}
    for message in sent:
        node_id = message.metadata.dst_node_id
        number[node_id] = number.get(node_id, 0) + 1
        (reply,) = [r for r in replies if r.metadata.reply_to_message_id == message.metadata.message_id]
        assert reply.content["metrics"]["calls"] == number[node_id]


# Virtual time and faults


def test_a_late_reply_is_not_there_before_its_time() -> None:
    grid = InProcessGrid(app_of(count), 1, faults=FaultModel(delay=Delay.parse(5.0)))
    ids = grid.push_messages(messages(grid))
    assert grid.pull_messages(ids) == []
    grid.sleep(4.9)
    assert grid.pull_messages(ids) == []
    grid.sleep(0.2)
    assert len(grid.pull_messages(ids)) == 1
    assert grid.now() == pytest.approx(5.1)


def test_a_timeout_returns_without_the_late_who_stay_pullable() -> None:
    faults = FaultModel(delay=Delay.parse(2.0), stragglers=frozenset({1}), slowdown=10.0)
    grid = InProcessGrid(app_of(count), 3, faults=faults)
    sent = messages(grid)
    started = time.monotonic()
    replies = grid.send_and_receive(sent, timeout=6.0)
    assert sorted(by_partition(replies, "calls")) == [0, 2]
    assert grid.now() == 6.0
    grid.sleep(14.0)
    late = grid.pull_messages([m.metadata.message_id for m in sent])
    assert sorted(by_partition(late, "calls")) == [1]
    assert time.monotonic() - started < 5.0


def test_a_dropped_message_is_never_worked_on() -> None:
    grid = InProcessGrid(app_of(count), 2, faults={0: FaultModel(dropout=1.0)})
    replies = grid.send_and_receive(messages(grid), timeout=10.0)
    assert by_partition(replies, "calls") == {1: 1}
    grid._faults = None
    assert by_partition(grid.send_and_receive(messages(grid)), "calls") == {0: 1, 1: 2}


def test_a_crashed_node_is_noticed_and_leaves() -> None:
    grid = InProcessGrid(app_of(count), 2, faults=FaultModel(crash_at={1: 2}))
    assert len(by_partition(grid.send_and_receive(messages(grid)), "calls")) == 2
    before = messages(grid)
    replies = grid.send_and_receive(before)
    assert [r.error.code for r in replies if r.has_error()] == [5]
    assert grid.now() == engine.HEARTBEAT_LAPSE
    assert len(grid.get_node_ids()) == 1
    # A message to it is now refused at once.
    dead = next(m.metadata.dst_node_id for m in before if m.metadata.dst_node_id not in grid.get_node_ids())
    (reply,) = grid.send_and_receive([Message(content(), dead, "train")])
    assert (reply.error.code, grid.now()) == (5, engine.HEARTBEAT_LAPSE)


def test_corrupt_replies_arrive_corrupt() -> None:
    grid = InProcessGrid(BatchedApp(), 3, faults={1: FaultModel(corrupt="nan")})
    replies = grid.send_and_receive(messages(grid))
    nans = {
        int(r.content["metrics"]["partition-id"]): bool(np.isnan(r.content["arrays"]["0"].numpy()).all())
        for r in replies
    }
    assert nans == {0: False, 1: True, 2: False}


# Strict mode


class LazyBfloat16(Array):
    """An array that would be serialised when its bytes are asked for, and cannot be."""

    __qualname__ = "Array"

    def __init__(self) -> None:
        self.__dict__.update(dtype="bfloat16", shape=(2,), stype="numpy.ndarray")

    @property
    def data(self) -> bytes:  # type: ignore[override]
        return Array(torch.zeros(2, dtype=torch.bfloat16)).data


def test_strict_names_the_array_that_the_server_cannot_send() -> None:
    records = content()
    records["model"] = ArrayRecord()
    records["model"]["weight"] = LazyBfloat16()
    grid = InProcessGrid(app_of(count), 2, strict=True)
    with pytest.raises(ValueError, match=r"message train to node \d+: record 'model', key 'weight'"):
        grid.push_messages(messages(grid, records=records))
    InProcessGrid(app_of(count), 2).push_messages(messages(grid, records=records))


def test_strict_names_the_metric_that_a_client_cannot_send() -> None:
    def sneak(message: Message, context: Context) -> Message:
        losses = MetricRecord({"losses": [0.5]})
        losses["losses"].append(np.float32(0.25))  # past the record's own check
        return Message(RecordDict({"metrics": losses}), reply_to=message)

    grid = InProcessGrid(app_of(sneak), 1, strict=True)
    with pytest.raises(ValueError, match="reply train of partition 0: record 'metrics', key 'losses'"):
        grid.send_and_receive(messages(grid))


def test_strict_names_the_state_that_a_device_cannot_keep() -> None:
    def sneak(message: Message, context: Context) -> Message:
        context.state["memory"] = MetricRecord({"steps": 2**70})
        return answer_with(context, message)

    grid = InProcessGrid(app_of(sneak), 1, strict=True)
    with pytest.raises(ValueError, match="state of partition 0: record 'memory', key 'steps'"):
        grid.send_and_receive(messages(grid))


# Inside Flower


class LateGrid(InProcessGrid):
    """Stands for Flower's grid: its nodes register one after the other."""

    asked = 0

    def get_node_ids(self) -> list[int]:
        self.asked += 1
        return super().get_node_ids()[: self.asked]


def test_inside_waits_for_the_nodes_and_keeps_run_and_ids() -> None:
    outer = LateGrid(app_of(count), 4, seed=5)

    class Inner(InProcessGrid):
        pass

    context = Context(1, SUPERLINK_NODE_ID, {}, RecordDict(), {"num-clients": 4, "seed": 1})
    grid = Inner.inside(outer, app_of(count), context)
    assert grid.get_node_ids() == sorted(outer.get_node_ids())
    assert grid.run == outer.run
    assert by_partition(grid.send_and_receive(messages(grid)), "calls") == {0: 1, 1: 1, 2: 1, 3: 1}


def test_inside_says_how_many_nodes_are_missing() -> None:
    class Inner(InProcessGrid):
        pass

    outer = InProcessGrid(app_of(count), 2)
    context = Context(1, SUPERLINK_NODE_ID, {}, RecordDict(), {})
    with pytest.raises(ValueError, match=r"5 nodes must be online after 0\.2 s, got 2"):
        Inner.inside(outer, app_of(count), context, num_nodes=5, timeout=0.2)
