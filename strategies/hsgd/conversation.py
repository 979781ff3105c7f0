"""Exchanges outside training: introductions, set-up and evaluation."""

from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.exchange import Question, answered
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Reply
from hedgerow.wire.parties import INTRODUCTIONS

__all__ = ["Conversation"]

Check = Callable[[int, RecordDict], Any]


class Conversation:
    """A series of exchanges outside training, with one report.

    - ``booked``: Whether to book the transfers through the hub. Introductions are never booked, alone or
      inside a message, because a resumed run repeats them.
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
        """Make an exchange, and return the valid replies sorted by partition id."""
        roster = self._federation.gather(grid)
        nodes = [(roster.nodes[partition], content) for partition, content in contents]
        there = {node: content for node, content in nodes if node.node_id in roster.online}
        self.report.rejected["offline"] += len(nodes) - len(there)
        self._number += 1
        question = Question(
            message_type,
            f"{self._round}-{self._number}",
            there,
            lambda node, content: check(node.partition_id, content),
            ended=self._ended,
            timeout=timeout,
            booked=self._booked,
            unbooked=(INTRODUCTIONS,),
        )
        return list(answered(self._federation, grid, self._round, question))

    def _ended(self, inbox: Inbox) -> None:
        if not self._booked:
            # Introductions are asked for several times in a row: an error there is no strike.
            inbox.refused -= inbox.report.errors.keys()
        self._federation.judge(inbox)
        self.report.sent += inbox.report.sent
        self.report.accepted += inbox.report.accepted
        self.report.rejected += inbox.report.rejected
        self.report.errors |= inbox.report.errors
