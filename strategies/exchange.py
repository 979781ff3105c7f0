"""The one way a strategy talks to nodes: a roster, then exchanges with a deadline and a quorum.

Flower gives node ids that are random per run, in no order, and says nothing of a node's partition,
role or data size, so a ``query.whoami`` asks once. Replies are checked one by one and handed on in the
order of partition ids, whatever order they came in: sums are then the same on every engine.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from logging import INFO, WARNING
from math import isfinite
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.wire.limits import MAX_EXAMPLES
from hedgerow.wire.message_types import WHOAMI
from hedgerow.wire.printable import quoted, shown
from hedgerow.wire.records import PayloadError, only_record, records_of

__all__ = [
    "RAISED",
    "Exchange",
    "ExchangeReport",
    "Node",
    "Reply",
    "Roster",
    "RosterError",
    "checked_metrics",
    "collect",
    "weighted_metrics",
]

# Flower's code for a ClientApp that raised; as an answer to WHOAMI, that it has no such handler.
RAISED = 2
_POLL_SECONDS = 0.1
# Characters of a role or group that a node may introduce itself with.
_MAX_WORD = 100
# What Flower's ClientApp raises for a message that it has no handler of: with functions, with a client_fn.
_NO_HANDLER = ("No query function registered", "Invalid message type")
# How often a silent node is asked who it is before the time is over.
_QUESTIONS = 8
# Seconds to wait for answers to questions that were asked again.
_LATE_ANSWERS = 20.0
# Seconds that a round waits at most for a node that came back to say who it is.
_PATIENCE = 60.0


class RosterError(RuntimeError):
    """The nodes that a run needs did not come, or are not who they should be."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the federation.

    Parameters
    ----------
    partition_id : int
        Its place in the federation, 0 to N-1: keys data, streams and order.
    node_id : int
        Flower's id, random per run (and new after a restart without node authentication).
    num_examples : int or None
        Local training examples; None until the node has told.
    role, group : str
        From the node's config; empty where not set.
    """

    partition_id: int
    node_id: int
    num_examples: int | None = None
    role: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that arrived in time and passed its checks; ``value`` is what the check made of it."""

    node: Node
    content: RecordDict
    value: Any


@dataclass
class ExchangeReport:
    """What one exchange sent, got and lost.

    Parameters
    ----------
    sent : int
        Instructions sent.
    accepted : int
        Replies that arrived in time and passed every check.
    rejected : Counter[str]
        Lost replies by reason: ``error <code>``, ``no reply``, ``after quorum``, ``stale``,
        ``unknown node``, ``duplicate``, ``non-finite``, ``wrong shape``, …
    """

    sent: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


def collect(
    grid: Grid, messages: Sequence[Message], timeout: float, poll: float = _POLL_SECONDS
) -> Iterator[Message]:
    """Send messages and yield the replies as they arrive, until all came or the time is over.

    A grid with a clock of its own (an engine with simulated delays) is asked for the time and made to
    wait; else the wall clock counts. An error that Flower's SuperLink tells of a node is that node's reply.
    """
    now, sleep = _clock(grid)
    end = now() + timeout
    ids = list(grid.push_messages(messages))
    # In the order of sending: which of several waiting replies comes first must not depend on hashes.
    pending = dict.fromkeys(message_id for message_id in ids if message_id)
    # Flower's simulation leaves out what it could not send, and does not say whose the others are.
    sent = dict(zip(ids, messages, strict=True)) if len(ids) == len(messages) else {}
    while pending:
        arrived = False
        for message in grid.pull_messages(list(pending)):
            answered = message.metadata.reply_to_message_id
            pending.pop(answered, None)
            arrived = True
            yield _signed(message, sent.get(answered))
        if now() >= end:
            return
        if pending and not arrived:
            sleep(min(poll, max(end - now(), 0.0)))


def _clock(grid: Grid) -> tuple[Callable[[], float], Callable[[float], None]]:
    """Return how to tell the time and how to wait: the grid's own way where it has one."""
    return getattr(grid, "now", time.monotonic), getattr(grid, "sleep", time.sleep)


def _signed(message: Message, instruction: Message | None) -> Message:
    """Return an error in the name of the node it is about: the SuperLink signs those itself."""
    if instruction is None or not message.has_error():
        return message
    return Message(message.error, reply_to=instruction)


class Roster:
    """Who takes part, in the order of partition ids.

    Parameters
    ----------
    nodes : Sequence[Node]
        The nodes.
    introduced : bool
        False if the nodes do not say who they are (see ``hedgerow.clients.introduce``): then partition ids
        are the ranks of the sorted node ids, and sizes are learnt from the replies.
    """

    def __init__(self, nodes: Sequence[Node], introduced: bool) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.partition_id)
        self.introduced = introduced
        self.online = {node.node_id for node in nodes}
        self._question = WHOAMI
        self._refused: set[int] = set()

    def __len__(self) -> int:
        return len(self.nodes)

    @classmethod
    def gather(cls, grid: Grid, expected: int, timeout: float) -> "Roster":
        """Wait for ``expected`` nodes and learn who they are.

        Parameters
        ----------
        grid : Grid
            Flower's grid.
        expected : int
            How many nodes the run needs, >= 1. More may be there: with introductions those with
            partition ids below ``expected`` are taken.
        timeout : float
            Seconds to wait, for the nodes and then for their answers.

        Raises
        ------
        RosterError
            If fewer come, if two claim one partition, or if a partition is missing.
        """
        node_ids = _wait_for_nodes(grid, expected, timeout)
        partitions = set(range(expected))
        answers, question = _Introductions(grid, timeout), WHOAMI
        # One node first: where its ClientApp has no answer no other has, and each would log an error.
        first = min(node_ids)
        answers.ask([first], partitions, question, most=2)
        if any(words in answers.refused.get(first, "") for words in _NO_HANDLER):
            del answers.refused[first]
            question = MessageType.TRAIN
            answers.ask([first], partitions, question)
            if first in answers.refused:
                answers.finish()
                return cls._by_rank(node_ids, expected)
        answers.ask(node_ids, partitions, question)
        answers.finish()
        if not answers.nodes and len(answers.refused) == len(node_ids):
            return cls._by_rank(node_ids, expected)
        roster = cls(_partitions(list(answers.nodes.values()), expected, len(node_ids)), True)
        roster._question, roster._refused = question, set(answers.refused)
        return roster

    @classmethod
    def _by_rank(cls, node_ids: list[int], expected: int) -> "Roster":
        log(
            WARNING,
            "No node says who it is: partition ids are the ranks of the sorted node ids, other ones in every "
            "run, and sizes are learnt from the replies. ClientApp(mods=[introduce]), with 'from "
            "hedgerow.clients import introduce', keeps each node's own partition id. One node was asked; "
            "what its log says of that is of no consequence.",
        )
        return cls([Node(rank, node_id) for rank, node_id in enumerate(sorted(node_ids)[:expected])], False)

    def refresh(self, grid: Grid, timeout: float) -> None:
        """Note which nodes are online, and find those that came back under a new id.

        Where nobody is there, which a cut network looks like, waits up to ``timeout`` seconds for someone:
        rounds that take no time would be over before anyone can come back.
        """
        now, sleep = _clock(grid)
        end = now() + timeout
        self._look(grid, timeout)
        while not self.online and now() < end:
            sleep(min(1.0, timeout / 10))
            self._look(grid, timeout)

    def _look(self, grid: Grid, timeout: float) -> None:
        current = set(grid.get_node_ids())
        known = {node.node_id for node in self.nodes}
        vacant = [node for node in self.nodes if node.node_id not in current]
        if vacant and (strangers := sorted(current - known - self._refused)):
            if self.introduced:
                vacancies = {node.partition_id for node in vacant}
                answers = _Introductions(grid, min(timeout, _PATIENCE))
                answers.ask(strangers, vacancies, self._question)
                answers.finish()
                self._refused |= answers.refused.keys()
                found = {node.partition_id: node for node in answers.nodes.values()}
            else:
                found = {
                    old.partition_id: replace(old, node_id=new)
                    for old, new in zip(vacant, strangers, strict=False)
                }
            for old in vacant:
                if (new := found.get(old.partition_id)) is not None:
                    log(INFO, "Partition %d is back as node %d.", old.partition_id, new.node_id)
                    size = new.num_examples if new.num_examples is not None else old.num_examples
                    self.nodes[old.partition_id] = replace(new, num_examples=size)
        self.online = {node.node_id for node in self.nodes} & current


def _partitions(nodes: list[Node], expected: int, num_nodes: int) -> list[Node]:
    taken: dict[int, Node] = {}
    for node in sorted(nodes, key=lambda n: n.node_id):
        if node.partition_id in taken:
            raise RosterError(
                f"Two nodes claim partition-id {node.partition_id}: nodes "
                f"{taken[node.partition_id].node_id} and {node.node_id}. "
                "Give each SuperNode a partition-id of its own in --node-config."
            )
        taken[node.partition_id] = node
    if missing := [i for i in range(expected) if i not in taken]:
        raise RosterError(
            f"Expected partitions 0 to {expected - 1}, but no node introduced itself as {missing[:5]}"
            f"{' …' if len(missing) > 5 else ''} ({len(nodes)} of {num_nodes} nodes answered)."
        )
    return [taken[i] for i in range(expected)]


def _wait_for_nodes(grid: Grid, expected: int, timeout: float) -> list[int]:
    now, sleep = _clock(grid)
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


class _Introductions:
    """Questions to nodes who they are, and what came back.

    An introduction can be lost like any message, so silent nodes are asked again from time to time; a
    slow answer to an earlier question counts. One that refused is not asked again.
    """

    def __init__(self, grid: Grid, timeout: float) -> None:
        self._grid = grid
        self._now, self._sleep = _clock(grid)
        self._end = self._now() + timeout
        self._interval = timeout / _QUESTIONS
        self._pending: set[str] = set()
        self.nodes: dict[int, Node] = {}
        # By node id, what its ClientApp raised.
        self.refused: dict[int, str] = {}

    def ask(
        self, node_ids: Iterable[int], partitions: set[int], question: str, most: float = _QUESTIONS
    ) -> None:
        """Ask until all answered, all ``partitions`` are known, or time or ``most`` questions are over."""
        end, ask_at = min(self._end, self._now() + most * self._interval), self._now()
        asked = sorted(node_ids)
        # A mod stands before no handler that the app has not: it is asked as ``train``, which every app has.
        record = RecordDict({"whoami" if question == MessageType.TRAIN else "config": ConfigRecord()})
        while silent := [i for i in asked if i not in self.nodes and i not in self.refused]:
            if partitions <= {node.partition_id for node in self.nodes.values()} or self._now() >= end:
                break
            if self._now() >= ask_at:
                ttl = self._end - self._now()
                questions = [Message(record, node_id, question, ttl=ttl) for node_id in silent]
                self._pending |= {told for told in self._grid.push_messages(questions) if told}
                ask_at = self._now() + self._interval
            self._listen()

    def finish(self) -> None:
        """Wait for the answers to questions that were asked twice, so that none is left under way.

        Flower's simulation may let a second answer overwrite what the node kept of a message that came
        between.
        """
        end = min(self._end, self._now() + _LATE_ANSWERS)
        while self._pending and self._now() < end:
            self._listen()

    def _listen(self) -> None:
        arrived = list(self._grid.pull_messages(list(self._pending)))
        for message in arrived:
            self._pending.discard(message.metadata.reply_to_message_id)
            node_id = message.metadata.src_node_id
            if message.has_error():
                if message.error.code == RAISED:
                    self.refused[node_id] = str(message.error.reason)
            elif (node := _introduced(message)) is not None:
                self.nodes[node_id] = node
        if not arrived:
            self._sleep(_POLL_SECONDS)


def _introduced(message: Message) -> Node | None:
    try:
        me = message.content.config_records["whoami"]
        return Node(
            partition_id=_told(me, "partition-id"),
            node_id=message.metadata.src_node_id,
            num_examples=_told(me, "num-examples") if "num-examples" in me else None,
            role=_word(me, "role"),
            group=_word(me, "group"),
        )
    except (KeyError, ValueError) as error:
        log(WARNING, "Node %d introduced itself wrongly: %s.", message.metadata.src_node_id, shown(error))
        return None


def _told(me: ConfigRecord, key: str) -> int:
    value = me[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_EXAMPLES:
        raise ValueError(f"{key} is {quoted(value)}; valid is an integer from 0 to {MAX_EXAMPLES}")
    return value


def _word(me: ConfigRecord, key: str) -> str:
    value = str(me.get(key, ""))
    # It stands in logs and errors as it is.
    if value != shown(value, _MAX_WORD):
        raise ValueError(
            f"{key} is {quoted(value)}; valid is a text of up to {_MAX_WORD} printable characters"
        )
    return value


class Exchange:
    """One exchange: messages to some nodes, and the checks that their replies must pass.

    Parameters
    ----------
    nodes : Iterable[Node]
        The nodes that were sent a message.
    group_id : str
        The messages' group (the round); a reply of another group is ``stale``.
    check : Callable[[Node, RecordDict], Any]
        Returns what to keep of a valid reply; raises PayloadError for any other.
    quorum : int or None (default: None)
        Stop once this many replies are accepted; None waits for all until the deadline.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        group_id: str,
        check: Callable[[Node, RecordDict], Any],
        quorum: int | None = None,
    ) -> None:
        self._waiting = {node.node_id: node for node in sorted(nodes, key=lambda n: n.partition_id)}
        self._asked = set(self._waiting)
        self._group_id = group_id
        self._check = check
        self._quorum = quorum
        self.report = ExchangeReport(sent=len(self._waiting))

    def accept(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Yield the valid replies in the order of partition ids, as early as that order allows.

        A reply is held back only while a node before it may still answer, so memory stays bounded by
        how far replies overtake each other.
        """
        held: dict[int, Reply] = {}
        order = list(self._waiting)
        position = 0
        for message in messages:
            reply = self._validated(message)
            if reply is not None:
                held[reply.node.node_id] = reply
                self.report.accepted += 1
            while position < len(order) and order[position] not in self._waiting:
                if (ready := held.pop(order[position], None)) is not None:
                    yield ready
                position += 1
            if self.report.accepted == self._quorum:
                break
        for node_id in order[position:]:
            if node_id in held:
                yield held.pop(node_id)
        if self._waiting:
            reason = "after quorum" if self.report.accepted == self._quorum else "no reply"
            self.report.rejected[reason] += len(self._waiting)
        self._log()

    def _validated(self, message: Message) -> Reply | None:
        try:
            return self._check_envelope_and_content(message)
        except PayloadError as error:
            self.report.rejected[error.reason] += 1
            log(INFO, "\t> Reply of node %d not used: %s", message.metadata.src_node_id, error)
            return None

    def _check_envelope_and_content(self, message: Message) -> Reply:
        node_id = message.metadata.src_node_id
        if message.metadata.group_id != self._group_id:
            stale = quoted(message.metadata.group_id)
            raise PayloadError("stale", f"of round {stale}, not {self._group_id!r}")
        node = self._waiting.pop(node_id, None)
        if node is None:
            asked = node_id in self._asked
            raise PayloadError("duplicate" if asked else "unknown node", f"node {node_id}")
        if message.has_error():
            raise PayloadError(f"error {message.error.code}", (message.error.reason or "").strip()[-300:])
        return Reply(node, message.content, self._check(node, message.content))

    def _log(self) -> None:
        lost = sum(self.report.rejected.values())
        if lost:
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.report.rejected.items()))
            log(INFO, "\tReceived %d of %d replies (%s)", self.report.accepted, self.report.sent, reasons)


def checked_metrics(content: RecordDict, weighted_by_key: str) -> MetricRecord:
    """Return a reply's one MetricRecord if its weight is in (0, 2^53] and all its values are finite.

    Raises
    ------
    PayloadError
        With reason ``bad metrics``, ``bad weight`` or ``non-finite``.
    """
    metrics = only_record(content, MetricRecord, "bad metrics")
    weight = metrics.get(weighted_by_key)
    if not isinstance(weight, int | float) or not 0 < weight <= MAX_EXAMPLES:
        raise PayloadError(
            "bad weight", f"{weighted_by_key}={quoted(weight)}, expected 0 < weight <= {MAX_EXAMPLES}"
        )
    for key, value in metrics.items():
        if not all(isfinite(v) for v in (value if isinstance(value, list) else [value])):
            raise PayloadError("non-finite", f"metric {shown(key)}={quoted(value)}")
    return metrics


def weighted_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return the weighted mean of the metrics that all replies carry (the default of ``*_aggr_fn``)."""
    records = [next(iter(records_of(content, MetricRecord).values())) for content in contents]
    weights = np.array([float(record[weighted_by_key]) for record in records])  # type: ignore[arg-type]
    mean = MetricRecord()
    for key in records[0]:
        values = [record.get(key) for record in records]
        if (
            key == weighted_by_key
            or len({np.shape(v) for v in values if v is not None}) != 1
            or None in values
        ):
            continue
        average = np.average(np.array(values, np.float64), axis=0, weights=weights)
        mean[key] = average.tolist() if average.ndim else float(average)
    return mean
