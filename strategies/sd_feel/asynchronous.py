"""SD-FEEL without lock-step: a server gossips when its own rounds are done, with what neighbours sent last.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1, of which eq. (5) waits for all neighbours.
Ours: eq. (5) with the model that each neighbour sent last, for as many exchanges as ``max_staleness`` allows;
a neighbour without such a model leaves its weight with the server. Averages of what is late stay bounded for
weights that are not negative (J. N. Tsitsiklis, D. P. Bertsekas, M. Athans, "Distributed Asynchronous
Deterministic and Stochastic Gradient Optimization Algorithms", IEEE Trans. Automatic Control, 1986), so the
mixing matrix is P' = I - theta (I - P), with the largest theta <= 1 whose P' has no negative entry. The mean
weighted by the clusters is not kept from one exchange to the next, as it is in lock-step, and a fast server's
clients do more rounds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO
from typing import Any, Unpack

import networkx as nx
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, Clusters
from hedgerow.strategies.sd_feel.relayed import gossip_transfers
from hedgerow.strategies.sd_feel.servers import ServerModels, ServerTransfer
from hedgerow.strategies.sd_feel.stragglers import Stragglers
from hedgerow.strategies.sd_feel.strategy import SDFeel
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.edge_servers import weighted_sum

__all__ = ["AsynchronousSDFeel", "lazy_column"]


def lazy_column(matrix: NDArray[np.float64], graph: nx.Graph, server: int) -> dict[int, float]:
    """Return what a server takes of each, p'_{j,d} by j, of P' = I - theta (I - P) that is not negative."""
    least = float(matrix.diagonal().min())
    theta = 1.0 / (1.0 - least) if least < 0 else 1.0
    column = {j: theta * float(matrix[j, server]) for j in sorted(graph.neighbors(server))}
    return {**column, server: max(1.0 - sum(column.values()), 0.0)}


@dataclass
class _Sent:
    """A server's model on its way to its neighbours, or with them."""

    arrives: float
    exchange: int
    model: NDArray[Any]


@dataclass
class _Timeline:
    """Where each server is, on one simulated clock.

    Parameters
    ----------
    rounds : list of int
        Intra-cluster rounds that each server has ended.
    starts : list of float
        When the one at hand began.
    results : dict of NDArray
        By server, the cluster's mean (M,) at the end of the round at hand, where it was computed.
    sent : list of list
        Of each server the models that may still be used, in the order in which they were sent.
    used : dict of tuple
        By (receiver, sender), the exchange of the sender's model that was used last, and how often.
    """

    rounds: list[int]
    starts: list[float]
    results: dict[int, NDArray[Any]] = field(default_factory=dict)
    sent: list[list[_Sent]] = field(default_factory=list)
    used: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def begun(cls, servers: int) -> "_Timeline":
        return cls([0] * servers, [0.0] * servers, sent=[[] for _ in range(servers)])

    def newest(self, server: int, now: float) -> _Sent | None:
        """Return the last model of a server that has arrived, and forget those of before it."""
        there = self.sent[server]
        while len(there) > 1 and there[1].arrives <= now:
            there.pop(0)
        return there[0] if there and there[0].arrives <= now else None


class AsynchronousSDFeel(SDFeel):
    """SD-FEEL whose edge servers do not wait for each other, each on its own simulated clock.

    The servers' rounds are events in simulated time. One round of this strategy trains the clusters of all
    servers whose round has begun and is not computed, and then goes through the events, in the order of time
    and server, up to the first that needs one which is not. So what is computed together never changes a
    result: the order of events does, and it is a function of the settings and the seed.

    Parameters
    ----------
    max_staleness : int (default: 2)
        For how many more exchanges of its own a server uses a neighbour's model after the first, >= 0, if
        nothing newer has come.
    stragglers : Stragglers or None (default: None)
        Which clients are slow.
    num_servers, topology, tau1, tau2, clusters, **options
        As of ``SDFeel``; an exchange is one gossip step (alpha = 1).

    Notes
    -----
    ``iterations`` are those of the mean server. ``train`` has ``server-rounds``, the rounds of each server;
    ``stale-models``, how many neighbours' models were left out since the round before for their age; and
    ``missing-models``, of neighbours that had sent none.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    def __init__(
        self,
        *,
        num_servers: int = 2,
        topology: str | nx.Graph | Iterable[tuple[int, int]] = "ring",
        tau1: int = 1,
        tau2: int = 1,
        max_staleness: int = 2,
        clusters: Clusters = None,
        stragglers: Stragglers | None = None,
        **options: Unpack[ClusteredOptions],
    ) -> None:
        int_at_least(0, max_staleness=max_staleness)
        self.max_staleness = max_staleness
        self._servers = num_servers
        super().__init__(
            num_servers=num_servers, topology=topology, tau1=tau1, tau2=tau2, alpha=1, clusters=clusters,
            stragglers=stragglers, **options,
        )  # fmt: skip

    def unwrapped(self) -> str | None:
        """Return that there is no round's model, for servers are at rounds of their own."""
        return "its edge servers are at different rounds, and u is no model that nodes train on"

    def _forget(self) -> None:
        super()._forget()
        self._timeline = _Timeline.begun(self._servers)
        self._left_out = {"stale-models": 0, "missing-models": 0}
        # When the round at hand of each server ends, where it was asked before.
        self._ends: dict[tuple[int, int], float] = {}
        self._now = 0.0

    # Who trains.

    def _at_hand(self) -> list[int]:
        """Return the servers whose round has begun and is not computed."""
        return [d for d in range(self.num_servers) if d not in self._timeline.results]

    def _drawn_of(self, server: int) -> list[int]:
        """Return the clients that take part in a server's round at hand."""
        own = [i for i, d in enumerate(self.clusters) if d == server]
        return self._taking_part(self._timeline.rounds[server] + 1, own)

    def participants(self, server_round: int) -> list[int]:
        """Return the partition ids that take part: in each server's round, by its own number."""
        return sorted(i for server in self._at_hand() for i in self._drawn_of(server))

    def work_of(self, server: int, server_round: int) -> dict[str, int]:
        """Return what a server asks of its clients."""
        done = self._timeline.rounds[server] * self.local_steps
        return {"server-round": server_round, "local-steps": self.local_steps, "first-step": done}

    # What happens.

    def exchange_due(self, server_round: int) -> bool:
        """Return True: any round may have events with an exchange."""
        return True

    def exchanged(self, server_round: int, models: ServerModels) -> tuple[NDArray[Any], list[ServerTransfer]]:
        """Return the servers' models (D, M) at the time of the last event, and what was sent until then."""
        timeline, vectors = self._timeline, self._trained().vectors.copy()
        timeline.results |= {d: models.vectors[d] for d in self._at_hand()}
        self._left_out = dict.fromkeys(self._left_out, 0)
        columns = models.exchanged
        transfers: list[ServerTransfer] = []
        while (d := self._next()) in timeline.results:
            self._now = self._end(d)
            vectors[d] = timeline.results.pop(d)
            timeline.rounds[d] += 1
            if timeline.rounds[d] % self.tau2 == 0:
                own = np.ascontiguousarray(vectors[d, columns])
                transfers += self._send(d, own)
                vectors[d, columns] = self._mixed(d, own)
            timeline.starts[d] = self._now
        self._ends = {key: end for key, end in self._ends.items() if key[1] > timeline.rounds[key[0]]}
        return vectors, transfers

    def _next(self) -> int:
        """Return the server whose round at hand ends first."""
        return min(range(self.num_servers), key=lambda d: (self._end(d), d))

    def _end(self, server: int) -> float:
        number = self._timeline.rounds[server] + 1
        if (server, number) not in self._ends:
            took = self._server_seconds(number, self._drawn_of(server))
            self._ends[server, number] = self._timeline.starts[server] + took
        return self._ends[server, number]

    def _send(self, server: int, model: NDArray[Any]) -> list[ServerTransfer]:
        """Have a model on its way to a server's neighbours, and return the transfers."""
        arrives = self._now + self._link_seconds()
        number = self._timeline.rounds[server] // self.tau2
        self._timeline.sent[server].append(_Sent(arrives, number, model.copy()))
        every = gossip_transfers(self.graph, [model] * self.num_servers)
        return [one for one in every if one.source == server]

    def _mixed(self, server: int, own: NDArray[Any]) -> NDArray[Any]:
        """Return a server's model after one step of eq. (5) with what it has of its neighbours."""
        column = self._column(server)
        models = {server: own}
        for peer in sorted(column.keys() - {server}):
            newest = self._timeline.newest(peer, self._now)
            if newest is None:
                self._left_out["missing-models"] += 1
                continue
            exchange, times = self._timeline.used.get((server, peer), (0, 0))
            times = times + 1 if exchange == newest.exchange else 1
            if times > self.max_staleness + 1:
                self._left_out["stale-models"] += 1
                continue
            self._timeline.used[server, peer] = newest.exchange, times
            models[peer] = newest.model
        weights = {peer: column[peer] for peer in sorted(models)}
        weights[server] += sum(column[peer] for peer in sorted(column.keys() - models.keys()))
        out, term = np.empty(own.shape, np.float64), np.empty(own.shape, np.float64)
        weighted_sum(((weight, models[peer]) for peer, weight in weights.items()), out, term)  # (5)
        return out.astype(own.dtype)

    def _column(self, server: int) -> dict[int, float]:
        """Return what a server takes of each, p'_{j,d} by j."""
        return lazy_column(self.mixing.matrix, self.graph, server)

    def _round_seconds(self, server_round: int) -> float:
        return self._now - self.clock.seconds

    # State.

    @property
    def iterations(self) -> int | None:
        """Local iterations of the mean server since the start; None where a reply did not tell them."""
        done = sum(self._timeline.rounds) * self.local_steps // self.num_servers
        return done if self._steps_told else None

    def check_num_rounds(self, num_rounds: int) -> None:
        """Raise ValueError unless a run may have so many rounds; they need not be whole blocks."""
        int_at_least(0, num_rounds=num_rounds)

    def _state(self) -> dict[str, Any]:
        timeline = self._timeline
        sent = [(d, one) for d, models in enumerate(timeline.sent) for one in models]
        events = {
            "rounds": list(timeline.rounds),
            "starts": list(timeline.starts),
            "now": self._now,
            "computed": sorted(timeline.results),
            "results": [timeline.results[d] for d in sorted(timeline.results)],
            "sent": [[d, one.arrives, one.exchange] for d, one in sent],
            "models": [one.model for _, one in sent],
            "used": [[*key, *value] for key, value in sorted(timeline.used.items())],
        }
        return {**super()._state(), "events": events}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        told = state["events"]
        timeline = _Timeline.begun(self._servers)
        timeline.rounds = [int(number) for number in told["rounds"]]
        timeline.starts = [float(start) for start in told["starts"]]
        timeline.results = {
            int(d): np.asarray(result) for d, result in zip(told["computed"], told["results"], strict=True)
        }
        for (d, arrives, exchange), model in zip(told["sent"], told["models"], strict=True):
            timeline.sent[int(d)].append(_Sent(float(arrives), int(exchange), np.asarray(model)))
        timeline.used = {(int(d), int(j)): (int(n), int(times)) for d, j, n, times in told["used"]}
        self._timeline, self._now = timeline, float(told["now"])

    # Flower's interface.

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the clusters that trained, eq. (3), go through what happens next, and return u."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            metrics["server-rounds"] = list(self._timeline.rounds)
            metrics.update(self._left_out)
        return arrays, metrics

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Asynchronous rounds: max_staleness = %d", self.max_staleness)
        super().summary()
