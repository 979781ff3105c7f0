"""Messages of few objects, to nodes that say that they read them."""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.clients import BatchClientApp, each, introduced, whoami
from hedgerow.sim.runs.packing_grid import PackingGrid
from hedgerow.wire import WHOAMI, to_record


def is_packed(content: RecordDict) -> bool:
    return all(key.startswith("packed") for key in content)


def doubled(content: RecordDict) -> RecordDict:
    arrays = {key: 2 * array.numpy() for key, array in content["arrays"].items()}  # type: ignore[union-attr]
    return RecordDict({"arrays": to_record(arrays), "seen": ConfigRecord({"keys": list(content)})})


def ours() -> ClientApp:
    """An app with a Flower mod, which the engine calls with messages, as Flower does on a device."""
    handlers = {"train": each(lambda call: doubled(call.content)), WHOAMI: whoami(lambda _: 10)}

    def unpacked_for_mods(message: Message, context: Context, call_next: Any) -> Message:
        assert not is_packed(message.content)
        reply = call_next(message, context)
        assert not is_packed(reply.content)
        return cast(Message, reply)

    return BatchClientApp(handlers, mods=[unpacked_for_mods])


def plain() -> ClientApp:
    app = introduced(ClientApp(), lambda _: 10)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(doubled(message.content), reply_to=message)

    return app


def asked(grid: RecordingGrid, kinds: Iterable[str]) -> list[RecordDict]:
    """Ask two nodes for each kind; return the replies to the last."""
    packing, replies = cast(Grid, PackingGrid(grid)), list[Message]()
    model = to_record({f"layer{i}": np.full(3, i) for i in range(4)})
    for kind in kinds:
        content = {"config": ConfigRecord()} if kind == WHOAMI else {"arrays": model}
        messages = [Message(RecordDict(content), node, kind) for node in packing.get_node_ids()]
        replies = list(packing.pull_messages(list(packing.push_messages(messages))))
        assert all(list(message.content) == list(content) for message in messages)
    return [reply.content for reply in replies]


@pytest.mark.parametrize(
    ("app", "kinds", "few"),
    [(ours, [WHOAMI, "train"], True), (ours, ["train"], False), (plain, [WHOAMI, "train"], False)],
)
def test_nodes_that_read_packed_contents_get_and_send_them_and_others_never(
    app: Any, kinds: list[str], few: bool
) -> None:
    with RecordingGrid(app(), 2, strict=True) as grid:
        replies = asked(grid, kinds)
        for _, _, content in (*grid.sent[-2:], *grid.replies[-2:]):
            assert is_packed(content) == few
            assert any(isinstance(record, ArrayRecord) for record in content.values()) != few
    for content in replies:
        assert content["seen"] == ConfigRecord({"keys": ["arrays"]})
        assert {key: list(array.numpy()) for key, array in content["arrays"].items()} == {
            f"layer{i}": [2 * i] * 3 for i in range(4)
        }


def test_nodes_are_not_asked_in_a_simulation() -> None:
    with RecordingGrid(ours(), 2, strict=True) as grid:
        messages = [
            Message(RecordDict({"config": ConfigRecord()}), node, WHOAMI) for node in grid.get_node_ids()
        ]
        replies = grid.pull_messages(grid.push_messages(messages))
        (me, _) = [reply.content["whoami"] for reply in replies]
    assert "packed" not in me


def test_a_reply_that_cannot_be_unpacked_comes_as_it_is_and_the_others_are_read() -> None:
    broken = RecordDict({"packed.0/arrays": ConfigRecord({"layout": "7", "data": b""})})
    first: list[int] = []

    def spoil(kind: str, partition: int, reply: Message) -> RecordDict | None:
        if not is_packed(reply.content) or first:
            return None
        first.append(1)
        return broken

    with RecordingGrid(ours(), 2, strict=True, pull=spoil) as grid:
        assert sorted(map(list, asked(grid, [WHOAMI, "train"]))) == [["arrays", "seen"], ["packed.0/arrays"]]
