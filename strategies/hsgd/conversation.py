"""Questions to parties beside training: who they are, what they agree on, how well they are told."""

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.messages import INTRODUCTIONS
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Reply, collect
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import payload_bytes

__all__ = ["Conversation"]

Check = Callable[[int, RecordDict], Any]


class Conversation:
    """Exchanges beside training, one after the other, reported as one.

    Parameters
    ----------
    federation : Federation
        Whose nodes, ledger and deadline they are.
    server_round : int
        The round.
    booked : bool (default: True)
        Whether the legs through the hub are booked. Introductions are not, nor those that stand beside a
        message: a run that goes on repeats them.
    """

    def __init__(self, federation: Federation, server_round: int, *, booked: bool = True) -> None:
        self._federation, self._round, self._booked = federation, server_round, booked
        self._number = 0
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
        roster, ledger = self._federation.gather(grid), self._federation.ledger
        deadline = self._federation.timeout if timeout is None else timeout
        self._number += 1
        group = f"{self._round}-{self._number}"
        nodes = [(roster.nodes[partition], content) for partition, content in contents]
        there = [(node, content) for node, content in nodes if node.node_id in roster.online]
        self.report.rejected["offline"] += len(nodes) - len(there)
        inbox = Inbox(
            [node for node, _ in there], group, lambda node, content: check(node.partition_id, content)
        )
        for node, content in there if self._booked else ():
            plain = RecordDict({key: record for key, record in content.items() if key != INTRODUCTIONS})
            ledger.book(self._round, HUB_TO_NODE, 0, node.partition_id, 0, payload_bytes(plain))
        messages = [
            Message(content, node.node_id, message_type, ttl=deadline, group_id=group)
            for node, content in there
        ]
        replies = list(inbox.accept(collect(grid, messages, deadline) if messages else ()))
        self._federation.judge(inbox)
        for reply in replies if self._booked else ():
            size = payload_bytes(reply.content)
            ledger.book(self._round, NODE_TO_HUB, reply.node.partition_id, 0, 0, size)
        self.report.sent += inbox.report.sent
        self.report.accepted += inbox.report.accepted
        self.report.rejected += inbox.report.rejected
        return replies
