"""Gossip between edge servers that do not wait for each other, with nobody between them (level E3).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", eq. (5).
Ours: a server sends its model and goes on; it takes of each neighbour what came last, as ``asynchronous.py``
says. Nothing is agreed on: cluster sizes travel with the models, and each server makes its column of the
matrix of what it knows.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any

import networkx as nx
import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.peers import PeerChannel, Topic
from hedgerow.strategies.sd_feel.asynchronous import lazy_column
from hedgerow.strategies.sd_feel.direct import (
    LARGEST_SIZE,
    SMALLEST_SIZE,
    UNREADABLE,
    DistanceBound,
    GossipReport,
    link_report,
    mixed,
)
from hedgerow.strategies.topology import mixing
from hedgerow.wire.checks import int_at_least, positive
from hedgerow.wire.records import PayloadError
from hedgerow.wire.robust_means import Aggregation

__all__ = ["LatestGossip"]

_HEADER_LENGTH = 4
# Of one server in a message: its number, its exchange, its size.
_LARGEST_ENTRY = 96
_MOST_EXCHANGES = 2**53
_PAUSE = 0.2


@dataclass
class _Came:
    """A neighbour's model (M,), and in how many exchanges it was used."""

    model: NDArray[np.float64]
    uses: int = 0


@dataclass
class LatestReport(GossipReport):
    """What one exchange came to; ``members`` are those whose models were used, this server's among them.

    Parameters
    ----------
    stale, missing : int (default: 0)
        Neighbours whose model was too old, and from whom none has come.
    """

    stale: int = 0
    missing: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def metrics(self) -> dict[str, int | float | list[int] | list[float]]:
        """Return it as a round's record has it."""
        refused = {f"refused-models-{why.replace(' ', '-')}": n for why, n in sorted(self.refused.items())}
        return {**super().metrics(), "stale-models": self.stale, "missing-models": self.missing, **refused}


class LatestGossip:
    """One edge server among neighbours that it does not wait for.

    Parameters
    ----------
    graph : networkx.Graph
        The servers' graph on 0 to D - 1, connected.
    channel : PeerChannel
        To its neighbours in the graph, open while this is used.
    period : int
        tau2: rounds between two exchanges, >= 1.
    max_staleness : int
        As of ``AsynchronousSDFeel``, >= 0.
    rule : Aggregation
        As of ``DirectGossip``.
    timeout : float
        Seconds that a message may take, > 0; a newer one waits for no longer.
    max_update_norm_ratio : float (default: 100.0)
        As of ``DirectGossip``.
    """

    def __init__(
        self,
        graph: nx.Graph,
        channel: PeerChannel,
        *,
        period: int,
        max_staleness: int,
        rule: Aggregation,
        timeout: float,
        max_update_norm_ratio: float = 100.0,
    ) -> None:
        int_at_least(1, period=period)
        int_at_least(0, max_staleness=max_staleness)
        positive(timeout=timeout)
        self.graph, self.channel, self.period = graph, channel, period
        self.max_staleness, self.rule, self.timeout = max_staleness, rule, timeout
        self.me = channel.me
        self.report = LatestReport()
        self._bound = DistanceBound(max_update_norm_ratio)
        self._changed = threading.Condition()
        self._closing = False
        # What is to be sent to each neighbour, and how many it took since the last exchange.
        self._outbox: dict[int, bytes] = {}
        self._sent: Counter[int] = Counter()
        # What came of each neighbour, unread; and read, with how often it was used.
        self._arrived: dict[int, bytes | bytearray] = {}
        self._came: dict[int, _Came] = {}
        # Of each server that is heard of: its exchange when it said so, and its cluster's size.
        self._sizes: dict[int, tuple[int, float]] = {}
        self._traffic = {peer: replace(one) for peer, one in channel.traffic.items()}
        self._last_topic = 0
        senders = [
            threading.Thread(target=self._send, args=(peer,), daemon=True) for peer in channel.neighbours
        ]
        self._threads = [*senders, threading.Thread(target=self._listen, daemon=True)]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def room(servers: int) -> int:
        """Return the bytes of a message beside its model, at most."""
        return _HEADER_LENGTH + 64 + _LARGEST_ENTRY * servers

    # What neighbours call; nothing is agreed on.

    def answer(self, peer: int, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a neighbour that asks whether this server is there."""
        return {"there": True}

    def comes(self, peer: int, topic: Topic) -> bool:
        """Return False: no neighbour is to wait."""
        return False

    def join(self, completed_rounds: int, patience: float, num_rounds: int) -> int:
        """Wait until neighbours are there, or ``patience`` seconds; return ``completed_rounds``."""
        end = time.monotonic() + patience
        missing = set(self.channel.neighbours)
        while True:
            missing = {peer for peer in missing if self.channel.call(peer, {}, 5.0) is None}
            if not missing or time.monotonic() > end:
                break
            time.sleep(_PAUSE)
        if missing:
            log(WARNING, "Neighbours that are not there yet: %s", sorted(missing))
        return completed_rounds

    def close(self, seconds: float) -> None:
        """Let what is on its way arrive, or give it up after so many seconds."""
        end = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: not self._outbox, seconds)
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), _PAUSE))

    # An exchange.

    def exchanged(self, server_round: int, model: NDArray[Any], size: float) -> NDArray[Any]:
        """Send this server's model (M,), and return it after one step of eq. (5) with what neighbours sent.

        Parameters
        ----------
        server_round : int
            A multiple of ``period``.
        model : NDArray (M,)
            Floating.
        size : float
            |S|, the samples of this server's cluster, > 0.
        """
        start = time.monotonic()
        report = self.report = LatestReport()
        number = server_round // self.period
        with self._changed:
            arrived, self._arrived = self._arrived, {}
            report.sent, self._sent = self._sent, Counter()
        own = model.astype(np.float64)
        for peer in sorted(arrived):
            try:
                self._came[peer] = _Came(self._read(peer, arrived[peer], model, own))
            except PayloadError as error:
                report.refused[error.reason] += 1
        self._sizes[self.me] = number, size
        self._offer(self._encoded(number, np.ascontiguousarray(model)))
        column, report.zeta = self._column(size)
        models = {}
        for peer in self.channel.neighbours:
            came = self._came.get(peer)
            if came is None:
                report.missing += 1
            elif came.uses > self.max_staleness:
                report.stale += 1
            else:
                came.uses += 1
                models[peer] = came.model
        report.members = sorted([self.me, *models])
        out = mixed(self.me, own, models, column, self.rule)
        before, self._traffic = self._traffic, {p: replace(one) for p, one in self.channel.traffic.items()}
        report.links = {
            peer: link_report(before[peer], self._traffic[peer]) for peer in self.channel.neighbours
        }
        report.seconds = time.monotonic() - start
        return out.astype(model.dtype)

    def _column(self, size: float) -> tuple[dict[int, float], float]:
        """Return what this server takes of each; one whose size nobody told counts as this one."""
        sizes = [self._sizes.get(server, (0, size))[1] for server in range(len(self.graph))]
        found = mixing(self.graph, sizes)
        return lazy_column(found.matrix, self.graph, self.me), found.zeta

    def _encoded(self, number: int, model: NDArray[Any]) -> bytes:
        told = [[server, at, size] for server, (at, size) in sorted(self._sizes.items())]
        header = json.dumps({"exchange": number, "sizes": told}).encode()
        return len(header).to_bytes(_HEADER_LENGTH, "big") + header + model.tobytes()

    def _read(
        self, peer: int, message: bytes | bytearray, like: NDArray[Any], own: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return a neighbour's model, and note the sizes it has heard of; PayloadError if it is unusable."""
        end = _HEADER_LENGTH + int.from_bytes(message[:_HEADER_LENGTH], "big")
        try:
            told = json.loads(message[_HEADER_LENGTH:end])
            sizes = {int(server): (int(at), float(size)) for server, at, size in told["sizes"]}
        except UNREADABLE as error:
            raise PayloadError("unreadable", "header") from error
        for server, (at, size) in sizes.items():
            if server not in self.graph or not (
                0 <= at < _MOST_EXCHANGES and SMALLEST_SIZE <= size <= LARGEST_SIZE
            ):
                raise PayloadError("unreadable", "sizes")
        if len(message) - end != like.nbytes:
            raise PayloadError("wrong size", "of a model")
        model = np.frombuffer(message, like.dtype, offset=end).astype(np.float64)
        if not np.isfinite(model).all():
            raise PayloadError("non-finite", "model")
        self._bound.check(model, own)
        self._bound.learn([model], own)
        for server, (at, size) in sizes.items():
            # Of itself a server knows best; of others the later word holds, and a neighbour's own first.
            if server != self.me and (server == peer or self._sizes.get(server, (-1, 0.0))[0] < at):
                self._sizes[server] = at, size
        return model

    # The threads.

    def _offer(self, message: bytes) -> None:
        """Have a message sent to all neighbours; one that is not on its way yet is replaced."""
        with self._changed:
            for peer in self.channel.neighbours:
                self._outbox[peer] = message
            self._changed.notify_all()

    def _topic(self) -> Topic:
        # Later than all before, also those of a start of before that got further.
        self._last_topic = max(time.time_ns() // 1_000_000, self._last_topic + 1)
        return Topic(self._last_topic, 0)

    def _send(self, peer: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or peer in self._outbox)
                if self._closing:
                    return
                message, topic = self._outbox[peer], self._topic()
            taken = self.channel.tell(peer, topic, message, self.timeout)
            with self._changed:
                self._sent[peer] += taken
                if self._outbox.get(peer) is message:
                    del self._outbox[peer]
                self._changed.notify_all()

    def _listen(self) -> None:
        while not self._closing:
            told = self.channel.take(_PAUSE)
            with self._changed:
                self._arrived |= {peer: one.payload for peer, one in told.items()}
