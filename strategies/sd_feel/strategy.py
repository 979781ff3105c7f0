"""SD-FEEL and its baselines: HierFAVG, FEEL, FedAvg.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data": Algorithm 1, eqs. (2)-(5), and the baselines of its section V.
Differs: edge servers are emulated (see ``clusters.py``), or nodes between which the server relays (see
``relayed.py``); the mixing matrix is I - s L Omega with columns summing to one, the reading under
which eq. (5) keeps both consensus and the weighted mean; a client that drops out leaves its cluster's mean to
the others, which the paper leaves open.
"""

from collections.abc import Iterable, Sequence
from logging import INFO
from typing import Any, Unpack

import networkx as nx
import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy
from hedgerow.strategies.sd_feel.theory import Scheme
from hedgerow.strategies.topology import Mixing, as_graph, mixing
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["EDGE_SERVERS", "FedAvg", "Feel", "HierFAvg", "SDFeel"]

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
    clusters : Sequence[int] or None (default: None)
        The server of each client, by partition id; None for contiguous clusters as equal as can be.
    exact_if_complete : bool (default: False)
        On a complete graph take the exact mean in one step. The paper's matrix does so only if all
        clusters have the same size.
    edge_servers : {"emulated", "nodes"} (default: "emulated")
        Where the edge servers are: in the strategy's state, or nodes of their own with the partition ids C
        to C + D - 1, which answer ``train.intra`` and ``train.gossip``
        (``hedgerow.clients.sd_feel_client`` does). Models, modelled traffic and simulated seconds are the
        same, bit for bit. A round with gossip is then 2 + alpha exchanges, each with the round's deadline;
        see ``hedgerow.strategies.sd_feel.relayed.EdgeFederation``, also for edge servers that are lost.
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
        clusters: Sequence[int] | None = None,
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

    def server_links(self) -> list[tuple[str, int, int]]:
        """Return both directions of every edge, once a gossip step."""
        directed = sorted([(i, j) for i, j in self.graph.edges] + [(j, i) for i, j in self.graph.edges])
        return [("edge->edge", i, j) for i, j in directed] * self.alpha

    def exchanged(
        self, server_round: int, models: NDArray[Any]
    ) -> tuple[NDArray[Any], list[tuple[str, int, int]]]:
        """Return the servers' models (D, M) after gossip, here or at the edge servers, and its transfers."""
        if self.edges is None:
            return super().exchanged(server_round, models)
        columns_mixed = self._gossiped_columns()
        mixed, sent = self.edges.gossiped(server_round, models, self.mixing, self.alpha, columns_mixed)
        return mixed, [("edge->edge", i, j) for i, j in sent]

    def check_num_rounds(self, num_rounds: int) -> None:
        """Raise ValueError unless tau2 divides the number of rounds."""
        super().check_num_rounds(num_rounds)
        _whole_blocks(num_rounds, self.tau2)

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Gossip:")
        log(INFO, "\t│\t├── Graph: %d edges", self.graph.number_of_edges())
        log(INFO, "\t│\t├── Edge servers: %s", "emulated" if self.edges is None else "nodes")
        log(INFO, "\t│\t└── tau1 = %d | tau2 = %d | alpha = %d", self.local_steps, self.tau2, self.alpha)
        super().summary()


class HierFAvg(ClusteredStrategy):
    """HierFAVG: as SD-FEEL, but a cloud takes the exact mean of the servers' models.

    Parameters
    ----------
    num_servers : int (default: 2)
        Edge servers, 1 to the number of clients.
    tau1, tau2 : int (default: 1)
        Edge period in local iterations, cloud period in edge aggregations, >= 1.
    clusters : Sequence[int] or None (default: None)
        The server of each client, by partition id; None for contiguous clusters as equal as can be.
    **options
        See ``ClusteredStrategy``.
    """

    scheme = Scheme.HIERFAVG

    def __init__(
        self,
        *,
        num_servers: int = 2,
        tau1: int = 1,
        tau2: int = 1,
        clusters: Sequence[int] | None = None,
        **options: Unpack[ClusteredOptions],
    ) -> None:
        int_at_least(1, tau2=tau2)
        super().__init__(clusters=clusters, num_servers=num_servers, local_steps=tau1, **options)
        self.tau2 = tau2

    def exchange_due(self, server_round: int) -> bool:
        """Return whether tau2 divides the round."""
        return server_round % self.tau2 == 0

    def between_servers(self, models: NDArray[Any]) -> NDArray[Any]:
        """Give every server the exact weighted mean."""
        mean = np.zeros(models.shape[1], np.float64)
        for weight, model in zip(self.server_weights, models, strict=True):
            mean += weight * model
        return np.tile(mean.astype(models.dtype), (len(models), 1))

    def server_links(self) -> list[tuple[str, int, int]]:
        """Return one model up and one down for each server; the cloud is node 0 of its tier."""
        servers = range(self.num_servers)
        return [("edge->cloud", d, 0) for d in servers] + [("cloud->edge", 0, d) for d in servers]

    def check_num_rounds(self, num_rounds: int) -> None:
        """Raise ValueError unless tau2 divides the number of rounds."""
        super().check_num_rounds(num_rounds)
        _whole_blocks(num_rounds, self.tau2)


class Feel(ClusteredStrategy):
    """FEEL: one edge server with few channels, which schedules a few random clients each round.

    Parameters
    ----------
    clients_per_round : int (default: 5)
        Clients scheduled a round, uniformly without replacement, 1 to the size of the pool.
    tau1 : int (default: 1)
        Local iterations a round, >= 1.
    pool : Sequence[int] or None (default: None)
        The partition ids to draw from; None for all.
    **options
        See ``ClusteredStrategy``; ``participation`` then thins out the scheduled clients.
    """

    scheme = Scheme.FEEL

    def __init__(
        self,
        *,
        clients_per_round: int = 5,
        tau1: int = 1,
        pool: Sequence[int] | None = None,
        **options: Unpack[ClusteredOptions],
    ) -> None:
        super().__init__(clusters=None, num_servers=1, local_steps=tau1, **options)
        self.pool = sorted(range(self.num_clients) if pool is None else set(pool))
        if not self.pool or self.pool[0] < 0 or self.pool[-1] >= self.num_clients:
            raise ValueError(f"pool is {self.pool}; valid are partition ids 0 to {self.num_clients - 1}")
        if not 1 <= clients_per_round <= len(self.pool):
            raise ValueError(f"clients_per_round is {clients_per_round}; valid is 1 to {len(self.pool)}")
        self.clients_per_round = clients_per_round

    def participants(self, server_round: int) -> list[int]:
        """Return the scheduled clients that take part."""
        stream = generator(self.settings.seed, round=server_round, purpose=Purpose.SCHEDULE)
        scheduled = set(stream.choice(self.pool, self.clients_per_round, replace=False).tolist())
        return [i for i in super().participants(server_round) if i in scheduled]


class FedAvg(ClusteredStrategy):
    """FedAvg of every client with the cloud, over the same messages, ledger and clock.

    Parameters
    ----------
    local_steps : int (default: 1)
        Local iterations a round (SD-FEEL's tau1 * tau2), >= 1.
    **options
        See ``ClusteredStrategy``.
    """

    scheme = Scheme.FEDAVG
    up_link = "client->cloud"
    down_link = "cloud->client"

    def __init__(self, *, local_steps: int = 1, **options: Unpack[ClusteredOptions]) -> None:
        super().__init__(clusters=None, num_servers=1, local_steps=local_steps, **options)


def _whole_blocks(num_rounds: int, tau2: int) -> None:
    if num_rounds % tau2:
        raise ValueError(f"num_rounds is {num_rounds}; valid is a multiple of tau2 = {tau2}")
