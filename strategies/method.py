"""The driver of methods: a round is a generator of exchanges, which Flower's loop and the suite's alike run.

One place sends, checks, books and judges. What is no algorithm is an aggregator or a part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.aggregate.mean import Aggregator, Mean
from hedgerow.strategies.exchange import (
    Columns,
    Exchange,
    Question,
    RoundFailedError,
    Steps,
    Vector,
    answered,
)
from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.inbox import Inbox, Node, Reply, collect
from hedgerow.strategies.parts.part import Part
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.wire.records import Layout, payload_bytes

__all__ = ["Learnt", "Method", "Run", "read"]

S = TypeVar("S")
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
    model : Callable[[], NDArray]
        Returns the model (M,) that stands for the state before the round.
    """

    federation: Federation
    round: int
    config: Mapping[str, Any]
    there: Sequence[int]
    parts: Sequence[Part]
    model: Callable[[], Vector] | None = None
    # The nodes whose learning the round has absorbed, and the metrics that they told.
    absorbed: list[int] = field(default_factory=list)
    contents: list[RecordDict] = field(default_factory=list)
    # What the round's record says beside.
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """Keys what is drawn."""
        return self.federation.settings.seed

    @property
    def layout(self) -> Layout:
        """The model's."""
        return self.federation.known_layout()

    def size(self, node: int, claimed: float) -> float:
        """Return |S_i|: the examples that a node claimed first, up to the run's bound."""
        self.federation.sizes.setdefault(node, claimed)
        return self.federation.weight_of(node)

    def book(self, link: str, source: int, target: int, payload: int) -> None:
        """Book a model that servers tell each other: its nominal bits, and the bytes of its payload."""
        self.federation.ledger.book(self.round, link, source, target, self.federation.model_bits, payload)

    def known_size(self, node: int, otherwise: float) -> float:
        """Return the examples that a node claimed first, or what stands in where it claimed none."""
        return self.federation.sizes.get(node, otherwise)

    def prepared(self, exchange: Exchange) -> Exchange:
        """Return what parts make of an exchange: what nodes are asked, and how their replies are read."""
        for part in self.parts:
            exchange = part.ask(exchange, self)
        return replace(exchange, config={**self.config, **exchange.config})


class Method(FederatedStrategy, Generic[S]):
    """A Flower ``Strategy`` of a method that says ``begin``, ``round`` and ``model`` of a frozen ``State``.

    Parameters
    ----------
    federation : Federation
        The nodes.
    aggregator : Aggregator
        What is taken of the replies.
    parts : Sequence[Part] (default: ())
        What is added beside: compression, for example.
    """

    state_class: ClassVar[type]

    def __init__(self, federation: Federation, *, aggregator: Aggregator, parts: Sequence[Part] = ()) -> None:
        self.aggregator, self.parts = aggregator, tuple(parts)
        super().__init__(federation)

    # What a paper says.

    @abstractmethod
    def begin(self, model: Vector) -> S:
        """Return the state before the first round, of the initial model (M,)."""

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

    # State.

    def _forget(self) -> None:
        self.state: S | None = None
        self._steps: Steps[S] | None = None
        for part in self.parts:
            part.forget()

    def _state(self) -> dict[str, Any]:
        state = self._known_state()
        return {
            "method": {one.name: getattr(state, one.name) for one in fields(state)},  # type: ignore[arg-type]
            "parts": {part.name: part.state_dict() for part in self.parts},
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        if "method" not in state:
            raise ValueError(f"state is none of {type(self).__name__}: it was written by an earlier version")
        self.state = self.state_class(**state["method"])
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
        """Return the messages of the round's training exchange."""
        self._begin_round(server_round)
        if self.state is None:
            self.state = self.begin(self.federation.vector(arrays))
        self._grid = grid
        there = self.federation.open_round(grid).present
        before = partial(self.model, self.state)
        self._run = Run(self.federation, server_round, dict(config), there, self.parts, before)
        self._steps = self._made(self.state, self._run)
        self._exchange = self._to_training(next(self._steps))
        return self._sent(self._exchange)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Go on to the end of the round; None, and the state of before, if too few replies came."""
        run, steps = self._run, self._steps
        assert steps is not None
        try:
            step = self._send(steps, self._trained(replies))
            while True:
                step = self._send(steps, self._answered(step))
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

    # Mechanics.

    def _made(self, state: S, run: Run) -> Steps[S]:
        for part in self.parts:
            yield from part.opened(run)
        return (yield from self.round(state, run))

    def _to_training(self, step: Exchange | Question) -> Exchange:
        assert self._steps is not None
        while isinstance(step, Question) or step.kind != MessageType.TRAIN:
            step = self._send(self._steps, self._answered(step))
        return step

    def _send(self, steps: Steps[S], replies: Iterator[Any]) -> Exchange | Question:
        try:
            return steps.send(replies)
        finally:
            deque(replies, maxlen=0)  # What a round does not read is checked and booked all the same.

    def _sent(self, exchange: Exchange) -> list[Message]:
        """Return the messages of the training exchange, booked."""
        nodes, away = self.federation.there(list(exchange.asked))
        return self.federation.instruct(
            self._run.round,
            self._contents(exchange, nodes),
            partial(read, self.federation, exchange),
            offline=exchange.offline + away,
        )

    def _contents(self, exchange: Exchange, nodes: Sequence[Node]) -> list[tuple[Node, RecordDict]]:
        """Return what nodes are asked, booked."""
        names = self.settings.arrayrecord_key, self.settings.configrecord_key
        bits = self.federation.model_bits if exchange.counted else 0
        shared: dict[int, tuple[dict[str, ArrayRecord | ConfigRecord], dict[str, Any], RecordDict]] = {}
        for ask in exchange.asks:
            records: dict[str, ArrayRecord | ConfigRecord] = {
                names[0]: self._arrays(ask.model),
                **ask.records,
            }
            told = {**exchange.config, **ask.config}
            shared[ask.pool] = records, told, RecordDict({**records, names[1]: ConfigRecord(told)})
        contents = []
        for node in nodes:
            ask = exchange.asked[node.partition_id]
            records, told, content = shared[ask.pool]
            if ask.own:
                own = {key: values[node.partition_id] for key, values in ask.own.items()}
                content = RecordDict({**records, names[1]: ConfigRecord({**told, **own})})
            contents.append((node, content))
            sizes = sum(map(payload_bytes, records.values())), payload_bytes(content)
            self.federation.book_down(
                self._run.round, exchange.links[0], ask.pool, node.partition_id, bits, sizes
            )
        return contents

    def _trained(self, replies: Iterable[Message]) -> Iterator[Columns]:
        """Yield the valid replies of the training exchange, booked; RoundFailedError if they are too few."""
        learns = self._exchange.reads is None
        for columns in self._chunks(self._exchange, self.federation.accept(replies)):
            if learns:
                self._run.absorbed += columns.nodes
                self._run.contents += [reply.metrics for reply in columns.replies]
            yield columns
        if learns and not self.federation.enough():
            raise RoundFailedError

    def _chunks(self, exchange: Exchange, replies: Iterable[Reply]) -> Iterator[Columns]:
        """Yield the valid replies of an exchange, booked."""
        rows = max(1, _CHUNK // max(1, self.federation.known_layout().size * 8))
        link, held = exchange.links[1], list[Reply]()
        for reply in replies:
            node, arrays, bits = reply.node.partition_id, only_arrays(reply.content), reply.value.bits
            pool = exchange.asked[node].pool
            self.federation.book_up(self._run.round, link, node, pool, bits, arrays, reply)
            held.append(reply)
            if len(held) == rows:
                yield _columns(exchange, held)
                held = []
        if held:
            yield _columns(exchange, held)

    def _answered(self, step: Exchange | Question) -> Iterator[Any]:
        """Yield the replies to what is asked beside the training exchange, over the grid."""
        federation, server_round = self.federation, self._run.round
        if isinstance(step, Question):
            yield from answered(federation, self._grid, server_round, step)
            return
        nodes, _ = federation.there(list(step.asked))
        group = f"{server_round} {step.kind}"
        inbox = Inbox(nodes, group, partial(read, federation, step))
        messages = [
            Message(content, node.node_id, step.kind, ttl=federation.timeout, group_id=group)
            for node, content in self._contents(step, nodes)
        ]
        replies = collect(self._grid, messages, federation.timeout) if messages else ()
        yield from self._chunks(step, inbox.accept(replies))


@dataclass(frozen=True)
class Learnt:
    """What a valid reply holds: its row, the examples that its node claims, and the paper's bits."""

    row: Any
    claimed: float
    bits: int


def read(federation: Federation, exchange: Exchange, node: Node, content: RecordDict) -> Learnt:
    """Read a reply to a training exchange.

    Raises
    ------
    PayloadError
        If it is not what was asked for.
    """
    layout = federation.known_layout()
    if exchange.reads is not None:
        row = exchange.reads(node, content)
        for check in exchange.checks:
            check(node, content)
        return Learnt(row, 0.0, exchange.coding.bits(layout) if exchange.counted else 0)
    sent = exchange.asked[node.partition_id].model
    arrays, claimed = only_arrays(content), federation.checked_weight(content)
    row = exchange.coding.read(arrays, sent, layout)
    with np.errstate(over="ignore"):
        federation.bound().check(row.vector if exchange.coding.changes else row.vector - sent, sent)
    for check in exchange.checks:
        check(node, content)
    return Learnt(row.vector, claimed, row.bits)


def _columns(exchange: Exchange, replies: Sequence[Reply]) -> Columns:
    nodes = [reply.node.partition_id for reply in replies]
    return Columns(
        nodes,
        [exchange.asked[node].pool for node in nodes],
        [reply.value.row for reply in replies],
        [reply.value.claimed for reply in replies],
        replies,
    )
