"""Gossip between edge servers that are separate orchestrators with direct connections (level E3).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", eq. (5).
Ours: the paper does not say how servers without a centre agree on a mixing matrix and preserve the weighted
mean when links or servers fail. Before they gossip, servers flood their clusters' sizes and their working
links, in as many steps as there are servers, and build the matrix of the servers that they can reach. In
every step both ends of a link acknowledge each other's model, and use the link only if both have it. Else its
weight goes to each end's own model: since |S_i| p_{j,i} = |S_j| p_{i,j}, the mean weighted by |S| is
preserved. One case remains, which no protocol can exclude: if a link fails between the last message and its
acknowledgement, only one end uses it.
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

from hedgerow.strategies.inbox import TOO_LARGE
from hedgerow.strategies.limits import norm_of
from hedgerow.strategies.topology import mixing
from hedgerow.wire.checks import int_at_least, positive
from hedgerow.wire.edge_servers import columns, robust_step, weighted_sum
from hedgerow.wire.links.peers import UNREADABLE, Exchanged, LinkTraffic, PeerChannel, Topic
from hedgerow.wire.records import PayloadError
from hedgerow.wire.robust_means import Aggregation

_DIGEST_BYTES = 32
_YES, _NO = b"\x01", b"\x00"
# Seconds to wait for the answer to a request.
_QUESTION = 5.0
_LONGEST_START = 64
# Number of exchanges in the median distance between neighbours.
_REMEMBERED = 16
SMALLEST_SIZE, LARGEST_SIZE = 2.0**-20, 2.0**53
# After all stages of a round.
_END = 2**32
# Most exchanges that a repeatedly late neighbour is excluded from.
_LONGEST_REST = 64


@dataclass
class GossipReport:
    """The report of one exchange with the neighbours."""

    # The reachable servers, also over others, with this one.
    members: list[int] = field(default_factory=list)
    # Second largest eigenvalue modulus of their matrix; nan if this server is alone.
    zeta: float = float("nan")
    # Links that were lost in some step, by reason.
    lost: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    # Number of acknowledged models, by neighbour.
    sent: Counter[int] = field(default_factory=Counter)
    # The share of ``seconds`` for the transfer of models, without the agreements before and after.
    model_seconds: float = 0.0
    # Traffic by neighbour.
    links: dict[int, LinkTraffic] = field(default_factory=dict)

    def metrics(self) -> dict[str, int | float | list[int] | list[float]]:
        """Return the metrics for a round's record; lists follow the order of ``neighbours``."""
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
    """Return a server's model (M,) after one step, eq. (5); its own model gets missing servers' weights."""
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
    """An agreement with a neighbour: its start id, and the first common exchange."""

    start: str
    first: int


class DirectGossip:
    """One edge server among its neighbours.

    Parameters
    ----------
    graph : networkx.Graph
        The servers' graph on 0 to D - 1, connected.
    channel : PeerChannel
        To its neighbours in the graph; it must use ``answer`` and ``comes`` of this object.
    period : int
        tau2: rounds between two exchanges, >= 1.
    steps : int
        alpha, >= 0.
    rule : Aggregation
        The mean, eq. (5), or a rule of ``neighbourhood_rule`` against Byzantine neighbours.
    exact_if_complete : bool (default: False)
        See ``mixing``.
    timeout : float (default: 600.0)
        Seconds to wait for a neighbour that is online and late, > 0; stage i of an exchange waits i + 1 times
        as long, as a neighbour may have waited for others in the stages before.
    max_update_norm_ratio : float (default: 100.0)
        A neighbour's model is refused (``update too large``) if its distance from this server's exceeds both
        twice the norm of this server's model (for servers that were separated for long) and this multiple of
        the usual distance in the exchanges before (in the first one, of the model's norm); >= 1, or 0 for no
        bound.
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
        # The round of the last exchange that began; and the agreement with each participating neighbour.
        self._begun = 0
        self._links: dict[int, _Link] = {}
        # In how many exchanges in a row a participating neighbour was lost.
        self._lapses: Counter[int] = Counter()
        self.max_update_norm_ratio = max_update_norm_ratio
        # The median distance of the neighbours' models before the first step of each exchange.
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        # The id of this start: a restarted server has forgotten its agreements.
        self._start = secrets.token_hex(8)
        self.report = GossipReport()

    # Joining. Of two neighbours the one with the lower number asks, so that there is one agreement.

    def answer(self, peer: int, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a neighbour's request, which has its start id and may ask to join from a round on."""
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
        """Return whether this server will send a waiting neighbour a message of a topic."""
        with self._lock:
            link = self._links.get(peer)
            return link is not None and max(link.first, self._begun) <= topic.round

    def _rest(self, peer: int) -> int:
        """Return for how many rounds a neighbour that was lost several times in a row is excluded."""
        lapses = self._lapses[peer]
        return self.period * min(2 ** min(lapses - 1, 10) - 1, _LONGEST_REST) if lapses else 0

    def join(self, completed_rounds: int, patience: float, num_rounds: int) -> int:
        """Agree with the neighbours, and return the round after which this server continues.

        That is the one that it has completed; for a server that reconnects, the last one in which most of
        its neighbours began to exchange their models. Waits up to ``patience`` seconds for neighbours that
        are not online yet; those that come later join later. Reported rounds beyond ``num_rounds`` are
        ignored.
        """
        with self._lock:
            self._begun = completed_rounds - completed_rounds % self.period
        end = time.monotonic() + patience
        reported: dict[int, int] = {}
        reached = completed_rounds
        while True:
            missing = self._strangers()
            answers = {peer: where for peer in missing if (where := self._ask(peer, {})) is not None}
            reported |= {peer: int(where["begun"]) for peer, where in answers.items()}
            known = [begun for begun in reported.values() if begun <= num_rounds]
            # The lower median: with two others, no single neighbour can send this server to the end.
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
            log(WARNING, "Neighbours that are not online yet: %s", missing)
        with self._lock:
            # Agreements hold, also with a neighbour that has begun since.
            agreed = [link.first for link in self._links.values() if link.first <= num_rounds]
            if agreed:
                reached = max(completed_rounds, min(agreed) - self.period)
            self._begun = reached - reached % self.period
        return reached

    def _strangers(self) -> list[int]:
        with self._lock:
            return [peer for peer in self.channel.neighbours if peer not in self._links]

    def _ask(self, peer: int, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return a neighbour's answer; None without a valid one."""
        answer = self.channel.call(peer, {**request, "start": self._start}, _QUESTION)
        if (
            answer is None
            or not isinstance(begun := answer.get("begun"), int)
            or not 0 <= begun < 2**53
            or begun % self.period
        ):
            return None
        return answer

    def _meet(self, peer: int, where: dict[str, Any]) -> None:
        """Agree with a neighbour on the next exchange that neither has begun."""
        for _ in range(5):
            with self._lock:
                first = max(self._begun + self._rest(peer), int(where["begun"])) + self.period
            answer = self._ask(peer, {"join": first})
            if answer is None:
                return
            if answer.get("joined") is True:
                with self._lock:
                    self._links[peer] = _Link(str(answer.get("start"))[:_LONGEST_START], first)
                return
            where = answer

    # An exchange.

    def exchanged(self, server_round: int, model: NDArray[Any], size: float) -> NDArray[Any]:
        """Return this server's model (M,) after ``steps`` gossip steps, eq. (5), with the reachable servers.

        It is rounded once, to the model's dtype; between two steps it is float64. ``server_round`` is a
        multiple of ``period``, and ``size`` is |S| > 0, the samples of this server's cluster. ``report``
        has the details.
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
        """Exclude neighbours from the rest of an exchange; they learn this when they query."""
        for peer in peers:
            self.channel.leave_out(peer, Topic(server_round, _END))

    def _working_links(self, server_round: int, expected: set[int]) -> set[int]:
        """Return the neighbours with links that work in both directions, as both ends know."""
        heard = self._exchange(Topic(server_round, 0), dict.fromkeys(expected, _YES)).both_ways
        links = self._agreed(Topic(server_round, 1), expected, heard)
        self._lost(expected - links, "no answer")
        self._leave_out(server_round, expected - links)
        return links

    def _exchange(self, topic: Topic, payloads: Mapping[int, bytes]) -> Exchanged:
        # A neighbour may have waited for others in every stage before: one late server must not make its
        # neighbours late too.
        return self.channel.exchange(topic, payloads, self.timeout * (1 + topic.stage))

    def _agreed(self, topic: Topic, asked: set[int], had: set[int]) -> set[int]:
        """Return the neighbours for which both ends report to have the other's message."""
        sent = {peer: _YES if peer in had else _NO for peer in asked}
        found = self._exchange(topic, sent)
        return {peer for peer in found.both_ways & had if found.received[peer] == _YES}

    def _flooded(
        self, server_round: int, links: set[int], size: float
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Return each reachable server's entry, and the links that work to the end."""
        known = {self.me: {"size": float(size), "links": sorted(links)}}
        for step in range(len(self.graph) - 1):
            payload = json.dumps({str(server): known[server] for server in sorted(known)}).encode()
            topic = Topic(server_round, 2 + step)
            found = self._exchange(topic, dict.fromkeys(links, payload))
            here = found.both_ways
            self._lost(links - here, "no answer")
            for peer in sorted(found.received):
                try:
                    heard = self._entries(found.received[peer])
                except UNREADABLE:
                    self._lost({peer} & here, "unreadable")
                    here.discard(peer)
                    continue
                # The first entry counts: no server can change another's, or its own.
                known = {**heard, **known}
            self._leave_out(server_round, links - here)
            links = here
        return known, links

    def _entries(self, payload: bytes | bytearray) -> dict[int, dict[str, Any]]:
        """Return the servers' entries in a neighbour's message; raises one of ``UNREADABLE`` if invalid."""
        entries = {}
        for name, entry in json.loads(payload).items():
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
        # Servers with another view have another matrix; mixing with them would not preserve the mean.
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
                # The other end did not confirm that it has a usable model of this one.
                self._lost({peer}, why.get(peer, "not agreed"))
            self._leave_out(server_round, with_whom - both)
            now = mixed(self.me, now, {peer: models[peer] for peer in sorted(both)}, column, self.rule)
            with_whom, sent = both, now
        return now, with_whom

    def _read(
        self, message: bytes | bytearray, digest: bytes, like: NDArray[Any], own: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return a neighbour's model; PayloadError if it cannot be used."""
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
        """Drop lost neighbours until there is a new agreement; try to agree with those that are out."""
        with self._lock:
            for peer in expected & found:
                self._lapses.pop(peer, None)
            for peer in expected - found:
                # A restarted neighbour may have joined since.
                if (link := self._links.get(peer)) is not None and link.first <= self._begun:
                    del self._links[peer]
                    self._lapses[peer] += 1
        for peer in self._strangers():
            if (where := self._ask(peer, {})) is not None and peer > self.me:
                self._meet(peer, where)

    def _lost(self, peers: set[int], reason: str) -> None:
        self.report.lost.update({reason: len(peers)} if peers else {})
