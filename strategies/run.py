"""One attempt of a round: its context, and its exchanges as messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.exchange import (
    Columns,
    Exchange,
    Models,
    Question,
    Replies,
    RoundFailedError,
    Row,
    Steps,
    Together,
    Vector,
    answered,
)
from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Reply, collect
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.part import Parts
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import Layout, nominal_bits, payload_bytes

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


@dataclass(eq=False)
class Run:
    """The context of one attempt of a round: its inputs beside the state, and what it records.

    Parameters
    ----------
    federation : Federation
        The nodes.
    round : int
        From 1.
    config : Mapping
        The caller's config for every node.
    there : Sequence[int]
        Partition ids of the online nodes, ascending.
    parts : Parts
        The parts of the run.
    grid : Grid or None (default: None)
        Carries the messages; None without a network.
    model : Callable[[], NDArray] or None (default: None)
        Returns the model (M,) of the state before the round.
    """

    federation: Federation
    round: int
    config: Mapping[str, Any]
    there: Sequence[int]
    parts: Parts
    grid: Grid | None = None
    model: Callable[[], Vector] | None = None
    # Message counts of the last exchange over the grid; complete once its replies are read.
    report: ExchangeReport = field(default_factory=ExchangeReport)
    # Message counts of all ``Together``, and their number.
    whole: ExchangeReport = field(default_factory=ExchangeReport)
    waves: int = 0
    # The nodes whose updates the round has absorbed, and their metrics.
    absorbed: list[int] = field(default_factory=list)
    contents: list[RecordDict] = field(default_factory=list)
    # The same metrics in columns, if there were no single replies.
    table: Mapping[str, NDArray[Any]] | None = None
    # Further metrics of the round.
    metrics: dict[str, Any] = field(default_factory=dict)
    # The update of the base that nodes hold (see ``Downlink``), if the round moves it.
    update: Mapping[str, Any] | None = None
    # The models that were sent, by id, and their arrays.
    _arrays: dict[int, tuple[Vector, ArrayRecord]] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Seed of the server's random draws."""
        return self.federation.settings.seed

    @property
    def id(self) -> int:
        """Flower's id of the run; a resumed run has another one."""
        return 0 if self.grid is None else self.grid.run.run_id

    @property
    def layout(self) -> Layout:
        """The model's layout."""
        return self.federation.known_layout()

    def sizes(self, nodes: Sequence[int], claimed: Sequence[float]) -> Sequence[float]:
        """Return |S_i| of nodes (K,): the examples that each claimed first, up to the run's bound."""
        return self.federation.limits.weights_of(nodes, claimed)

    def known_sizes(self, nodes: Sequence[int], otherwise: float) -> Sequence[float]:
        """Return |S_i| of nodes (K,), or ``otherwise`` for one that has claimed none."""
        known, weight = self.federation.limits.sizes, self.federation.limits.weight_of
        return [weight(i) if i in known else otherwise for i in nodes]

    def book(
        self, link: str, ends: Sequence[tuple[int, int]], payloads: Sequence[int], bits: int | None = None
    ) -> None:
        """Book transfers between servers, one for each (source, target), with their payloads in bytes.

        ``bits`` are the nominal bits of one; None for a model's.
        """
        if ends:
            sources, targets = zip(*ends, strict=True)
            bits = self.federation.model_bits if bits is None else bits
            self.federation.ledger.book_all(self.round, link, sources, targets, bits, payloads)

    def changed(self, exchange: Exchange) -> Exchange:
        """Return an exchange as the parts change it."""
        for part in self.parts.hooks["ask"]:
            exchange = part.ask(exchange, self)
        return exchange

    def prepared(self, exchange: Exchange) -> Exchange:
        """Return an exchange as the parts change it, with the caller's config."""
        exchange = self.changed(exchange)
        frozen = self.federation.frozen_config if self.federation.frozen else {}
        config = {**self.config, **exchange.config, **frozen}
        return replace(exchange, config=config)

    # Exchanges.

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
        assert self.grid is not None
        if isinstance(step, Question):
            return answered(self.federation, self.grid, self.round, step)
        sending = self.to_send(step)
        self.book_sent(step, sending)
        first, ttl = step.exchanges[0], self.federation.timeout
        group = f"{self.round}-{self.group(step)}"
        inbox = Inbox(sending.nodes, group, self.reader(step))
        self.report = inbox.report
        messages = sending.messages(step.kind, group, ttl)
        came = collect(self.grid, messages, min(ttl, first.timeout)) if messages else ()
        replies = inbox.accept(_until(came, first.done))
        if not isinstance(step, Together):
            return self.columns(step, replies)
        if sending.offline:
            inbox.report.rejected["offline"] = sending.offline
        held = list(replies)
        self.federation.judge(inbox)
        return self.read_together(step, held, inbox.report)

    def group(self, step: Exchange | Together) -> str:
        """Return the name that distinguishes the messages of an exchange from the round's others."""
        return str(self.waves) if isinstance(step, Together) else step.group

    def read_together(
        self, step: Together, replies: Sequence[Reply], report: ExchangeReport
    ) -> tuple[Replies, ...]:
        """Return the valid replies to each exchange, booked, and add up the message counts."""
        self.whole.sent += report.sent
        self.whole.accepted += report.accepted
        self.whole.rejected += report.rejected
        self.whole.errors |= report.errors
        of = {id(exchange): list[Reply]() for exchange in step.exchanges}
        for reply in replies:
            of[id(step.of(reply.node.partition_id))].append(reply)
        return tuple(self.columns(exchange, of[id(exchange)]) for exchange in step.exchanges)

    def to_send(self, step: Exchange | Together) -> Sending:
        """Return the instructions of an exchange; nodes with equal ones share one object."""
        known: dict[Any, tuple[RecordDict, tuple[int, int]]] = {}
        if isinstance(step, Together):
            assert self.grid is not None
            roster = self.federation.gather(self.grid)
            self.waves += 1
            asked = [(ask.pool, i, one) for one in step.exchanges for i, ask in one.asked.items()]
            if len(step.exchanges) > 1:
                asked.sort(key=lambda row: row[0])
            there = [(i, one) for _, i, one in asked if roster.nodes[i].node_id in roster.online]
            nodes, offline = [roster.nodes[i] for i, _ in there], len(asked) - len(there)
            made = [self._content(one, i, known) for i, one in there]
        else:
            if step.trains:
                nodes, away = self.federation.members.select_online(list(step.asked))
            else:
                nodes, away = self.federation.members.nodes_of(step.asked), 0
            offline = step.offline + away
            made = [self._content(step, node.partition_id, known) for node in nodes]
        return Sending(nodes, [content for content, _ in made], [size for _, size in made], offline)

    def book_sent(self, step: Exchange | Together, sending: Sending) -> None:
        """Book the instructions of an exchange."""
        ledger, members = self.federation.ledger, [node.partition_id for node in sending.nodes]
        if isinstance(step, Together):
            of = {i: one for one in step.exchanges for i in one.asked}
            for at, (_, size) in zip(members, sending.sizes, strict=True):
                if of[at].booked:
                    ledger.book(self.round, HUB_TO_NODE, 0, at, of[at].asked[at].bits or 0, size)
        elif members and (step.links[0] or step.booked):
            asks, sizes = [step.asked[at] for at in members], sending.sizes
            model = self.federation.model_bits if step.blocks is None else Models().bits(step.blocks.layout)
            bits = [model if ask.bits is None else ask.bits for ask in asks]
            if link := step.links[0]:
                pools = [ask.pool for ask in asks]
                ledger.book_all(self.round, link, pools, members, bits, [size for size, _ in sizes])
            ledger.book_all(
                self.round, HUB_TO_NODE, [0] * len(members), members, bits, [size for _, size in sizes]
            )

    def _content(
        self, exchange: Exchange, at: int, known: dict[Any, tuple[RecordDict, tuple[int, int]]]
    ) -> tuple[RecordDict, tuple[int, int]]:
        """Return a node's content and its sizes in bytes; nodes with equal contents share one object."""
        ask = exchange.asked[at]
        own = [values.get(at) for values in ask.own.values()]
        lacks = at in self.federation.lacking
        alike = (
            id(exchange),
            ask.pool,
            lacks,
            *(v if isinstance(v, str | int | float) else id(v) for v in own),
        )
        if alike not in known:
            content = self.instruction(exchange, at)
            booked = RecordDict({k: v for k, v in content.items() if k not in exchange.unbooked})
            config = content[self.federation.settings.configrecord_key]
            size = sum(payload_bytes(record) for record in booked.values() if record is not config)
            known[alike] = content, (size, payload_bytes(booked))
        if lacks:
            self.federation.lacking.discard(at)
        return known[alike]

    def instruction(self, exchange: Exchange, node: int) -> RecordDict:
        """Return the content of a node's message; nodes that are sent the same model share its arrays."""
        ask, settings = exchange.asked[node], self.federation.settings
        own = {key: values[node] for key, values in ask.own.items() if node in values}
        records = {key: value for key, value in own.items() if isinstance(value, ArrayRecord | ConfigRecord)}
        values = {key: value for key, value in own.items() if key not in records}
        arrays = ask.arrays
        if arrays is None and ask.model is not None:
            if id(ask.model) not in self._arrays:
                self._arrays[id(ask.model)] = (
                    ask.model,
                    exchange.layout(self.federation).unflatten(ask.model),
                )
            arrays = self._arrays[id(ask.model)][1]
        model = {} if arrays is None else {settings.arrayrecord_key: arrays}
        # An exchange that was not ``prepared`` has no checksum yet.
        about = self.federation.frozen_config if model and self.federation.frozen else {}
        config = ConfigRecord({**exchange.config, **about, **ask.config, **values})
        lacked = self.federation.frozen_for(node) if about else {}
        return RecordDict({**model, **ask.records, **records, **lacked, settings.configrecord_key: config})

    def reader(self, exchange: Exchange | Together) -> Callable[[Node, RecordDict], Any]:
        """Return the function that reads the replies to an exchange."""
        if isinstance(exchange, Together):
            return lambda node, content: read(self, exchange.of(node.partition_id), node, content)
        # The reader outlives the instructions, so it must not hold them.
        kept = exchange if exchange.reads is None else replace(exchange, asks=())
        return partial(read, self, kept)

    def columns(self, exchange: Exchange, replies: Iterable[Reply]) -> Replies:
        """Yield the valid replies of an exchange, booked."""
        held = list[Reply]()
        rows = max(1, _CHUNK // max(1, exchange.layout(self.federation).size * 8))
        for reply in replies:
            for part in self.parts.hooks["take"]:
                part.take(exchange, reply, self)
            held.append(reply)
            if len(held) == rows:
                yield self._booked(exchange, held)
                held = []
        if held:
            yield self._booked(exchange, held)
        if exchange.reads is None and not self.federation.enough():
            raise RoundFailedError

    def _booked(self, exchange: Exchange, replies: Sequence[Reply]) -> Columns:
        """Book valid replies, and return them as columns."""
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
            self.contents += [reply.metrics for reply in replies]
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
        nodes, ledger = columns.nodes, self.federation.ledger
        if link := exchange.links[1]:
            ledger.book_all(self.round, link, nodes, columns.pools, bits, arrays)
        if link or exchange.booked:
            ledger.book_all(self.round, NODE_TO_HUB, nodes, [0] * len(nodes), bits, whole)
        if exchange.reads is None:
            self.absorbed += nodes
            for part in self.parts.hooks["learnt"] if nodes else ():
                part.learnt(exchange, columns, self)
        return columns


@dataclass(frozen=True)
class ReadReply:
    """A valid reply: its row, claimed number of examples, bits as the paper counts them, and read arrays."""

    row: Any
    claimed: float
    bits: int
    arrays: ArrayRecord | None = None


def read(run: Run, exchange: Exchange, node: Node, content: RecordDict) -> ReadReply:
    """Read a reply to an exchange; raise PayloadError if it is not valid."""
    federation = run.federation
    for part in run.parts.hooks["check"]:
        part.check(node, content, exchange, run)
    if exchange.reads is not None:
        row = exchange.reads(node, content)
        row = row if isinstance(row, Row) else Row(row, exchange.coding.bits(exchange.layout(federation)))
        return ReadReply(row.vector, 0.0, row.bits)
    sent = exchange.asked[node.partition_id].model
    assert sent is not None, "the exchange has models"
    arrays, claimed = only_arrays(content), federation.limits.checked_weight(content)
    row = exchange.coding.read(arrays, sent, exchange.layout(federation), node.partition_id)
    if federation.settings.max_update_norm_ratio:
        with np.errstate(over="ignore", invalid="ignore"):  # An overflow is infinite, and refused.
            move = row.vector if exchange.coding.changes else row.vector - sent
        exchange.check(federation, move, sent)
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
