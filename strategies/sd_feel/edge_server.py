"""One edge server of SD-FEEL: an orchestrator that gossips directly with its neighbours (level E3).

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data": Algorithm 1, eqs. (2)-(5), which has no coordinator and no cloud.
"""

import hashlib
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from logging import INFO
from typing import Any, Unpack

import networkx as nx
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.edges.direct import DirectGossip
from hedgerow.strategies.edges.mixers import Alone, on_mixed, sent_bytes
from hedgerow.strategies.edges.relayed import check_edge_rule
from hedgerow.strategies.exchange import Steps, Vector
from hedgerow.strategies.round_end import EvaluateFn
from hedgerow.strategies.sd_feel.algorithm import State
from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy
from hedgerow.strategies.sd_feel.theory import SystemName, inter_seconds
from hedgerow.strategies.topology import as_graph
from hedgerow.wire.checks import int_at_least, int_between, positive
from hedgerow.wire.ledger import PEER_TO_PEER
from hedgerow.wire.links.peers import PeerChannel, PeerCredentials, Topic
from hedgerow.wire.records import Layout


class EdgeServerSDFeel(ClusteredStrategy):
    """One of the D edge servers of SD-FEEL, with its own clients; the other servers run the same elsewhere.

    Its clients are the nodes of its own Flower federation. Their partition ids count the clients of all
    servers, so that a client trains the same under any server. If every server and client is online
    throughout, servers end with the models of ``SDFeel``, bit for bit.

    Parameters
    ----------
    edge : int
        The index of this server, 0 to D - 1.
    peers : Sequence[str]
        ``host:port`` of every server, this one included, for the servers' exchange.
    topology : str, networkx.Graph or edge list (default: "ring")
        The servers' graph, as in ``SDFeel``.
    tau1, tau2, alpha, exact_if_complete
        As in ``SDFeel``, the same at all servers.
    credentials : PeerCredentials or None (default: None)
        Credentials for authentication between servers; None only on a single machine.
    listen : str (default: "")
        The address to listen on, if not the server's own address.
    peer_timeout : float (default: 600.0)
        Longest wait (s) in an exchange for an online but late neighbor, > 0; half of it when the run starts.
    lost_after : float (default: 15.0)
        Seconds after which an unresponsive neighbor is excluded, > 0.
    partitions : Container[int] or None (default: None)
        The partition ids of this server's clients; any other node is excluded as ``another server's``. None
        accepts any client, and drops one that moved to another server: the cluster's size is that of the
        online clients, reported in each exchange.
    **options
        As in ``ClusteredStrategy``; without ``num_clients`` any number of clients takes part.

    Notes
    -----
    A lost neighbor is excluded, and its weight stays with this server. A neighbor that reconnects joins the
    next exchange and continues from there. In a round with an exchange, the ``train`` metrics have
    ``servers`` (the servers reached), ``zeta`` of their matrix, ``gossip-seconds`` and the part spent on
    models (``model-exchange-seconds``), the latency model's ``modelled-gossip-seconds``, measurements of the
    link to each of the ``neighbours`` (``link-…``), and ``lost-links-…`` by reason. Every round has the
    ``cluster-size``.

    Raises
    ------
    OSError
        When the run starts, if its address cannot be listened on.
    """

    scheme = SystemName.SD_FEEL

    def __init__(
        self,
        *,
        edge: int,
        peers: Sequence[str],
        topology: str | nx.Graph | Iterable[tuple[int, int]] = "ring",
        tau1: int = 1,
        tau2: int = 1,
        alpha: int = 1,
        exact_if_complete: bool = False,
        credentials: PeerCredentials | None = None,
        listen: str = "",
        peer_timeout: float = 600.0,
        lost_after: float = 15.0,
        partitions: Container[int] | None = None,
        **options: Unpack[ClusteredOptions],
    ) -> None:
        int_at_least(0, alpha=alpha)
        positive(peer_timeout=peer_timeout)
        int_between(0, len(peers) - 1, edge=edge)
        options.setdefault("num_clients", 0)
        self.edge, self.peers, self.alpha = edge, list(peers), alpha
        super().__init__(
            clusters=None, num_servers=1, local_steps=tau1, tau2=tau2, mixer=_Neighbours(self), **options
        )
        self.exact_if_complete = exact_if_complete
        self.graph = as_graph(topology, len(peers), self.settings.seed)
        check_edge_rule(self.aggregation.rule, self.graph)
        self._credentials, self._listen = credentials, listen
        self._peer_timeout, self._lost_after = peer_timeout, lost_after
        self._partitions, self._there = partitions, list[int]()
        self._gossip: DirectGossip | None = None
        # The last round that the other servers completed, if this one has not.
        self._reached = 0
        self._resumes = False
        if partitions is not None:
            self.federation.members.admits = lambda node: (
                None if node.partition_id in partitions else "another server's"
            )
        # Report invalid channel settings now: the channel is built and thrown away.
        self._channel("", 1)

    def _channel(self, layout: str, largest: int) -> PeerChannel:
        def answer(peer: int, request: dict[str, Any]) -> dict[str, Any]:
            return self._gossip.answer(peer, request) if self._gossip is not None else {}

        def comes(peer: int, topic: Topic) -> bool:
            return self._gossip is not None and self._gossip.comes(peer, topic)

        return PeerChannel(
            self.edge,
            self.peers,
            self.graph.neighbors(self.edge),
            run=self._settings_digest(),
            layout=layout,
            largest=largest,
            credentials=self._credentials,
            listen=self._listen,
            answer=answer,
            comes=comes,
            lost_after=self._lost_after,
        )

    def _settings_digest(self) -> str:
        """Return a digest of the settings that the servers of one run share."""
        return run_digest(
            self.graph,
            tau1=self.local_steps,
            tau2=self.tau2,
            seed=self.settings.seed,
            aggregation=str(self.aggregation),
            alpha=self.alpha,
            exact_if_complete=self.exact_if_complete,
        )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Connect to the neighbors and run the rounds; parameters as in ``FederatedStrategy.start``."""
        self.check_num_rounds(num_rounds)
        layout = Layout.of(initial_arrays)
        # The largest message: either the servers' reports on each other, or a digest and a float64 model.
        largest = max(2**16 + 2**10 * len(self.graph), 64 + 8 * layout.size)
        with self._channel(layout_digest(layout), largest) as channel:
            gossip = self._gossip = DirectGossip(
                self.graph,
                channel,
                period=self.tau2,
                steps=self.alpha,
                rule=self.aggregation.rule,
                exact_if_complete=self.exact_if_complete,
                timeout=self._peer_timeout,
                max_update_norm_ratio=self.settings.max_update_norm_ratio,
            )
            # Zero unless the run resumes: ``start`` then begins with the first round.
            completed, self._resumes = self.completed_rounds if self._resumes else 0, False
            self._reached = gossip.join(completed, self._peer_timeout / 2, num_rounds)
            return super().start(
                grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            )

    @property
    def gossip(self) -> DirectGossip:
        """Gossip with the neighbors; RuntimeError before ``start``."""
        if self._gossip is None:
            raise RuntimeError("No neighbours: start comes first.")
        return self._gossip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the next ``start`` resumes after its round, or where the other servers are."""
        super().load_state_dict(state)
        self._resumes = True

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Skip the rounds that the other servers have completed."""
        if self._reached > self.completed_rounds:
            log(INFO, "The other servers have completed round %d: this one goes on there.", self._reached)
            self.federation.completed = self._reached
        return super()._set_up(arrays, grid)

    def scheduled(self, run: RoundContext) -> Sequence[int]:
        """Return the clients that take part in a round."""
        self._there = list(run.online)
        return super().scheduled(run)

    @property
    def cluster_sizes(self) -> NDArray[np.float64]:
        """Samples of this server's cluster (1,); of the online clients only if clients may move."""
        if self._partitions is not None or not self._there:
            return super().cluster_sizes
        weights = np.ones(self.num_clients)
        if self.aggregation.rule.is_mean:
            weights = self.federation.limits.weights(self.num_clients)
        sizes: NDArray[np.float64] = np.array([weights[self._there].sum()])
        return sizes

    def ended(self, state: State, run: RoundContext) -> None:
        """Report the cluster's size, and measurements of the exchange with the neighbors."""
        run.metrics["cluster-size"] = float(self.cluster_sizes.sum())
        # The consensus error is unknown: this server has one model only.
        if self._gossip is not None and run.round % self.tau2 == 0:
            run.metrics.update(self._gossip.report.metrics())
            modelled = inter_seconds(self.scheme, self.time.system(self.federation), alpha=self.alpha)
            run.metrics["modelled-gossip-seconds"] = modelled

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Gossip:")
        log(INFO, "\t│\t├── Edge server %d of %d, level E3", self.edge, len(self.graph))
        log(INFO, "\t│\t├── Neighbours: %s", sorted(self.graph.neighbors(self.edge)))
        log(INFO, "\t│\t└── tau1 = %d | tau2 = %d | alpha = %d", self.local_steps, self.tau2, self.alpha)
        super().summary()


def run_digest(
    graph: nx.Graph, *, tau1: int, tau2: int, seed: int, aggregation: str, **others: object
) -> str:
    """Return a digest of the settings that the servers of one run, and their monitor, share."""
    settings = {
        "tau1": tau1,
        "tau2": tau2,
        "seed": seed,
        "aggregation": aggregation,
        "edges": sorted(sorted(edge) for edge in graph.edges),
        "servers": len(graph),
        **others,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def layout_digest(layout: Layout) -> str:
    """Return a digest of a model's keys, shapes and types, in order."""
    return hashlib.sha256(json.dumps([layout.keys, layout.shapes, layout.dtypes]).encode()).hexdigest()


class _Neighbours(Alone):
    """Mixes a server's model with its neighbours'."""

    def __init__(self, server: EdgeServerSDFeel) -> None:
        self._server, self.steps = server, server.alpha

    def mix(self, servers: Vector, sizes: NDArray[np.float64], run: RoundContext) -> Steps[Vector]:
        """Return this server's model (1, M) after gossip with its neighbours, eq. (5).

        The ledger books every byte of the channel as ``peer->peer``, and the modelled transfers:
        one model to each neighbour in each of its steps.
        """
        edge, gossip, ledger = self._server.edge, self._server.gossip, run.federation.ledger
        size = float(sizes.sum())
        after = on_mixed(
            servers,
            run.federation.known_layout(),
            lambda models: gossip.exchanged(run.round, models[0], size)[None],
        )
        for peer, link in gossip.report.links.items():
            if link.bytes:
                ledger.book(run.round, PEER_TO_PEER, edge, peer, 0, link.bytes)
        for step in range(self.steps):
            sent = sent_bytes(edge, servers.shape[1], np.dtype(np.float64) if step else servers.dtype)
            peers = sorted(self._server.graph.neighbors(edge))
            ends = [(edge, peer) for peer in peers if gossip.report.sent.get(peer, 0) > step]
            run.book("edge->edge", ends, [sent] * len(ends))
        yield from ()
        return after
