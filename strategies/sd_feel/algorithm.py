"""The rounds of SD-FEEL.

Paper: Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang, "Semi-Decentralized Federated Edge Learning for Fast
Convergence on Non-IID Data", Algorithm 1. HierFAVG, FEEL and FedAvg (section V) are the same rounds with
another mixer, one cluster, or other clients per round.
Differs: |S_i| of a node with its own data counts up to ``max_weight_ratio`` medians.

Notation: server d has the model w^(d), (M,); its cluster C_d has |S_d| samples; u is the mean of the servers'
models by |S_d|. A round is tau1 local iterations; every tau2-th ends with a mix of the servers' models.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.edges.clusters import Clusters
from hedgerow.strategies.edges.mixers import Mixer
from hedgerow.strategies.exchange import Ask, Exchange, Steps, Vector
from hedgerow.strategies.method import Method


@dataclass(frozen=True, eq=False)
class State:
    """w^(d) of every server, (D, M)."""

    servers: Vector


class Algorithm(Method[State]):
    """Algorithm 1, line by line; ``ClusteredStrategy`` adds the user's settings."""

    state_class = State
    # The modelled links of the downlink and of the uplink.
    down_link, up_link = "edge->client", "client->edge"
    assignment: Clusters
    mixer: Mixer
    local_steps: int
    tau2: int

    def begin(self, model: Vector) -> State:
        """Return w_0 for every server."""
        return State(np.tile(model, (self.assignment.num_servers, 1)))

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Train clients from their server's model, average each cluster, and mix every tau2-th round."""
        w = state.servers
        clusters = self.assignment.members(self.scheduled(run))
        asks = [Ask(clients, w[d], pool=d) for d, clients in clusters.items()]
        train = Exchange("train", asks, self.instructions(run), (self.down_link, self.up_link))
        means = yield from self.means(train, run)  # (2), (3)
        w = w.copy()
        for d, mean in means.items():  # A server without replies keeps its model.
            w[d] = mean.model()
        if run.round % self.tau2 == 0:
            w = yield from self.mixer.mix(w, self.cluster_sizes, run)  # (5)
        return State(w)

    def model(self, state: State) -> Vector:
        """Return u; no server holds it unless all servers agree."""
        return self.mixer.mean(state.servers, self.server_weights)

    @abstractmethod
    def scheduled(self, run: RoundContext) -> Sequence[int]:
        """Return the clients that take part in a round."""

    @property
    def cluster_sizes(self) -> NDArray[np.float64]:
        """|S_d|, (D,)."""
        return self.assignment.sizes(by_examples=True)

    @property
    def server_weights(self) -> NDArray[np.float64]:
        """The clusters' shares of all samples (D,)."""
        sizes = self.cluster_sizes
        shares: NDArray[np.float64] = sizes / sizes.sum()
        return shares

    def instructions(self, run: RoundContext) -> Mapping[str, Any]:
        """Return the clients' instructions for a round."""
        return {
            "server-round": run.round,
            "local-steps": self.local_steps,
            "first-step": (run.round - 1) * self.local_steps,
        }
