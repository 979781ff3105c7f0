"""A handler written over a list of calls gives the same answers one by one and all at once."""

from collections.abc import Sequence
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tests.clients.contexts import context

from hedgerow.clients import BatchClientApp, each, introduce, introduced, whoami
from hedgerow.wire import Batched, Call

pytestmark = pytest.mark.usefixtures("flower_identity")

SUPERLINK = 1


def context_of(partition_id: int, **node_config: str) -> Context:
    return context(partition_id, num_partitions=3, **node_config)


def calls(*values: int, message_type: str = "train") -> list[Call]:
    return [
        Call(RecordDict({"config": ConfigRecord({"value": value})}), context_of(i), message_type)
        for i, value in enumerate(values)
    ]


def reciprocal(batch: Sequence[Call]) -> list[RecordDict | Exception]:
    """Answer 1 / value and count this node's calls in its state."""
    answers: list[RecordDict | Exception] = []
    for call in batch:
        seen = int(call.context.state["seen"]["calls"]) + 1 if "seen" in call.context.state else 1
        call.context.state["seen"] = MetricRecord({"calls": seen})
        value = call.content["config"]["value"]
        if value == 0:
            answers.append(ZeroDivisionError(f"partition {call.partition_id} has nothing"))
        else:
            answers.append(RecordDict({"m": MetricRecord({"inverse": 1 / value, "calls": seen})}))
    return answers


def ask(app: BatchClientApp, call: Call) -> RecordDict:
    """Call the app as Flower does: one message, one context."""
    message = Message(call.content, SUPERLINK, call.message_type)
    reply = app(message, call.context)
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    return reply.content


def test_one_by_one_equals_the_batch_and_the_handler_that_was_given() -> None:
    app = BatchClientApp({"train": reciprocal})
    assert isinstance(app, Batched)
    assert app.batch_handler("evaluate") is None
    handler = app.batch_handler("train")
    assert handler is not None
    together = handler(calls(1, 2, 4))
    assert [ask(app, call) for call in calls(1, 2, 4)] == together == reciprocal(calls(1, 2, 4))
    (call,) = calls(1)
    assert [ask(app, call)["m"]["calls"] for _ in range(3)] == [1, 2, 3]


def test_an_exception_in_place_of_an_answer_is_raised_to_flower() -> None:
    with pytest.raises(ZeroDivisionError, match="partition 0 has nothing"):
        ask(BatchClientApp({"train": reciprocal}), calls(0)[0])


@pytest.mark.parametrize("message_type", ["train", "train.local_step", "evaluate", "query", "query.whoami"])
def test_a_handler_answers_its_message_type_and_is_told_it(message_type: str) -> None:
    def echo(batch: Sequence[Call]) -> list[RecordDict]:
        return [RecordDict({"c": ConfigRecord({"type": call.message_type})}) for call in batch]

    app = BatchClientApp({message_type: echo, "train.other": reciprocal})
    assert ask(app, calls(2, message_type=message_type)[0])["c"]["type"] == message_type


def test_an_unknown_kind_of_message_is_refused_when_the_app_is_made() -> None:
    with pytest.raises(ValueError, match=r"message type must be train, evaluate or query, .*got 'tran'"):
        BatchClientApp({"tran": reciprocal})


# Handlers of one call


def test_each_answers_call_by_call_with_an_exception_in_place_of_a_failed_answer() -> None:
    def work(call: Call) -> RecordDict:
        if call.partition_id == 1:
            raise KeyError("data-dir")
        return RecordDict({"m": MetricRecord({"id": call.partition_id})})

    good, bad, fine = each(work)(calls(7, 7, 7))
    assert isinstance(bad, KeyError)
    assert [answer["m"]["id"] for answer in (good, fine)] == [0, 2]  # type: ignore[index]


# Introductions


@pytest.mark.parametrize("own", [{}, {"role": "edge", "group": "north"}])
def test_a_node_tells_its_partition_its_number_of_examples_and_the_role_and_group_of_its_config(
    own: dict[str, str],
) -> None:
    (answer,) = whoami(lambda _: 12)([Call(RecordDict(), context_of(2, **own), "query.whoami")])
    assert isinstance(answer, RecordDict)
    expected = {"message-format": 1, "partition-id": 2, "num-examples": 12, "role": "", "group": "", **own}
    assert dict(answer["whoami"]) == expected


# Introductions of any ClientApp


def plain(mods: list[Any] | None = None) -> ClientApp:
    """A ClientApp as anybody writes it: it has one function, which fails without arrays."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    return app


def told(app: ClientApp, message: Message, context: Context) -> dict[str, Any]:
    return dict(app(message, context).content["whoami"])


ASKED = {
    "as a function": lambda: Message(RecordDict(), SUPERLINK, "query.whoami"),
    "before a function": lambda: Message(RecordDict({"whoami": ConfigRecord()}), SUPERLINK, "train"),
}


def test_the_mod_introduces_a_node_of_any_app() -> None:
    me = told(plain([introduce]), ASKED["before a function"](), context_of(2, group="north"))
    assert me == {"message-format": 1, "partition-id": 2, "role": "", "group": "north"}

    def client_fn(context: Context) -> Any:
        raise AssertionError("no client is made to say who a node is")

    app = ClientApp(client_fn, mods=[introduce])
    assert told(app, ASKED["as a function"](), context_of(1))["partition-id"] == 1


def test_a_node_tells_the_size_of_its_node_config_or_what_an_introduction_counts() -> None:
    context = context_of(1)
    context.node_config["num-examples"] = 70
    assert told(plain([introduce]), ASKED["before a function"](), context)["num-examples"] == 70
    assert told(introduced(plain()), ASKED["as a function"](), context)["num-examples"] == 70
    app = introduced(plain(), lambda context: 10 * int(context.node_config["partition-id"]))
    assert told(app, ASKED["as a function"](), context_of(2))["num-examples"] == 20


def test_the_mod_lets_all_other_messages_pass() -> None:
    arrays = ArrayRecord()
    message = Message(RecordDict({"arrays": arrays, "config": ConfigRecord()}), SUPERLINK, "train")
    assert list(plain([introduce])(message, context_of(0)).content) == ["arrays"]


@pytest.mark.parametrize("value", [None, -1, "two", True, 0.5])
def test_a_node_without_a_partition_id_is_told_where_it_comes_from(value: Any) -> None:
    context = context_of(0)
    context.node_config["partition-id"] = value
    with pytest.raises(
        ValueError, match=r"partition-id of this node must be an integer >= 0, got .*--node-config"
    ):
        told(plain([introduce]), ASKED["before a function"](), context)
