"""The settings of SD-FEEL and its baselines, and their valid combinations.

The rounds are in ``algorithm.py``.
"""

from collections.abc import Sequence
from dataclasses import replace
from logging import INFO
from typing import Unpack

import networkx as nx
import numpy as np
from flwr.app import ArrayRecord
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.aggregate import Aggregator, Choice, WeightedMean
from hedgerow.strategies.aggregate.secure_sums import SecureSum, SecureSums, parse_secure_sum
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.edges.clusters import Chosen, Clusters
from hedgerow.strategies.edges.mixers import Alone, GossipMixer, Mixer, consensus_error
from hedgerow.strategies.edges.relayed import EdgeFederation, EdgeNodes
from hedgerow.strategies.exchange import Vector
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.options import FederationOptions
from hedgerow.strategies.parts.engine_time import EngineTime
from hedgerow.strategies.parts.part import Part
from hedgerow.strategies.parts.steps import ReportedSteps
from hedgerow.strategies.round_end import Progress
from hedgerow.strategies.sd_feel.algorithm import Algorithm, State
from hedgerow.strategies.sd_feel.simulated_time import SimulatedTime, Stragglers
from hedgerow.strategies.sd_feel.theory import System, SystemName
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.robust_means import Aggregation


class ClusteredOptions(FederationOptions, total=False):
    """Keyword options of every strategy of the family; see ``ClusteredStrategy``."""

    participation: float
    system: System | None
    engine_clock: bool
    aggregation: str | Aggregation | Aggregator
    secure_sum: bool | SecureSum


class ClusteredStrategy(Algorithm):
    """Rounds of local training, a weighted mean in each cluster, and an exchange between servers.

    A strategy round is one intra-cluster round. Edge servers are emulated in the strategy's state, unless a
    method has nodes for them: client-server messages are real, and the servers' exchange is linear algebra
    in the strategy. In both cases the ledger counts the transfers of the modelled system.
    **The ClientApp must take ``config["local-steps"]`` local iterations (mini-batch steps) from
    ``config["first-step"]`` on, and reply with one ArrayRecord of the model's keys and one MetricRecord with
    ``"num-examples"``, its number of local training examples** (not of samples processed), **and
    ``"num-steps"``, the number of iterations taken.** A reply with another number than requested is
    rejected as ``num-steps is not local-steps``. After the first reply without it, ``iterations`` and
    simulated seconds are unknown: None in callbacks and records, with one warning.

    Nodes report their partition (``hedgerow.clients.introduce``). Otherwise partition ids are the ranks of
    the random node ids, and clusters cannot be chosen.

    Parameters
    ----------
    clusters : Sequence[int], "group" or None
        The server of each client, by partition id; ``"group"`` for one server per ``group`` in the nodes'
        configs, in the order of the names (numeric if all are numbers); None for contiguous clusters of
        equal size. The last two have ``num_clients`` clients. A late node joins its group's server or, if the
        number of clients is open, the server with the fewest clients.
    num_servers : int
        Servers D, >= 1.
    local_steps : int
        Local iterations per round, >= 1.
    participation : float (default: 1.0)
        Probability beta in (0, 1] that a client takes part in a round. Draws are independent, and do not
        depend on beta, so that a lower beta gives nested subsets.
    system : System or None (default: None)
        Sizes and rates of the simulated clock; None is the paper's rates and compute with the size of
        the trained model.
    engine_clock : bool (default: False)
        Whether simulated time is the engine's, on which ``fault-delay`` delays replies, instead of the
        paper's latency model. With a buffer it is so in any case.
    aggregation : str, Aggregation or Aggregator (default: "mean")
        How an edge server combines its clients' models: ``mean``, eq. (3), a Byzantine-robust rule, see
        ``parse_aggregation``, or your own aggregator. Under a rule all clients have the same weight, whatever
        number of examples they report, and clusters weigh by their clients. A server with too few models for
        its rule uses their median.
    secure_sum : bool or SecureSum (default: False)
        Whether the server sees only the sum of each cluster's updates; a ``SecureSum`` changes the default
        settings. Clients must answer ``query.sum_keys`` and ``query.sum_shares``, as those of
        ``hedgerow.clients.sd_feel_client`` do. A round takes one more exchange. A cluster with too few
        clients, or too few survivors, keeps its model. With ``SecureSum(noise=...)`` all clients of a cluster
        have the same weight. ``max_update_norm_ratio`` then limits a cluster's mean, and the clients
        themselves enforce ``max_weight_ratio``.
    mixer : Mixer or None (default: None)
        The servers' exchange every ``tau2`` rounds; None for none.
    tau2 : int (default: 1)
        Rounds between two exchanges of the servers, >= 1.
    edge_nodes : bool (default: False)
        Whether the servers are nodes that average their clients' models and gossip as ``mixer`` does.
    stragglers : Stragglers or None (default: None)
        The slow clients.
    **options
        See ``FederationOptions``; ``num_clients`` is the number of clients C.

    Raises
    ------
    RosterError
        Once the nodes are online, if clusters are chosen and no node reports its partition, or if the nodes'
        groups are not ``num_servers``.

    Notes
    -----
    With ``"group"`` a node without a group, or with a group that has no server, is excluded as ``no group``
    or ``unknown group``. The groups are fixed when the run starts.

    Flower's differential-privacy wrappers work with one server only: they compare replies with the arrays of
    the round, and with several servers each cluster trains from its own server's model.
    """

    scheme: SystemName

    def __init__(
        self,
        *,
        clusters: Chosen,
        num_servers: int,
        local_steps: int,
        tau2: int = 1,
        mixer: Mixer | None = None,
        participation: float = 1.0,
        system: System | None = None,
        engine_clock: bool = False,
        aggregation: str | Aggregation | Aggregator = "mean",
        secure_sum: bool | SecureSum = False,
        edge_nodes: bool = False,
        stragglers: Stragglers | None = None,
        graph: nx.Graph | None = None,
        **options: Unpack[FederationOptions],
    ) -> None:
        int_at_least(1, num_servers=num_servers, local_steps=local_steps, tau2=tau2)
        self.aggregation = Choice.of(aggregation)
        # Under a rule all clients have the same weight.
        self._by_examples = self.aggregation.rule.is_mean
        summed = parse_secure_sum(secure_sum, self.aggregation)
        if summed is not None and edge_nodes:
            raise ValueError("secure_sum must be False where edge servers are nodes")
        if self.aggregation.own and edge_nodes:
            raise ValueError(
                "aggregation must be the text of a rule where edge servers are nodes, got "
                f"{self.aggregation}: they take their means themselves"
            )
        if engine_clock and stragglers is not None:
            raise ValueError("stragglers must be None with engine_clock: they are slow on the paper's clock")
        in_range("participation", participation, 0.0, 1.0, open_below=True)
        self.num_servers, self.local_steps, self.tau2 = num_servers, local_steps, tau2
        self.participation, self.system, self.stragglers = participation, system, stragglers
        num_clients = None if clusters is None or isinstance(clusters, str) else len(clusters)
        federation: Federation
        # The edge servers, if they are nodes.
        self.edges: EdgeNodes | None = None
        if edge_nodes:
            assert isinstance(mixer, GossipMixer)
            federation = EdgeFederation(num_clients, num_servers, **options)
            self.edges = EdgeNodes(federation, mixer, self.aggregation.rule)
        else:
            federation = Federation(num_clients, **options)
        self.assignment = Clusters(clusters, num_servers, federation, num_servers if edge_nodes else 0)
        self.mixer = self.edges or mixer or Alone()
        links = {"down_link": self.down_link, "up_link": self.up_link}
        self.sums = None if summed is None else SecureSums(summed, federation, **links)
        self._check_sizes()
        self.steps = ReportedSteps()
        self.time = SimulatedTime(
            self.scheme, system, tau1=local_steps, tau2=tau2, gossip_steps=self.mixer.steps,
            up_link=self.up_link, steps=self.steps, stragglers=stragglers, graph=graph,
        )  # fmt: skip
        aggregator = self.sums or self.edges or self.aggregation.aggregator(WeightedMean())
        parts: list[Part] = [self.assignment, self.steps]
        if federation.settings.buffer is None:  # Else the clock is the engine's.
            parts.append(EngineTime() if engine_clock else self.time)
        super().__init__(federation, aggregator=aggregator, parts=parts)

    def _check_sizes(self) -> None:
        """Raise ValueError if the smallest cluster is too small for the rule or for secure sums."""
        smallest, least = self.assignment.smallest, self.aggregation.rule.least
        if smallest is None:
            return
        if smallest < least:
            raise ValueError(
                f"aggregation is '{self.aggregation}', which needs {least} clients; the smallest cluster has "
                f"{smallest}"
            )
        if self.sums is not None and smallest < self.sums.settings.min_nodes:
            raise ValueError(
                f"secure_sum needs {self.sums.settings.min_nodes} clients in each cluster; the smallest has "
                f"{smallest}"
            )

    def participants(self, server_round: int) -> list[int]:
        """Return the partition ids of a round: Bernoulli(beta) draws, with one stream per client."""
        return self._taking_part(server_round, range(len(self.assignment.of)))

    def scheduled(self, run: RoundContext) -> Sequence[int]:
        """Return the clients that take part in a round; only those online are sent a message."""
        return self.participants(run.round)

    def _taking_part(self, server_round: int, clients: Sequence[int]) -> list[int]:
        """Return the clients that have a server and a draw below beta."""
        beta, with_server = self.participation, self.assignment.among(clients)
        if beta == 1.0:  # No draws are needed: each takes a stream of its own.
            return with_server
        return [i for i in with_server if self.federation.members.uniform(server_round, i) < beta]

    @property
    def clusters(self) -> tuple[int, ...]:
        """Each client's server, by partition id; -1 for one that has not joined yet."""
        return self.assignment.of

    @property
    def num_clients(self) -> int:
        """The number of clients C."""
        return len(self.clusters)

    @property
    def iterations(self) -> int | None:
        """Local iterations since the start; None if a reply did not report them."""
        return self.completed_rounds * self.local_steps if self.steps.all_report else None

    def progress(self) -> Progress:
        """Return iterations, traffic and simulated seconds since the start; None if unknown."""
        progress = super().progress()
        return progress if self.steps.all_report else replace(progress, sim_seconds=None)

    @property
    def cluster_sizes(self) -> NDArray[np.float64]:
        """Samples of each cluster (D,), with the mean for a client of unknown size.

        Under a robust rule, which ignores reported samples, the clients of each cluster.
        """
        return self.assignment.sizes(by_examples=self._by_examples)

    def server_models(self) -> list[ArrayRecord]:
        """Return the servers' models."""
        return [self._arrays(model) for model in self._known_state().servers]

    def consensus_error(self) -> float:
        """Return the data-weighted mean squared distance of the servers' models to u."""
        return consensus_error(self._known_state().servers, self.server_weights)

    def ended(self, state: State, run: RoundContext) -> None:
        """Report how far apart the servers' models are."""
        run.metrics["consensus-error"] = self.consensus_error()

    def moved(self, state: State, model: Vector) -> State:
        """Replace the model of a single server; ValueError if there are several."""
        if self.unwrapped() is not None:
            raise self.not_movable()
        return State(model[None])

    def unstepped(self) -> str | None:
        """Return why no server step can act, if edge servers are nodes."""
        return None if self.edges is None else "edge servers are nodes here, and average themselves"

    def unbuffered(self) -> str | None:
        """Return why there can be no buffer: several servers, or what only rounds have."""
        if (why := self.unwrapped()) is not None:
            return why
        if self.participation < 1.0:
            return "participation is drawn for a round; buffer.concurrency says how many nodes work"
        if self.stragglers is not None:
            return "stragglers are slow on the paper's clock, and with a buffer time is the engine's"
        return None

    def unwrapped(self) -> str | None:
        """Return why wrappers are refused: several servers, each with a model of its own."""
        if self.num_servers == 1 and self.edges is None:
            return None
        return f"each of its {self.num_servers} edge servers has a model of its own, and nodes train on that"

    def check_num_rounds(self, num_rounds: int) -> None:
        """Raise ValueError unless tau2 divides the number of rounds."""
        super().check_num_rounds(num_rounds)
        if num_rounds % self.tau2:
            raise ValueError(f"num_rounds must be a multiple of tau2 = {self.tau2}, got {num_rounds}")

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> Federation:")
        log(INFO, "\t│\t├── Clients: %d | servers: %d", self.num_clients, self.num_servers)
        log(INFO, "\t│\t├── Local iterations a round: %d", self.local_steps)
        log(INFO, "\t│\t├── Aggregation: %s", self.aggregation)
        if self.sums is not None:
            log(INFO, "\t│\t├── Secure sums: %s", self.sums.settings)
        log(INFO, "\t│\t└── Participation: %.3g", self.participation)
        self.log_keys()
