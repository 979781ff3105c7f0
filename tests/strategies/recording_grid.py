"""A grid that keeps what passes, for tests of what nodes are sent and tell."""

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict

from hedgerow.sim import InProcessGrid
from hedgerow.sim.engine.grid import App


class RecordingGrid(InProcessGrid):
    """Keeps every content that passes: message type, partition id, content."""

    def __init__(self, app: App, num_nodes: int, **options: Any) -> None:
        super().__init__(app, num_nodes, **options)
        self.partitions = {node.node_id: node.partition_id for node in self._nodes.values()}
        self.sent: list[tuple[str, int, RecordDict]] = []
        self.replies: list[tuple[str, int, RecordDict]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        self.sent += [
            (m.metadata.message_type, self.partitions[m.metadata.dst_node_id], m.content) for m in messages
        ]
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        pulled = super().pull_messages(message_ids)
        self.replies += [
            (m.metadata.message_type, self.partitions[m.metadata.src_node_id], m.content)
            for m in pulled
            if m.has_content()
        ]
        return pulled
