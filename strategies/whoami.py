"""Queries nodes for their introductions, ``query.whoami``."""

import re
import time
from collections.abc import Callable, Iterable
from logging import WARNING

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.node import Node, introduced
from hedgerow.wire.failures import RunFailedError
from hedgerow.wire.message_types import WHOAMI
from hedgerow.wire.printable import shown
from hedgerow.wire.records import PayloadError

# Flower's code for a ClientApp that raised; in answer to WHOAMI it means that there is no such handler.
RAISED = 2
_POLL_SECONDS = 0.1
# What Flower's ClientApp raises without a handler for a message: with functions, with a client_fn.
_NO_HANDLER = ("No query function registered", "Invalid message type")
# A SuperNode's report of what its ClientApp raised.
_REASON = re.compile(r"<class '(?:\w+\.)*(\w+)'>:<['\"](.*)['\"]>")
# Queries sent to a silent node before its time is up.
_QUESTIONS = 8
# Longest wait (s) for answers to repeated queries.
_LATE_ANSWERS = 20.0


class RosterError(RunFailedError):
    """Too few nodes came online, or their introductions are not usable."""


def grid_clock(grid: Grid) -> tuple[Callable[[], float], Callable[[float], None]]:
    """Return the grid's functions ``now`` and ``sleep``, or the system's if it has none."""
    return getattr(grid, "now", time.monotonic), getattr(grid, "sleep", time.sleep)


def wait_for_nodes(grid: Grid, expected: int, timeout: float) -> list[int]:
    """Return the ids of the online nodes once there are enough; RosterError if the time is up."""
    now, sleep = grid_clock(grid)
    end = now() + timeout
    while len(node_ids := list(grid.get_node_ids())) < expected:
        if now() >= end:
            raise RosterError(
                f"{len(node_ids)} nodes after {timeout:g} s, but {expected} are needed. In simulation: pass "
                f"--federation-config 'num-supernodes={expected}' to flwr run. On devices: start "
                f"{expected} SuperNodes."
            )
        sleep(min(1.0, timeout / 10))
    return node_ids


def raised_words(report: str) -> str:
    """Return the error in a SuperNode's report of what its ClientApp raised, as one line."""
    return shown(_REASON.sub(r"\1: \2", (report.strip().splitlines() or ["?"])[-1]), 300)


class NodeQuery:
    """Sends ``query.whoami`` to nodes and collects the answers.

    Messages can be lost, so silent nodes are queried again at intervals; a late answer to an earlier query
    counts. A node that has answered, even wrongly, is not queried again.
    """

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.grid = grid
        self.now, self._sleep = grid_clock(grid)
        self._end = self.now() + timeout
        self.interval = timeout / _QUESTIONS
        # Message ids in sending order: the order of waiting answers must not depend on hashes.
        self._pending: dict[str, None] = {}
        self._ask_at: dict[int, float] = {}
        # By node id, in order of arrival.
        self.nodes: dict[int, Node] = {}
        # By node id, what its ClientApp raised.
        self.raised: dict[int, str] = {}
        self._refused: dict[int, str] = {}
        self.num_answers = 0

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.now() >= self._end

    @property
    def num_asked(self) -> int:
        """How many nodes were queried."""
        return len(self._ask_at)

    @property
    def unusable(self) -> dict[int, str]:
        """Why queried nodes have no usable introduction, by node id."""
        reasons = dict.fromkeys(self.silent(self._ask_at), "no introduction")
        reasons |= self._refused
        return dict(sorted((reasons | dict.fromkeys(self.raised, "introduction raised")).items()))

    def causes(self) -> str:
        """Return the first error that a ClientApp raised, and how many more did; empty without one."""
        if not self.raised:
            return ""
        first, others = min(self.raised), len(self.raised) - 1
        words = raised_words(self.raised[first])
        more = f" ({others} more raised an error)" if others else ""
        return f"Node {first}: {words}{more}"

    def silent(self, node_ids: Iterable[int]) -> list[int]:
        """Return the nodes that have not answered."""
        answered = self.nodes.keys() | self.raised.keys() | self._refused.keys()
        return sorted(i for i in node_ids if i not in answered)

    def try_questions(self, node_id: int) -> str:
        """Query one node, as ``train`` if it has no query function; return the message type that was used."""
        self.ask([node_id], WHOAMI, most=2)
        if not any(words in self.raised.get(node_id, "") for words in _NO_HANDLER):
            return WHOAMI
        del self.raised[node_id]
        self._ask_at.pop(node_id)
        self.ask([node_id], MessageType.TRAIN)
        return MessageType.TRAIN

    def ask(
        self,
        node_ids: Iterable[int],
        question: str,
        most: float = _QUESTIONS,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Query until all have answered, ``enough()``, or after ``most`` queries or the end of the time."""
        end, asked = min(self._end, self.now() + most * self.interval), list(node_ids)
        while self.silent(asked) and not enough() and self.now() < end:
            self.step(asked, question)

    def step(self, node_ids: Iterable[int], question: str) -> None:
        """Query the silent nodes that are due, and receive what has arrived."""
        now = self.now()
        due = [i for i in self.silent(node_ids) if self._ask_at.get(i, now) <= now]
        if due:
            # Mods run only before existing handlers, so they are queried as ``train``, which every app has.
            key = "whoami" if question == MessageType.TRAIN else "config"
            record, ttl = RecordDict({key: ConfigRecord()}), max(self._end - now, 1e-3)
            questions = [Message(record, node_id, question, ttl=ttl) for node_id in due]
            self._pending |= {sent: None for sent in self.grid.push_messages(questions) if sent}
            self._ask_at |= dict.fromkeys(due, now + self.interval)
        self._listen()

    def finish(self) -> None:
        """Wait for the answers to repeated queries, so that none is in flight afterwards.

        In Flower's simulation a second answer may overwrite state that the node kept for a message between.
        """
        end = min(self._end, self.now() + _LATE_ANSWERS)
        while self._pending and self.now() < end:
            self._listen()

    def _listen(self) -> None:
        arrived = list(self.grid.pull_messages(list(self._pending)))
        for message in sorted(arrived, key=lambda message: message.metadata.src_node_id):
            self._pending.pop(message.metadata.reply_to_message_id, None)
            self._take(message)
        if not arrived:
            self._sleep(_POLL_SECONDS)

    def _take(self, message: Message) -> None:
        node_id = message.metadata.src_node_id
        if node_id in self.nodes:  # The first answer counts.
            return
        self.num_answers += 1
        if message.has_error():
            if message.error.code == RAISED:
                self.raised[node_id] = str(message.error.reason)
        else:
            try:
                self.nodes[node_id] = introduced(message)
            except PayloadError as error:
                self._refused[node_id] = error.reason
                log(WARNING, "Node %d introduced itself wrongly: %s.", node_id, shown(error))
