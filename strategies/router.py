"""Carries payloads from node to node along the edges of a graph, one hop an event.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1: node i
asks some neighbours for their models of iteration k. In Flower nodes can only talk to the server, so the
server relays; it takes no other part.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import networkx as nx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.inbox import Inbox, Node, Roster, collect
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB, Ledger
from hedgerow.wire.message_types import PUBLISH
from hedgerow.wire.records import PayloadError, config_in, payload_bytes

__all__ = ["NODE_TO_NODE", "Bundles", "GraphAt", "Router", "RoutingReport", "Wants", "graph_at"]

NODE_TO_NODE = "node->node"

# The graph on which iteration k may communicate; in a directed one an edge leads from sender to receiver.
GraphAt = Callable[[int], nx.Graph]
# Receiver: the neighbours whose payloads it wants.
Wants = Mapping[int, Sequence[int]]
# Receiver: sender: payload.
Bundles = dict[int, dict[int, bytes]]
# A sender and its receivers: what it is told of them, by receiver.
Introduce = Callable[[int, Sequence[int]], Mapping[int, bytes]]


def graph_at(graph: nx.Graph | GraphAt) -> GraphAt:
    """Return a fixed graph, or one that changes with the iteration, as a function of the iteration."""
    if isinstance(graph, nx.Graph):
        return lambda k: graph
    return lru_cache(maxsize=8)(graph)


@dataclass
class RoutingReport:
    """What one event asked for, carried and lost.

    Parameters
    ----------
    publishers : int
        Nodes that were asked to publish.
    deliveries : int
        Payloads handed to receivers, the directed messages of the modelled system.
    refused : int
        Requests for a node that is no neighbour: never carried.
    lost : Counter[str]
        Publishers that gave nothing by reason: ``offline``, ``late`` (not among the first that arrived),
        and those of ``ExchangeReport.rejected``.
    withheld : int
        Payloads that publishers would not make: empty ones, of a receiver that is not who it was.
    """

    publishers: int = 0
    deliveries: int = 0
    refused: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    withheld: int = 0


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


class Router:
    """The relay of one event after the other.

    ``route`` tells the chosen neighbours to publish (``query.publish`` with ``iteration`` = k), and returns
    for each receiver exactly what its chosen neighbours replied (ConfigRecord ``payload``, key ``bytes``:
    one payload, or with ``per_receiver`` a list that follows the request's ``receivers``).

    What the router learns, and a method's privacy must bear: the graph; who asks whom, and when; how often a
    node communicates; payload sizes; which deliveries failed; and **all that is in an open payload**. It
    reads none, combines no two, and keeps none after the event (when ``route`` has returned, only its result
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
        Gets each delivery as ``node->node`` and the legs through the hub as such: a request and a reply for
        each publisher, whatever the number of its receivers. None: one of its own.

    Attributes
    ----------
    report : RoutingReport
        The last event.
    """

    def __init__(self, graph: nx.Graph | GraphAt, payloads: Payloads, ledger: Ledger | None = None) -> None:
        self.graph = graph_at(graph)
        self.payloads = payloads
        self.ledger = Ledger() if ledger is None else ledger
        self.report = RoutingReport()

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
        introduce: Introduce | None = None,
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
        introduce : Callable[[int, Sequence[int]], Mapping[int, bytes]] or None (default: None)
            What a sender is told of its receivers beside the request (ConfigRecord ``introductions``).
        """
        self.report = RoutingReport()
        asked = self._along_edges(k, wants)
        readers = _readers(asked)
        nodes = [roster.nodes[j] for j in readers if roster.nodes[j].node_id in roster.online]
        self.report.publishers = len(nodes)
        self._lost("offline", len(readers) - len(nodes))
        box = _Box(asked, first)
        group = f"{server_round}-publish"
        exchange = Inbox(nodes, group, lambda node, content: self._read(node, content, readers, box))
        messages = []
        for node in nodes:
            request = ConfigRecord({"iteration": k})
            if self.payloads.per_receiver:
                request["receivers"] = readers[node.partition_id]
            content = RecordDict({"config": request})
            if introduce and (told := introduce(node.partition_id, readers[node.partition_id])):
                content["introductions"] = ConfigRecord({str(i): one for i, one in told.items()})
            self.ledger.book(server_round, HUB_TO_NODE, 0, node.partition_id, 0, payload_bytes(content))
            messages.append(Message(content, node.node_id, PUBLISH, ttl=timeout, group_id=group))
        for reply in exchange.accept(box.until_full(collect(grid, messages, timeout))) if messages else ():
            sender = reply.node.partition_id
            bits = sum(map(self.payloads.bits, reply.value))
            self.ledger.book(server_round, NODE_TO_HUB, sender, 0, bits, payload_bytes(reply.content))
        self.report.lost += exchange.report.rejected
        if first and (late := self.report.lost.pop("no reply", 0)):
            self.report.lost["late"] = late
        bundles = {receiver: dict(sorted(bundle.items())) for receiver, bundle in box.bundles.items()}
        self._book(server_round, bundles)
        return bundles

    def _along_edges(self, k: int, wants: Wants) -> dict[int, list[int]]:
        """Return the requests that follow an edge, each once, receivers and senders ascending."""
        graph = self.graph(k)
        asked = {i: sorted({j for j in wants[i] if graph.has_edge(j, i) and j != i}) for i in sorted(wants)}
        self.report.refused = sum(len(set(wants[i])) - len(asked[i]) for i in asked)
        return asked

    def _read(
        self, node: Node, content: RecordDict, readers: Mapping[int, list[int]], box: "_Box"
    ) -> list[bytes]:
        """Put a publisher's payloads into its readers' bundles, in the order of arrival."""
        receivers = readers[node.partition_id]
        payloads = self._checked(content, len(receivers))
        copies = payloads if self.payloads.per_receiver else payloads * len(receivers)
        for receiver, payload in zip(receivers, copies, strict=True):
            if payload or not self.payloads.per_receiver:
                box.put(node.partition_id, receiver, payload)
            else:
                self.report.withheld += 1
        return payloads

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

    def _book(self, server_round: int, bundles: Bundles) -> None:
        for receiver, bundle in bundles.items():
            self.report.deliveries += len(bundle)
            for sender, payload in bundle.items():
                bits = self.payloads.bits(payload)
                self.ledger.book(server_round, NODE_TO_NODE, sender, receiver, bits, len(payload))

    def _lost(self, reason: str, count: int) -> None:
        if count:
            self.report.lost[reason] += count


class _Box:
    """The bundles of an event while payloads come in."""

    def __init__(self, asked: Mapping[int, Sequence[int]], first: Mapping[int, int] | None) -> None:
        self.bundles: Bundles = {receiver: {} for receiver in asked}
        self._places = {
            receiver: min((first or {}).get(receiver, len(senders)), len(senders))
            for receiver, senders in asked.items()
        }

    def put(self, sender: int, receiver: int, payload: bytes) -> None:
        if len(self.bundles[receiver]) < self._places[receiver]:
            self.bundles[receiver][sender] = payload

    def until_full(self, messages: Iterable[Message]) -> Iterator[Message]:
        for message in messages:
            yield message
            # The consumer has read the message by now, and filled what it could.
            if all(len(self.bundles[i]) == places for i, places in self._places.items()):
                return


def _readers(asked: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Return, for each sender, who asked for it; both ascending."""
    readers: dict[int, list[int]] = {}
    for receiver, senders in asked.items():
        for sender in senders:
            readers.setdefault(sender, []).append(receiver)
    return dict(sorted(readers.items()))
