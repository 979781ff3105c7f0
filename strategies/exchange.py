"""The exchanges that make up a round, with their replies as columns.

``Method.round`` is a generator. It yields an ``Exchange`` and is sent its replies, chunks of ``Columns`` in
the order of partition ids. An aggregator may also yield a ``Question``, which is not part of the learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import Inbox, Reply, collect
from hedgerow.strategies.limits import UpdateBound
from hedgerow.strategies.node import Node
from hedgerow.wire.blocks import MODEL, Blocks
from hedgerow.wire.compress import compressed_part
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import Layout, payload_bytes

Vector = NDArray[Any]
T = TypeVar("T")
Weigh = Callable[[RoundContext, "Columns"], Sequence[float]]
Bounds = Sequence[tuple[UpdateBound, slice | NDArray[np.intp], Vector | None]]


@dataclass(frozen=True, eq=False)
class Ask:
    """The instructions for the nodes of one pool.

    Parameters
    ----------
    nodes : Sequence[int]
        Partition ids, ascending.
    model : NDArray or None
        Their start model, (M,); None if no model is sent.
    config : Mapping[str, Any]
        The pool's config, added to that of the exchange.
    own : Mapping[str, Mapping[int, Any]]
        Values for single nodes, by key and partition id: an ArrayRecord or ConfigRecord becomes a record of
        the instruction, any other value an entry of its config.
    records : Mapping[str, ArrayRecord or ConfigRecord]
        Further records of the instruction.
    arrays : ArrayRecord or None (default: None)
        The arrays that are sent as the model; None for all of it.
    held : Mapping[str, ArrayRecord]
        Records that nodes must hold; a part sends them to the nodes that lack them.
    pool : int (default: 0)
        The pool's number; an aggregator takes one mean per pool.
    bits : int or None (default: None)
        Bits of one instruction as the paper counts them; None for a model's bits.
    """

    nodes: Sequence[int]
    model: Vector | None
    config: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    records: Mapping[str, ArrayRecord | ConfigRecord] = field(default_factory=dict)
    arrays: ArrayRecord | None = None
    held: Mapping[str, ArrayRecord] = field(default_factory=dict)
    pool: int = 0
    bits: int | None = None


@dataclass(frozen=True)
class Row:
    """A decoded reply: a vector (M,) or another value, and its bits as the paper counts them."""

    vector: Any
    bits: int


class Coding(Protocol):
    """How a reply's arrays encode its node's model.

    ``changes`` is True if a row is the change of the model that the node was sent, False if it is a model.
    """

    changes: bool

    def read(self, record: ArrayRecord, sent: Vector, layout: Layout, node: int) -> Row:
        """Decode a node's arrays; raise PayloadError if they are not of this coding."""

    def bits(self, layout: Layout) -> int:
        """Return the bits, as the paper counts them, of a reply that only a sum decodes."""

    def summed(self, model: Vector, layout: Layout) -> ArrayRecord:
        """Return the arrays of a sent model (M,) whose changes nodes add up in a secure sum."""

    def change(self, numbers: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Decode the mean of a secure sum to a change of the model (M,)."""


class Models:
    """Nodes reply with their whole models."""

    changes = False

    def read(self, record: ArrayRecord, sent: Vector, layout: Layout, node: int) -> Row:
        """Return the model."""
        return Row(layout.flatten(record, sent.dtype), self.bits(layout))

    def bits(self, layout: Layout) -> int:
        """Return 32 per parameter; running statistics and counters do not count."""
        return 32 * compressed_part(layout).size

    def summed(self, model: Vector, layout: Layout) -> ArrayRecord:
        """Return all of the model."""
        return layout.unflatten(model)

    def change(self, numbers: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Return the numbers."""
        return numbers


@dataclass(frozen=True, eq=False)
class Exchange:
    """An exchange of messages with the nodes of some pools.

    Flower's loop makes the first exchange of a round whose kind is of the category ``train``; others go
    over the grid, each in its own message group.

    Parameters
    ----------
    kind : str
        Flower's message type.
    asks : Sequence[Ask]
        One per pool.
    config : Mapping[str, Any]
        Config for all nodes.
    links : tuple of str
        Links of the modeled system, to the nodes and back; empty to book only the legs through the hub.
    coding : Coding
        Decodes replies.
    offline : int (default: 0)
        Number of chosen nodes that are offline, and not among its nodes.
    reads : Callable[[Node, RecordDict], Any] or None
        Decodes replies that do not encode a model, in place of ``coding``: returns the row, or a ``Row``
        with its bits.
    bounded : Mapping[str, (slice or NDArray, NDArray)]
        The parts of a row with bounded updates, by name: its positions, and the reference model of the bound.
        Empty for one part, the model that was sent.
    blocks : Blocks or None (default: None)
        The vectors that instructions and replies carry next to the model; ``Ask.model`` and rows are then
        ``blocks.joined(...)``. Each block has a bound of its own.
    group : str (default: "")
        Distinguishes the messages of an exchange over the grid from the round's others.
    timeout : float (default: inf)
        Seconds to wait for replies over the grid, at most until the run's deadline.
    done : Callable[[], bool] or None (default: None)
        Called after each reply over the grid; returns whether no other reply is needed.
    booked : bool (default: True)
        Whether it counts as traffic.
    over_grid : bool (default: False)
        Whether it goes over the grid whatever its kind.
    unbooked : tuple of str (default: ())
        Records of its instructions that do not count as traffic.
    weigh : Callable[[RoundContext, Columns], Sequence[float]] or None (default: None)
        Returns the method's weights of replies (K,). None for the examples. See ``WeightedMean``.
    """

    kind: str
    asks: Sequence[Ask]
    config: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[str, str] = ("", "")
    coding: Coding = field(default_factory=Models)
    offline: int = 0
    reads: Callable[[Node, RecordDict], Any] | None = None
    bounded: Mapping[str, tuple[slice | NDArray[np.intp], Vector]] = field(default_factory=dict)
    blocks: Blocks | None = None
    group: str = ""
    timeout: float = math.inf
    done: Callable[[], bool] | None = None
    booked: bool = True
    over_grid: bool = False
    unbooked: tuple[str, ...] = ()
    weigh: Weigh | None = None

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges that are made at once: this one alone."""
        return (self,)

    @property
    def trains(self) -> bool:
        """Whether it is of the category ``train`` and not ``over_grid``."""
        return self.kind.partition(".")[0] == MessageType.TRAIN and not self.over_grid

    @cached_property
    def asked(self) -> Mapping[int, Ask]:
        """The ask of each of its nodes, by partition id, ascending."""
        return dict(sorted((i, ask) for ask in self.asks for i in ask.nodes))

    def sent(self, pool: int) -> Vector:
        """Return the model that a pool was sent, (M,)."""
        model = next(ask.model for ask in self.asks if ask.pool == pool)
        assert model is not None, "the exchange has models"
        return model

    def bounds(self, federation: Federation) -> Bounds:
        """Return the bounds on a row's update: each with its part of a row, and the reference model.

        None in place of a reference is that part of the model that the node was sent.
        """
        bound = federation.limits.bound
        if self.bounded:
            return [(bound(name), where, model) for name, (where, model) in self.bounded.items()]
        blocks = {MODEL: slice(None)} if self.blocks is None else self.blocks.slices
        return [(bound(name), where, None) for name, where in blocks.items()]

    def layout(self, federation: Federation) -> Layout:
        """Return the layout of the vectors that it carries."""
        return federation.known_layout() if self.blocks is None else self.blocks.layout

    def statistics(self, federation: Federation) -> NDArray[np.intp]:
        """Return the positions of running statistics and counters in a row: averages, not sums of updates."""
        if self.blocks is not None:
            layout = self.blocks.layouts[MODEL]
        else:
            # What a row has beside the arrays that are sent are factors.
            sent = self.asks[0].arrays
            layout = federation.known_layout() if sent is None else Layout.of(sent)
        parameters = compressed_part(layout).keys
        others = [where for key, where in layout.slices.items() if key not in parameters]
        return np.concatenate([np.arange(0), *(np.arange(one.start, one.stop) for one in others)])

    def changed(self, context: RoundContext) -> Exchange:
        """Return the exchange as the parts of a run change it."""
        exchange = self
        for part in context.parts.hooks["ask"]:
            exchange = part.ask(exchange, context)
        return exchange

    def prepared(self, context: RoundContext) -> Exchange:
        """Return the exchange as the parts of a run change it, with the caller's config."""
        exchange, federation = self.changed(context), context.federation
        frozen = federation.frozen_config if federation.frozen else {}
        return replace(exchange, config={**context.config, **exchange.config, **frozen})


@dataclass(frozen=True, eq=False)
class Question:
    """An exchange outside the learning, for example of keys or shares.

    Parameters
    ----------
    kind : str
        Flower's message type.
    group : str
        Distinguishes its messages from those of other questions.
    contents : Mapping[Node, RecordDict]
        The message content for each node.
    check : Callable[[Node, RecordDict], Any]
        Converts a valid reply to a value; raises PayloadError for others.
    book : Callable[..., None]
        Books a message on the modeled link, see ``SecureSums.book``.
    bits : Callable[[RecordDict], int]
        The nominal bits of a content on its leg to or from the hub.
    ended : Callable[[Inbox], None] or None
        Called when the exchange is over; None for ``Federation.judge``.
    timeout : float or None (default: None)
        Seconds to wait for replies; None for the run's deadline.
    booked : bool (default: True)
        Whether it counts as traffic.
    unbooked : tuple of str (default: ())
        Records of its contents that do not count as traffic.
    """

    kind: str
    group: str
    contents: Mapping[Node, RecordDict]
    check: Callable[[Node, RecordDict], Any]
    book: Callable[..., None] = lambda *where, **which: None
    bits: Callable[[RecordDict], int] = lambda content: 0
    ended: Callable[[Inbox], None] | None = None
    timeout: float | None = None
    booked: bool = True
    unbooked: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Columns:
    """Replies of K nodes.

    Parameters
    ----------
    nodes, pools : Sequence[int]
        Partition ids, ascending, and their pools (K,).
    rows : Sequence[Any]
        Decoded replies: vectors (M,), unless the exchange ``reads`` otherwise.
    claimed : Sequence[float]
        The claimed numbers of examples (K,).
    replies : Sequence[Reply]
        The replies themselves.
    """

    nodes: Sequence[int]
    pools: Sequence[int]
    rows: Sequence[Any]
    claimed: Sequence[float]
    replies: Sequence[Reply]


class RoundFailedError(Exception):
    """An exchange got fewer valid replies than its minimum; the round is repeated from the same state."""


def answered(federation: Federation, grid: Grid, server_round: int, question: Question) -> Iterator[Reply]:
    """Send a question; yield its valid replies in the order of partition ids, booked."""
    inbox = Inbox(question.contents, question.group, question.check)
    ttl = federation.timeout if question.timeout is None else question.timeout

    def book(at: int, content: RecordDict, *, down: bool) -> None:
        if not question.booked:
            return
        carried = payload_bytes(
            RecordDict({key: record for key, record in content.items() if key not in question.unbooked})
        )
        link, source, target = (HUB_TO_NODE, 0, at) if down else (NODE_TO_HUB, at, 0)
        federation.ledger.book(server_round, link, source, target, question.bits(content), carried)
        question.book(server_round, at, carried, down=down)

    messages = []
    for node, content in question.contents.items():
        book(node.partition_id, content, down=True)
        messages.append(Message(content, node.node_id, question.kind, ttl=ttl, group_id=question.group))
    for reply in inbox.accept(collect(grid, messages, ttl) if messages else ()):
        book(reply.node.partition_id, reply.content, down=False)
        yield reply
    (question.ended or federation.judge)(inbox)


def check_update(bounds: Bounds, update: Vector, sent: Vector) -> None:
    """Record the norms of an update (M,) of the model that a node was sent; PayloadError if too large."""
    for bound, where, model in bounds:
        bound.check(update[where], sent[where] if model is None else model)


Replies = Iterator[Columns]
# A generator that yields exchanges and questions, is sent their replies, and returns a T.
Steps = Generator["Exchange | Question | Together", Any, T]


@dataclass(frozen=True, eq=False)
class Together:
    """Exchanges of one kind with different nodes, made at once: all are sent before any reply is read.

    Messages are sent pool by pool. ``RoundContext.whole`` has the message counts of all of a round's.
    """

    exchanges: tuple[Exchange, ...]

    @property
    def kind(self) -> str:
        """Flower's message type."""
        return self.exchanges[0].kind

    @property
    def trains(self) -> bool:
        """Whether one of them is of the category ``train`` and not ``over_grid``."""
        return any(exchange.trains for exchange in self.exchanges)

    @cached_property
    def of(self) -> Mapping[int, Exchange]:
        """The exchange that each node takes part in, by partition id."""
        return {node: exchange for exchange in self.exchanges for node in exchange.asked}


def together(*steps: Steps[Any]) -> Steps[tuple[Any, ...]]:
    """Run several generators in step, with their exchanges made at once; return their results.

    Replies are sent to the generators in this order. Questions are made one by one.
    """
    results: list[Any] = [None] * len(steps)
    replies: dict[int, Any] = dict.fromkeys(range(len(steps)))
    while replies:
        asked: dict[int, Exchange] = {}
        for at, sent in replies.items():
            try:
                step = steps[at].send(sent)
                while not isinstance(step, Exchange):
                    step = steps[at].send((yield step))
                asked[at] = step
            except StopIteration as end:
                results[at] = end.value
        came = (yield Together(tuple(asked.values()))) if asked else ()
        replies = dict(zip(asked, came, strict=True))
    return tuple(results)
