"""Gossip between edge servers that are orchestrators of their own, with nobody between them (level E3).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", eq. (5).
Ours: what the paper leaves open, how servers without a centre come to one mixing matrix and keep the weighted
mean where a link or a server fails. Before they gossip, servers flood who is there: each tells its cluster's
size and the links that work, over as many steps as there are servers, and builds the matrix of the servers
that it can reach. In every step both ends of a link tell each other whether they have the other's model, and
leave the link out unless both have. Its weight then goes to each end's own model: since
|S_i| p_{j,i} = |S_j| p_{i,j}, the mean weighted by |S| stays what it was.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.peers import PeerChannel, Topic
from hedgerow.strategies.topology import mixing
from hedgerow.wire.checks import int_at_least, positive
from hedgerow.wire.edge_servers import columns, robust_step, weighted_sum
from hedgerow.wire.robust_means import Aggregation

__all__ = ["DirectGossip", "GossipReport"]

_DIGEST_BYTES = 32
_YES, _NO = b"\x01", b"\x00"
# Seconds to wait for the answer to a question that needs no work.
_QUESTION = 5.0
_LARGEST_SIZE = 2.0**53


@dataclass
class GossipReport:
    """What one exchange with the neighbours came to.

    Parameters
    ----------
    members : list of int
        The servers that this one could reach, over others too, itself among them.
    zeta : float
        Second largest eigenvalue modulus of their matrix; nan where it is alone.
    lost : Counter
        Links that were left out in some step, by reason.
    seconds : float
        What it took.
    """

    members: list[int] = field(default_factory=list)
    zeta: float = float("nan")
    lost: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def metrics(self) -> dict[str, int | float | list[int]]:
        """Return it as a round's record has it."""
        lost = {
            f"lost-links-{reason.replace(' ', '-')}": count for reason, count in sorted(self.lost.items())
        }
        return {"servers": self.members, "zeta": self.zeta, "gossip-seconds": self.seconds, **lost}


class _Link(NamedTuple):
    """What was agreed on with a neighbour: with which start of it, and from which exchange on."""

    start: str
    first: int


class DirectGossip:
    """One edge server among its neighbours.

    Parameters
    ----------
    graph : networkx.Graph
        The servers' graph on 0 to D - 1, connected.
    channel : PeerChannel
        To its neighbours in the graph; ``answer`` of this object must be what the channel answers with.
    period : int
        tau2: rounds between two exchanges, >= 1.
    steps : int
        alpha, >= 0.
    rule : Aggregation
        The mean, eq. (5); or what a server takes where neighbours may lie, of ``neighbourhood_rule``.
    exact_if_complete : bool (default: False)
        See ``mixing``.
    timeout : float (default: 600.0)
        Seconds until a step goes on without a neighbour that is there and late, > 0.
    """

    def __init__(
        self,
        graph: nx.Graph,
        channel: PeerChannel,
        *,
        period: int,
        steps: int,
        rule: Aggregation,
        exact_if_complete: bool = False,
        timeout: float = 600.0,
    ) -> None:
        int_at_least(1, period=period)
        int_at_least(0, steps=steps)
        positive(timeout=timeout)
        self.graph, self.channel = graph, channel
        self.period, self.steps, self.rule = period, steps, rule
        self.exact_if_complete, self.timeout = exact_if_complete, timeout
        self.me = channel.me
        self._lock = threading.Lock()
        # The last exchange that began, a round; and what was agreed on with each neighbour that takes part.
        self._begun = 0
        self._links: dict[int, _Link] = {}
        # Which start of this server this is: one that was started again has forgotten what was agreed on.
        self._start = secrets.token_hex(8)
        self.report = GossipReport()

    # Who is there. Of two neighbours the one with the lower number asks, so that both know one agreement.

    def answer(self, peer: int, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a neighbour, which says who it is and may ask to take part from a round on."""
        start = str(request["start"])
        with self._lock:
            known = self._links.get(peer)
            if known is not None and known.start != start:
                del self._links[peer]
                self.channel.forsake(peer)
            if (first := request.get("join")) is None:
                return {"begun": self._begun, "start": self._start}
            if int(first) <= self._begun or int(first) % self.period:
                return {"begun": self._begun, "start": self._start, "joined": False}
            self._links[peer] = _Link(start, int(first))
            return {"begun": self._begun, "start": self._start, "joined": True}

    def join(self, completed_rounds: int, patience: float) -> int:
        """Meet the neighbours, and return the round after which this server goes on.

        That is the one that it has completed; or, of a server that comes back, the last one in which the
        others exchanged their models.

        Parameters
        ----------
        completed_rounds : int
            Of this server, >= 0.
        patience : float
            Seconds to wait for neighbours that are not there yet; those that come later join later.
        """
        with self._lock:
            self._begun = completed_rounds - completed_rounds % self.period
        end = time.monotonic() + patience
        reached = completed_rounds
        while True:
            for peer in self._strangers():
                where = self._told(peer, {})
                if where is None or peer not in self._strangers():
                    continue  # One that was met while it was asked may have gone on already.
                reached = max(reached, where["begun"])
                with self._lock:
                    self._begun = max(self._begun, reached - reached % self.period)
                if peer > self.me:
                    self._meet(peer, where)
            missing = self._strangers()
            if not missing or time.monotonic() > end:
                break
            time.sleep(0.2)
        if missing:
            log(WARNING, "Neighbours that are not there yet: %s", missing)
        return reached

    def _strangers(self) -> list[int]:
        with self._lock:
            return [peer for peer in self.channel.neighbours if peer not in self._links]

    def _told(self, peer: int, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return a neighbour's answer; None where there is none that can be read."""
        told = self.channel.call(peer, {**request, "start": self._start}, _QUESTION)
        if (
            told is None
            or not isinstance(begun := told.get("begun"), int)
            or begun < 0
            or begun % self.period
        ):
            return None
        return told

    def _meet(self, peer: int, where: dict[str, Any]) -> None:
        """Agree with a neighbour on the next exchange that neither has begun."""
        for _ in range(5):
            first = max(self._begun, where["begun"]) + self.period
            answer = self._told(peer, {"join": first})
            if answer is None:
                return
            if answer.get("joined") is True:
                with self._lock:
                    self._links[peer] = _Link(str(answer.get("start")), first)
                return
            where = answer

    # An exchange.

    def exchanged(self, server_round: int, model: NDArray[Any], size: float) -> NDArray[Any]:
        """Return this server's model (M,) after ``steps`` gossip steps, eq. (5), with whom it reaches.

        Rounded once, to the model's dtype; between two steps it is float64. What happened is in ``report``.

        Parameters
        ----------
        server_round : int
            A multiple of ``period``, after those of before.
        model : NDArray (M,)
            Floating.
        size : float
            |S|, the samples of this server's cluster, > 0.
        """
        start = time.monotonic()
        with self._lock:
            self._begun = server_round
            expected = {peer for peer, link in self._links.items() if link.first <= server_round}
        self.report = GossipReport()
        links = self._working_links(server_round, expected)
        view = self._flooded(server_round, links, size)
        now = model.astype(np.float64)
        members, matrix = self._matrix(view)
        if len(members) > 1:
            now = self._stepped(server_round, model, links, view, members, matrix)
        self._renew(expected - links)
        self.report.members = members
        self.report.seconds = time.monotonic() - start
        return now.astype(model.dtype)

    def _working_links(self, server_round: int, expected: set[int]) -> set[int]:
        """Return the neighbours with which messages go both ways, as both ends know."""
        told = self.channel.exchange(
            Topic(server_round, 0), dict.fromkeys(expected, _YES), self.timeout
        ).both_ways
        links = self._agreed(Topic(server_round, 1), expected, told)
        self._lost(expected - links, "no answer")
        return links

    def _agreed(self, topic: Topic, asked: set[int], had: set[int]) -> set[int]:
        """Return those of whom both ends say that they have what the other sent."""
        sent = {peer: _YES if peer in had else _NO for peer in asked}
        found = self.channel.exchange(topic, sent, self.timeout)
        return {peer for peer in found.both_ways & had if found.received[peer] == _YES}

    def _flooded(self, server_round: int, links: set[int], size: float) -> dict[int, dict[str, Any]]:
        """Return what each server that can be reached says of itself."""
        known = {self.me: {"size": float(size), "links": sorted(links)}}
        for step in range(len(self.graph) - 1):
            told = json.dumps({str(server): known[server] for server in sorted(known)}).encode()
            topic = Topic(server_round, 2 + step)
            found = self.channel.exchange(topic, dict.fromkeys(links, told), self.timeout)
            for peer in sorted(found.received):
                try:
                    heard = self._entries(found.received[peer])
                except (ValueError, KeyError, TypeError, RecursionError):
                    self._lost({peer}, "unreadable")
                    continue
                # What is known first stands: nobody changes what another said, or what it said itself.
                known = {**heard, **known}
        return known

    def _entries(self, payload: bytes) -> dict[int, dict[str, Any]]:
        """Return what a neighbour has heard of the servers; ValueError where it is no such thing."""
        told = json.loads(payload)
        entries = {}
        for name, entry in told.items():
            server, size, links = int(name), float(entry["size"]), [int(peer) for peer in entry["links"]]
            if server not in self.graph or not 0 < size <= _LARGEST_SIZE:
                raise ValueError(f"server {server} of size {size}")
            if not set(links) <= set(self.graph.neighbors(server)):
                raise ValueError(f"server {server} has the links {links}")
            entries[server] = {"size": size, "links": sorted(set(links))}
        return entries

    def _matrix(self, view: Mapping[int, Mapping[str, Any]]) -> tuple[list[int], NDArray[np.float64]]:
        """Return the servers of this one's component, ascending, and their mixing matrix."""
        working = nx.Graph()
        working.add_nodes_from(view)
        working.add_edges_from(
            (i, j) for i in view for j in view[i]["links"] if j in view and i in view[j]["links"]
        )
        members = sorted(nx.node_connected_component(working, self.me))
        if len(members) == 1:
            return members, np.ones((1, 1))
        places = {server: place for place, server in enumerate(members)}
        graph = nx.relabel_nodes(working.subgraph(members), places)
        found = mixing(
            graph, [view[server]["size"] for server in members], exact_if_complete=self.exact_if_complete
        )
        self.report.zeta = found.zeta
        return members, found.matrix

    def _stepped(
        self,
        server_round: int,
        model: NDArray[Any],
        links: set[int],
        view: Mapping[int, Mapping[str, Any]],
        members: list[int],
        matrix: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        # Servers that see another federation have another matrix: between them no mean would be kept.
        seen = {str(server): view[server] for server in members}
        digest = hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).digest()
        column = {members[place]: weight for place, weight in columns(matrix)[members.index(self.me)]}
        now, sent = model.astype(np.float64), np.ascontiguousarray(model)
        first = Topic(server_round, len(self.graph) + 1)
        with_whom = {peer for peer in links if peer in column}
        for step in range(self.steps):
            payload = digest + sent.tobytes()
            topic = first._replace(stage=first.stage + 2 * step)
            found = self.channel.exchange(topic, dict.fromkeys(with_whom, payload), self.timeout)
            models = {}
            for peer, message in found.received.items():
                try:
                    models[peer] = self._read(message, digest, sent)
                except ValueError as error:
                    self._lost({peer}, str(error))
            had = found.taken & models.keys()
            both = self._agreed(topic._replace(stage=topic.stage + 1), with_whom, had)
            self._lost({peer for peer in with_whom - both if peer not in found.received}, "no model")
            now = self._mixed(now, {peer: models[peer] for peer in sorted(both)}, column)
            with_whom, sent = both, now
        return now

    def _read(self, message: bytes, digest: bytes, like: NDArray[Any]) -> NDArray[np.float64]:
        if len(message) != _DIGEST_BYTES + like.nbytes:
            raise ValueError("wrong size")
        if message[:_DIGEST_BYTES] != digest:
            raise ValueError("another view")
        model = np.frombuffer(message, like.dtype, offset=_DIGEST_BYTES).astype(np.float64)
        if not np.isfinite(model).all():
            raise ValueError("non-finite")
        return model

    def _mixed(
        self, own: NDArray[np.float64], models: Mapping[int, NDArray[np.float64]], column: Mapping[int, float]
    ) -> NDArray[np.float64]:
        """Return one step, eq. (5); the weight of who is missing is this server's own."""
        weights = {server: column[server] for server in sorted([*models, self.me])}
        for server in sorted(column.keys() - weights.keys()):
            weights[self.me] += column[server]
        everyone = {server: own if server == self.me else models[server] for server in weights}
        if not self.rule.is_mean:
            return robust_step(self.me, everyone, weights, self.rule)
        out, term = np.empty_like(own), np.empty_like(own)
        weighted_sum(((weights[server], everyone[server]) for server in weights), out, term)  # (5)
        return out

    def _renew(self, lost: set[int]) -> None:
        """Leave out neighbours that were not there until they are met again; ask those that are out."""
        with self._lock:
            for peer in lost:
                self._links.pop(peer, None)
        for peer in self._strangers():
            if (where := self._told(peer, {})) is not None and peer > self.me:
                self._meet(peer, where)

    def _lost(self, peers: set[int], reason: str) -> None:
        self.report.lost.update({reason: len(peers)} if peers else {})
