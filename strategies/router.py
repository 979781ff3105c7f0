"""Relays payloads from node to node along the edges of a graph, one hop per event.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1: node i
gets the models of iteration k from some neighbours. Flower's nodes can only communicate with the server, so
the server relays payloads, and does nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Protocol

import networkx as nx
from flwr.app import RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Row, Steps
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.messenger import Messenger
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts import Part, Parts
from hedgerow.strategies.roster import Roster
from hedgerow.wire.ledger import Ledger
from hedgerow.wire.message_types import PUBLISH
from hedgerow.wire.records import PayloadError, config_in

if TYPE_CHECKING:
    from hedgerow.strategies.introductions import Introductions

NODE_TO_NODE = "node->node"

# The communication graph of iteration k; directed edges lead from sender to receiver.
GraphAt = Callable[[int], nx.Graph]
# Receiver: the neighbours that it wants payloads from.
Wants = Mapping[int, Sequence[int]]
# Receiver: sender: payload.
Bundles = dict[int, dict[int, bytes]]


def graph_at(graph: nx.Graph | GraphAt) -> GraphAt:
    """Return a fixed or changing graph as a function of the iteration."""
    if isinstance(graph, nx.Graph):
        return lambda k: graph
    return lru_cache(maxsize=8)(graph)


@dataclass
class RoutingReport:
    """Message counts of one event."""

    # The receivers of each publisher's payload, ascending.
    readers: dict[int, list[int]] = field(default_factory=dict)
    # Requests for a node that is not a neighbour; they are ignored.
    refused: int = 0
    # Publishers without a payload by reason: ``offline``, ``late`` (not among the first that arrived), and
    # those of ``ExchangeReport.rejected``.
    lost: Counter[str] = field(default_factory=Counter)
    # Empty payloads: the publisher refuses a receiver with a changed key.
    withheld: int = 0

    @property
    def deliveries(self) -> int:
        """Delivered payloads, the directed messages of the modelled system."""
        return sum(map(len, self.readers.values()))


class Payloads(Protocol):
    """What a router knows about payloads; it does not read them."""

    def bits(self, payload: bytes) -> int:
        """Return the information bits of a payload as the paper counts them."""

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest payload; larger ones are lost."""

    @property
    def per_receiver(self) -> bool:
        """Whether a sender encodes for each receiver, or once for all."""


class Router(Part):
    """The relay of payloads with one server as the hub of all nodes.

    ``bundles`` asks the chosen neighbors to publish (``query.publish`` with ``iteration`` = k), and returns
    for each receiver exactly the replies of its chosen neighbors (ConfigRecord ``payload``, key ``bytes``:
    one payload, or with ``per_receiver`` a list in the order of the request's ``receivers``). Each delivery
    is booked as ``node->node``, and the legs through the hub as such: a request and a reply per publisher,
    whatever the number of its receivers. ``route`` does the same outside a ``Gossip``.

    The router sees the graph, which node queries which and when, how often a node communicates, payload
    sizes, failed deliveries, and **everything in an open payload**; a method's privacy must account for this.
    It does not read or combine payloads, and keeps none after the event, but its operator could: the server
    knows the run's seed, which suffices to decode an open payload. It can drop, delay or corrupt a sealed
    payload (``hedgerow.wire.sealed``), but cannot read it unless it was a man in the middle when the two ends
    were introduced, which pinned keys prevent.

    Parameters
    ----------
    graph : networkx.Graph or Callable[[int], networkx.Graph]
        On the nodes 0, ..., M - 1, or a function that returns the graph of each iteration. In a directed
        graph an edge (j, i) carries payloads from j to i only.
    payloads : Payloads
        Bits and largest size of payloads: ``PayloadSizes`` if all are alike.
    ledger : Ledger or None (default: None)
        Books the transfers of ``route``; None for its own ledger.

    Attributes
    ----------
    report : RoutingReport
        Message counts of the last event.
    """

    name = "router"
    # The run's name at all servers that carry its payloads; None with one server.
    run_name: str | None = None
    # Of this server's nodes, if links are sealed.
    introductions: Introductions | None = None

    def __init__(self, graph: nx.Graph | GraphAt, payloads: Payloads, ledger: Ledger | None = None) -> None:
        self.graph = graph_at(graph)
        self.payloads = payloads
        self.ledger = Ledger() if ledger is None else ledger
        self.forget()

    def forget(self) -> None:
        """Forget the last event."""
        self.report = RoutingReport()

    def ended(self, run: RoundContext) -> None:
        """Report an event's deliveries and losses."""
        report = self.report
        lost = sum(report.lost.values())
        run.metrics |= {"deliveries": report.deliveries, "lost-payloads": lost, "refused": report.refused}

    # As a carrier.

    @contextmanager
    def joined(self, iterations: int) -> Iterator[None]:
        """Carry payloads of a run with this number of completed iterations."""
        yield

    def over(self, own: int | None) -> bool:
        """Return whether there are no more events; ``own`` is the next one of this server's nodes."""
        return own is None

    def agreed(self, own: int | None, wants: Wants) -> int | None:
        """Return the next event, agreed on with other servers; None if there is none.

        ``own`` is the next iteration at which a node of this server communicates, or None; ``wants`` are the
        senders that those nodes then want payloads from, by node.
        """
        return own

    def note_read(self, i: int, senders: Iterable[int], refused: Iterable[int]) -> None:
        """Record which payloads a node could read, for the servers that carried them."""

    def route(
        self,
        grid: Grid,
        roster: Roster,
        server_round: int,
        k: int,
        wants: Wants,
        *,
        timeout: float,
        first: Mapping[int, int] | None = None,
    ) -> Bundles:
        """Return the payloads of iteration k that each receiver wants, by receiver and sender.

        Parameters
        ----------
        grid, roster : Grid, Roster
            Flower's grid, and the nodes.
        server_round : int
            The round for booking.
        k : int
            The iteration.
        wants : Mapping[int, Sequence[int]]
            The neighbors that each receiver chose. Nodes that are not neighbors are refused.
        timeout : float
            Seconds to wait for the publishers.
        first : Mapping[int, int] or None (default: None)
            Each receiver gets this number of payloads, the first that arrive; the event ends when all have
            theirs. None delivers every payload.
        """
        federation = Federation.of(roster, self.ledger, timeout)
        run = RoundContext(federation, server_round, {}, roster.present, Parts(), grid)
        return Messenger(run).driven(self.bundles(k, wants, run, first or {}))

    def bundles(self, k: int, wants: Wants, run: RoundContext, first: Mapping[int, int]) -> Steps[Bundles]:
        """Do the same within a run; its parts may change the exchange."""
        report = self.report = RoutingReport()
        asked = self._along_edges(k, wants)
        readers, there = _turned(asked), set(run.online)
        publishers = [j for j in readers if j in there]
        report.lost += Counter(offline=len(readers) - len(publishers))
        box: Bundles = {i: {} for i in asked}
        room = {i: min(first.get(i, len(senders)), len(senders)) for i, senders in asked.items()}
        each = self.payloads.per_receiver
        asks = [Ask([j], None, {"receivers": readers[j]} if each else {}, pool=j) for j in publishers]
        publish = Exchange(
            PUBLISH, asks, {"iteration": k},
            reads=partial(self._read, readers, box, room), group="publish",
            done=lambda: all(len(box[i]) == room[i] for i in box),
        )  # fmt: skip
        for _ in (yield publish.changed(run)):
            pass
        report.lost += run.report.rejected
        if first and (late := report.lost.pop("no reply", 0)):
            report.lost["late"] = late
        bundles = {receiver: dict(sorted(bundle.items())) for receiver, bundle in box.items()}
        report.readers = _turned(bundles)
        for receiver, bundle in bundles.items():
            for sender, payload in bundle.items():
                bits = self.payloads.bits(payload)
                run.federation.ledger.book(run.round, NODE_TO_NODE, sender, receiver, bits, len(payload))
        return bundles

    def _along_edges(self, k: int, wants: Wants) -> dict[int, list[int]]:
        """Return the requests that follow an edge, each once, receivers and senders ascending."""
        graph = self.graph(k)
        asked = {i: sorted({j for j in wants[i] if graph.has_edge(j, i) and j != i}) for i in sorted(wants)}
        self.report.refused = sum(len(set(wants[i])) - len(asked[i]) for i in asked)
        return asked

    def _read(
        self,
        readers: Mapping[int, list[int]],
        box: Bundles,
        room: Mapping[int, int],
        node: Node,
        content: RecordDict,
    ) -> Row:
        """Put a publisher's payloads into its readers' bundles, as they arrive; return their bits.

        ``room`` is how many payloads a reader takes at most.
        """
        receivers = readers[node.partition_id]
        payloads = self._checked(content, len(receivers))
        copies = payloads if self.payloads.per_receiver else payloads * len(receivers)
        for receiver, payload in zip(receivers, copies, strict=True):
            if not payload and self.payloads.per_receiver:
                self.report.withheld += 1
            elif len(box[receiver]) < room[receiver]:
                box[receiver][node.partition_id] = payload
        return Row(None, sum(map(self.payloads.bits, payloads)))

    def _checked(self, content: RecordDict, receivers: int) -> list[bytes]:
        published = config_in(content, "payload").get("bytes")
        payloads = published if isinstance(published, list) else [published]
        if len(payloads) != (receivers if self.payloads.per_receiver else 1):
            raise PayloadError("bad payload", f"{len(payloads)} payloads for {receivers} receivers")
        checked = [payload for payload in payloads if isinstance(payload, bytes)]
        if len(checked) != len(payloads):
            raise PayloadError("bad payload", "the reply has no bytes under 'payload'")
        if (largest := max(map(len, checked))) > self.payloads.max_bytes:
            raise PayloadError("too large", f"{largest} bytes, at most {self.payloads.max_bytes}")
        return checked


def _turned(senders: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
    """Return, for each sender, its receivers; both ascending."""
    readers: dict[int, list[int]] = {}
    for receiver in sorted(senders):
        for sender in senders[receiver]:
            readers.setdefault(sender, []).append(receiver)
    return dict(sorted(readers.items()))
