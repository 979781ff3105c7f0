"""SD-FEEL: edge clusters whose edge servers gossip.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data": Algorithm 1, eqs. (2)-(5).
Differs: edge servers are emulated (see ``clusters.py``), or nodes between which the server relays (see
``relayed.py``); the mixing matrix is I - s L Omega with columns summing to one, the reading under
which eq. (5) keeps both consensus and the weighted mean; a client that drops out leaves its cluster's mean to
the others, which the paper leaves open.
"""

from collections.abc import Iterable, Mapping
from logging import INFO, WARNING
from typing import Any, Unpack

import networkx as nx
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy, Clusters, whole_blocks
from hedgerow.strategies.sd_feel.probes import probed
from hedgerow.strategies.sd_feel.relayed import check_edge_rule, gossip_transfers
from hedgerow.strategies.sd_feel.servers import ServerModels, ServerTransfer
from hedgerow.strategies.sd_feel.stragglers import ServerClocks, Stragglers
from hedgerow.strategies.sd_feel.theory import Scheme, cluster_seconds, inter_seconds
from hedgerow.strategies.topology import Mixing, as_graph, mixing
from hedgerow.wire.checks import int_at_least

__all__ = ["EDGE_SERVERS", "SDFeel"]

EDGE_SERVERS = ("emulated", "nodes")


class SDFeel(ClusteredStrategy):
    """Semi-decentralised federated edge learning: edge servers that gossip, no cloud.

    Every ``tau1`` local iterations each server takes the weighted mean of its clients' models, eq. (3);
    every ``tau1 * tau2`` iterations the servers then run ``alpha`` gossip steps over their graph:

    .. math:: w^{(d)}_l = \\sum_{j \\in N_d \\cup \\{d\\}} p_{j,d} \\, w^{(j)}_{l-1}  \\quad (5)

    One strategy round is ``tau1`` local iterations. The returned arrays are u, the data-weighted mean of
    the servers' models, which no single server owns unless they agree.

    Parameters
    ----------
    num_servers : int (default: 2)
        Edge servers D, 1 to the number of clients.
    topology : str, networkx.Graph or edge list (default: "ring")
        The servers' graph, connected: a name of ``hedgerow.strategies.topology.TOPOLOGIES``, or a graph
        on the nodes 0 to D - 1.
    tau1 : int (default: 1)
        Intra-cluster period in local iterations, >= 1.
    tau2 : int (default: 1)
        Inter-cluster period in intra-cluster aggregations, >= 1.
    alpha : int (default: 1)
        Gossip steps of an inter-cluster aggregation, >= 0; 0 leaves the clusters alone.
    clusters : Sequence[int], "group" or None (default: None)
        The server of each client, by partition id; ``"group"`` for the groups of the nodes' configs; None
        for contiguous clusters as equal as can be. See ``ClusteredStrategy``.
    exact_if_complete : bool (default: False)
        On a complete graph take the exact mean in one step. The paper's matrix does so only if all
        clusters have the same size.
    edge_servers : {"emulated", "nodes"} (default: "emulated")
        Where the edge servers are: in the strategy's state, or nodes of their own with the partition ids C
        to C + D - 1, which answer ``train.intra`` and ``train.gossip``
        (``hedgerow.clients.sd_feel_client`` does). Models, modelled traffic and simulated seconds are the
        same, bit for bit. A round with gossip is then 2 + alpha exchanges, each with the round's deadline;
        see ``hedgerow.strategies.sd_feel.relayed.EdgeFederation``, also for edge servers that are lost, and
        those that lie: ``aggregation`` is then also what each takes in gossip, and the models of the two
        levels differ under a rule.
    stragglers : Stragglers or None (default: None)
        Which clients are slow. Simulated time is then that of the last server, each on a clock of its own: it
        waits for its slowest client, and in gossip for its neighbours.
    probe_rounds : int (default: 0)
        Before the first so many rounds all clients that are there tell grad F_i(u) and estimates of L and
        sigma^2 (``train.gradient``), for the planner: the round's metrics have ``curvature``,
        ``gradient-variance``, ``gradient-dissimilarity`` (kappa^2) and ``gradient2`` (``sd_feel.probes``).
        The server holds all gradients at once. Training and simulated seconds are as without. Not with
        ``secure_sum``: gradients are each client's own.
    **options
        Participation, seed, Flower's FedAvg names, clock, callbacks: see ``ClusteredStrategy``, also for
        **what the ClientApp must do**.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
    """

    scheme = Scheme.SD_FEEL

    def __init__(
        self,
        *,
        num_servers: int = 2,
        topology: str | nx.Graph | Iterable[tuple[int, int]] = "ring",
        tau1: int = 1,
        tau2: int = 1,
        alpha: int = 1,
        clusters: Clusters = None,
        exact_if_complete: bool = False,
        edge_servers: str = "emulated",
        stragglers: Stragglers | None = None,
        probe_rounds: int = 0,
        **options: Unpack[ClusteredOptions],
    ) -> None:
        int_at_least(1, tau2=tau2)
        int_at_least(0, alpha=alpha, probe_rounds=probe_rounds)
        if edge_servers not in EDGE_SERVERS:
            raise ValueError(
                f"edge_servers is {edge_servers!r}; valid is {' or '.join(map(repr, EDGE_SERVERS))}"
            )
        if probe_rounds and options.get("secure_sum"):
            raise ValueError(
                f"probe_rounds is {probe_rounds}; valid with secure_sum is 0: they are each client's"
            )
        self.stragglers, self.probe_rounds = stragglers, probe_rounds
        super().__init__(
            clusters=clusters,
            num_servers=num_servers,
            local_steps=tau1,
            edge_nodes=edge_servers == "nodes",
            **options,
        )
        self.tau2 = tau2
        self.alpha = alpha
        self._mixing: Mixing | None = None
        self.exact_if_complete = exact_if_complete
        self.graph = as_graph(topology, num_servers, self.settings.seed)
        self._clocks = ServerClocks(self.graph)
        if self.edges is not None:
            check_edge_rule(self.aggregation, self.graph)

    def _forget(self) -> None:
        super()._forget()
        # What the probe before a round has shown, if anything, and before which.
        self._probed_before, self._probed = 0, MetricRecord()
        if hasattr(self, "graph"):  # Not while this is being made.
            self._clocks = ServerClocks(self.graph)

    @property
    def gossip_steps(self) -> int:
        """Alpha."""
        return self.alpha

    @property
    def mixing(self) -> Mixing:
        """The mixing matrix of the clusters' sizes as far as they are known."""
        sizes = self.cluster_sizes
        if self._mixing is None or not np.array_equal(self._mixing.sizes, sizes):
            self._mixing = mixing(self.graph, sizes, exact_if_complete=self.exact_if_complete)
            zeta = self._mixing.zeta
            log(INFO, "\tMixing matrix: zeta = %.6f, zeta^alpha = %.6f", zeta, zeta**self.alpha)
        return self._mixing

    @property
    def contraction(self) -> float:
        """Zeta^alpha, what one inter-cluster aggregation at least multiplies the disagreement by."""
        return float(self.mixing.zeta**self.alpha)

    def exchange_due(self, server_round: int) -> bool:
        """Return whether tau2 divides the round."""
        return server_round % self.tau2 == 0

    def between_servers(self, models: NDArray[Any]) -> NDArray[Any]:
        """Gossip ``alpha`` steps, eq. (5)."""
        return self.mixing.gossip(models, self.alpha)

    def server_links(self, models: ServerModels) -> list[ServerTransfer]:
        """Return both directions of every edge, once a gossip step, as edge servers that are nodes send them.

        Models travel in float64 from the second step on: nothing is rounded between two steps.
        """
        first = models.vectors[0]
        between = np.empty(first.shape, np.float64)
        return [
            transfer
            for step in range(self.alpha)
            for transfer in gossip_transfers(self.graph, [between if step else first] * self.num_servers)
        ]

    def exchanged(self, server_round: int, models: ServerModels) -> tuple[NDArray[Any], list[ServerTransfer]]:
        """Return the servers' models (D, M) after gossip, here or at the edge servers, and its transfers."""
        if self.edges is None:
            return super().exchanged(server_round, models)
        return self.edges.gossiped(server_round, models.vectors, self.mixing, self.alpha, models.exchanged)

    # Clients that are slow.

    def _server_seconds(self, server_round: int, clients: Iterable[int]) -> float:
        """Return the seconds of a round of a server whose clients these are."""
        stragglers = self.stragglers
        slowest = 1.0 if stragglers is None else stragglers.slowest(self.settings.seed, server_round, clients)
        return cluster_seconds(self._system(), tau1=self.local_steps, slowdown=slowest)

    def _link_seconds(self) -> float:
        """Return the seconds of one gossip step."""
        return inter_seconds(self.scheme, self._system(), alpha=1)

    def _round_seconds(self, server_round: int) -> float:
        if self.stragglers is None:
            return super()._round_seconds(server_round)
        clients: list[list[int]] = [[] for _ in range(self.num_servers)]
        for i in self.participants(server_round):
            clients[self.clusters[i]].append(i)
        self._clocks.work([self._server_seconds(server_round, own) for own in clients])
        if self.exchange_due(server_round):
            self._clocks.exchange(self.alpha, self._link_seconds())
        return max(self._clocks.seconds) - self.clock.seconds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send each participant its server's model; first rounds begin with a probe."""
        self._begin_round(server_round)
        messages = super().configure_train(server_round, arrays, config, grid)
        if self._probed_before < server_round <= self.probe_rounds:
            self._probed_before, self._probed = server_round, self._probe(server_round, config, grid)
        return messages

    def _probe(self, server_round: int, config: ConfigRecord, grid: Grid) -> MetricRecord:
        """Return what the clients' gradients at u show, and of the system what a plan needs beside."""
        # Clients without a server have not come yet.
        servers = {client: server for client, server in enumerate(self.clusters) if server >= 0}
        sizes, system = self.federation.weights(self.num_clients), self._system()
        u = self.current_arrays()
        assert u is not None  # Models are there once a round is configured.
        links = (self.down_link, self.up_link)
        found, lost = probed(self.federation, grid, server_round, u, config, servers, sizes, links)
        metrics = MetricRecord({"probe-lost": lost})
        if found is None:
            log(WARNING, "No client told its gradient before round %d: nothing is estimated.", server_round)
            return metrics
        shares = sizes / sizes.sum()
        metrics.update(found.metrics())
        metrics["sum-m2"] = float(shares @ shares)
        metrics["zeta"] = float(self.mixing.zeta)
        metrics["iteration-seconds"] = system.compute.seconds()
        metrics["parameters"] = system.num_params
        return metrics

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average each cluster, eq. (3), gossip if due, eq. (5), and return u."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None and self._probed_before == server_round:
            metrics.update(self._probed)
        return arrays, metrics

    def _state(self) -> dict[str, Any]:
        clocks = {} if self.stragglers is None else self._clocks.state_dict()
        return {**super()._state(), **clocks}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        if self.stragglers is not None:
            self._clocks.load_state_dict(state)

    def check_num_rounds(self, num_rounds: int) -> None:
        """Raise ValueError unless tau2 divides the number of rounds."""
        super().check_num_rounds(num_rounds)
        whole_blocks(num_rounds, self.tau2)

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Gossip:")
        log(INFO, "\t│\t├── Graph: %d edges", self.graph.number_of_edges())
        log(INFO, "\t│\t├── Edge servers: %s", "emulated" if self.edges is None else "nodes")
        log(INFO, "\t│\t└── tau1 = %d | tau2 = %d | alpha = %d", self.local_steps, self.tau2, self.alpha)
        super().summary()
