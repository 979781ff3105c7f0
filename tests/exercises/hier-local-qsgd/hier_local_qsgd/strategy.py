"""Hier-Local-QSGD: clients, edge servers and a cloud, with quantised uplinks on both levels.

Paper: L. Liu, J. Zhang, S. Song, K. B. Letaief, "Hierarchical Federated Learning With Quantization:
Convergence Analysis and System Design", IEEE Trans. Wireless Communications, 2023, Algorithm 1.
"""

from dataclasses import dataclass

import numpy as np

from hedgerow.strategies import Ask, Exchange, Federation, Method, WeightedMean
from hedgerow.strategies.edges import Clusters

from .quantiser import Quantised, bits, quantised, restored


@dataclass(frozen=True)
class State:
    """The cloud's model (M,), and each edge server's (D, M)."""

    cloud: np.ndarray
    edges: np.ndarray


class HierLocalQSGD(Method[State]):
    """A round is tau1 local steps and the edges' means; every tau2-th ends at the cloud."""

    state_class = State

    def __init__(self, *, num_edges=2, tau1=2, tau2=2, levels=8, **options):
        if not 1 <= levels <= 127:
            raise ValueError(f"levels must be an integer from 1 to 127, got {levels}")
        self.tau1, self.tau2, self.levels = tau1, tau2, levels
        federation = Federation(**options)
        self.clusters = Clusters(None, num_edges, federation)
        super().__init__(federation, aggregator=WeightedMean(), parts=[self.clusters])

    def begin(self, model):
        return State(model, np.tile(model, (self.clusters.num_servers, 1)))

    def round(self, state, run):
        members = self.clusters.members(range(self.federation.num_clients))
        asks = [Ask(nodes, state.edges[d], pool=d) for d, nodes in members.items()]
        told = {"round": run.round, "tau1": self.tau1, "levels": self.levels, "seed": run.seed}
        links = ("edge->client", "client->edge")
        train = Exchange("train", asks, told, links, coding=Quantised(self.levels))
        means = yield from self.means(train, run)
        edges = state.edges.copy()
        for d, mean in means.items():
            edges[d] = mean.model()
        if run.round % self.tau2:
            return State(state.cloud, edges)
        sizes = self.clusters.sizes(by_examples=True)
        move = np.zeros(state.cloud.shape)
        for d, (edge, share) in enumerate(zip(edges, sizes / sizes.sum(), strict=True)):
            # Edge servers draw after the nodes.
            number = self.federation.num_clients + d
            norm, signed = quantised(edge - state.cloud, self.levels, run.seed, run.round, number)
            move += share * restored(norm, signed, self.levels)
            run.book("edge->cloud", [(d, 0)], [signed.nbytes + 4], bits(signed.size, self.levels))
        cloud = (state.cloud + move).astype(state.cloud.dtype)
        run.book("cloud->edge", [(0, d) for d in range(len(edges))], [cloud.nbytes] * len(edges))
        return State(cloud, np.tile(cloud, (len(edges), 1)))

    def model(self, state):
        return state.cloud

    @property
    def iterations(self):
        return self.completed_rounds * self.tau1
