"""The driver of methods: a round is a generator of exchanges, which Flower's loop and the suite's alike run.

One place sends, checks, books and judges. What is no algorithm is an aggregator or a part.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.aggregate.mean import Aggregator, Mean
from hedgerow.strategies.exchange import (
    Columns,
    Exchange,
    Question,
    Replies,
    RoundFailedError,
    Steps,
    Vector,
    answered,
)
from hedgerow.strategies.federation import Federation, only_arrays
from hedgerow.strategies.inbox import Node, Reply
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
    grid : Grid or None (default: None)
        What carries its messages.
    """

    federation: Federation
    round: int
    config: Mapping[str, Any]
    there: Sequence[int]
    parts: Sequence[Part]
    grid: Grid | None = None
    # The nodes whose learning the round has absorbed, and the metrics that they told.
    absorbed: list[int] = field(default_factory=list)
    contents: list[RecordDict] = field(default_factory=list)
    # What the round's record says beside.
    told: dict[str, float] = field(default_factory=dict)
    # What takes what nodes hold to its next version, where the round has moved it.
    update: Mapping[str, Any] | None = None
    # The models that were sent, by id, and their arrays.
    _arrays: dict[int, tuple[Vector, ArrayRecord]] = field(default_factory=dict)

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

    def known_size(self, node: int, otherwise: float) -> float:
        """Return the examples that a node claimed first, or what stands in where it claimed none."""
        return self.federation.sizes.get(node, otherwise)

    def instruction(self, exchange: Exchange, node: int) -> RecordDict:
        """Return what an exchange sends a node; all nodes of a pool share the model's arrays."""
        ask, settings = exchange.asked[node], self.federation.settings
        own = {key: values[node] for key, values in ask.own.items() if node in values}
        records = {key: value for key, value in own.items() if isinstance(value, ArrayRecord)}
        told = {key: value for key, value in own.items() if key not in records}
        arrays = ask.arrays
        if arrays is None:
            if id(ask.model) not in self._arrays:
                self._arrays[id(ask.model)] = ask.model, self.layout.unflatten(ask.model)
            arrays = self._arrays[id(ask.model)][1]
        return RecordDict(
            {
                settings.arrayrecord_key: arrays,
                **ask.records,
                **records,
                settings.configrecord_key: ConfigRecord({**exchange.config, **ask.config, **told}),
            }
        )

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

    def moved(self, state: S, model: Vector) -> S:
        """Return the state after a wrapper has changed its model; ValueError if it cannot."""
        raise ValueError(f"{type(self).__name__}: its model is more than arrays")

    # State.

    def _forget(self) -> None:
        self.state: S | None = None
        self._steps: Steps[S] | None = None
        for part in self.parts:
            part.forget()
        if self.sums is not None:
            self.sums.forget()

    def _state(self) -> dict[str, Any]:
        state = self._known_state()
        return {
            "method": {one.name: getattr(state, one.name) for one in fields(state)},  # type: ignore[arg-type]
            "parts": {part.name: part.state_dict() for part in self.parts},
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        if "parts" not in state:
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
        there = self.federation.gather(grid).present
        self._run = Run(self.federation, server_round, dict(config), there, self.parts, grid)
        self._steps = self.round(self.state, self._run)
        self._exchange = self._to_training(next(self._steps))
        return self._sent(self._exchange)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Go on to the end of the round; None, and the state of before, if too few replies came."""
        run, steps = self._run, self._steps
        assert steps is not None
        for part in self.parts:
            replies = part.arrived(replies, self._exchange, run)
        try:
            step = self._send(steps, self._chunks(self._exchange, replies))
            while True:
                step = steps.send(self._answered(step))
        except RoundFailedError:
            return None, None
        except StopIteration as end:
            self.state = end.value
        for part in self.parts:
            part.ended(run)
        self.federation.completed = server_round
        metrics = self.train_metrics(run.contents)
        metrics.update(run.told)
        return self.current_arrays(), metrics

    def train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Return the round's metrics of those that nodes told."""
        return self.federation.train_metrics(contents)

    # Mechanics.

    def _to_training(self, step: Exchange | Question) -> Exchange:
        assert self._steps is not None
        while isinstance(step, Question):
            step = self._steps.send(self._answered(step))
        return step

    def _send(self, steps: Steps[S], replies: Replies) -> Exchange | Question:
        try:
            return steps.send(replies)
        finally:
            deque(replies, maxlen=0)  # What a round does not read is checked and booked all the same.

    def _sent(self, exchange: Exchange) -> list[Message]:
        """Return the messages of a training exchange, booked."""
        nodes, away = self.federation.there(list(exchange.asked))
        offline = exchange.offline + away
        bits = self.federation.model_bits if exchange.down_bits is None else exchange.down_bits
        contents = []
        # Nodes that are told the same share one content.
        known: dict[Any, tuple[RecordDict, tuple[int, int]]] = {}
        for node in nodes:
            at, ask = node.partition_id, exchange.asked[node.partition_id]
            own = [values.get(at) for values in ask.own.values()]
            alike = ask.pool, *(v if isinstance(v, str | int | float) else id(v) for v in own)
            if alike not in known:
                content = self._run.instruction(exchange, at)
                told = content[self.settings.configrecord_key]
                size = sum(payload_bytes(record) for record in content.values() if record is not told)
                known[alike] = content, (size, payload_bytes(content))
            content, sizes = known[alike]
            contents.append((node, content))
            self.federation.book_down(self._run.round, exchange.links[0], ask.pool, at, bits, sizes)
        messages = self.federation.instruct(
            self._run.round, contents, partial(read, self._run, exchange), offline=offline
        )
        return [*messages, *(m for part in self.parts for m in part.beside(exchange, nodes, self._run))]

    def _chunks(self, exchange: Exchange, replies: Iterable[Message]) -> Replies:
        """Yield the valid replies of a training exchange, booked."""
        federation, run = self.federation, self._run
        held: list[Reply] = []
        rows = max(1, _CHUNK // max(1, federation.known_layout().size * 8))
        for reply in federation.accept(replies):
            node, arrays = reply.node.partition_id, only_arrays(reply.content)
            pool, bits = exchange.asked[node].pool, reply.value.bits
            federation.book_up(run.round, exchange.links[1], node, pool, bits, arrays, reply)
            for part in self.parts:
                part.accepted(node, run)
            if exchange.reads is None:
                run.absorbed.append(node)
                run.contents.append(reply.metrics)
            held.append(reply)
            if len(held) == rows:
                yield _columns(exchange, held)
                held = []
        if held:
            yield _columns(exchange, held)
        if exchange.reads is None and not federation.enough():
            raise RoundFailedError

    def _answered(self, question: Exchange | Question) -> Iterator[Reply]:
        assert isinstance(question, Question), "a round has one training exchange"
        return answered(self.federation, self._grid, self._run.round, question)


@dataclass(frozen=True)
class Learnt:
    """What a valid reply holds: its row, the examples that its node claims, and the paper's bits."""

    row: Any
    claimed: float
    bits: int


def read(run: Run, exchange: Exchange, node: Node, content: RecordDict) -> Learnt:
    """Read a reply to a training exchange.

    Raises
    ------
    PayloadError
        If it is not what was asked for.
    """
    federation, layout = run.federation, run.layout
    for part in run.parts:
        part.check(node, content, exchange, run)
    if exchange.reads is not None:
        return Learnt(exchange.reads(node, content), 0.0, exchange.coding.bits(layout))
    sent = exchange.asked[node.partition_id].model
    arrays, claimed = only_arrays(content), federation.checked_weight(content)
    row = exchange.coding.read(arrays, sent, layout, node.partition_id)
    with np.errstate(over="ignore", invalid="ignore"):  # What overflows is infinite, and too far.
        move = row.vector if exchange.coding.changes else row.vector - sent
    exchange.check(federation, move, sent)
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
