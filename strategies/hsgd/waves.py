"""The messages of a round that takes many exchanges: who is there, what was lost, what the hub carried."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.messages import INTRODUCTIONS
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Reply, collect
from hedgerow.strategies.roster import RAISED
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import payload_bytes

__all__ = ["Waves"]

Check = Callable[[int, RecordDict], Any]


class Waves:
    """Exchanges of one round, one after the other, reported as one.

    Parameters
    ----------
    federation : Federation
        Whose nodes, ledger and deadline they are.
    server_round : int
        The round.
    booked : bool (default: True)
        Whether the legs through the hub are booked. Introductions are not, nor those that stand beside a
        message: a run that goes on repeats them.

    Attributes
    ----------
    raised : set of int
        The partition ids of nodes whose ClientApp raised, as one does that has forgotten what it was told.
    """

    def __init__(self, federation: Federation, server_round: int, *, booked: bool = True) -> None:
        self._federation = federation
        self._round = server_round
        self._booked = booked
        self._number = 0
        self._open: Inbox | None = None
        self._asked: dict[int, int] = {}
        self.raised: set[int] = set()
        self.report = ExchangeReport()

    def ask(
        self,
        grid: Grid,
        message_type: str,
        contents: Sequence[tuple[int, RecordDict]],
        check: Check,
        timeout: float | None = None,
    ) -> list[Reply]:
        """Make an exchange, and return the valid replies in the order of partition ids."""
        messages = self.open(grid, message_type, contents, check, timeout)
        return self.close(collect(grid, messages, self._deadline(timeout)) if messages else ())

    def open(
        self,
        grid: Grid,
        message_type: str,
        contents: Sequence[tuple[int, RecordDict]],
        check: Check,
        timeout: float | None = None,
    ) -> list[Message]:
        """Open an exchange and return its messages, for whoever sends them; ``close`` takes the replies."""
        roster = self._federation.gather(grid)
        self._number += 1
        group = f"{self._round}-{self._number}"
        nodes = [(roster.nodes[partition], content) for partition, content in contents]
        there = [(node, content) for node, content in nodes if node.node_id in roster.online]
        if offline := len(nodes) - len(there):
            self.report.rejected["offline"] += offline
        self._open = Inbox(
            [node for node, _ in there], group, lambda node, content: check(node.partition_id, content)
        )
        self._asked = {node.node_id: node.partition_id for node, _ in there}
        sizes: dict[int, int] = {}
        for node, content in there:
            # Devices of a group share their content, which is then measured once.
            size = sizes.setdefault(id(content), _booked_bytes(content))
            self._book(HUB_TO_NODE, 0, node.partition_id, size)
        ttl = self._deadline(timeout)
        return [
            Message(content, node.node_id, message_type, ttl=ttl, group_id=group) for node, content in there
        ]

    def close(self, messages: Iterable[Message]) -> list[Reply]:
        """Return the valid replies to the exchange that is open, in the order of partition ids."""
        if self._open is None:
            raise RuntimeError("No exchange is open: configure_train comes first.")
        exchange, self._open = self._open, None
        replies = list(exchange.accept(self._heard(messages)))
        self._federation.judge(exchange)
        for reply in replies:
            self._book(NODE_TO_HUB, reply.node.partition_id, 0, payload_bytes(reply.content))
        self.report.sent += exchange.report.sent
        self.report.accepted += exchange.report.accepted
        self.report.rejected.update(exchange.report.rejected)
        return replies

    def _heard(self, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            node_id = message.metadata.src_node_id
            if message.has_error() and message.error.code == RAISED and node_id in self._asked:
                self.raised.add(self._asked[node_id])
            yield message

    def _book(self, leg: str, source: int, target: int, size: int) -> None:
        if self._booked:
            self._federation.ledger.book(self._round, leg, source, target, 0, size)

    def _deadline(self, timeout: float | None) -> float:
        return self._federation.timeout if timeout is None else timeout


def _booked_bytes(content: RecordDict) -> int:
    known = content.get(INTRODUCTIONS)
    return payload_bytes(content) - (0 if known is None else len(INTRODUCTIONS) + payload_bytes(known))
