"""SD-FEEL: clusters of clients with edge servers that gossip.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data": Algorithm 1, eqs. (2)-(5).
Differs: edge servers are emulated, or are nodes with messages relayed by the server (``edges/relayed.py``).
The mixing matrix is I - s L Omega with columns summing to one; read so, eq. (5) preserves consensus and the
weighted mean. The paper does not cover dropouts; here a cluster's mean is that of its remaining clients.
"""

from collections.abc import Iterable, Mapping
from logging import INFO
from typing import Unpack

import networkx as nx
from flwr.common import log

from hedgerow.strategies.aggregate.secure_sums import parse_secure_sum
from hedgerow.strategies.edges.clusters import Chosen
from hedgerow.strategies.edges.mixers import GossipMixer
from hedgerow.strategies.edges.relayed import check_edge_rule
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.parts.part import Parts
from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy
from hedgerow.strategies.sd_feel.probes import Probes
from hedgerow.strategies.sd_feel.simulated_time import Stragglers
from hedgerow.strategies.sd_feel.theory import SystemName
from hedgerow.strategies.topology import Mixing, as_graph
from hedgerow.wire.checks import int_at_least, one_of

EDGE_SERVERS = ("emulated", "nodes")


class SDFeel(ClusteredStrategy):
    """Semi-decentralized federated edge learning: edge servers that gossip, without a cloud.

    Every ``tau1`` local iterations each server takes the weighted mean of its clients' models, eq. (3);
    every ``tau1 * tau2`` iterations the servers then run ``alpha`` gossip steps over their graph:

    .. math:: w^{(d)}_l = \\sum_{j \\in N_d \\cup \\{d\\}} p_{j,d} \\, w^{(j)}_{l-1}  \\quad (5)

    A strategy round is ``tau1`` local iterations. The returned arrays are u, the data-weighted mean of the
    servers' models; no server holds it unless all servers agree.

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
        Gossip steps per inter-cluster aggregation, >= 0; with 0 clusters stay isolated.
    clusters : Sequence[int], "group" or None (default: None)
        The server of each client; see ``ClusteredStrategy``.
    exact_if_complete : bool (default: False)
        On a complete graph, take the exact mean in one step. The paper's matrix does so only if all
        clusters have the same size.
    edge_servers : {"emulated", "nodes"} (default: "emulated")
        Where the edge servers are: in the strategy's state, or nodes of their own with the partition ids C
        to C + D - 1, which answer ``train.intra`` and ``train.gossip``
        (``hedgerow.clients.sd_feel_client`` does). Models, modeled traffic and simulated seconds are the
        same, bit for bit. With nodes, a round with gossip takes 2 + alpha exchanges, each with the round's
        deadline; see ``hedgerow.strategies.edges.relayed.EdgeNodes``, also for lost and Byzantine edge
        servers: each then uses ``aggregation`` in gossip too, and under a rule the models of the two
        settings differ.
    stragglers : Stragglers or None (default: None)
        The slow clients. Each server then has a clock of its own and waits for its slowest client, and in
        gossip for its neighbors; simulated time is the last server's.
    probe_rounds : int (default: 0)
        Before each of this many first rounds all online clients report grad F_i(u) and estimates of L and
        sigma^2 (``train.gradient``), for the planner: the round's metrics have ``curvature``,
        ``gradient-variance``, ``gradient-dissimilarity`` (kappa^2) and ``gradient2`` (``sd_feel.probes``).
        The server holds all gradients at once. Training and simulated seconds do not change. Not allowed
        with ``secure_sum``, as a gradient reveals a single client.
    **options
        Participation, seed, Flower's FedAvg names, clock, callbacks: see ``ClusteredStrategy``, also for
        **what the ClientApp must do**.
    """

    scheme = SystemName.SD_FEEL

    def __init__(
        self,
        *,
        num_servers: int = 2,
        topology: str | nx.Graph | Iterable[tuple[int, int]] = "ring",
        tau1: int = 1,
        tau2: int = 1,
        alpha: int = 1,
        clusters: Chosen = None,
        exact_if_complete: bool = False,
        edge_servers: str = "emulated",
        stragglers: Stragglers | None = None,
        probe_rounds: int = 0,
        **options: Unpack[ClusteredOptions],
    ) -> None:
        int_at_least(1, num_servers=num_servers)
        int_at_least(0, alpha=alpha, probe_rounds=probe_rounds)
        one_of("edge_servers", edge_servers, EDGE_SERVERS)
        parse_secure_sum(options.get("secure_sum", False), probe_rounds=probe_rounds)
        self.alpha, self.stragglers, self.probe_rounds = alpha, stragglers, probe_rounds
        self.graph = as_graph(topology, num_servers, options.get("seed", 0))
        self.exact_if_complete = exact_if_complete
        self._gossip = GossipMixer(self.graph, alpha, exact_if_complete)
        super().__init__(
            clusters=clusters,
            num_servers=num_servers,
            local_steps=tau1,
            tau2=tau2,
            mixer=self._gossip,
            edge_nodes=edge_servers == "nodes",
            stragglers=stragglers,
            graph=self.graph,
            **options,
        )
        if self.edges is not None:
            check_edge_rule(self.aggregation.rule, self.graph)
        links = (self.down_link, self.up_link)
        if probe_rounds:
            probes = Probes(probe_rounds, self.assignment, links, self._planned_with)
            self.parts = Parts((*self.parts, probes))

    @property
    def mixing(self) -> Mixing:
        """The mixing matrix for the known sizes of the clusters."""
        return self._gossip.mixing(self.cluster_sizes)

    def _planned_with(self, federation: Federation) -> Mapping[str, float]:
        """Return the planner's inputs beside the probes' estimates."""
        system = self.time.system(federation)
        return {
            "zeta": float(self.mixing.zeta),
            "iteration-seconds": system.compute.seconds(),
            "parameters": system.num_params,
        }

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Gossip:")
        log(INFO, "\t│\t├── Graph: %d edges", self.graph.number_of_edges())
        log(INFO, "\t│\t├── Edge servers: %s", "emulated" if self.edges is None else "nodes")
        log(INFO, "\t│\t└── tau1 = %d | tau2 = %d | alpha = %d", self.local_steps, self.tau2, self.alpha)
        super().summary()
