"""A grid that counts the messages and bytes that pass through it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hedgerow.sim.engine._compat import NodeInfo, Run
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB, Traffic
from hedgerow.wire.records import payload_bytes


@dataclass
class Meter:
    """Messages and payload bytes since the start, by message type and leg; replies lost in a round."""

    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    payload: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def count_sent(self, messages: Sequence[Message]) -> None:
        """Count instructions."""
        # The messages of a broadcast share one record, which is measured once.
        sizes: dict[int, int] = {}
        for message in messages:
            self._count(message, HUB_TO_NODE, sizes)
        self.sent += len(messages)

    def count_replies(self, replies: Sequence[Message]) -> None:
        """Count replies, those with an error by its code."""
        sizes: dict[int, int] = {}
        for reply in replies:
            self._count(reply, NODE_TO_HUB, sizes)
            if reply.has_error():
                self.rejected[f"error {reply.error.code}"] += 1
            else:
                self.accepted += 1

    def _count(self, message: Message, leg: str, sizes: dict[int, int]) -> None:
        place = message.metadata.message_type, leg
        self.messages[place] += 1
        if message.has_content():
            self.payload[place] += _size(message.content, sizes)

    def by_type(self) -> dict[str, dict[str, Traffic]]:
        """Return the traffic by message type and leg."""
        out: dict[str, dict[str, Traffic]] = {}
        for (message_type, leg), count in sorted(self.messages.items()):
            size = self.payload[message_type, leg]
            out.setdefault(message_type, {})[leg] = Traffic(count, 8 * size, size)
        return out

    def next_round(self) -> None:
        """Reset the counts of a round."""
        self.sent = self.accepted = 0
        self.rejected = Counter()

    def state_dict(self) -> list[list[Any]]:
        """Return the traffic, for a checkpoint."""
        return [[*place, count, self.payload[place]] for place, count in self.messages.items()]

    def load_state_dict(self, state: Iterable[Sequence[Any]]) -> None:
        """Restore a checkpoint."""
        for message_type, leg, count, size in state:
            self.messages[message_type, leg], self.payload[message_type, leg] = count, size


def _size(content: RecordDict, sizes: dict[int, int]) -> int:
    total = 0
    for name, record in content.items():
        key = id(record)
        if key not in sizes:
            sizes[key] = payload_bytes(record)
        total += len(name) + sizes[key]
    return total


class MeteredGrid(Grid):
    """Count the traffic on a grid and forward every call to it.

    ``on_exchange`` is called before messages are sent.
    """

    def __init__(self, grid: Grid, meter: Meter, on_exchange: Callable[[], None]) -> None:
        self._grid, self._meter, self._on_exchange = grid, meter, on_exchange
        self._one_at_a_time = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run that messages belong to."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Build a message."""
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the online nodes."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Return the online nodes."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        self._on_exchange()
        message_ids = list(self._grid.push_messages(messages))
        self._meter.count_sent(list(messages))
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies."""
        replies = list(self._grid.pull_messages(message_ids))
        self._meter.count_replies(replies)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return their replies."""
        sent = list(messages)
        # Strategies of Flower's legacy API send each node's message from its own thread.
        with self._one_at_a_time:
            self._on_exchange()
            replies = list(self._grid.send_and_receive(sent, timeout=timeout))
            self._meter.count_sent(sent)
            self._meter.count_replies(replies)
            if missing := len(sent) - len(replies):
                self._meter.rejected["no reply"] += missing
        return replies
