"""The driver of methods: a round is a generator of exchanges, which Flower's loop and the suite's alike run.

One place sends, checks, books and judges. What is no algorithm is an aggregator or a part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from logging import INFO
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.aggregate.mean import Aggregator, Mean, WeightedMean
from hedgerow.strategies.exchange import (
    Columns,
    Exchange,
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
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Node, Reply, collect
from hedgerow.strategies.parts.part import Part
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import Layout, payload_bytes

__all__ = ["Learnt", "Method", "Run", "read"]

S = TypeVar("S")
T = TypeVar("T")
# Replies that are held at once, in bytes of their vectors.
_CHUNK = 1 << 28


@dataclass(eq=False)
class Run:
    """What a round may know beside its state, and where what it tells goes; one for each try.

    Parameters
    ----------
    federation : Federation
        The nodes.
    round : int
        From 1.
    config : Mapping
        What the caller has every node told.
    there : Sequence[int]
        Partition ids of those that are there, ascending.
    parts : Sequence[Part]
        Those of the run.
    grid : Grid or None (default: None)
        Over which messages go; None where there is no network.
    model : Callable[[], NDArray] or None (default: None)
        Returns the model (M,) that stands for the state before the round.
    """

    federation: Federation
    round: int
    config: Mapping[str, Any]
    there: Sequence[int]
    parts: Sequence[Part]
    grid: Grid | None = None
    model: Callable[[], Vector] | None = None
    # What the last exchange over the grid sent, got and lost: all of it once its replies are read.
    report: ExchangeReport = field(default_factory=ExchangeReport)
    # What all that was made together sent, got and lost, and how often that was.
    whole: ExchangeReport = field(default_factory=ExchangeReport)
    waves: int = 0
    # The nodes whose learning the round has absorbed, and the metrics that they told.
    absorbed: list[int] = field(default_factory=list)
    contents: list[RecordDict] = field(default_factory=list)
    # What the round's record says beside.
    told: dict[str, Any] = field(default_factory=dict)
    # What takes what nodes hold to its next version, where the round has moved it.
    update: Mapping[str, Any] | None = None
    # The models that were sent, by id, and their arrays.
    _arrays: dict[int, tuple[Vector, ArrayRecord]] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Keys what is drawn."""
        return self.federation.settings.seed

    @property
    def id(self) -> int:
        """Flower's number of the run, another one if it goes on."""
        return 0 if self.grid is None else self.grid.run.run_id

    @property
    def layout(self) -> Layout:
        """The model's."""
        return self.federation.known_layout()

    def size(self, node: int, claimed: float) -> float:
        """Return |S_i|: the examples that a node claimed first, up to the run's bound."""
        self.federation.sizes.setdefault(node, claimed)
        return self.federation.weight_of(node)

    def known_size(self, node: int, otherwise: float) -> float:
        """Return the examples that a node claimed first, or what stands in where it claimed none."""
        return self.federation.sizes.get(node, otherwise)

    def book(self, link: str, source: int, target: int, payload: int, bits: int | None = None) -> None:
        """Book what servers tell each other: the bytes of its payload, and its nominal bits, or a model's."""
        bits = self.federation.model_bits if bits is None else bits
        self.federation.ledger.book(self.round, link, source, target, bits, payload)

    def changed(self, exchange: Exchange) -> Exchange:
        """Return what parts make of an exchange: what nodes are asked, and how their replies are read."""
        for part in self.parts:
            exchange = part.ask(exchange, self)
        return exchange

    def prepared(self, exchange: Exchange) -> Exchange:
        """Return the same, with what the caller has every node told."""
        exchange = self.changed(exchange)
        return replace(exchange, config={**self.config, **exchange.config})

    # Exchanges.

    def driven(self, steps: Steps[T]) -> T:
        """Make exchanges that are part of no round, all of them over the grid; return what comes of them."""
        try:
            step = next(steps)
            while True:
                step = send(steps, self.answered(step))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def answered(self, step: Exchange | Question | Together) -> Any:
        """Make an exchange over the grid, or a question; return its valid replies, booked as they are read.

        Of what is made together, the replies to each.
        """
        assert self.grid is not None
        if isinstance(step, Question):
            return answered(self.federation, self.grid, self.round, step)
        contents, offline = self.to_send(step)
        first, ttl = step.exchanges[0], self.federation.timeout
        group = f"{self.round}-{self.group(step)}"
        inbox = Inbox([node for node, _ in contents], group, self.reader(step))
        self.report = inbox.report
        messages = [
            Message(content, to.node_id, step.kind, ttl=ttl, group_id=group) for to, content in contents
        ]
        came = collect(self.grid, messages, min(ttl, first.timeout)) if messages else ()
        replies = inbox.accept(_until(came, first.done))
        if not isinstance(step, Together):
            return self.columns(step, replies)
        if offline:
            inbox.report.rejected["offline"] = offline
        held = list(replies)
        self.federation.judge(inbox)
        return self.read_together(step, held, inbox.report)

    def group(self, step: Exchange | Together) -> str:
        """Return what sets the messages of an exchange apart from the round's others."""
        return str(self.waves) if isinstance(step, Together) else step.group

    def read_together(
        self, step: Together, replies: Sequence[Reply], report: ExchangeReport
    ) -> tuple[Replies, ...]:
        """Return the valid replies to each of some exchanges, booked, and add up what became of all."""
        self.whole.sent += report.sent
        self.whole.accepted += report.accepted
        self.whole.rejected += report.rejected
        self.whole.errors |= report.errors
        of = {id(exchange): list[Reply]() for exchange in step.exchanges}
        for reply in replies:
            of[id(step.of(reply.node.partition_id))].append(reply)
        return tuple(self.columns(exchange, of[id(exchange)]) for exchange in step.exchanges)

    def _sent_together(self, step: Together) -> tuple[list[tuple[Node, RecordDict]], int]:
        assert self.grid is not None
        roster = self.federation.gather(self.grid)
        self.waves += 1
        asked = [(ask.pool, i, one) for one in step.exchanges for i, ask in one.asked.items()]
        if len(step.exchanges) > 1:
            asked.sort(key=lambda row: row[0])
        contents, known = [], dict[Any, tuple[RecordDict, tuple[int, int]]]()
        for _, at, exchange in asked:
            if roster.nodes[at].node_id not in roster.online:
                continue
            content, (_, size) = self._content(exchange, at, known)
            contents.append((roster.nodes[at], content))
            if exchange.booked:
                self.federation.ledger.book(
                    self.round, HUB_TO_NODE, 0, at, exchange.asked[at].bits or 0, size
                )
        return contents, len(asked) - len(contents)

    def to_send(self, exchange: Exchange | Together) -> tuple[list[tuple[Node, RecordDict]], int]:
        """Return the contents of an exchange's messages, booked, and how many of its nodes are not there."""
        if isinstance(exchange, Together):
            return self._sent_together(exchange)
        if exchange.trains:
            nodes, away = self.federation.there(list(exchange.asked))
        else:
            nodes, away = [self.federation.node(i) for i in exchange.asked], 0
        contents, ledger = [], self.federation.ledger
        known: dict[Any, tuple[RecordDict, tuple[int, int]]] = {}
        for node in nodes:
            at = node.partition_id
            ask = exchange.asked[at]
            content, sizes = self._content(exchange, at, known)
            contents.append((node, content))
            bits = self.federation.model_bits if ask.bits is None else ask.bits
            if exchange.links[0]:
                self.federation.book_down(self.round, exchange.links[0], ask.pool, at, bits, sizes)
            elif exchange.booked:
                ledger.book(self.round, HUB_TO_NODE, 0, at, bits, sizes[1])
        return contents, exchange.offline + away

    def _content(
        self, exchange: Exchange, at: int, known: dict[Any, tuple[RecordDict, tuple[int, int]]]
    ) -> tuple[RecordDict, tuple[int, int]]:
        """Return what a node is sent, and the bytes of it: nodes that are told the same share one content."""
        ask = exchange.asked[at]
        own = [values.get(at) for values in ask.own.values()]
        alike = id(exchange), ask.pool, *(v if isinstance(v, str | int | float) else id(v) for v in own)
        if alike not in known:
            content = self.instruction(exchange, at)
            booked = RecordDict({k: v for k, v in content.items() if k not in exchange.unbooked})
            told = content[self.federation.settings.configrecord_key]
            size = sum(payload_bytes(record) for record in booked.values() if record is not told)
            known[alike] = content, (size, payload_bytes(booked))
        return known[alike]

    def instruction(self, exchange: Exchange, node: int) -> RecordDict:
        """Return what an exchange sends a node; all that are sent a model share its arrays."""
        ask, settings = exchange.asked[node], self.federation.settings
        own = {key: values[node] for key, values in ask.own.items() if node in values}
        records = {key: value for key, value in own.items() if isinstance(value, ArrayRecord | ConfigRecord)}
        told = {key: value for key, value in own.items() if key not in records}
        arrays = ask.arrays
        if arrays is None and ask.model is not None:
            if id(ask.model) not in self._arrays:
                self._arrays[id(ask.model)] = ask.model, self.layout.unflatten(ask.model)
            arrays = self._arrays[id(ask.model)][1]
        model = {} if arrays is None else {settings.arrayrecord_key: arrays}
        config = ConfigRecord({**exchange.config, **ask.config, **told})
        return RecordDict({**model, **ask.records, **records, settings.configrecord_key: config})

    def reader(self, exchange: Exchange | Together) -> Callable[[Node, RecordDict], Any]:
        """Return what reads the replies to an exchange."""
        if isinstance(exchange, Together):
            return lambda node, content: read(self, exchange.of(node.partition_id), node, content)
        # What is read is kept longer than what was sent must be.
        kept = exchange if exchange.reads is None else replace(exchange, asks=())
        return partial(read, self, kept)

    def columns(self, exchange: Exchange, replies: Iterable[Reply]) -> Replies:
        """Yield the valid replies of an exchange, booked."""
        federation = self.federation
        held: list[Reply] = []
        rows = max(1, _CHUNK // max(1, self.layout.size * 8))
        for reply in replies:
            node, bits = reply.node.partition_id, reply.value.bits
            if link := exchange.links[1]:
                pool, arrays = exchange.asked[node].pool, only_arrays(reply.content)
                federation.book_up(self.round, link, node, pool, bits, arrays, reply)
            elif exchange.booked:
                federation.ledger.book(self.round, NODE_TO_HUB, node, 0, bits, payload_bytes(reply.content))
            for part in self.parts:
                part.take(exchange, reply, self)
            if exchange.reads is None:
                self.absorbed.append(node)
                self.contents.append(reply.metrics)
            held.append(reply)
            if len(held) == rows:
                yield self._learnt(exchange, held)
                held = []
        if held:
            yield self._learnt(exchange, held)
        if exchange.reads is None and not federation.enough():
            raise RoundFailedError

    def _learnt(self, exchange: Exchange, replies: Sequence[Reply]) -> Columns:
        columns = _columns(exchange, replies)
        if exchange.reads is None:
            for part in self.parts:
                part.learnt(exchange, columns, self)
        return columns


class Method(FederatedStrategy, Generic[S]):
    """A Flower ``Strategy`` of a method that says ``begin``, ``round`` and ``model`` of a frozen ``State``.

    Parameters
    ----------
    federation : Federation
        The nodes.
    aggregator : Aggregator (default: WeightedMean())
        What is taken of the replies.
    parts : Sequence[Part] (default: ())
        What is added beside: compression, for example.
    """

    state_class: ClassVar[type]

    def __init__(
        self, federation: Federation, *, aggregator: Aggregator | None = None, parts: Sequence[Part] = ()
    ) -> None:
        self.aggregator = aggregator or WeightedMean()
        # An aggregator that keeps state is a part too.
        kept = [self.aggregator] if isinstance(self.aggregator, Part) else []
        self.parts = (*parts, *kept, *federation.settings.parts)
        if len(names := [part.name for part in self.parts]) != len(set(names)):
            raise ValueError(f"parts have the names {names}; valid is another name for each")
        super().__init__(federation)

    # What a paper says.

    @abstractmethod
    def begin(self, model: Vector) -> S:
        """Return the state before the first round, of the initial model (M,); M is 0 where nodes have it."""

    @abstractmethod
    def round(self, state: S, run: Run) -> Steps[S]:
        """Yield the exchanges of a round, and return the state after it.

        A round that comes to nothing is made again from the same state: nothing else may be changed.
        """

    @abstractmethod
    def model(self, state: S) -> Vector:
        """Return the model (M,) that stands for a state."""

    def means(self, exchange: Exchange, run: Run) -> Steps[Mapping[int, Mean]]:
        """Make a training exchange; return what the aggregator takes of each pool's replies."""
        return self.aggregator.means(run.prepared(exchange), run)

    def ended(self, state: S, run: Run) -> None:
        """Take note of the state after a round that counts."""

    def moved(self, state: S, model: Vector) -> S:
        """Return the state after a wrapper has changed its model; ValueError if it cannot."""
        raise self.cannot_go_on()

    @property
    def iterations(self) -> int | None:
        """Local iterations since the start; None where a method does not say."""
        return None

    def summary(self) -> None:
        """Log the settings: the aggregator, and what parts do."""
        log(INFO, "\t├──> Aggregator: %s", type(self.aggregator).__name__)
        for line in [line for part in self.parts for line in part.describe()]:
            log(INFO, "\t├──> %s", line)
        self.federation.log_keys()

    # State.

    def saved(self, state: S) -> dict[str, Any]:
        """Return what a checkpoint holds of a state: its fields."""
        return {one.name: getattr(state, one.name) for one in fields(state)}  # type: ignore[arg-type]

    def restored(self, saved: Mapping[str, Any]) -> S:
        """Return the state of a checkpoint."""
        return self.state_class(**saved)  # type: ignore[no-any-return]

    def _forget(self) -> None:
        self.state: S | None = None
        # The round at hand, until it ends: its steps, and its training exchange.
        self._at_hand: tuple[Run, Steps[S], Exchange | Together] | None = None
        for part in self.parts:
            part.forget()
        if self.sums is not None:
            self.sums.forget()

    def _state(self) -> dict[str, Any]:
        return {
            "method": self.saved(self._known_state()),
            "parts": {part.name: part.state_dict() for part in self.parts},
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        if "parts" not in state:
            raise ValueError(f"state is none of {type(self).__name__}: it was written by an earlier version")
        self.state = self.restored(state["method"])
        for part in self.parts:
            part.load_state_dict(state["parts"][part.name])

    def _known_state(self) -> S:
        if self.state is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self.state

    def current_arrays(self) -> ArrayRecord | None:
        """Return the model of the completed rounds; None before the first."""
        return None if self.state is None else self._arrays(self.model(self.state))

    def _arrays(self, model: Vector) -> ArrayRecord:
        return self.federation.known_layout().unflatten(model)

    def adopt(self, arrays: ArrayRecord) -> None:
        """Go on from other arrays than the last round returned, where the method can."""
        if self.state is not None:  # Else the round begins with its arrays.
            dtype = self.model(self.state).dtype
            self.state = self.moved(self.state, self.federation.known_layout().flatten(arrays, dtype))

    # Flower's interface: the round's training exchange is handed over, all else goes over the grid.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages of the round's training exchange; none where nothing is left to do."""
        self._begin_round(server_round)
        self._at_hand = None
        if self.finished:
            return []
        if self.state is None:
            self.state = self.begin(self.federation.vector(arrays))
        there = self.federation.open_round(grid).present
        before = partial(self.model, self.state)
        run = Run(self.federation, server_round, dict(config), there, self.parts, grid, before)
        steps = self._made(self.state, run)
        try:
            step = next(steps)
            while isinstance(step, Question) or not step.trains:
                step = send(steps, run.answered(step))
        except StopIteration as end:
            self.state = end.value
            return []
        self._at_hand = run, steps, step
        contents, offline = run.to_send(step)
        messages = self.federation.instruct(
            server_round, contents, run.reader(step), offline=offline, message_type=step.kind,
            group=run.group(step),
        )  # fmt: skip
        nodes = [node for node, _ in contents]
        besides = [(part, exchange) for part in self.parts for exchange in step.exchanges]
        return [*messages, *(m for part, exchange in besides for m in part.beside(exchange, nodes, run))]

    def _made(self, state: S, run: Run) -> Steps[S]:
        for part in self.parts:
            yield from part.opened(run)
        return (yield from self.round(state, run))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Go on to the end of the round; None, and the state of before, if too few replies came."""
        if self._at_hand is None:
            return None, None
        (run, steps, made), self._at_hand = self._at_hand, None
        for part in self.parts:
            for exchange in made.exchanges:
                replies = part.arrived(replies, exchange, run)
        accepted = self.federation.accept(replies)
        try:
            if isinstance(made, Together):
                step = send(steps, run.read_together(made, list(accepted), self.federation.report))
            else:
                step = send(steps, run.columns(made, accepted))
            while True:
                step = send(steps, run.answered(step))
        except RoundFailedError:
            return None, None
        except StopIteration as end:
            self.state = end.value
        self.federation.completed = server_round
        for part in self.parts:
            part.ended(run)
        self.ended(self._known_state(), run)
        metrics = self.train_metrics(run.contents)
        metrics.update(run.told)
        return self.current_arrays(), metrics

    def train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Return the round's metrics of those that nodes told."""
        return self.federation.train_metrics(contents)


@dataclass(frozen=True)
class Learnt:
    """What a valid reply holds: its row, the examples that its node claims, and the paper's bits."""

    row: Any
    claimed: float
    bits: int


def read(run: Run, exchange: Exchange, node: Node, content: RecordDict) -> Learnt:
    """Read a reply to an exchange.

    Raises
    ------
    PayloadError
        If it is not what was asked for.
    """
    federation, layout = run.federation, run.layout
    for part in run.parts:
        part.check(node, content, exchange, run)
    if exchange.reads is not None:
        row = exchange.reads(node, content)
        row = row if isinstance(row, Row) else Row(row, exchange.coding.bits(layout))
        return Learnt(row.vector, 0.0, row.bits)
    sent = exchange.asked[node.partition_id].model
    assert sent is not None, "the exchange has models"
    arrays, claimed = only_arrays(content), federation.checked_weight(content)
    row = exchange.coding.read(arrays, sent, layout, node.partition_id)
    if federation.settings.max_update_norm_ratio:
        with np.errstate(over="ignore", invalid="ignore"):  # What overflows is infinite, and too far.
            move = row.vector if exchange.coding.changes else row.vector - sent
        exchange.check(federation, move, sent)
    return Learnt(row.vector, claimed, row.bits)


def send(steps: Steps[T], replies: Any) -> Exchange | Question | Together:
    try:
        return steps.send(replies)
    finally:  # What a round does not read is checked and booked all the same.
        for one in replies if isinstance(replies, tuple) else (replies,):
            deque(one, maxlen=0)


def _until(messages: Iterable[Message], done: Callable[[], bool] | None) -> Iterator[Message]:
    for message in messages:
        yield message
        # It has been read by now.
        if done is not None and done():
            return


def _columns(exchange: Exchange, replies: Sequence[Reply]) -> Columns:
    nodes = [reply.node.partition_id for reply in replies]
    return Columns(
        nodes,
        [exchange.asked[node].pool for node in nodes],
        [reply.value.row for reply in replies],
        [reply.value.claimed for reply in replies],
        replies,
    )
