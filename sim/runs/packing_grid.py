"""A grid that sends a model's arrays as one, to nodes that say that they read it (``wire/packed.py``)."""

from collections.abc import Iterable
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from hedgerow.wire.message_types import WHOAMI
from hedgerow.wire.packed import PACKED, is_packed, packed, unpacked
from hedgerow.wire.records import PayloadError, config_in


class PackingGrid:
    """A grid of a deployment, on which messages of many arrays are a few objects.

    Nodes are asked in ``query.whoami`` whether they read packed contents. Others, such as those of a plain
    ClientApp, are sent what any Flower node is. A strategy sees no difference.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._readers: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        messages = list(messages)
        contents = [message.content for message in messages]
        memo: dict[int, dict[str, ConfigRecord]] = {}
        try:
            for message, content in zip(messages, contents, strict=True):
                if message.metadata.message_type == WHOAMI:
                    message.content = RecordDict({**content, PACKED: ConfigRecord()})
                elif message.metadata.dst_node_id in self._readers:
                    message.content = packed(content, memo)
            return self._grid.push_messages(messages)
        finally:
            for message, content in zip(messages, contents, strict=True):
                message.content = content

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies; one that cannot be unpacked as it came."""
        replies = list(self._grid.pull_messages(message_ids))
        for reply in replies:
            if not reply.has_content():
                continue
            if config_in(reply.content, "whoami").get(PACKED) is True:
                self._readers.add(reply.metadata.src_node_id)
            if is_packed(reply.content):
                try:
                    reply.content = unpacked(reply.content)
                except PayloadError:
                    continue  # Its reader refuses it: it lacks the records of a reply.
        return replies
