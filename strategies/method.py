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
from numpy.typing import NDArray

from hedgerow.strategies.aggregate.mean import Aggregator, Mean, WeightedMean
from hedgerow.strategies.exchange import (
    Columns,
    Exchange,
    Models,
    Question,
    Replies,
    RoundFailedError,
    Row,
    Steps,
    Vector,
    answered,
)
from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Node, Reply, collect
from hedgerow.strategies.parts.part import Part
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.strategies.wrappers import Handed
from hedgerow.wire.calls import InColumns
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import Layout, PayloadError, payload_bytes

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
    # The nodes whose learning the round has absorbed, and the metrics that they told.
    absorbed: list[int] = field(default_factory=list)
    contents: list[RecordDict] = field(default_factory=list)
    # The same metrics in columns, where no single replies were made.
    table: Mapping[str, NDArray[Any]] | None = None
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

    def answered(self, step: Exchange | Question) -> Iterator[Any]:
        """Make an exchange over the grid, or a question; yield its valid replies, booked."""
        assert self.grid is not None
        if isinstance(step, Question):
            yield from answered(self.federation, self.grid, self.round, step)
            return
        contents, _ = self.to_send(step)
        kind, group, ttl = step.kind, f"{self.round}-{step.group}", self.federation.timeout
        inbox = Inbox([node for node, _ in contents], group, self.reader(step))
        self.report = inbox.report
        messages = [Message(content, to.node_id, kind, ttl=ttl, group_id=group) for to, content in contents]
        came = collect(self.grid, messages, min(ttl, step.timeout)) if messages else ()
        yield from self.columns(step, inbox.accept(_until(came, step.done)))

    def to_send(self, exchange: Exchange) -> tuple[list[tuple[Node, RecordDict]], int]:
        """Return the contents of an exchange's messages, booked, and how many of its nodes are not there."""
        if exchange.trains:
            nodes, away = self.federation.there(list(exchange.asked))
        else:
            nodes, away = [self.federation.node(i) for i in exchange.asked], 0
        contents, ledger = [], self.federation.ledger
        # Nodes that are told the same share one content.
        known: dict[Any, tuple[RecordDict, tuple[int, int]]] = {}
        for node in nodes:
            at = node.partition_id
            ask = exchange.asked[at]
            own = [values.get(at) for values in ask.own.values()]
            alike = ask.pool, *(v if isinstance(v, str | int | float) else id(v) for v in own)
            if alike not in known:
                content = self.instruction(exchange, at)
                told = content[self.federation.settings.configrecord_key]
                size = sum(payload_bytes(record) for record in content.values() if record is not told)
                known[alike] = content, (size, payload_bytes(content))
            content, sizes = known[alike]
            contents.append((node, content))
            bits = self.federation.model_bits if ask.bits is None else ask.bits
            if exchange.links[0]:
                self.federation.book_down(self.round, exchange.links[0], ask.pool, at, bits, sizes)
            elif exchange.booked:
                ledger.book(self.round, HUB_TO_NODE, 0, at, bits, sizes[1])
        return contents, exchange.offline + away

    def instruction(self, exchange: Exchange, node: int) -> RecordDict:
        """Return what an exchange sends a node; all that are sent a model share its arrays."""
        ask, settings = exchange.asked[node], self.federation.settings
        own = {key: values[node] for key, values in ask.own.items() if node in values}
        records = {key: value for key, value in own.items() if isinstance(value, ArrayRecord)}
        told = {key: value for key, value in own.items() if key not in records}
        arrays = ask.arrays
        if arrays is None and ask.model is not None:
            if id(ask.model) not in self._arrays:
                self._arrays[id(ask.model)] = ask.model, self.layout.unflatten(ask.model)
            arrays = self._arrays[id(ask.model)][1]
        model = {} if arrays is None else {settings.arrayrecord_key: arrays}
        config = ConfigRecord({**exchange.config, **ask.config, **told})
        return RecordDict({**model, **ask.records, **records, settings.configrecord_key: config})

    # An exchange at once, where the grid answers it without messages.

    def at_once(self, exchange: Exchange) -> Iterator[Columns] | None:
        """Make the training exchange without messages, to the same ends; None where messages must go."""
        answer = getattr(self.grid, "columns", None)
        simple = exchange.reads is None and type(exchange.coding) is Models and not exchange.bounded
        simple = simple and all(part.sees_columns for part in self.parts)
        bare = all(
            ask.model is not None and not (ask.arrays or ask.held or ask.records) for ask in exchange.asks
        )
        if answer is None or not simple or not bare or self.federation.settings.train_metrics_aggr_fn:
            return None
        nodes, away = self.federation.there(list(exchange.asked))
        groups: dict[Any, list[int]] = {}
        for node in nodes:
            ask = exchange.asked[node.partition_id]
            own = [values.get(node.partition_id) for values in ask.own.values()]
            if any(isinstance(value, ArrayRecord) for value in own):
                return None
            groups.setdefault((ask.pool, *own), []).append(node.partition_id)
        asked = [(self.instruction(exchange, members[0]), members) for members in groups.values()]
        found = answer(exchange.kind, asked)
        if found is None or found.rows.shape != (len(nodes), self.layout.size):
            return None
        if any(part.check_columns(exchange, found.metrics, self) for part in self.parts):
            return None
        return self._checked(exchange, nodes, exchange.offline + away, asked, found)

    def _checked(
        self,
        exchange: Exchange,
        nodes: Sequence[Node],
        offline: int,
        asked: Sequence[tuple[RecordDict, Sequence[int]]],
        found: InColumns,
    ) -> Iterator[Columns]:
        federation = self.federation
        self._book_down(exchange, asked)
        inbox = federation.open_exchange(self.round, nodes, self.reader(exchange), offline=offline)
        partitions = np.array([i for _, members in asked for i in members])
        rows, metrics = found.rows, {key: np.asarray(values) for key, values in found.metrics.items()}
        if (np.diff(partitions) < 0).any():
            order = np.argsort(partitions)
            rows, metrics = rows[order], {key: values[order] for key, values in metrics.items()}
        weights = np.asarray(metrics[federation.settings.weighted_by_key], np.float64)
        fine = np.isfinite(rows).all(axis=1) & federation.valid_weights(weights)
        for values in metrics.values():
            fine &= np.isfinite(values)
        sent = {ask.pool: ask.model for ask in exchange.asks}
        accepted, sizes = [], self._reply_sizes(rows, metrics)
        for k, node in enumerate(nodes):
            model = sent[exchange.asked[node.partition_id].pool]
            assert model is not None
            rows_dtype = rows[k].astype(model.dtype, copy=False)
            inbox.take(node)
            try:
                if not fine[k]:
                    read(
                        self, exchange, node, self._reply(rows[k], {key: v[k] for key, v in metrics.items()})
                    )
                if federation.settings.max_update_norm_ratio:
                    with np.errstate(over="ignore", invalid="ignore"):
                        exchange.check(federation, rows_dtype - model, model)
            except PayloadError as error:
                inbox.refuse(node, error)
                continue
            inbox.use(node)
            accepted.append(k)
        federation.judge(inbox)
        kept = [nodes[k].partition_id for k in accepted]
        pools = [exchange.asked[i].pool for i in kept]
        bits, ledger, link = exchange.coding.bits(self.layout), federation.ledger, exchange.links[1]
        arrays, whole = zip(*(sizes[k] for k in accepted), strict=True) if accepted else ((), ())
        if link:
            ledger.book_all(self.round, link, kept, pools, bits, arrays)
        ledger.book_all(self.round, NODE_TO_HUB, kept, [0] * len(kept), bits, whole)
        self.table = {key: values[accepted] for key, values in metrics.items()}
        self.absorbed += kept
        dtype = next(iter(sent.values())).dtype  # type: ignore[union-attr]
        taken = rows if len(accepted) == len(rows) else rows[accepted]
        vectors = list(taken.astype(dtype, copy=False))
        columns = Columns(kept, pools, vectors, weights[accepted].tolist(), [])
        if kept:
            for part in self.parts:
                part.learnt(exchange, columns, self)
            yield columns
        if not federation.enough():
            raise RoundFailedError

    def _book_down(self, exchange: Exchange, asked: Sequence[tuple[RecordDict, Sequence[int]]]) -> None:
        ledger = self.federation.ledger
        for content, members in asked:
            ask = exchange.asked[members[0]]
            told = content[self.federation.settings.configrecord_key]
            size = sum(payload_bytes(record) for record in content.values() if record is not told)
            bits = self.federation.model_bits if ask.bits is None else ask.bits
            whole, count = payload_bytes(content), len(members)
            if exchange.links[0]:
                pools = [ask.pool] * count
                ledger.book_all(self.round, exchange.links[0], pools, members, bits, [size] * count)
            ledger.book_all(self.round, HUB_TO_NODE, [0] * count, members, bits, [whole] * count)

    def _reply(self, row: Vector, metrics: Mapping[str, Any]) -> RecordDict:
        """Return the reply that a row stands for."""
        told = MetricRecord({key: value.item() for key, value in metrics.items()})
        return RecordDict({"arrays": self.layout.unflatten(row), "metrics": told})

    def _reply_sizes(self, rows: Vector, metrics: Mapping[str, NDArray[Any]]) -> list[tuple[int, int]]:
        """Return the bytes of each reply's arrays, and of all of it; integers take more as they grow."""
        whole = [values for values in metrics.values() if values.dtype.kind != "f"]
        known: dict[Any, tuple[int, int]] = {}
        sizes = []
        for k in range(len(rows)):
            alike = tuple(int(values[k]) for values in whole)
            if alike not in known:
                content = self._reply(rows[k], {key: values[k] for key, values in metrics.items()})
                known[alike] = payload_bytes(only_arrays(content)), payload_bytes(content)
            sizes.append(known[alike])
        return sizes

    def reader(self, exchange: Exchange) -> Callable[[Node, RecordDict], Any]:
        """Return what reads the replies to an exchange."""
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
        self._at_hand: tuple[Run, Steps[S], Exchange] | None = None
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
        self._to_training(server_round, arrays, config, grid)
        return self._messages()

    def train_at_once(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[ArrayRecord | None, MetricRecord | None] | list[Message]:
        """Make a round without messages, to the same ends; where they must go, return the round's.

        They must where the grid does not answer otherwise, or a subclass has other ways with messages.
        """
        own = type(self)
        hooks = ("configure_train", "aggregate_train", "train_metrics")
        if any(getattr(own, hook) is not getattr(Method, hook) for hook in hooks):
            return list(self.configure_train(server_round, arrays, config, grid))
        self._go_on_from(server_round, arrays)
        self._to_training(server_round, arrays, config, grid)
        if self._at_hand is None:
            return []
        run, steps, exchange = self._at_hand
        columns = run.at_once(exchange)
        if columns is None:
            return self._messages()
        self._at_hand = None
        new, metrics = self._finished(run, steps, columns)
        if new is not None:
            self._handed = Handed(new)
        return new, metrics

    def _to_training(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> None:
        """Begin a round, and go on to its training exchange, which is then at hand."""
        self._begin_round(server_round)
        self._at_hand = None
        if self.finished:
            return
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
            return
        self._at_hand = run, steps, step

    def _messages(self) -> list[Message]:
        """Return the messages of the training exchange at hand."""
        if self._at_hand is None:
            return []
        run, _, step = self._at_hand
        contents, offline = run.to_send(step)
        messages = self.federation.instruct(
            run.round, contents, run.reader(step), offline=offline, message_type=step.kind
        )
        nodes = [node for node, _ in contents]
        return [*messages, *(m for part in self.parts for m in part.beside(step, nodes, run))]

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
        (run, steps, exchange), self._at_hand = self._at_hand, None
        for part in self.parts:
            replies = part.arrived(replies, exchange, run)
        return self._finished(run, steps, run.columns(exchange, self.federation.accept(replies)))

    def _finished(
        self, run: Run, steps: Steps[S], columns: Iterator[Columns]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Go on from the training exchange to the end of the round."""
        try:
            step = send(steps, columns)
            while True:
                step = send(steps, run.answered(step))
        except RoundFailedError:
            return None, None
        except StopIteration as end:
            self.state = end.value
        self.federation.completed = run.round
        for part in self.parts:
            part.ended(run)
        self.ended(self._known_state(), run)
        if run.table is None:
            metrics = self.train_metrics(run.contents)
        else:
            metrics = self.federation.table_metrics(run.table)
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


def send(steps: Steps[T], replies: Iterator[Any]) -> Exchange | Question:
    try:
        return steps.send(replies)
    finally:
        deque(replies, maxlen=0)  # What a round does not read is checked and booked all the same.


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
