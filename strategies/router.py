"""Carries payloads from node to node along the edges of a graph, one hop an event.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1: node i
asks some neighbours for their models of iteration k. In Flower nodes can only talk to the server, so the
server relays; it takes no other part.
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

from hedgerow.strategies.exchange import Ask, Exchange, Row, Steps
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import Node, Roster
from hedgerow.strategies.parts import Part
from hedgerow.strategies.run import Run
from hedgerow.wire.ledger import Ledger
from hedgerow.wire.message_types import PUBLISH
from hedgerow.wire.records import PayloadError, config_in

if TYPE_CHECKING:
    from hedgerow.strategies.introductions import Introductions

__all__ = ["NODE_TO_NODE", "Bundles", "GraphAt", "Router", "RoutingReport", "Wants", "graph_at"]

NODE_TO_NODE = "node->node"

# The graph on which iteration k may communicate; in a directed one an edge leads from sender to receiver.
GraphAt = Callable[[int], nx.Graph]
# Receiver: the neighbours whose payloads it wants.
Wants = Mapping[int, Sequence[int]]
# Receiver: sender: payload.
Bundles = dict[int, dict[int, bytes]]


def graph_at(graph: nx.Graph | GraphAt) -> GraphAt:
    """Return a fixed graph, or one that changes with the iteration, as a function of the iteration."""
    if isinstance(graph, nx.Graph):
        return lambda k: graph
    return lru_cache(maxsize=8)(graph)


@dataclass
class RoutingReport:
    """What one event asked for, carried and lost."""

    # Who was handed what each published, ascending.
    readers: dict[int, list[int]] = field(default_factory=dict)
    # Requests for a node that is no neighbour: never carried.
    refused: int = 0
    # Publishers that gave nothing by reason: ``offline``, ``late`` (not among the first that arrived), and
    # those of ``ExchangeReport.rejected``.
    lost: Counter[str] = field(default_factory=Counter)
    # Payloads that publishers would not make: empty ones, of a receiver that is not who it was.
    withheld: int = 0

    @property
    def deliveries(self) -> int:
        """Payloads handed to receivers, the directed messages of the modelled system."""
        return sum(map(len, self.readers.values()))


class Payloads(Protocol):
    """What a router is told of payloads, which it does not read."""

    def bits(self, payload: bytes) -> int:
        """Return the information bits that the paper counts for a payload."""

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest payload; larger ones are lost."""

    @property
    def per_receiver(self) -> bool:
        """Whether a sender encodes for each receiver, or once for all."""


class Router(Part):
    """The carrier of payloads where one server is the hub of all nodes.

    ``bundles`` tells the chosen neighbours to publish (``query.publish`` with ``iteration`` = k), and returns
    for each receiver exactly what its chosen neighbours replied (ConfigRecord ``payload``, key ``bytes``:
    one payload, or with ``per_receiver`` a list that follows the request's ``receivers``). Each delivery is
    booked as ``node->node``, and the legs through the hub as such: a request and a reply for each publisher,
    whatever the number of its receivers. ``route`` is the same outside of a ``Gossip``.

    What the router learns, and a method's privacy must bear: the graph; who asks whom, and when; how often a
    node communicates; payload sizes; which deliveries failed; and **all that is in an open payload**. It
    reads none, combines no two, and keeps none after the event (when it has returned them, only its result
    refers to payloads), but whoever runs it can: the server knows the run's seed, from which all that decodes
    an open payload follows. A payload that is sealed (``hedgerow.wire.sealed``) it can lose, delay or spoil,
    and not read, unless it stood between the two ends when they were introduced; where nodes pin their
    neighbours' keys it cannot.

    Parameters
    ----------
    graph : networkx.Graph or Callable[[int], networkx.Graph]
        On the nodes 0, ..., M - 1; a function gives the graph of each iteration. In a directed one an edge
        (j, i) carries what j sends to i, and nothing the other way.
    payloads : Payloads
        The paper's bits of a payload, and how large it may be: ``PayloadSizes`` where all are alike.
    ledger : Ledger or None (default: None)
        Gets what ``route`` carries; None: one of its own.

    Attributes
    ----------
    report : RoutingReport
        The last event.
    """

    name = "router"
    # What a run is called at all of several servers that carry its payloads; None where there is one.
    run_name: str | None = None
    # Of this server's nodes, where links are sealed.
    introductions: Introductions | None = None

    def __init__(self, graph: nx.Graph | GraphAt, payloads: Payloads, ledger: Ledger | None = None) -> None:
        self.graph = graph_at(graph)
        self.payloads = payloads
        self.ledger = Ledger() if ledger is None else ledger
        self.forget()

    def forget(self) -> None:
        """Forget the last event."""
        self.report = RoutingReport()

    def ended(self, run: Run) -> None:
        """Tell what an event carried and lost."""
        report = self.report
        lost = sum(report.lost.values())
        run.told |= {"deliveries": report.deliveries, "lost-payloads": lost, "refused": report.refused}

    # As a carrier.

    @contextmanager
    def joined(self, iterations: int) -> Iterator[None]:
        """Carry payloads of a run that has made so many iterations."""
        yield

    def over(self, own: int | None) -> bool:
        """Return whether no event is to come; ``own`` is the next one of this server's nodes."""
        return own is None

    def agreed(self, own: int | None, wants: Wants) -> int | None:
        """Return the next event, after asking who else carries payloads; None if there is none.

        ``own`` is the next iteration at which a node of this server communicates, None if there is none, and
        ``wants`` whom those nodes then want to hear, by node.
        """
        return own

    def note_read(self, i: int, senders: Iterable[int], refused: Iterable[int]) -> None:
        """Note which payloads a node could read, for those that carried them."""

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
            Flower's grid, and who is there.
        server_round : int
            Under which the event is booked.
        k : int
            The iteration whose state is published.
        wants : Mapping[int, Sequence[int]]
            The neighbours that each receiver chose. Others than neighbours are refused.
        timeout : float
            Seconds to wait for the publishers.
        first : Mapping[int, int] or None (default: None)
            How many payloads each receiver takes, the first that arrive; later ones are ignored, and
            nobody is waited for once all have theirs. None hands on everything.
        """
        federation = Federation.of(roster, self.ledger, timeout)
        run = Run(federation, server_round, {}, roster.present, (), grid)
        return run.driven(self.bundles(k, wants, run, first or {}))

    def bundles(self, k: int, wants: Wants, run: Run, first: Mapping[int, int]) -> Steps[Bundles]:
        """Make the same in a run, whose parts may change the exchange."""
        report = self.report = RoutingReport()
        asked = self._along_edges(k, wants)
        readers, there = _turned(asked), set(run.there)
        publishers = [j for j in readers if j in there]
        report.lost += Counter(offline=len(readers) - len(publishers))
        box = _Box(asked, first)
        each = self.payloads.per_receiver
        asks = [Ask([j], None, {"receivers": readers[j]} if each else {}, pool=j) for j in publishers]
        publish = Exchange(
            PUBLISH, asks, {"iteration": k},
            reads=partial(self._read, readers, box), group="publish", done=box.full,
        )  # fmt: skip
        for _ in (yield run.changed(publish)):
            pass
        report.lost += run.report.rejected
        if first and (late := report.lost.pop("no reply", 0)):
            report.lost["late"] = late
        bundles = {receiver: dict(sorted(bundle.items())) for receiver, bundle in box.bundles.items()}
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

    def _read(self, readers: Mapping[int, list[int]], box: _Box, node: Node, content: RecordDict) -> Row:
        """Put a publisher's payloads into its readers' bundles, as they arrive; return their bits."""
        receivers = readers[node.partition_id]
        payloads = self._checked(content, len(receivers))
        copies = payloads if self.payloads.per_receiver else payloads * len(receivers)
        for receiver, payload in zip(receivers, copies, strict=True):
            if payload or not self.payloads.per_receiver:
                box.put(node.partition_id, receiver, payload)
            else:
                self.report.withheld += 1
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


class _Box:
    """The bundles of an event while payloads come in."""

    def __init__(self, asked: Mapping[int, Sequence[int]], first: Mapping[int, int]) -> None:
        self.bundles: Bundles = {receiver: {} for receiver in asked}
        self._places = {i: min(first.get(i, len(senders)), len(senders)) for i, senders in asked.items()}

    def put(self, sender: int, receiver: int, payload: bytes) -> None:
        if len(self.bundles[receiver]) < self._places[receiver]:
            self.bundles[receiver][sender] = payload

    def full(self) -> bool:
        return all(len(self.bundles[i]) == places for i, places in self._places.items())


def _turned(senders: Mapping[int, Iterable[int]]) -> dict[int, list[int]]:
    """Return, for each sender, its receivers; both ascending."""
    readers: dict[int, list[int]] = {}
    for receiver in sorted(senders):
        for sender in senders[receiver]:
            readers.setdefault(sender, []).append(receiver)
    return dict(sorted(readers.items()))
