"""The checks and the order of an exchange."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hedgerow.sim import FaultModel, InProcessGrid
from hedgerow.strategies import Node
from hedgerow.strategies.inbox import Inbox, checked_metrics, collect, weighted_metrics
from hedgerow.wire import Layout, PayloadError

pytestmark = pytest.mark.usefixtures("flower_identity")


NODES = [Node(partition_id=i, node_id=100 - i, num_examples=1) for i in range(5)]


def replies(order: Iterable[int], group: str = "7") -> Iterator[Message]:
    for i in order:
        instruction = Message(RecordDict(), NODES[i].node_id, "train", group_id=group)
        yield Message(RecordDict({"m": MetricRecord({"i": i})}), reply_to=instruction)


def value(node: Node, content: RecordDict) -> int:
    return int(content["m"]["i"])  # type: ignore[arg-type]


def test_replies_come_out_in_partition_order_whatever_order_they_came_in() -> None:
    exchange = Inbox(NODES, "7", value)
    assert [reply.value for reply in exchange.accept(replies([3, 0, 4, 2, 1]))] == [0, 1, 2, 3, 4]
    assert (exchange.report.accepted, exchange.report.rejected) == (5, {})


def test_a_reply_is_handed_on_as_soon_as_none_before_it_can_come() -> None:
    consumed: list[int] = []

    def arriving() -> Iterator[Message]:
        for i, message in zip([1, 0, 2, 4, 3], replies([1, 0, 2, 4, 3]), strict=True):
            consumed.append(i)
            yield message

    stream = Inbox(NODES, "7", value).accept(arriving())
    assert next(stream).value == 0
    assert consumed == [1, 0]
    assert next(stream).value == 1
    assert next(stream).value == 2
    assert consumed == [1, 0, 2]
    assert [reply.value for reply in stream] == [3, 4]


def test_silent_stale_unknown_and_duplicate_replies_are_counted() -> None:
    exchange = Inbox(NODES[:4], "7", value)
    mixed = [*replies([0]), *replies([0]), *replies([1], group="6"), *replies([4]), *replies([2])]
    assert [reply.value for reply in exchange.accept(mixed)] == [0, 2]
    assert exchange.report.rejected == {"duplicate": 1, "stale": 1, "unknown node": 1, "no reply": 2}


def test_error_replies_are_counted_by_code() -> None:
    instruction = Message(RecordDict(), NODES[0].node_id, "train", group_id="7")
    exchange = Inbox(NODES[:2], "7", value)
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
    app = ClientApp()
    app.query("whoami")(lambda message, context: Message(RecordDict(), reply_to=message))
    grid = Hub(app, 3, faults={1: FaultModel(crash_at={1: 1})})
    nodes = [Node(node.partition_id, node.node_id) for node in grid._nodes.values()]
    messages = [
        Message(RecordDict(), node.node_id, "query.whoami", ttl=600.0, group_id="7") for node in nodes
    ]
    exchange = Inbox(nodes, "7", lambda node, content: None)
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
        (metrics(n=1e300), "bad weight"),
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
        list(Inbox([node], "1", check).accept([answer]))

    with caplog.at_level("INFO", logger="flwr"):
        told(None)
        told(RecordDict({"arrays": ArrayRecord({"a": Array(np.zeros(1)), nasty: Array(np.zeros(1))})}))
    assert len(caplog.messages) >= 2
    for line in caplog.messages:
        assert line.removeprefix("\t> ").removeprefix("\t").isprintable()
        assert len(line) < 500
