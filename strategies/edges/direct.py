"""Gossip between edge servers that are orchestrators of their own, with nobody between them (level E3).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", eq. (5).
Ours: what the paper leaves open, how servers without a centre come to one mixing matrix and keep the weighted
mean where a link or a server fails. Before they gossip, servers flood who is there: each tells its cluster's
size and the links that work, over as many steps as there are servers, and builds the matrix of the servers
that it can reach. In every step both ends of a link tell each other whether they have the other's model, and
leave the link out unless both have. Its weight then goes to each end's own model: since
|S_i| p_{j,i} = |S_j| p_{i,j}, the mean weighted by |S| stays what it was. One case is left, which no protocol
can exclude: a link that is cut between the last word and its acknowledgement is used by one end alone.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from logging import WARNING
from math import sqrt
from statistics import median, median_low
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.parts.bounds import TOO_LARGE, norm_of
from hedgerow.strategies.peers import UNREADABLE, Exchanged, LinkTraffic, PeerChannel, Topic
from hedgerow.strategies.topology import mixing
from hedgerow.wire.checks import int_at_least, positive
from hedgerow.wire.edge_servers import columns, robust_step, weighted_sum
from hedgerow.wire.records import PayloadError
from hedgerow.wire.robust_means import Aggregation

__all__ = [
    "LARGEST_SIZE",
    "SMALLEST_SIZE",
    "DirectGossip",
    "GossipReport",
    "mixed",
]

_DIGEST_BYTES = 32
_YES, _NO = b"\x01", b"\x00"
# Seconds to wait for the answer to a question that needs no work.
_QUESTION = 5.0
_LONGEST_START = 64
# Exchanges that say which distances between neighbours are usual.
_REMEMBERED = 16
SMALLEST_SIZE, LARGEST_SIZE = 2.0**-20, 2.0**53
# After all stages of a round.
_END = 2**32
# Exchanges that a neighbour sits out at most which is late in one after the other.
_LONGEST_REST = 64


@dataclass
class GossipReport:
    """What one exchange with the neighbours came to."""

    # The servers that this one could reach, over others too, itself among them.
    members: list[int] = field(default_factory=list)
    # Second largest eigenvalue modulus of their matrix; nan where it is alone.
    zeta: float = float("nan")
    # Links that were left out in some step, by reason.
    lost: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    # Models that each neighbour took, by neighbour.
    sent: Counter[int] = field(default_factory=Counter)
    # Of ``seconds`` what the models themselves took, without what servers agree on before and after.
    model_seconds: float = 0.0
    # What was measured of the link to each neighbour.
    links: dict[int, LinkTraffic] = field(default_factory=dict)

    def metrics(self) -> dict[str, int | float | list[int] | list[float]]:
        """Return it as a round's record has it; what is of a link by neighbour, in the order of these."""
        lost = {
            f"lost-links-{reason.replace(' ', '-')}": count for reason, count in sorted(self.lost.items())
        }
        by_link: dict[str, list[int] | list[float]] = {}
        if self.links:
            by_link = {
                "neighbours": list(self.links),
                "link-bytes-sent": [link.bytes for link in self.links.values()],
                "link-bytes-received": [link.received for link in self.links.values()],
                "link-send-seconds": [link.seconds for link in self.links.values()],
                "link-wait-seconds": [link.waited for link in self.links.values()],
            }
        return {
            "servers": self.members,
            "zeta": self.zeta,
            "gossip-seconds": self.seconds,
            "model-exchange-seconds": self.model_seconds,
            **by_link,
            **lost,
        }


def mixed(
    me: int,
    own: NDArray[np.float64],
    models: Mapping[int, NDArray[np.float64]],
    column: Mapping[int, float],
    rule: Aggregation,
) -> NDArray[np.float64]:
    """Return a server's model (M,) after one step, eq. (5); the weight of who is missing is its own."""
    weights = {server: column[server] for server in sorted([*models, me])}
    for server in sorted(column.keys() - weights.keys()):
        weights[me] += column[server]
    everyone = {server: own if server == me else models[server] for server in weights}
    if not rule.is_mean:
        return robust_step(me, everyone, weights, rule)
    out, term = np.empty_like(own), np.empty_like(own)
    weighted_sum(((weights[server], everyone[server]) for server in weights), out, term)  # (5)
    return out


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
        To its neighbours in the graph; it must answer with ``answer`` and ``comes`` of this object.
    period : int
        tau2: rounds between two exchanges, >= 1.
    steps : int
        alpha, >= 0.
    rule : Aggregation
        The mean, eq. (5); or what a server takes where neighbours may lie, of ``neighbourhood_rule``.
    exact_if_complete : bool (default: False)
        See ``mixing``.
    timeout : float (default: 600.0)
        Seconds until an exchange goes on without a neighbour that is there and late, > 0; in its later
        stages as many times longer as came before, for who waited for others.
    max_update_norm_ratio : float (default: 100.0)
        A neighbour's model is left out (``update too large``) whose distance from this server's exceeds both
        twice the model's norm, which servers that were apart for long may be, and so many times what was
        usual in the exchanges before (in the first, of the model's norm); >= 1, or 0 for no bound.
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
        max_update_norm_ratio: float = 100.0,
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
        # In how many exchanges running a neighbour was lost that takes part.
        self._lapses: Counter[int] = Counter()
        self.max_update_norm_ratio = max_update_norm_ratio
        # Of each exchange the median distance of the neighbours' models before its first step.
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        # Which start of this server this is: one that was started again has forgotten what was agreed on.
        self._start = secrets.token_hex(8)
        self.report = GossipReport()

    # Who is there. Of two neighbours the one with the lower number asks, so that both know one agreement.

    def answer(self, peer: int, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a neighbour, which says who it is and may ask to take part from a round on."""
        start = request["start"]
        if not isinstance(start, str) or len(start) > _LONGEST_START:
            raise ValueError("start is not that of a server")
        with self._lock:
            known = self._links.get(peer)
            if known is not None and known.start != start:
                del self._links[peer]
                self._lapses.pop(peer, None)
                self.channel.forsake(peer)
            if (first := request.get("join")) is None:
                return {"begun": self._begun, "start": self._start}
            begun = self._begun + self._rest(peer)
            joined = int(first) > begun and int(first) % self.period == 0
            if joined:
                self._links[peer] = _Link(start, int(first))
            return {"begun": begun, "start": self._start, "joined": joined}

    def comes(self, peer: int, topic: Topic) -> bool:
        """Return whether a neighbour that waits for something of an exchange will be sent it."""
        with self._lock:
            link = self._links.get(peer)
            return link is not None and max(link.first, self._begun) <= topic.round

    def _rest(self, peer: int) -> int:
        """Return for how many rounds a neighbour that was lost several times running sits out."""
        lapses = self._lapses[peer]
        return self.period * min(2 ** min(lapses - 1, 10) - 1, _LONGEST_REST) if lapses else 0

    def join(self, completed_rounds: int, patience: float, num_rounds: int) -> int:
        """Meet the neighbours, and return the round after which this server goes on.

        That is the one that it has completed; or, of a server that comes back, the last one in which most of
        its neighbours began to exchange their models. Waits up to ``patience`` seconds for neighbours that
        are not there yet; those that come later join later. A neighbour beyond ``num_rounds`` is not
        believed.
        """
        with self._lock:
            self._begun = completed_rounds - completed_rounds % self.period
        end = time.monotonic() + patience
        told: dict[int, int] = {}
        reached = completed_rounds
        while True:
            missing = self._strangers()
            answers = {peer: where for peer in missing if (where := self._told(peer, {})) is not None}
            told |= {peer: int(where["begun"]) for peer, where in answers.items()}
            known = [begun for begun in told.values() if begun <= num_rounds]
            # No neighbour alone can send this server to the end, where there are two others.
            reached = max([reached, *([median_low(known)] if known else [])])
            with self._lock:
                self._begun = max(self._begun, reached - reached % self.period)
            for peer, where in answers.items():
                if peer > self.me:
                    self._meet(peer, where)
            missing = self._strangers()
            if not missing or time.monotonic() > end:
                break
            time.sleep(0.2)
        if missing:
            log(WARNING, "Neighbours that are not there yet: %s", missing)
        with self._lock:
            # What was agreed on holds, also with one that has begun since.
            agreed = [link.first for link in self._links.values() if link.first <= num_rounds]
            if agreed:
                reached = max(completed_rounds, min(agreed) - self.period)
            self._begun = reached - reached % self.period
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
            or not 0 <= begun < 2**53
            or begun % self.period
        ):
            return None
        return told

    def _meet(self, peer: int, where: dict[str, Any]) -> None:
        """Agree with a neighbour on the next exchange that neither has begun."""
        for _ in range(5):
            with self._lock:
                first = max(self._begun + self._rest(peer), int(where["begun"])) + self.period
            answer = self._told(peer, {"join": first})
            if answer is None:
                return
            if answer.get("joined") is True:
                with self._lock:
                    self._links[peer] = _Link(str(answer.get("start"))[:_LONGEST_START], first)
                return
            where = answer

    # An exchange.

    def exchanged(self, server_round: int, model: NDArray[Any], size: float) -> NDArray[Any]:
        """Return this server's model (M,) after ``steps`` gossip steps, eq. (5), with whom it reaches.

        Rounded once, to the model's dtype; between two steps it is float64. ``server_round`` is a multiple of
        ``period``, and ``size`` |S| > 0, the samples of this server's cluster. What happened is in
        ``report``.
        """
        start = time.monotonic()
        before = {peer: replace(self.channel.traffic[peer]) for peer in self.channel.neighbours}
        with self._lock:
            self._begun = server_round
            expected = {peer for peer, link in self._links.items() if link.first <= server_round}
        self.report = GossipReport()
        self._leave_out(server_round, set(self.channel.neighbours) - expected)
        links = self._working_links(server_round, expected)
        view, links = self._flooded(server_round, links, size)
        now = model.astype(np.float64)
        members, matrix = self._matrix(view)
        if len(members) > 1:
            now, links = self._stepped(server_round, model, links, view, members, matrix)
        self._renew(expected, links)
        self.report.members = members
        traffic = self.channel.traffic
        self.report.links = {peer: traffic[peer].since(then) for peer, then in before.items()}
        self.report.seconds = time.monotonic() - start
        return now.astype(model.dtype)

    def _leave_out(self, server_round: int, peers: set[int]) -> None:
        """Let neighbours that take no part in the rest of an exchange know it when they ask."""
        for peer in peers:
            self.channel.leave_out(peer, Topic(server_round, _END))

    def _working_links(self, server_round: int, expected: set[int]) -> set[int]:
        """Return the neighbours with which messages go both ways, as both ends know."""
        told = self._exchange(Topic(server_round, 0), dict.fromkeys(expected, _YES)).both_ways
        links = self._agreed(Topic(server_round, 1), expected, told)
        self._lost(expected - links, "no answer")
        self._leave_out(server_round, expected - links)
        return links

    def _exchange(self, topic: Topic, payloads: Mapping[int, bytes]) -> Exchanged:
        # Who is in time may have waited for others before, in each stage for as long as it may: one late
        # server must not have its neighbours lose theirs.
        return self.channel.exchange(topic, payloads, self.timeout * (1 + topic.stage))

    def _agreed(self, topic: Topic, asked: set[int], had: set[int]) -> set[int]:
        """Return those of whom both ends say that they have what the other sent."""
        sent = {peer: _YES if peer in had else _NO for peer in asked}
        found = self._exchange(topic, sent)
        return {peer for peer in found.both_ways & had if found.received[peer] == _YES}

    def _flooded(
        self, server_round: int, links: set[int], size: float
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Return what each server that can be reached says of itself, and the links that work to the end."""
        known = {self.me: {"size": float(size), "links": sorted(links)}}
        for step in range(len(self.graph) - 1):
            told = json.dumps({str(server): known[server] for server in sorted(known)}).encode()
            topic = Topic(server_round, 2 + step)
            found = self._exchange(topic, dict.fromkeys(links, told))
            here = found.both_ways
            self._lost(links - here, "no answer")
            for peer in sorted(found.received):
                try:
                    heard = self._entries(found.received[peer])
                except UNREADABLE:
                    self._lost({peer} & here, "unreadable")
                    here.discard(peer)
                    continue
                # What is known first stands: nobody changes what another said, or what it said itself.
                known = {**heard, **known}
            self._leave_out(server_round, links - here)
            links = here
        return known, links

    def _entries(self, payload: bytes | bytearray) -> dict[int, dict[str, Any]]:
        """Return what a neighbour has heard of the servers; raises one of ``UNREADABLE`` if it cannot."""
        told = json.loads(payload)
        entries = {}
        for name, entry in told.items():
            server, size, links = int(name), float(entry["size"]), [int(peer) for peer in entry["links"]]
            if server not in self.graph or not SMALLEST_SIZE <= size <= LARGEST_SIZE:
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
    ) -> tuple[NDArray[np.float64], set[int]]:
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
            began = time.monotonic()
            found = self._exchange(topic, dict.fromkeys(with_whom, payload))
            self.report.model_seconds += time.monotonic() - began
            self.report.sent.update(found.taken)
            models, why = {}, dict.fromkeys(with_whom - found.received.keys(), "no model")
            for peer, message in found.received.items():
                try:
                    models[peer] = self._read(message, digest, sent, now)
                except PayloadError as error:
                    why[peer] = error.reason
            if step == 0 and models:
                self._usual.append(median(norm_of(model - now) for model in models.values()))
            had = found.taken & models.keys()
            both = self._agreed(topic._replace(stage=topic.stage + 1), with_whom, had)
            for peer in sorted(with_whom - both):
                # The other does not have this one's model, or cannot use it, or was not heard to say so.
                self._lost({peer}, why.get(peer, "not agreed"))
            self._leave_out(server_round, with_whom - both)
            now = mixed(self.me, now, {peer: models[peer] for peer in sorted(both)}, column, self.rule)
            with_whom, sent = both, now
        return now, with_whom

    def _read(
        self, message: bytes | bytearray, digest: bytes, like: NDArray[Any], own: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return a neighbour's model; PayloadError where it cannot be used."""
        if len(message) != _DIGEST_BYTES + like.nbytes:
            raise PayloadError("wrong size", "of a model")
        if message[:_DIGEST_BYTES] != digest:
            raise PayloadError("another view", "of the servers")
        model = np.frombuffer(message, like.dtype, offset=_DIGEST_BYTES).astype(np.float64)
        if not np.isfinite(model).all():
            raise PayloadError("non-finite", "model")
        distance, norm = norm_of(model - own), norm_of(own) or sqrt(own.size)
        most = max(self.max_update_norm_ratio * (median(self._usual) if self._usual else norm), 2 * norm)
        if self.max_update_norm_ratio and not distance <= most:
            raise PayloadError(TOO_LARGE, f"norm {distance:.3g}, expected at most {most:.3g}")
        return model

    def _renew(self, expected: set[int], found: set[int]) -> None:
        """Leave out neighbours that were lost until they are met again; ask those that are out."""
        with self._lock:
            for peer in expected & found:
                self._lapses.pop(peer, None)
            for peer in expected - found:
                # Not one that was started again, and may have joined since.
                if (link := self._links.get(peer)) is not None and link.first <= self._begun:
                    del self._links[peer]
                    self._lapses[peer] += 1
        for peer in self._strangers():
            if (where := self._told(peer, {})) is not None and peer > self.me:
                self._meet(peer, where)

    def _lost(self, peers: set[int], reason: str) -> None:
        self.report.lost.update({reason: len(peers)} if peers else {})
