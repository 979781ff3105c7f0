"""The roster, and the checks and the order of an exchange."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hedgerow.sim.engine.faults import Delay, FaultModel
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.strategies.exchange import (
    Exchange,
    Node,
    Roster,
    RosterError,
    checked_metrics,
    collect,
    weighted_metrics,
)
from hedgerow.wire.records import Layout, PayloadError

pytestmark = pytest.mark.usefixtures("flower_identity")


def introducing(partition_ids: list[int] | None = None) -> ClientApp:
    """A ClientApp that answers whoami; ``partition_ids`` are what nodes claim."""
    app = ClientApp()

    @app.query("whoami")
    def whoami(message: Message, context: Context) -> Message:
        me = int(context.node_config["partition-id"])
        claimed = me if partition_ids is None else partition_ids[me]
        record = ConfigRecord(
            {"partition-id": claimed, "num-examples": 10 + me, "role": "leaf", "group": "g"}
        )
        return Message(RecordDict({"whoami": record}), reply_to=message)

    return app


def test_the_roster_is_in_the_order_of_partition_ids_and_knows_sizes_and_roles() -> None:
    roster = Roster.gather(InProcessGrid(introducing(), 5), 5, timeout=5)
    assert [node.partition_id for node in roster.nodes] == [0, 1, 2, 3, 4]
    assert [node.num_examples for node in roster.nodes] == [10, 11, 12, 13, 14]
    assert {(node.role, node.group) for node in roster.nodes} == {("leaf", "g")}
    assert [node.node_id for node in roster.nodes] != sorted(node.node_id for node in roster.nodes)


def test_too_few_nodes_are_an_error_that_says_how_to_get_them() -> None:
    with pytest.raises(RosterError, match=r"3 nodes after 5 s, but 4 are needed.*num-supernodes=4"):
        Roster.gather(InProcessGrid(introducing(), 3), 4, timeout=5)


def test_two_nodes_with_one_partition_are_an_error() -> None:
    with pytest.raises(RosterError, match="Two nodes claim partition-id 1"):
        Roster.gather(InProcessGrid(introducing([0, 1, 1]), 3), 3, timeout=5)


def test_a_missing_partition_is_an_error() -> None:
    with pytest.raises(RosterError, match=r"no node introduced itself as \[2\]"):
        Roster.gather(InProcessGrid(introducing([0, 1, 7]), 3), 3, timeout=5)


def test_more_nodes_than_expected_leaves_the_others_out() -> None:
    assert len(Roster.gather(InProcessGrid(introducing(), 5), 3, timeout=5)) == 3


def test_without_introductions_partition_ids_are_ranks_of_sorted_node_ids() -> None:
    grid = InProcessGrid(ClientApp(), 4)
    roster = Roster.gather(grid, 4, timeout=5)
    assert not roster.introduced
    assert [node.node_id for node in roster.nodes] == sorted(grid.get_node_ids())
    assert all(node.num_examples is None for node in roster.nodes)


def test_lost_introductions_are_asked_for_again() -> None:
    grid = InProcessGrid(introducing(), 12, faults=FaultModel(dropout=0.5), seed=1)
    roster = Roster.gather(grid, 12, timeout=120)
    assert [node.partition_id for node in roster.nodes] == list(range(12))
    assert roster.introduced


def test_no_question_is_under_way_once_the_roster_is_there() -> None:
    # Answers take longer than it takes to ask again: what is still under way could overwrite a node's state.
    grid = InProcessGrid(introducing(), 3, faults=FaultModel(delay=Delay("constant", (12.0,))))
    asked, answered = [], []
    push, pull = grid.push_messages, grid.pull_messages
    grid.push_messages = lambda messages: asked.extend(push(messages)) or asked[-3:]  # type: ignore[func-returns-value, method-assign]

    def pulled(ids: Iterable[str]) -> list[Message]:
        messages = list(pull(ids))
        answered.extend(message.metadata.reply_to_message_id for message in messages)
        return messages

    grid.pull_messages = pulled  # type: ignore[method-assign, assignment]
    Roster.gather(grid, 3, timeout=80)
    assert len(asked) == 6
    assert sorted(answered) == sorted(asked)


def test_a_node_that_never_answers_is_named_at_the_deadline() -> None:
    grid = InProcessGrid(introducing(), 3, faults={1: FaultModel(dropout=1.0)})
    with pytest.raises(RosterError, match=r"no node introduced itself as \[1\] \(2 of 3 nodes answered\)"):
        Roster.gather(grid, 3, timeout=60)
    assert grid.now() == pytest.approx(60, abs=1)


class Changing(InProcessGrid):
    """A grid whose nodes can leave, or come back under another id."""

    def leave(self, node_id: int) -> None:
        self.left = self._nodes.pop(node_id)

    def come_back(self, node_id: int) -> None:
        self.left.node_id = node_id
        self._nodes[node_id] = self.left


@pytest.mark.parametrize("app", [introducing(), ClientApp()], ids=["introduced", "by rank"])
def test_a_node_that_returns_under_a_new_id_is_found_again(app: ClientApp) -> None:
    grid = Changing(app, 4)
    roster = Roster.gather(grid, 4, timeout=5)
    old = roster.nodes[2].node_id
    grid.leave(old)
    roster.refresh(grid, timeout=5)
    assert len(roster.online) == 3
    assert old not in roster.online
    grid.come_back(12345)
    roster.refresh(grid, timeout=5)
    assert roster.nodes[2].node_id == 12345
    assert roster.online == {node.node_id for node in roster.nodes}


class Cut(InProcessGrid):
    """A grid whose nodes cannot be reached until some time."""

    back_at = 0.0

    def get_node_ids(self) -> list[int]:
        return list(super().get_node_ids()) if self.now() >= self.back_at else []


@pytest.mark.parametrize(("back_at", "waited"), [(0.0, 0.0), (20.0, 20.0), (1e9, 60.0)])
def test_where_nobody_is_there_someone_is_waited_for_until_the_deadline(
    back_at: float, waited: float
) -> None:
    grid = Cut(introducing(), 2)
    roster = Roster.gather(grid, 2, timeout=5)
    began, grid.back_at = grid.now(), grid.now() + back_at
    roster.refresh(grid, timeout=60)
    assert grid.now() - began == pytest.approx(waited, abs=1)
    assert len(roster.online) == (2 if waited < 60 else 0)


NODES = [Node(partition_id=i, node_id=100 - i, num_examples=1) for i in range(5)]


def replies(order: Iterable[int], group: str = "7") -> Iterator[Message]:
    for i in order:
        instruction = Message(RecordDict(), NODES[i].node_id, "train", group_id=group)
        yield Message(RecordDict({"m": MetricRecord({"i": i})}), reply_to=instruction)


def value(node: Node, content: RecordDict) -> int:
    return int(content["m"]["i"])  # type: ignore[arg-type]


def test_replies_come_out_in_partition_order_whatever_order_they_came_in() -> None:
    exchange = Exchange(NODES, "7", value)
    assert [reply.value for reply in exchange.accept(replies([3, 0, 4, 2, 1]))] == [0, 1, 2, 3, 4]
    assert (exchange.report.accepted, exchange.report.rejected) == (5, {})


def test_a_reply_is_handed_on_as_soon_as_none_before_it_can_come() -> None:
    consumed: list[int] = []

    def arriving() -> Iterator[Message]:
        for i, message in zip([1, 0, 2, 4, 3], replies([1, 0, 2, 4, 3]), strict=True):
            consumed.append(i)
            yield message

    stream = Exchange(NODES, "7", value).accept(arriving())
    assert next(stream).value == 0
    assert consumed == [1, 0]
    assert next(stream).value == 1
    assert next(stream).value == 2
    assert consumed == [1, 0, 2]
    assert [reply.value for reply in stream] == [3, 4]


def test_the_quorum_takes_the_first_responders_and_counts_the_others() -> None:
    exchange = Exchange(NODES, "7", value, quorum=3)
    assert [reply.value for reply in exchange.accept(replies([4, 0, 2, 1, 3]))] == [0, 2, 4]
    assert exchange.report.rejected == {"after quorum": 2}


def test_silent_stale_unknown_and_duplicate_replies_are_counted() -> None:
    exchange = Exchange(NODES[:4], "7", value)
    mixed = [*replies([0]), *replies([0]), *replies([1], group="6"), *replies([4]), *replies([2])]
    assert [reply.value for reply in exchange.accept(mixed)] == [0, 2]
    assert exchange.report.rejected == {"duplicate": 1, "stale": 1, "unknown node": 1, "no reply": 2}


def test_error_replies_are_counted_by_code() -> None:
    instruction = Message(RecordDict(), NODES[0].node_id, "train", group_id="7")
    exchange = Exchange(NODES[:2], "7", value)
    broken = Message(Error(code=5, reason=None), reply_to=instruction)
    assert [reply.value for reply in exchange.accept([broken, *replies([1])])] == [1]
    assert exchange.report.rejected == {"error 5": 1}


class Hub(InProcessGrid):
    """Signs the errors that it tells of a node itself, as the SuperLink does, and forgets their round."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        pulled = super().pull_messages(message_ids)
        for message in pulled:
            if message.has_error():
                message.metadata.__dict__.update(_src_node_id=1, _group_id="")
        return pulled


def test_an_error_that_the_hub_tells_of_a_node_is_that_nodes_one_lost_reply() -> None:
    grid = Hub(introducing(), 3, faults={1: FaultModel(crash_at={1: 1})})
    nodes = [Node(node.partition_id, node.node_id) for node in grid._nodes.values()]
    messages = [
        Message(RecordDict(), node.node_id, "query.whoami", ttl=600.0, group_id="7") for node in nodes
    ]
    exchange = Exchange(nodes, "7", lambda node, content: None)
    assert [reply.node.partition_id for reply in exchange.accept(collect(grid, messages, 600.0))] == [0, 2]
    assert exchange.report.rejected == {"error 5": 1}


def test_collect_gives_up_at_the_deadline() -> None:
    app = ClientApp()

    @app.train()
    def silent(message: Message, context: Context) -> Any:
        return None

    class Mute(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            return []

    grid = Mute(app, 2)
    instructions = [Message(RecordDict(), node_id, "train") for node_id in grid.get_node_ids()]
    assert list(collect(grid, instructions, timeout=9.0)) == []
    assert grid.now() == pytest.approx(9.0)


def metrics(**values: Any) -> RecordDict:
    return RecordDict({"metrics": MetricRecord(values)})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (RecordDict(), "bad metrics"),
        (metrics(loss=1.0), "bad weight"),
        (metrics(n=0), "bad weight"),
        (metrics(n=float("inf")), "bad weight"),
        (metrics(n=[1, 2]), "bad weight"),
        (metrics(n=1, loss=float("nan")), "non-finite"),
        (metrics(n=1, losses=[1.0, float("inf")]), "non-finite"),
    ],
)
def test_metrics_that_cannot_be_averaged_are_rejected(content: RecordDict, reason: str) -> None:
    with pytest.raises(PayloadError) as error:
        checked_metrics(content, "n")
    assert error.value.reason == reason


def test_metrics_are_averaged_by_weight_where_all_replies_have_them() -> None:
    mean = weighted_metrics([metrics(n=1, a=1.0, v=[1.0, 2.0]), metrics(n=3, a=5.0, v=[3.0, 4.0], b=2)], "n")
    assert dict(mean) == {"a": 4.0, "v": [2.5, 3.5]}
    assert np.isscalar(mean["a"])


def test_what_hostile_nodes_write_reaches_no_log_line_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    nasty = "\x1b[2J\r\nINFO :   all is well\u202e" + "x" * 10_000
    layout = Layout(("a",), ((1,),), ("float32",))
    node = Node(0, 17)

    def check(_: Node, content: RecordDict) -> object:
        return layout.flatten(content.array_records["arrays"])

    def told(content: RecordDict | None) -> None:
        message = Message(RecordDict(), 17, "train", group_id="1")
        answer = (
            Message(Error(1, nasty), reply_to=message)
            if content is None
            else Message(content, reply_to=message)
        )
        list(Exchange([node], "1", check).accept([answer]))

    with caplog.at_level("INFO", logger="flwr"):
        told(None)
        told(RecordDict({"arrays": ArrayRecord({"a": Array(np.zeros(1)), nasty: Array(np.zeros(1))})}))
    assert len(caplog.messages) >= 2
    for line in caplog.messages:
        assert line.removeprefix("\t> ").removeprefix("\t").isprintable()
        assert len(line) < 500
