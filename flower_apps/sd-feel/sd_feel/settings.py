"""The app's settings, and the strategy for them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from hedgerow.clients import LOCAL_OPTIMISER_TEXTS, TASK_TEXTS
from hedgerow.sim.runs.common_settings import (
    IterationSettings,
    LocalOptimiserSettings,
    PeerSettings,
    TrainingSettings,
)
from hedgerow.sim.runs.kinds import (
    Nodes,
    NodesOr0,
    Positive,
    PositiveFraction,
    RoundsOr0,
    Samples,
    Steps,
    StepsOr0,
    choice,
    choice_or,
    text,
)
from hedgerow.sim.runs.settings import Rules, Setting, setting
from hedgerow.strategies import EdgeServerSDFeel, FedAvg, Feel, HierFAvg, PeerCredentials, SDFeel, Stragglers
from hedgerow.strategies.aggregate.flower import FLOWER_TEXT
from hedgerow.strategies.aggregate.sum_settings import training_options
from hedgerow.strategies.edges import contiguous_clusters
from hedgerow.strategies.edges.clusters import Chosen
from hedgerow.strategies.parts.server_optimisers import SERVER_STEP_TEXTS
from hedgerow.strategies.registry import REGISTRY_TEXTS
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.round_end import RoundCallback
from hedgerow.strategies.sd_feel.clusters import ClusteredStrategy
from hedgerow.strategies.sd_feel.strategy import EDGE_SERVERS
from hedgerow.strategies.sd_feel.theory import PRESETS, preset
from hedgerow.strategies.topology import TOPOLOGIES, validate_topology
from hedgerow.tasks import OWN
from hedgerow.wire.budget import Budget
from hedgerow.wire.robust_means import parse_aggregation

DIRECT = "direct"


class Settings(PeerSettings, IterationSettings, LocalOptimiserSettings, TrainingSettings):
    """The app's settings."""

    TEXTS: ClassVar = {**TASK_TEXTS, **LOCAL_OPTIMISER_TEXTS, **REGISTRY_TEXTS, **SERVER_STEP_TEXTS}

    method: Annotated[str, choice_or(*FLOWER_TEXT, "sd-feel", "hierfavg", "feel", "fedavg")] = setting(
        "sd-feel",
        "SD-FEEL, or a baseline; `flwr:…` is FedAvg with a strategy of Flower",
        first=True,
    )
    iterations: int = setting(300, "local iterations K, a multiple of tau1 tau2")
    num_clients: Nodes = setting(20, "number of clients C")
    num_servers: Nodes = setting(4, "number of edge servers D; client i belongs to server floor(i D / C)")
    clusters: Literal["contiguous", "group"] = setting(
        "contiguous",
        "how clients are assigned to servers: `contiguous`, or one server for each `group` named in "
        "the node configs",
    )
    topology: Annotated[str, text(f"one of {', '.join(TOPOLOGIES)}")] = setting(
        "ring", "graph of the edge servers"
    )
    tau1: Steps = setting(5, "intra-cluster period, in local iterations", first=True)
    tau2: Steps = setting(2, "inter-cluster period, in intra-cluster aggregations", first=True)
    alpha: StepsOr0 = setting(2, "gossip steps per inter-cluster aggregation")
    participation: PositiveFraction = setting(1.0, "probability beta that a client takes part in a round")
    clients_per_round: Nodes = setting(5, "clients that FEEL schedules per round")
    exact_if_complete: bool = setting(
        False,
        "on a complete graph, take the exact mean (the paper's matrix gives it only for equal clusters)",
    )
    edge_servers: Annotated[str, choice(*EDGE_SERVERS, DIRECT)] = setting(
        "emulated",
        "where SD-FEEL's edge servers run: `emulated` in the strategy's state, as `nodes`, or "
        "`direct`: each is a SuperLink with a run of its own, and this is one of them",
        "deployment",
    )
    edge: NodesOr0 = setting(0, "`direct` only: index of this edge server, from 0", "deployment")
    peers: str = setting(
        "",
        "`direct` only: host:port at which each edge server listens for the others, in order, "
        "including this one",
    )
    stragglers: Annotated[str, text("transient(p,f) or lasting(p,f), or empty", Stragglers.parse)] = setting(
        "",
        "clients whose iterations take f times as long in simulated time: in a round with probability "
        "p (`transient`), or throughout (`lasting`)",
        "robustness",
    )
    probe_rounds: RoundsOr0 = setting(
        0,
        "number of first rounds before which all clients also report their gradient at u, for the planner",
        "run",
    )
    partition: str = setting("dirichlet(0.5)")
    model: str = setting("lenet", "`lenet` has 21,840 parameters on 1x28x28 and 31,340 on 3x32x32")
    learning_rate: Positive = setting(0.05, "step size of the clients' plain SGD", "training", first=True)
    batch_size: Samples = setting(10, "mini-batch size of the clients' plain SGD", "training")
    latency_preset: Annotated[str, choice(*PRESETS, "engine")] = setting(
        "honest",
        "the simulated clock. `honest`: the paper's model with the size and computation of the trained "
        "network; `paper-text`: with M = 21,840 and 138.4 MFLOP; `cifar-large`; `engine`: the engine's "
        "clock, on which fault-delay delays replies",
        "run",
    )
    evaluate_every: int = setting(5, "rounds between evaluations of u (training loss, test accuracy)")
    evaluate_servers: bool = setting(
        False,
        "each evaluation also measures the emulated edge servers' own models: `servers-accuracy`, the mean "
        "weighted by data, the worst and the best",
        "run",
    )
    train_loss_samples: int = setting(
        0, "number of training samples used to compute F(u), the same ones each time (0: all)"
    )

    @property
    def round_iterations(self) -> int:
        """The local iterations of one round: tau1, and tau1 tau2 for FedAvg."""
        return self.tau1 * (self.tau2 if self.method == "fedavg" or self.flower else 1)

    def sum_sizes(self) -> tuple[int, int]:
        """Return the nodes of the smallest and the largest sum of a round."""
        if self.clusters == "group":  # the cluster sizes are not known yet
            return self.num_clients, 0
        nodes = self.clients_per_round if self.method == "feel" else self.num_clients
        servers = self.num_servers if self.method in ("sd-feel", "hierfavg") else 1
        return nodes // servers, -(-nodes // servers)

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from super().rules()
        feel, clustered = self.method == "feel", self.method in ("sd-feel", "hierfavg")
        if clustered or feel:
            yield self.at_most("num-servers" if clustered else "clients-per-round", "num-clients")
        block, name = (self.tau1, "tau1") if feel else (self.tau1 * self.tau2, "tau1 tau2")
        yield not self.iterations % block, "iterations", f"a multiple of {block} ({name})"
        if not clustered:
            yield from self.usual("but for method = 'sd-feel' or 'hierfavg', which have clusters", "clusters")
        if self.secure_sum:
            hides = self.edge_servers != "nodes"
            yield hides, "edge-servers", "'emulated' or 'direct' with secure-sum"
            yield not self.probe_rounds, "probe-rounds", "0 with secure-sum (they are each client's)"
        if self.method != "sd-feel":
            gossip = "but for method = 'sd-feel', whose edge servers gossip"
            yield from self.usual(gossip, "edge-servers", "stragglers", "probe-rounds")
        else:
            try:
                validate_topology(self.topology, self.num_servers)
            except ValueError as error:
                yield False, "", str(error)
        # Stragglers are simulated, and here time is real; only emulated servers' models are here.
        if self.edge_servers != "emulated":
            yield from self.usual("but for edge-servers = 'emulated'", "stragglers", "evaluate-servers")
        if not clustered or self.partition == OWN or self.local_layers:
            where = "but for method = 'sd-feel' or 'hierfavg' on the server's test data"
            yield from self.usual(where, "evaluate-servers")
        if self.edge_servers != DIRECT:
            yield from self.usual(f"where edge-servers is not {DIRECT!r}", "edge", *PeerSettings.table())
        elif self.num_servers <= self.num_clients:
            yield from self._direct_rules()

    def _direct_rules(self) -> Rules:
        """Yield the conditions for an edge server with its own SuperLink."""
        servers, budget = self.num_servers, Budget.parse(self.stop_after)
        yield (
            len(self.peer_addresses) == servers, "peers",
            f"host:port of each of the {servers} edge servers, separated by commas ('hedgerow deploy local "
            "--level E3' starts them all on one machine)",
        )  # fmt: skip
        yield (
            self.partition != OWN, "partition",
            f"one of a data set with edge-servers = {DIRECT!r} (each server would build a different model "
            "from its own nodes' introductions)",
        )  # fmt: skip
        yield (
            budget is None or budget.of in ("iterations", "sim-seconds"), "stop-after",
            f"iterations=N or sim-seconds=S with edge-servers = {DIRECT!r} (servers with different traffic "
            "would end after different rounds)",
        )  # fmt: skip
        yield self.edge < servers, "edge", f"0 to {servers - 1}, as num-servers = {servers}"
        if self.clusters == "group":
            yield (
                self.min_available_nodes > 0, "min-available-nodes",
                f"> 0 with clusters = 'group' and edge-servers = {DIRECT!r}: the number of nodes, all of "
                "them its clients, that this server waits for",
            )  # fmt: skip
        elif self.edge < servers:
            own, rule = len(_own_clients(self)), parse_aggregation(self.aggregation)
            clients = f"the clients of edge server {self.edge}"
            yield self.min_available_nodes <= own, "min-available-nodes", f"at most {own}, {clients}"
            yield own >= rule.least, "aggregation", f"a rule of at most {own} clients, {clients}"


SETTINGS: Mapping[str, Setting] = Settings.table()
read = Settings.read


def _own_clients(values: Settings) -> list[int]:
    """Return the partition ids of this edge server's clients."""
    servers = contiguous_clusters(values.num_clients, values.num_servers)
    return [client for client, server in enumerate(servers) if server == values.edge]


def num_nodes(values: Settings) -> int:
    """Return the number of nodes of the federation: the clients, and edge servers that are nodes."""
    return values.num_clients + (values.num_servers if values.edge_servers == "nodes" else 0)


def quorum(values: Settings) -> int:
    """Return the number of nodes needed to start the run: clients, and all edge servers that are nodes.

    For an edge server with its own SuperLink, only its own clients count.
    """
    if values.edge_servers == DIRECT:
        return values.min_available_nodes or len(_own_clients(values))
    later = values.num_clients - (values.min_available_nodes or values.num_clients)
    return num_nodes(values) - later


def build_strategy(
    values: Settings,
    *,
    num_params: int,
    flops_per_iteration: float,
    roster: Roster | None = None,
    dealt_sizes: Sequence[int] | None = None,
    frozen: Collection[str] | None = None,
    on_round_end: Sequence[RoundCallback] = (),
) -> ClusteredStrategy:
    """Return the strategy for the settings.

    Parameters
    ----------
    values : Settings
        From ``read``.
    num_params : int
        Trainable parameters of the network, for the simulated clock.
    flops_per_iteration : float
        Floating-point operations of one local iteration, for the simulated clock.
    roster : Roster or None (default: None)
        The nodes, if they are already known.
    dealt_sizes : Sequence[int] or None (default: None)
        Each client's number of samples, if the server deals the data.
    frozen : Collection[str] or None (default: None)
        Keys of the frozen arrays, as in ``FederationOptions``.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Called after each round.
    """
    options: dict[str, Any] = {
        **training_options(values.run_config, values.flower),
        "participation": values.participation,
        "roster": roster,
        "dealt_sizes": dealt_sizes,
        "frozen": frozen,
        "on_round_end": on_round_end,
        "system": preset(
            "honest" if values.latency_preset == "engine" else values.latency_preset,
            num_params=num_params,
            flops_per_iteration=flops_per_iteration,
        ),
        "engine_clock": values.latency_preset == "engine",
    }
    # A server with its own SuperLink does not know the others' clients.
    direct = {**options, "num_clients": 0, "min_available_nodes": quorum(values)}
    clusters: Chosen = "group" if values.clusters == "group" else None
    tau: dict[str, Any] = {"tau1": values.tau1, "tau2": values.tau2}
    gossip: dict[str, Any] = {
        **tau,
        "topology": values.topology,
        "alpha": values.alpha,
        "exact_if_complete": values.exact_if_complete,
    }
    match values.method:
        case "sd-feel" if values.edge_servers == DIRECT:
            files = values.credential_files
            return EdgeServerSDFeel(
                edge=values.edge,
                peers=values.peer_addresses,
                credentials=None if files is None else PeerCredentials(*files),
                listen=values.peer_listen,
                peer_timeout=values.peer_timeout,
                partitions=None if clusters else frozenset(_own_clients(values)),
                **gossip,
                **direct,
            )
        case "sd-feel":
            return SDFeel(
                num_servers=values.num_servers,
                clusters=clusters,
                edge_servers=values.edge_servers,
                stragglers=Stragglers.parse(values.stragglers),
                probe_rounds=values.probe_rounds,
                **gossip,
                **options,
            )
        case "hierfavg":
            return HierFAvg(num_servers=values.num_servers, clusters=clusters, **tau, **options)
        case "feel":
            return Feel(clients_per_round=values.clients_per_round, tau1=values.tau1, **options)
        case _:
            return FedAvg(local_steps=values.round_iterations, **options)
