"""Gossip between nodes of several sites, each with its own orchestrator, without a relay between the sites.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1, which has
neither server nor hub. Ours: a site is a SuperLink with its own nodes and run. Its ServerApp relays payloads
within the site, and sends those for other nodes to their site over the peers' channel.
Sites need no common clock: a communication of iteration k needs only the neighbours' payloads of k, and
iterations are totally ordered. So two neighbouring sites agree on the next iteration at which a node of
either communicates, and on the payloads that these nodes want; they exchange the payloads, and agree again.
All proceed in the order of iterations, so there is no deadlock.
"""

import base64
import binascii
import hashlib
import json
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any

import networkx as nx
from flwr.common import log

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.gossip.method import GossipMethod, PayloadSizes
from hedgerow.strategies.router import Bundles, Router, Wants
from hedgerow.wire.checks import int_at_least, positive
from hedgerow.wire.ledger import PEER_TO_PEER
from hedgerow.wire.links.peers import UNREADABLE, PeerChannel, PeerCredentials, Topic
from hedgerow.wire.sealed import INTRODUCTION_BYTES

# The stages of an iteration: sites agree before it, and exchange payloads in it.
_AGREE, _PAYLOADS = 0, 1
_START_BYTES = 8
_LONGEST_START = 64
_LATEST = 2**53
# Seconds to wait for the answer to a request.
_QUESTION = 5.0
# Attempts to reach lost sites take at most one part in this many of the time.
_SELDOM = 10
# Most bytes for the name of a node or a payload in messages between sites.
_ENTRY = 64


@dataclass(frozen=True)
class Site:
    """The number of this site, and the addresses of all sites.

    Node i of m belongs to site floor(i S / m).

    Parameters
    ----------
    own : int
        This site, 0 to S - 1.
    peers : Sequence[str]
        ``host:port`` of each of the S >= 1 sites, with this one.
    credentials : PeerCredentials or None (default: None)
        Authenticate the sites; None only if all are on one machine.
    listen : str (default: "")
        The listening address, if not the site's own one.
    timeout : float (default: 600.0)
        Seconds to wait for another site that is online and late, > 0; half of that for sites at the start.
    lost_after : float (default: 15.0)
        Seconds after which an unreachable site is excluded, > 0.
    """

    own: int
    peers: Sequence[str]
    credentials: PeerCredentials | None = None
    listen: str = ""
    timeout: float = 600.0
    lost_after: float = 15.0

    def __post_init__(self) -> None:
        int_at_least(0, own=self.own)
        positive(timeout=self.timeout, lost_after=self.lost_after)
        if self.own >= len(self.peers):
            raise ValueError(
                f"site must be from 0 to {len(self.peers) - 1}, an index into peers, got {self.own!r}"
            )

    def of(self, node: int, num_nodes: int) -> int:
        """Return the site of a node."""
        return node * len(self.peers) // num_nodes

    def nodes(self, num_nodes: int) -> list[int]:
        """Return this site's nodes, ascending; ValueError if there are more sites than nodes."""
        if len(self.peers) > num_nodes:
            raise ValueError(
                f"peers must have at most {num_nodes} sites, a node for each, got {len(self.peers)}"
            )
        return [node for node in range(num_nodes) if self.of(node, num_nodes) == self.own]


@dataclass
class _Link:
    """The state with another site: next is an agreement before iteration ``agrees``, or an exchange of
    payloads in ``event``; with neither, both sites are at their end.
    """

    start: str
    agrees: int | None
    event: int | None = None
    # The senders here that that site's nodes want payloads from in the event, by receiver.
    asked: Mapping[int, list[int]] = field(default_factory=dict)
    # The introductions of this site's nodes that it has.
    told: dict[int, bytes] = field(default_factory=dict)

    @property
    def next(self) -> Topic | None:
        """The topic of the next exchange."""
        if self.agrees is not None:
            return Topic(self.agrees, _AGREE)
        return None if self.event is None else Topic(self.event, _PAYLOADS)


class Sites(Router):
    """One site among its neighbours: the sites with neighbours of its own nodes.

    A late or offline site loses its nodes' messages, but does not stop the run: it is excluded, and queried
    from time to time. When it is online again, it joins at an iteration that neither side has begun.

    All sites must have the same method, number of iterations K and ``settings``, which ``run_name``
    identifies. Nodes must get all payloads that they choose (``method.first`` is None). ``absent`` are the
    neighbours that do not take part in the current event, and ``seconds`` is the time spent waiting for
    sites.
    """

    def __init__(
        self,
        site: Site,
        method: GossipMethod,
        payloads: PayloadSizes,
        num_iterations: int | None,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(method.graph, payloads)
        self.site, self.method = site, method
        self.nodes = frozenset(site.nodes(method.num_nodes))
        if any(method.first(i) is not None for i in self.nodes):
            raise ValueError("site must be None where nodes take only the first that reply")
        common = {**settings, "num-iterations": num_iterations, "sites": len(site.peers)}
        self.run_name = "sites/" + _digest(method, common)
        self._end = _LATEST if num_iterations is None else num_iterations
        self._lock = threading.Lock()
        self._begin(0)  # Raises errors before a run.

    def _begin(self, iterations: int) -> None:
        """Reset the channel and all agreements, after this number of iterations."""
        site, num_nodes = self.site, self.method.num_nodes
        agreed = num_nodes * (num_nodes + 1) * _ENTRY + num_nodes * (2 * INTRODUCTION_BYTES + _ENTRY)
        payloads = self._most_crossing() * (self.payloads.max_bytes + _ENTRY)
        self._channel = PeerChannel(
            site.own,
            site.peers,
            self._neighbours(),
            run=str(self.run_name),
            layout=f"{self.method.name} {self.method.dim}",
            largest=max(agreed, payloads, 1 << 12),
            credentials=site.credentials,
            listen=site.listen,
            answer=self._answer,
            comes=self._comes,
            lost_after=site.lost_after,
        )
        # The last iteration that has begun, so that no site can join in it any more.
        self._begun = iterations - 1
        self._links: dict[int, _Link] = {}
        self._start = secrets.token_hex(_START_BYTES)
        self._seek_at: dict[int, float] = {}
        # Payloads from other sites, by site and receiver: senders, and those that the receiver refused.
        self._made_of: dict[int, dict[int, tuple[list[int], list[int]]]] = defaultdict(dict)
        self._booked: Counter[int] = Counter()
        self.absent: set[int] = set()
        self.seconds = 0.0

    def _neighbours(self) -> set[int]:
        """Return the sites with neighbours of own nodes; all sites if the graph changes."""
        graph = self.method.graph(0)
        if self.method.graph(1) is not graph:
            return set(range(len(self.site.peers))) - {self.site.own}
        return {self.of(j) for i in self.nodes for j in nx.all_neighbors(graph, i)} - {self.site.own}

    def _most_crossing(self) -> int:
        graph = self.method.graph(0)
        if self.method.graph(1) is not graph:
            return len(self.nodes) * self.method.num_nodes
        return sum(j not in self.nodes for i in self.nodes for j in nx.all_neighbors(graph, i))

    def of(self, node: int) -> int:
        """Return a node's site."""
        return self.site.of(node, self.method.num_nodes)

    @contextmanager
    def joined(self, iterations: int) -> Iterator[None]:
        """Listen, after this number of iterations; OSError if the address cannot be bound."""
        self._begin(iterations)
        with self._channel:
            self._join()
            yield

    def ended(self, run: RoundContext) -> None:
        """Report lost sites and waiting time, and book the traffic to other sites since the last event."""
        super().ended(run)
        run.metrics |= {"lost-sites": len(self.absent), "site-seconds": self.seconds}
        for peer, traffic in self._channel.traffic.items():
            if size := traffic.bytes - self._booked[peer]:
                run.federation.ledger.book(run.round, PEER_TO_PEER, self.site.own, peer, 0, size)
                self._booked[peer] = traffic.bytes

    # Joining. Of two sites the one with the lower number asks, so that there is one agreement.

    def _join(self) -> None:
        """Wait for the neighbours; those that come later join later."""
        end = time.monotonic() + self.site.timeout / 2
        while (missing := self._lost()) and time.monotonic() < end:
            self._seek(missing)
            time.sleep(0.1)
        if missing := self._lost():
            log(WARNING, "Sites that are not online yet: %s", missing)

    def _lost(self) -> list[int]:
        """Return the neighbours without an agreement."""
        with self._lock:
            return [peer for peer in self._channel.neighbours if peer not in self._links]

    def _seek(self, peers: Iterable[int]) -> None:
        """Agree with reachable sites; notify those that must ask that this one is online."""
        for peer in peers:
            began = time.monotonic()
            if peer > self.site.own:
                self._meet(peer)
            else:
                self._channel.call(peer, {"start": self._start}, _QUESTION)
            now = time.monotonic()
            self._seek_at[peer] = now + _SELDOM * (now - began)

    def _meet(self, peer: int) -> None:
        """Agree with a site on the first iteration that neither has begun."""
        request: dict[str, Any] = {"start": self._start}
        for _ in range(5):
            answer = self._channel.call(peer, request, _QUESTION)
            begun = None if answer is None else answer.get("begun")
            if answer is None or not isinstance(begun, int) or not -1 <= begun < _LATEST:
                return
            if answer.get("joined") is True and "join" in request:
                with self._lock:
                    # If that iteration has begun here since, the other site will learn it in the exchange.
                    if request["join"] > self._begun:
                        start = str(answer.get("start"))[:_LONGEST_START]
                        self._links[peer] = _Link(start, request["join"])
                return
            with self._lock:
                request["join"] = max(begun, self._begun) + 1

    def _answer(self, peer: int, request: dict[str, Any]) -> dict[str, Any]:
        start = request["start"]
        if not isinstance(start, str) or len(start) > _LONGEST_START:
            raise ValueError("start is not that of a site")
        with self._lock:
            self._seek_at.pop(peer, None)
            known = self._links.get(peer)
            if known is not None and known.start != start:
                del self._links[peer]
                self._channel.forsake(peer)
            answer = {"begun": self._begun, "start": self._start}
            if (join := request.get("join")) is None:
                return answer
            joined = isinstance(join, int) and self._begun < join < _LATEST
            if joined:
                self._links[peer] = _Link(start, join)
            return {**answer, "joined": joined}

    def _comes(self, peer: int, topic: Topic) -> bool:
        with self._lock:
            link = self._links.get(peer)
            return link is not None and link.next is not None and link.next <= topic

    def _leave(self, peer: int, link: _Link) -> None:
        """Exclude a site until there is a new agreement; the caller holds the lock."""
        if self._links.get(peer) is link:
            del self._links[peer]
            log(WARNING, "Site %d is lost, with its nodes' messages.", peer)

    # From event to event.

    def _next_event(self, own: int | None) -> int | None:
        """Return the next known event, with ``own`` of own nodes; None is final only if ``over``."""
        with self._lock:
            events = [link.event for link in self._links.values() if link.event is not None]
        return min([*events, *([own] if own is not None else [])], default=None)

    def over(self, own: int | None) -> bool:
        """Return whether there are no more events and agreements."""
        with self._lock:
            agreed = all(link.agrees is None for link in self._links.values())
        return agreed and self._next_event(own) is None

    def agreed(self, own: int | None, wants: Wants) -> int | None:
        """Make all agreements that precede the next event; return that event."""
        self.seconds = 0.0
        now = time.monotonic()
        self._seek([peer for peer in self._lost() if now >= self._seek_at.get(peer, 0.0)])
        while (due := self._due(own)) is not None:
            before, links = due
            sent = {}
            for peer, link in links.items():
                sent[peer] = json.dumps(self._tell(peer, link, own, wants)).encode()
            found = self._exchange(Topic(before, _AGREE), sent)
            for peer, link in links.items():
                self._made_of.pop(peer, None)
                try:
                    event, asked = self._hear(peer, before, found[peer])
                except UNREADABLE:
                    with self._lock:
                        self._leave(peer, link)
                    continue
                both = [k for k in (own, event) if k is not None]
                with self._lock:
                    link.agrees, link.event = None, min(both, default=None)
                    link.asked = asked if event is not None and link.event == event else {}
        with self._lock:
            here = {peer for peer, link in self._links.items() if link.agrees is None}
        self.absent = set(self._channel.neighbours) - here
        return self._next_event(own)

    def _due(self, own: int | None) -> tuple[int, dict[int, _Link]] | None:
        """Return the iteration of the next agreement, and its sites; None if an event comes before it."""
        event = self._next_event(own)
        with self._lock:
            agrees = [link.agrees for link in self._links.values() if link.agrees is not None]
            if not agrees or (event is not None and min(agrees) > event):
                if event is not None:
                    self._begun = max(self._begun, event)
                return None
            before = min(agrees)
            self._begun = max(self._begun, before)
            return before, {peer: link for peer, link in self._links.items() if link.agrees == before}

    def _tell(self, peer: int, link: _Link, own: int | None, wants: Wants) -> dict[str, Any]:
        """Return the message to a site: the next own event, wanted payloads, and introductions."""
        asked = {str(i): [j for j in wants[i] if self._is_of(peer, j)] for i in wants}
        message: dict[str, Any] = {"next": own, "wants": {i: those for i, those in asked.items() if those}}
        if (introductions := self.introductions) is not None:
            new = {i: one for i in self.nodes if (one := introductions.of.get(i)) != link.told.get(i) and one}
            link.told.update(new)
            message["introductions"] = {
                str(i): [base64.b64encode(one).decode(), i in introductions.pinning]
                for i, one in sorted(new.items())
            }
            message["read"] = {str(i): read for i, read in sorted(self._made_of[peer].items())}
        return message

    def _is_of(self, peer: int, node: int) -> bool:
        return 0 <= node < self.method.num_nodes and self.of(node) == peer

    def _hear(
        self, peer: int, before: int, message: bytes | bytearray
    ) -> tuple[int | None, dict[int, list[int]]]:
        """Return a site's next event, and the payloads of this site that its nodes then want.

        Raises one of ``UNREADABLE`` if the message is not valid; a site may only report its own nodes.
        """
        content = json.loads(message)
        event = content["next"]
        if event is not None and not (isinstance(event, int) and before <= event < self._end):
            raise ValueError(f"next is {event!r}")
        asked = {}
        for name, those in content["wants"].items():
            if not self._is_of(peer, i := int(name)):
                raise ValueError(f"node {i} is none of site {peer}")
            asked[i] = sorted({j for j in those if isinstance(j, int) and j in self.nodes})
        if (introductions := self.introductions) is not None:
            for name, (text, pinning) in content["introductions"].items():
                one = base64.b64decode(text, validate=True)
                if not self._is_of(peer, i := int(name)) or len(one) != INTRODUCTION_BYTES:
                    raise binascii.Error(f"node {i}")
                introductions.take(i, one, pinning is True)
            for name, (senders, refused) in content["read"].items():
                if not self._is_of(peer, i := int(name)):
                    raise ValueError(f"node {i} is none of site {peer}")
                introductions.confirm(i, self.nodes.intersection(senders), refused)
        return event, asked

    def bundles(self, k: int, wants: Wants, run: RoundContext, first: Mapping[int, int]) -> Steps[Bundles]:
        """Return the bundles of own nodes for iteration k, after the exchange with other sites."""
        graph = self.graph(k)
        # Keeps requests for nodes that are not neighbours, which the router refuses.
        here = {i: [j for j in wants[i] if j in self.nodes or not graph.has_edge(j, i)] for i in wants}
        with self._lock:
            links = [link for _, link in sorted(self._links.items()) if link.event == k]
        elsewhere = {i: senders for link in links for i, senders in link.asked.items()}
        bundles = yield from super().bundles(k, {**here, **elsewhere}, run, first)
        received = self.exchanged(k, bundles)
        for i in wants:
            apart = {j for j in wants[i] if graph.has_edge(j, i) and j not in self.nodes}
            come = {j: payload for j, payload in received.get(i, {}).items() if j in apart}
            bundles[i] = dict(sorted({**bundles[i], **come}.items()))
            self.report.lost += Counter({"another site's": len(apart) - len(come)})
        return {i: bundles[i] for i in wants}

    def exchanged(self, k: int, bundles: Bundles) -> Bundles:
        """Send other sites their nodes' bundles of iteration k; return the payloads for own nodes."""
        with self._lock:
            links = {peer: link for peer, link in self._links.items() if link.event == k}
        sent = {
            peer: _packed({i: bundle for i, bundle in bundles.items() if self.of(i) == peer})
            for peer in links
        }
        found = self._exchange(Topic(k, _PAYLOADS), sent)
        received: Bundles = {}
        for peer, link in links.items():
            try:
                entries = list(_unpacked(found[peer]))
            except UNREADABLE:
                with self._lock:
                    self._leave(peer, link)
                self.absent.add(peer)
                continue
            for i, j, payload in entries:
                if i in self.nodes and self._is_of(peer, j) and 0 < len(payload) <= self.payloads.max_bytes:
                    received.setdefault(i, {})[j] = payload
            with self._lock:
                link.agrees, link.event, link.asked = k + 1, None, {}
        return received

    def note_read(self, i: int, senders: Iterable[int], refused: Iterable[int]) -> None:
        """Record which payloads an own node could read, for the senders' sites."""
        refusals = set(refused)
        by_site: dict[int, list[int]] = defaultdict(list)
        for j in senders:
            if j not in self.nodes:
                by_site[self.of(j)].append(j)
        for peer, those in by_site.items():
            self._made_of[peer][i] = those, sorted(refusals.intersection(those))

    def _exchange(self, topic: Topic, sent: Mapping[int, bytes]) -> dict[int, bytes | bytearray]:
        """Return the messages of the sites that were reached, too."""
        began = time.monotonic()
        found = self._channel.exchange(topic, sent, self.site.timeout) if sent else None
        self.seconds += time.monotonic() - began
        return {} if found is None else {peer: found.received[peer] for peer in found.both_ways}

    def describe(self) -> list[str]:
        """Describe the site's neighbours."""
        return [f"Site {self.site.own} of {len(self.site.peers)}, next to {self._channel.neighbours}"]


def _digest(method: GossipMethod, settings: Mapping[str, Any]) -> str:
    """Return a digest of the settings that all sites of a run must share."""
    graph = method.graph(0)
    common = {
        "method": method.name,
        "edges": sorted(list(edge) if graph.is_directed() else sorted(edge) for edge in graph.edges),
        "nodes": [dict(method.instructions(i)) for i in range(method.num_nodes)],
        **settings,
    }
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()


def _packed(bundles: Mapping[int, Mapping[int, bytes]]) -> bytes:
    """Return payloads as bytes: a line of receivers, senders and lengths, then the payloads."""
    entries = [(i, j, payload) for i, bundle in bundles.items() for j, payload in bundle.items()]
    header = json.dumps([(i, j, len(payload)) for i, j, payload in entries]).encode()
    return b"\n".join((header, b"".join(payload for _, _, payload in entries)))


def _unpacked(message: bytes | bytearray) -> Iterable[tuple[int, int, bytes]]:
    """Yield receiver, sender and payload; raises one of ``UNREADABLE`` if the message is not valid."""
    header, _, rest = bytes(message).partition(b"\n")
    start = 0
    for i, j, length in json.loads(header):
        if not (isinstance(i, int) and isinstance(j, int) and 0 <= length <= len(rest) - start):
            raise ValueError("payloads of another length")
        yield i, j, rest[start : start + length]
        start += length
