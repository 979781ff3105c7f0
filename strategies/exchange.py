"""What a round of a method is made of: exchanges with its nodes, whose replies are columns.

``Method.round`` is a generator. It yields an ``Exchange`` and is sent its replies, chunks of ``Columns`` in
the order of partition ids. An aggregator may yield a ``Question`` beside, of which nothing is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.inbox import Inbox, Node, Reply, collect
from hedgerow.wire.compress import compressed_part
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.records import Layout, payload_bytes

if TYPE_CHECKING:
    from hedgerow.strategies.federation import Federation

__all__ = [
    "Ask",
    "Coding",
    "Columns",
    "Exchange",
    "Models",
    "Question",
    "Replies",
    "RoundFailedError",
    "Row",
    "Steps",
    "Together",
    "answered",
    "together",
]

Vector = NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ask:
    """What the nodes of one pool are asked.

    Parameters
    ----------
    nodes : Sequence[int]
        Partition ids, ascending.
    model : NDArray or None
        What they begin from, (M,); None where they are sent no model.
    config : Mapping[str, Any]
        What they are told beside what the whole exchange is told.
    own : Mapping[str, Mapping[int, Any]]
        What each is told alone: by key, its value for each node that is told; an ArrayRecord or ConfigRecord
        is a record of the instruction, all else stands in its config.
    records : Mapping[str, ArrayRecord or ConfigRecord]
        Further records of the instruction.
    arrays : ArrayRecord or None (default: None)
        What is sent as the model; None for all of it.
    held : Mapping[str, ArrayRecord]
        What nodes must hold beside, however they come by it: a part has it sent to those that do not.
    pool : int (default: 0)
        The pool's number; an aggregator takes a mean of each pool.
    bits : int or None (default: None)
        What the paper counts of what each is sent; None for a model's bits.
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
    """What one reply stands for: a vector (M,) or a value, and the bits that the paper counts for it."""

    vector: Any
    bits: int


class Coding(Protocol):
    """How the arrays of a reply stand for what its node learnt.

    ``changes`` says what a row is: the change of the model that its node was sent, or a model.
    """

    changes: bool

    def read(self, record: ArrayRecord, sent: Vector, layout: Layout, node: int) -> Row:
        """Return what a node's arrays stand for.

        Raises
        ------
        PayloadError
            If they are none of this coding.
        """

    def bits(self, layout: Layout) -> int:
        """Return the bits that the paper counts for a reply that only a sum decodes."""

    def summed(self, model: Vector, layout: Layout) -> ArrayRecord:
        """Return what of the model that they were sent (M,) nodes add up in a sum."""

    def change(self, numbers: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Return the change of the model (M,) that the mean of what nodes added up stands for."""


class Models:
    """Nodes reply with their whole models."""

    changes = False

    def read(self, record: ArrayRecord, sent: Vector, layout: Layout, node: int) -> Row:
        """Return the model."""
        return Row(layout.flatten(record, sent.dtype), self.bits(layout))

    def bits(self, layout: Layout) -> int:
        """Return 32 a parameter; running statistics and counters are none."""
        return 32 * compressed_part(layout).size

    def summed(self, model: Vector, layout: Layout) -> ArrayRecord:
        """Return all of it."""
        return layout.unflatten(model)

    def change(self, numbers: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Return the numbers."""
        return numbers


@dataclass(frozen=True, eq=False)
class Exchange:
    """One question to the nodes of some pools, by which a method learns.

    The first one of a round whose kind is of the category ``train`` is handed to Flower's loop; others go
    over the grid, each in a group of its own.

    Parameters
    ----------
    kind : str
        Flower's message type.
    asks : Sequence[Ask]
        One for each pool.
    config : Mapping[str, Any]
        What all of them are told.
    links : tuple of str
        Links of the modelled system: to the nodes, and back; empty where the legs through the hub alone are
        booked.
    coding : Coding
        How replies are read.
    offline : int (default: 0)
        How many of those that were chosen are not there, and not among its nodes.
    reads : Callable[[Node, RecordDict], Any] or None
        Reads replies in place of ``coding``, where none stands for a model: returns what their row is, or a
        ``Row``, where the reply's bits count.
    bounded : Mapping[str, (slice, NDArray)]
        The parts of a row whose moves are bounded, by name: where they stand, and the model whose norm says
        what is small. Empty for one part, the model that was sent.
    group : str (default: "")
        Sets the messages of an exchange over the grid apart from the round's others.
    timeout : float (default: inf)
        Seconds that replies over the grid are waited for, if the run's deadline is not before.
    done : Callable[[], bool] or None (default: None)
        Says after each reply over the grid whether no other is needed.
    booked : bool (default: True)
        Whether it is traffic.
    beside : bool (default: False)
        Whether it goes over the grid whatever its kind is.
    unbooked : tuple of str (default: ())
        Records of its instructions that are no traffic.
    """

    kind: str
    asks: Sequence[Ask]
    config: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[str, str] = ("", "")
    coding: Coding = field(default_factory=Models)
    offline: int = 0
    reads: Callable[[Node, RecordDict], Any] | None = None
    bounded: Mapping[str, tuple[slice, Vector]] = field(default_factory=dict)
    group: str = ""
    timeout: float = math.inf
    done: Callable[[], bool] | None = None
    booked: bool = True
    beside: bool = False
    unbooked: tuple[str, ...] = ()

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Return what is made at once: this one alone."""
        return (self,)

    @property
    def trains(self) -> bool:
        """Whether it is of the category ``train``, and not beside."""
        return self.kind.partition(".")[0] == MessageType.TRAIN and not self.beside

    @cached_property
    def asked(self) -> Mapping[int, Ask]:
        """The ask of each of its nodes, by partition id, ascending."""
        return dict(sorted((i, ask) for ask in self.asks for i in ask.nodes))

    def sent(self, pool: int) -> Vector:
        """Return the model that a pool was sent, (M,)."""
        model = next(ask.model for ask in self.asks if ask.pool == pool)
        assert model is not None, "the exchange has models"
        return model

    def check(self, federation: Federation, move: Vector, sent: Vector) -> None:
        """Note how far a row is from what was sent (M,); PayloadError where that is too far."""
        for name, (where, model) in (self.bounded or {"model": (slice(None), sent)}).items():
            federation.bound(name).check(move[where], model)


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked beside the learning: keys, shares.

    Parameters
    ----------
    kind : str
        Flower's message type.
    group : str
        Sets its messages apart from those of other questions.
    contents : Mapping[Node, RecordDict]
        What each node is told.
    check : Callable[[Node, RecordDict], Any]
        Makes a value of a valid reply; raises PayloadError for others.
    book : Callable[..., None]
        Books what a member is told, or tells, on the modelled link, see ``SecureSums.book``.
    bits : Callable[[RecordDict], int]
        The nominal bits of a content on its leg to or from the hub.
    ended : Callable[[Inbox], None] or None
        Told of the exchange when it is over; None for ``Federation.judge``.
    timeout : float or None (default: None)
        Seconds that replies are waited for; None for the run's deadline.
    booked : bool (default: True)
        Whether it is traffic.
    unbooked : tuple of str (default: ())
        Records of its contents that are no traffic.
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
        Partition ids, ascending, and the pools that they were asked in (K,).
    rows : Sequence[Any]
        What each reply stands for: vectors (M,), unless the exchange ``reads`` otherwise.
    claimed : Sequence[float]
        The examples that each claims to have (K,).
    replies : Sequence[Reply]
        As they came.
    """

    nodes: Sequence[int]
    pools: Sequence[int]
    rows: Sequence[Any]
    claimed: Sequence[float]
    replies: Sequence[Reply]


class RoundFailedError(Exception):
    """An exchange got fewer valid replies than its minimum: the round is made again, from the same state."""


def answered(federation: Federation, grid: Grid, server_round: int, question: Question) -> Iterator[Reply]:
    """Ask a question; yield its valid replies in the order of partition ids, booked."""
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


Replies = Iterator[Columns]
# Yields exchanges and questions, is sent their replies, and returns a T.
Steps = Generator["Exchange | Question | Together", Any, T]


@dataclass(frozen=True, eq=False)
class Together:
    """Exchanges of one kind with different nodes, which are made at once: all are sent before any is read.

    Messages go out pool by pool. The report of all that a round makes so is ``Run.whole``.
    """

    exchanges: tuple[Exchange, ...]

    @property
    def kind(self) -> str:
        """Flower's message type."""
        return self.exchanges[0].kind

    @property
    def trains(self) -> bool:
        """Whether one of them is of the category ``train``, and not beside."""
        return any(exchange.trains for exchange in self.exchanges)

    def of(self, node: int) -> Exchange:
        """Return the exchange that a node is asked in."""
        return next(exchange for exchange in self.exchanges if node in exchange.asked)


def together(*steps: Steps[Any]) -> Steps[tuple[Any, ...]]:
    """Make the exchanges of several steps at once; return what comes of each.

    Replies are handed to one after the other, in this order. Questions are asked one by one.
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
