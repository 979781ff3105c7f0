"""Message exchanges between a strategy and its nodes, with a deadline and a quorum.

Replies are checked one by one and yielded in the order of partition ids, whatever their order of arrival, so
that sums are equal on every engine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from math import inf
from typing import Any

import numpy as np
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.node import Node
from hedgerow.strategies.whoami import RAISED, grid_clock
from hedgerow.wire.limits import MAX_EXAMPLES, MAX_METRIC
from hedgerow.wire.printable import quoted, shown
from hedgerow.wire.records import PayloadError, only_record, records_of

# The reason for refusing an update.
TOO_LARGE = "update too large"
_POLL_SECONDS = 0.1
# Bounds on a reply, checked before it is read: records, values per record, metrics per record, characters per
# key.
_MOST_RECORDS, _MOST_VALUES, _MOST_METRICS, _LONGEST_KEY = 64, 100_000, 1_000, 1_000


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply that arrived in time and passed its check; ``value`` is the check's result."""

    node: Node
    content: RecordDict
    value: Any

    @property
    def metrics(self) -> RecordDict:
        """Its metrics alone, the input of ``*_metrics_aggr_fn``."""
        return RecordDict({**records_of(self.content, MetricRecord)})


@dataclass
class ExchangeReport:
    """Message counts of one exchange."""

    # Instructions.
    sent: int = 0
    # Replies that arrived in time and passed every check.
    accepted: int = 0
    # Lost replies by reason: ``error <code>``, ``no reply``, ``stale``, ``unknown node``, ``duplicate``,
    # ``no content``, ``too many keys``, ``update too large``, ``non-finite``, ``wrong shape``, …; and
    # excluded nodes: ``duplicate name``, ``malformed introduction``, ``another input shape``, …
    rejected: Counter[str] = field(default_factory=Counter)
    # Error replies, by partition id.
    errors: dict[int, Error] = field(default_factory=dict)


def collect(grid: Grid, messages: Sequence[Message], timeout: float) -> Iterator[Message]:
    """Send messages and yield the replies as they arrive, until all have come or the time is up.

    Uses the grid's own clock if it has one (an engine with simulated delays), else the wall clock. An error
    that Flower's SuperLink reports about a node counts as that node's reply.
    """
    now, sleep = grid_clock(grid)
    end = now() + timeout
    ids = list(grid.push_messages(messages))
    # In sending order: the order of waiting replies must not depend on hashes.
    pending = dict.fromkeys(message_id for message_id in ids if message_id)
    # Flower's simulation omits the ids of messages that it could not send; then ids have no known recipient.
    sent = dict(zip(ids, messages, strict=True)) if len(ids) == len(messages) else {}
    while pending:
        arrived = False
        for message in grid.pull_messages(list(pending)):
            answered = message.metadata.reply_to_message_id
            pending.pop(answered, None)
            arrived = True
            if (instruction := sent.get(answered)) is not None and message.has_error():
                # The SuperLink is the sender of its errors; attribute them to the node that they concern.
                yield Message(message.error, reply_to=instruction)
            else:
                yield message
        if now() >= end:
            return
        if pending and not arrived:
            sleep(min(_POLL_SECONDS, max(end - now(), 0.0)))


class Inbox:
    """The replies to one exchange, and the checks that they must pass.

    ``group_id`` is the messages' group (the round): a reply of another one is ``stale``. ``check`` returns
    the value of a valid reply, and raises PayloadError for any other.
    """

    def __init__(
        self, nodes: Iterable[Node], group_id: str, check: Callable[[Node, RecordDict], Any]
    ) -> None:
        self._waiting = {node.node_id: node for node in sorted(nodes, key=lambda n: n.partition_id)}
        self._asked = set(self._waiting)
        self._group_id = group_id
        self._check = check
        # For each node whose message has its own group: the group, and the reader of its reply.
        self._single: dict[int, tuple[str, Callable[[Node, RecordDict], Any]]] = {}
        self.report = ExchangeReport(sent=len(self._waiting))
        # Partition ids with a refused reply or an error of the node's own, and with a valid one.
        self.refused: set[int] = set()
        self.used: set[int] = set()

    def accept(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """Yield the valid replies in the order of partition ids, as early as that order allows.

        A reply is held back only while a node before it may still answer, which bounds the memory.
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
        for node_id in order[position:]:
            if node_id in held:
                yield held.pop(node_id)
        if self._waiting:
            self.report.rejected["no reply"] += len(self._waiting)
        if self.report.rejected.total():
            reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.report.rejected.items()))
            log(INFO, "\tReceived %d of %d replies (%s)", self.report.accepted, self.report.sent, reasons)

    def close(self) -> None:
        """Forget how replies are read, and with it the models that were sent; the counts stay."""
        self._check = lambda node, content: None

    # Replies to single messages.

    def expect(self, node: Node, group_id: str, check: Callable[[Node, RecordDict], Any]) -> None:
        """Wait for a node's reply to one message, known by its group; ``check`` reads it."""
        self._waiting[node.node_id] = node
        self._asked.add(node.node_id)
        self._single[node.node_id] = group_id, check

    def taken(self, message: Message) -> Reply | None:
        """Return a reply if it is valid; else None, and its reason is counted."""
        if (reply := self._validated(message)) is not None:
            self.report.accepted += 1
        return reply

    # Replies without messages.

    def settle(self, nodes: Sequence[Node], errors: Mapping[int, PayloadError]) -> None:
        """Count the replies of all nodes: those with an error, by position, as lost, the others as valid."""
        self._waiting.clear()
        for at, node in enumerate(nodes):
            if at not in errors:
                self.used.add(node.partition_id)
                continue
            self.refused.add(node.partition_id)
            self.report.rejected[errors[at].reason] += 1
            log(INFO, "\t> Reply of node %d not used: %s", node.node_id, errors[at])
        self.report.accepted += len(nodes) - len(errors)

    def _validated(self, message: Message) -> Reply | None:
        try:
            return self._checked(message)
        except PayloadError as error:
            self.report.rejected[error.reason] += 1
            log(INFO, "\t> Reply of node %d not used: %s", message.metadata.src_node_id, error)
            return None

    def _checked(self, message: Message) -> Reply:
        node_id = message.metadata.src_node_id
        group_id, check = self._single.get(node_id, (self._group_id, self._check))
        if message.metadata.group_id != group_id:
            stale = quoted(message.metadata.group_id)
            raise PayloadError("stale", f"of round {stale}, not {group_id!r}")
        node = self._waiting.pop(node_id, None)
        if node is None:
            asked = node_id in self._asked
            raise PayloadError("duplicate" if asked else "unknown node", f"node {node_id}")
        if message.has_error():
            self.report.errors[node.partition_id] = message.error
            if message.error.code == RAISED:  # Others are of the network, or of a node that is gone.
                self.refused.add(node.partition_id)
            raise PayloadError(f"error {message.error.code}", (message.error.reason or "").strip()[-300:])
        try:
            if not message.has_content():
                raise PayloadError("no content", "neither content nor error")
            _check_size(message.content)
            reply = Reply(node, message.content, check(node, message.content))
        except PayloadError:
            self.refused.add(node.partition_id)
            raise
        self.used.add(node.partition_id)
        return reply


def _check_size(content: RecordDict) -> None:
    """Raise PayloadError if a reply has too many or too long keys."""
    if len(content) > _MOST_RECORDS:
        raise PayloadError("too many keys", f"{len(content)} records, expected at most {_MOST_RECORDS}")
    for record in content.values():
        most = _MOST_METRICS if isinstance(record, MetricRecord) else _MOST_VALUES
        if len(record) > most:
            kind = type(record).__name__
            raise PayloadError("too many keys", f"{len(record)} in a {kind}, expected at most {most}")
        if isinstance(record, MetricRecord):
            count = sum(len(value) for value in record.values() if isinstance(value, list))
            if count > _MOST_VALUES:
                raise PayloadError(
                    "bad metrics", f"{count} numbers in lists, expected at most {_MOST_VALUES}"
                )
    for keys in (content, *content.values()):
        if longest := next((key for key in keys if len(key) > _LONGEST_KEY), None):
            raise PayloadError("long key", f"{len(longest)} characters, expected at most {_LONGEST_KEY}")


def checked_metrics(content: RecordDict, weighted_by_key: str) -> MetricRecord:
    """Return a reply's one MetricRecord if its weight is in (0, 2^53] and all its values in [-1e30, 1e30].

    Else raise PayloadError with reason ``bad metrics``, ``bad weight`` or ``non-finite``.
    """
    metrics = only_record(content, MetricRecord, "bad metrics")
    weight = metrics.get(weighted_by_key)
    if not isinstance(weight, int | float) or not 0 < weight <= MAX_EXAMPLES:
        raise PayloadError(
            "bad weight", f"{weighted_by_key}={quoted(weight)}, expected 0 < weight <= {MAX_EXAMPLES}"
        )
    for key, value in metrics.items():
        for one in value if isinstance(value, list) else [value]:
            if not abs(one) <= MAX_METRIC:  # Neither is NaN.
                reason = "bad metrics" if one == one and abs(one) != inf else "non-finite"  # noqa: PLR0124
                raise PayloadError(reason, f"{shown(key)}={quoted(one)}, expected -1e30 to 1e30")
    return metrics


def weighted_metrics(
    contents: list[RecordDict], weighted_by_key: str, max_weight_ratio: float = 0.0
) -> MetricRecord:
    """Return the weighted mean of the metrics that all replies have (the default of ``*_aggr_fn``).

    Weights are capped at ``max_weight_ratio`` times their median; 0 for no bound. ``weights-capped`` counts
    those that are.
    """
    records = [only_record(content, MetricRecord, "bad metrics") for content in contents]
    table = {}
    for key in records[0]:
        values = [record.get(key) for record in records]
        if len({np.shape(v) for v in values if v is not None}) == 1 and None not in values:
            table[key] = np.array(values, np.float64)
    return mean_metrics(table, weighted_by_key, max_weight_ratio)


def mean_metrics(
    table: Mapping[str, NDArray[Any]], weighted_by_key: str, max_weight_ratio: float = 0.0
) -> MetricRecord:
    """Return the weighted mean of metrics in columns (K, ...), by name; see ``weighted_metrics``."""
    weights = np.asarray(table[weighted_by_key], np.float64)
    mean = MetricRecord()
    if max_weight_ratio and (cut := int((weights > (most := max_weight_ratio * np.median(weights))).sum())):
        weights, mean["weights-capped"] = np.minimum(weights, most), cut
    for key, values in table.items():
        if key != weighted_by_key:
            average = np.average(np.asarray(values, np.float64), axis=0, weights=weights)
            mean[key] = average.tolist() if average.ndim else float(average)
    return mean
