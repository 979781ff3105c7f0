"""A grid that keeps what passes, and may change it, for tests of what nodes are sent and tell."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Error, Message, RecordDict

from hedgerow.sim import InProcessGrid
from hedgerow.sim.engine.grid import App

# Message type, partition id and content of a message; returns another content, or None to leave it.
Push = Callable[[str, int, RecordDict], RecordDict | None]
# The same of a reply, which may have an error in place of a content; may return an error in its place.
Pull = Callable[[str, int, Message], RecordDict | Error | None]


class RecordingGrid(InProcessGrid):
    """Keeps what passes: message type, partition id, content; ``push`` and ``pull`` may change it first."""

    def __init__(
        self, app: App, num_nodes: int, *, push: Push | None = None, pull: Pull | None = None, **options: Any
    ) -> None:
        super().__init__(app, num_nodes, **options)
        self.partitions = {node.node_id: node.partition_id for node in self._nodes.values()}
        self.push, self.pull = push, pull
        self.sent: list[tuple[str, int, RecordDict]] = []
        self.replies: list[tuple[str, int, RecordDict]] = []
        self._instructions: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        for message in messages:
            kind, partition = message.metadata.message_type, self.partitions[message.metadata.dst_node_id]
            if self.push is not None and (changed := self.push(kind, partition, message.content)) is not None:
                message.content = changed
            self.sent.append((kind, partition, message.content))
        ids = super().push_messages(messages)
        self._instructions |= dict(zip(ids, messages, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        pulled = []
        for told in super().pull_messages(message_ids):
            reply, about = told, told.metadata
            kind, partition = about.message_type, self.partitions.get(about.src_node_id, -1)
            if self.pull is not None and (changed := self.pull(kind, partition, told)) is not None:
                reply = Message(changed, reply_to=self._instructions[about.reply_to_message_id])
            if reply.has_content():
                self.replies.append((kind, partition, reply.content))
            pulled.append(reply)
        return pulled

    def states(self) -> dict[int, RecordDict]:
        """Return what each node keeps, by partition."""
        return {node.partition_id: node.state for node in self._nodes.values()}
