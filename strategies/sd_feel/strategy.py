"""SD-FEEL: edge clusters whose edge servers gossip.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data": Algorithm 1, eqs. (2)-(5).
Differs: edge servers are emulated (see ``clusters.py``), or nodes between which the server relays (see
``relayed.py``); the mixing matrix is I - s L Omega with columns summing to one, the reading under
which eq. (5) keeps both consensus and the weighted mean; a client that drops out leaves its cluster's mean to
the others, which the paper leaves open.
"""

from collections.abc import Iterable
from logging import INFO
from typing import Any, Unpack

import networkx as nx
import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy, Clusters, whole_blocks
from hedgerow.strategies.sd_feel.relayed import check_edge_rule, gossip_transfers
from hedgerow.strategies.sd_feel.servers import ServerModels, ServerTransfer
from hedgerow.strategies.sd_feel.theory import Scheme
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
        **options: Unpack[ClusteredOptions],
    ) -> None:
        int_at_least(1, tau2=tau2)
        int_at_least(0, alpha=alpha)
        if edge_servers not in EDGE_SERVERS:
            raise ValueError(
                f"edge_servers is {edge_servers!r}; valid is {' or '.join(map(repr, EDGE_SERVERS))}"
            )
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
        if self.edges is not None:
            check_edge_rule(self.aggregation, self.graph)

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
            log(INFO, "\tMixing matrix: zeta = %.6f, zeta^alpha = %.6f", self._mixing.zeta, self.contraction)
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
