"""The messenger of a round: it sends, checks and books exchanges.

Replies come as messages (``answered``, ``columns``) or, from an engine that can, as columns without messages
(``at_once``). Both ways send what ``to_send`` made, and book and count replies in ``taken``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import (
    Bounds,
    Columns,
    Exchange,
    Models,
    Question,
    Replies,
    RoundFailedError,
    Row,
    Steps,
    Together,
    answered,
    check_update,
)
from hedgerow.strategies.federation import only_arrays
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Reply, collect
from hedgerow.strategies.node import Node
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import nominal_bits, payload_bytes

T = TypeVar("T")
# Size of a chunk of replies, in bytes of their vectors.
_CHUNK = 1 << 28


@dataclass(frozen=True, eq=False)
class Sending:
    """The instructions of an exchange, for each node that is sent one.

    ``sizes`` has the bytes of all records but the config, and of all; ``offline`` counts the asked nodes that
    are sent none.
    """

    nodes: Sequence[Node]
    contents: Sequence[RecordDict]
    sizes: Sequence[tuple[int, int]]
    offline: int

    def messages(self, kind: str, group: str, ttl: float) -> list[Message]:
        """Return the messages."""
        return [
            Message(content, node.node_id, kind, ttl=ttl, group_id=group)
            for node, content in zip(self.nodes, self.contents, strict=True)
        ]


class Messenger:
    """Makes the exchanges of one attempt of a round.

    Parameters
    ----------
    context : RoundContext
        The attempt.
    """

    def __init__(self, context: RoundContext) -> None:
        self.context = context
        self._federation = context.federation
        # The number of ``Together``.
        self._waves = 0

    def driven(self, steps: Steps[T]) -> T:
        """Make exchanges outside a round, all of them over the grid; return the generator's result."""
        try:
            step = next(steps)
            while True:
                step = send(steps, self.answered(step))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def answered(self, step: Exchange | Question | Together) -> Any:
        """Make an exchange or a question over the grid; return its valid replies, booked as they are read.

        For ``Together``, returns the replies to each exchange.
        """
        context, grid = self.context, self.context.grid
        assert grid is not None
        if isinstance(step, Question):
            return answered(self._federation, grid, context.round, step)
        sending = self.to_send(step)
        self.book_sent(step, sending)
        first, ttl = step.exchanges[0], self._federation.timeout
        group = self.group(step, alone=True)
        inbox = Inbox(sending.nodes, group, self.reader(step))
        context.report = inbox.report
        messages = sending.messages(step.kind, group, ttl)
        came = collect(grid, messages, min(ttl, first.timeout)) if messages else ()
        replies = inbox.accept(_until(came, first.done))
        if not isinstance(step, Together):
            return self.columns(step, replies)
        if sending.offline:
            inbox.report.rejected["offline"] = sending.offline
        held = list(replies)
        self._federation.judge(inbox)
        return self.read_together(step, held, inbox.report)

    def group(self, step: Exchange | Together, *, alone: bool) -> str:
        """Return the group of an exchange's messages, which distinguishes them from the round's others.

        ``alone`` is whether they go over the grid, not through Flower's loop.
        """
        own = str(self._waves) if isinstance(step, Together) else step.group
        return f"{self.context.round}-{own}" if own or alone else str(self.context.round)

    def read_together(
        self, step: Together, replies: Sequence[Reply], report: ExchangeReport
    ) -> tuple[Replies, ...]:
        """Return the valid replies to each exchange, booked, and add up the message counts."""
        self.context.whole.sent += report.sent
        self.context.whole.accepted += report.accepted
        self.context.whole.rejected += report.rejected
        self.context.whole.errors |= report.errors
        of = {id(exchange): list[Reply]() for exchange in step.exchanges}
        for reply in replies:
            of[id(step.of[reply.node.partition_id])].append(reply)
        return tuple(self.columns(exchange, of[id(exchange)]) for exchange in step.exchanges)

    def to_send(self, step: Exchange | Together) -> Sending:
        """Return the instructions of an exchange; nodes with equal ones share one object."""
        known: dict[Any, tuple[RecordDict, tuple[int, int]]] = {}
        if isinstance(step, Together):
            assert self.context.grid is not None
            roster = self._federation.gather(self.context.grid)
            self._waves += 1
            asked = [(ask.pool, i, one) for one in step.exchanges for i, ask in one.asked.items()]
            if len(step.exchanges) > 1:
                asked.sort(key=lambda row: row[0])
            there = [(i, one) for _, i, one in asked if roster.nodes[i].node_id in roster.online]
            nodes, offline = [roster.nodes[i] for i, _ in there], len(asked) - len(there)
            made = [self._content(one, i, known) for i, one in there]
        else:
            if step.trains:
                nodes, away = self._federation.members.select_online(list(step.asked))
            else:
                nodes, away = self._federation.members.nodes_of(step.asked), 0
            offline = step.offline + away
            made = [self._content(step, node.partition_id, known) for node in nodes]
        return Sending(nodes, [content for content, _ in made], [size for _, size in made], offline)

    def book_sent(self, step: Exchange | Together, sending: Sending) -> None:
        """Book the instructions of an exchange."""
        ledger, members = self._federation.ledger, [node.partition_id for node in sending.nodes]
        if isinstance(step, Together):
            for at, (_, size) in zip(members, sending.sizes, strict=True):
                if (exchange := step.of[at]).booked:
                    ledger.book(self.context.round, HUB_TO_NODE, 0, at, exchange.asked[at].bits or 0, size)
        elif members and (step.links[0] or step.booked):
            asks, sizes = [step.asked[at] for at in members], sending.sizes
            model = Models().bits(step.layout(self._federation))
            bits = [model if ask.bits is None else ask.bits for ask in asks]
            if link := step.links[0]:
                pools = [ask.pool for ask in asks]
                ledger.book_all(self.context.round, link, pools, members, bits, [size for size, _ in sizes])
            hub, whole = [0] * len(members), [size for _, size in sizes]
            ledger.book_all(self.context.round, HUB_TO_NODE, hub, members, bits, whole)

    def _content(
        self, exchange: Exchange, at: int, known: dict[Any, tuple[RecordDict, tuple[int, int]]]
    ) -> tuple[RecordDict, tuple[int, int]]:
        """Return a node's content and its sizes in bytes; nodes with equal contents share one object."""
        ask = exchange.asked[at]
        own = [values.get(at) for values in ask.own.values()]
        lacks = at in self._federation.lacking
        alike = (
            id(exchange),
            ask.pool,
            lacks,
            *(v if isinstance(v, str | int | float) else id(v) for v in own),
        )
        if alike not in known:
            content = instruction(self.context, exchange, at)
            booked = RecordDict({k: v for k, v in content.items() if k not in exchange.unbooked})
            config = content[self._federation.settings.configrecord_key]
            size = sum(payload_bytes(record) for record in booked.values() if record is not config)
            known[alike] = content, (size, payload_bytes(booked))
        if lacks:
            self._federation.lacking.discard(at)
        return known[alike]

    def reader(self, step: Exchange | Together) -> Callable[[Node, RecordDict], ReadReply]:
        """Return the function that reads the replies to an exchange."""
        if isinstance(step, Exchange):
            return Reader(self.context, step)
        readers = {id(exchange): Reader(self.context, exchange) for exchange in step.exchanges}
        return lambda node, content: readers[id(step.of[node.partition_id])](node, content)

    def columns(self, exchange: Exchange, replies: Iterable[Reply]) -> Replies:
        """Yield the valid replies of an exchange, booked."""
        held = list[Reply]()
        rows = max(1, _CHUNK // max(1, exchange.layout(self._federation).size * 8))
        for reply in replies:
            for part in self.context.parts.hooks["take"]:
                part.take(exchange, reply, self.context)
            held.append(reply)
            if len(held) == rows:
                yield self.booked(exchange, held)
                held = []
        if held:
            yield self.booked(exchange, held)
        if exchange.reads is None and not self._federation.enough():
            raise RoundFailedError

    def booked(self, exchange: Exchange, replies: Sequence[Reply]) -> Columns:
        """Book valid replies; return them as columns."""
        nodes = [reply.node.partition_id for reply in replies]
        rows, claimed = [reply.value.row for reply in replies], [reply.value.claimed for reply in replies]
        bits, sizes, whole = [reply.value.bits for reply in replies], list[int](), list[int]()
        if exchange.links[1]:
            arrays = [
                only_arrays(reply.content) if reply.value.arrays is None else reply.value.arrays
                for reply in replies
            ]
            # The paper's bits, unless the record was decoded from a smaller one.
            bits = [nominal_bits(one, own) for one, own in zip(arrays, bits, strict=True)]
            sizes = [payload_bytes(one) for one in arrays]
        if exchange.links[1] or exchange.booked:
            whole = [payload_bytes(reply.content) for reply in replies]
        if exchange.reads is None:
            self.context.contents += [reply.metrics for reply in replies]
        columns = Columns(nodes, [exchange.asked[node].pool for node in nodes], rows, claimed, replies)
        return self.taken(exchange, columns, bits, sizes, whole)

    def taken(
        self,
        exchange: Exchange,
        columns: Columns,
        bits: int | Sequence[int],
        arrays: Sequence[int],
        whole: Sequence[int],
    ) -> Columns:
        """Book valid replies, and count them if they are updates; return them.

        ``bits`` are those of the paper; ``arrays`` and ``whole`` have the bytes of a reply's arrays and of
        all of it, (K,), where the exchange needs them.
        """
        nodes, ledger = columns.nodes, self._federation.ledger
        if link := exchange.links[1]:
            ledger.book_all(self.context.round, link, nodes, columns.pools, bits, arrays)
        if link or exchange.booked:
            ledger.book_all(self.context.round, NODE_TO_HUB, nodes, [0] * len(nodes), bits, whole)
        if exchange.reads is None:
            self.context.absorbed += nodes
            for part in self.context.parts.hooks["learnt"] if nodes else ():
                part.learnt(exchange, columns, self.context)
        return columns


def instruction(context: RoundContext, exchange: Exchange, node: int) -> RecordDict:
    """Return the content of a node's message; nodes that are sent the same model share its arrays."""
    federation, ask = context.federation, exchange.asked[node]
    own = {key: values[node] for key, values in ask.own.items() if node in values}
    records = {key: value for key, value in own.items() if isinstance(value, ArrayRecord | ConfigRecord)}
    values = {key: value for key, value in own.items() if key not in records}
    arrays = ask.arrays
    if arrays is None and ask.model is not None:
        if id(ask.model) not in context.sent:
            context.sent[id(ask.model)] = ask.model, exchange.layout(federation).unflatten(ask.model)
        arrays = context.sent[id(ask.model)][1]
    model = {} if arrays is None else {federation.settings.arrayrecord_key: arrays}
    # An exchange that was not ``prepared`` has no checksum yet.
    about = federation.frozen_config if model and federation.frozen else {}
    config = ConfigRecord({**exchange.config, **about, **ask.config, **values})
    lacked = federation.frozen_for(node) if about else {}
    return RecordDict(
        {**model, **ask.records, **records, **lacked, federation.settings.configrecord_key: config}
    )


@dataclass(frozen=True)
class ReadReply:
    """A valid reply: its row, claimed number of examples, bits as the paper counts them, and read arrays."""

    row: Any
    claimed: float
    bits: int
    arrays: ArrayRecord | None = None


class Reader:
    """Reads the replies to an exchange.

    Parameters
    ----------
    context : RoundContext
        The attempt of the round.
    exchange : Exchange
        The exchange.
    """

    def __init__(self, context: RoundContext, exchange: Exchange) -> None:
        self._context, self._limits = context, context.federation.limits
        self._checks = context.parts.hooks["check"]
        # A reader outlives the instructions, so it must not hold those that it does not need.
        self._exchange = exchange if exchange.reads is None else replace(exchange, asks=())
        self.bounds: Bounds = ()
        if exchange.reads is None:
            self._layout = exchange.layout(context.federation)
            if context.federation.settings.max_update_norm_ratio:
                self.bounds = exchange.bounds(context.federation)

    def __call__(self, node: Node, content: RecordDict) -> ReadReply:
        """Read a reply; raise PayloadError if it is not valid."""
        exchange = self._exchange
        for part in self._checks:
            part.check(node, content, exchange, self._context)
        if exchange.reads is not None:
            row = exchange.reads(node, content)
            if not isinstance(row, Row):
                row = Row(row, exchange.coding.bits(exchange.layout(self._context.federation)))
            return ReadReply(row.vector, 0.0, row.bits)
        sent = exchange.asked[node.partition_id].model
        assert sent is not None, "the exchange has models"
        arrays, claimed = only_arrays(content), self._limits.checked_weight(content)
        row = exchange.coding.read(arrays, sent, self._layout, node.partition_id)
        if self.bounds:
            with np.errstate(over="ignore", invalid="ignore"):  # An overflow is infinite, and refused.
                move = row.vector if exchange.coding.changes else row.vector - sent
            check_update(self.bounds, move, sent)
        return ReadReply(row.vector, claimed, row.bits, arrays)


def send(steps: Steps[T], replies: Any) -> Exchange | Question | Together:
    """Send a generator the replies to its last step; return its next step."""
    try:
        return steps.send(replies)
    finally:  # Replies that the round does not read are still checked and booked.
        for one in replies if isinstance(replies, tuple) else (replies,):
            deque(one, maxlen=0)


def _until(messages: Iterable[Message], done: Callable[[], bool] | None) -> Iterator[Message]:
    for message in messages:
        yield message  # The consumer has read it when this resumes.
        if done is not None and done():
            return
