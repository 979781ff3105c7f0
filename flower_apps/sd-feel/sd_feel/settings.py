"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.common_settings import (
    BOUND_SETTINGS,
    HOLDOUT,
    ITERATIONS,
    QUORUM,
    RUN_SETTINGS,
    SEED,
    STACK_SETTINGS,
    SUM_NOISE_SETTINGS,
    SUM_SETTINGS,
    WEIGHT_BOUND,
    aggregation_setting,
    registry_setting,
    task_settings,
    training_problems,
)
from hedgerow.sim.runs.kinds import (
    MAX_NODES,
    MAX_ROUNDS,
    POSITIVE,
    choice,
    flag,
    in_range,
    text,
    whole,
)
from hedgerow.sim.runs.peer_settings import (
    credential_files,
    credential_problems,
    peer_addresses,
    peer_settings,
    peers_setting,
)
from hedgerow.sim.runs.settings import Setting, at_most, override, reader
from hedgerow.strategies import (
    EdgeServerSDFeel,
    FedAvg,
    Feel,
    HierFAvg,
    PeerCredentials,
    SDFeel,
    Stragglers,
)
from hedgerow.strategies.aggregate.sum_settings import secure_sum_of, sum_problems
from hedgerow.strategies.edges import contiguous_clusters
from hedgerow.strategies.edges.clusters import Chosen
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy
from hedgerow.strategies.sd_feel.strategy import EDGE_SERVERS
from hedgerow.strategies.sd_feel.theory import PRESETS, System, preset
from hedgerow.strategies.topology import TOPOLOGIES, validate_topology
from hedgerow.tasks import OWN
from hedgerow.wire.budget import Budget
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.robust_means import AGGREGATIONS, parse_aggregation

__all__ = ["DIRECT", "SETTINGS", "build_strategy", "local_steps", "num_nodes", "quorum", "read"]

DIRECT = "direct"

# Of edge servers that are orchestrators of their own.
PEER_SETTINGS: Mapping[str, Setting] = {
    "edge": Setting(0, whole(0, MAX_NODES), "with `direct`: which of the edge servers this is, from 0"),
    "peers": peers_setting(
        "with `direct`: where each edge server listens for the others, in their order, this one too",
    ),
    **peer_settings("edge server"),
}

SETTINGS: Mapping[str, Setting] = {
    "method": Setting("sd-feel", choice("sd-feel", "hierfavg", "feel", "fedavg"), "SD-FEEL, or a baseline"),
    "iterations": replace(ITERATIONS, default=300, help="local iterations K, a multiple of tau1 tau2"),
    "num-clients": Setting(20, whole(1, MAX_NODES), "clients C"),
    "num-servers": Setting(
        4, whole(1, MAX_NODES), "edge servers D; client i belongs to server floor(i D / C)"
    ),
    "clusters": Setting(
        "contiguous",
        choice("contiguous", "group"),
        "whose client a client is: `contiguous`, or a server to each `group` that the nodes' configs name",
    ),
    "topology": Setting("ring", text(f"one of {', '.join(TOPOLOGIES)}"), "the servers' graph"),
    "tau1": Setting(5, whole(1, MAX_STEPS), "intra-cluster period"),
    "tau2": Setting(2, whole(1, MAX_STEPS), "inter-cluster period"),
    "alpha": Setting(2, whole(0, MAX_STEPS), "gossip steps"),
    "participation": Setting(
        1.0, in_range(0.0, 1.0, open_below=True), "probability beta that a client takes part in a round"
    ),
    "clients-per-round": Setting(5, whole(1, MAX_NODES), "clients that FEEL schedules"),
    "exact-if-complete": Setting(
        False,
        flag(),
        "on a complete graph take the exact mean (the paper's matrix does so only for equal clusters)",
    ),
    "edge-servers": Setting(
        "emulated",
        choice(*EDGE_SERVERS, DIRECT),
        "where SD-FEEL's edge servers are: `emulated` in the strategy's state, `nodes` of their own, or "
        "`direct`: each a SuperLink and a run of its own, of which this is one",
    ),
    **PEER_SETTINGS,
    "stragglers": Setting(
        "",
        text("transient(p,f) or lasting(p,f), or empty", Stragglers.parse),
        "clients whose iterations take f times as long in simulated time: in a round with probability p, or "
        "all along",
    ),
    "probe-rounds": Setting(
        0,
        whole(0, MAX_ROUNDS),
        "first rounds before which all clients also tell their gradient at u, for the planner",
    ),
    **override(
        task_settings(TASK_TEXTS),
        defaults={"partition": "dirichlet(0.5)"},
        helps={"model": "`lenet` has 21,840 parameters on 1x28x28 and 31,340 on 3x32x32"},
    ),
    "learning-rate": Setting(0.05, POSITIVE, "step size of the clients' plain SGD"),
    "batch-size": Setting(10, whole(1, MAX_SAMPLES), "samples of a mini-batch of the clients' plain SGD"),
    "holdout": HOLDOUT,
    "min-available-nodes": QUORUM,
    "registry": registry_setting(Registry.named),
    "aggregation": aggregation_setting(AGGREGATIONS, parse_aggregation),
    **SUM_SETTINGS,
    **SUM_NOISE_SETTINGS,
    "max-weight-ratio": WEIGHT_BOUND,
    **BOUND_SETTINGS,
    "seed": SEED,
    "latency-preset": Setting(
        "honest",
        choice(*PRESETS),
        "`honest`: size and work of the trained net; `paper-text`: M = 21,840 and 138.4 MFLOP; `cifar-large`",
    ),
    **STACK_SETTINGS,
    **override(
        RUN_SETTINGS,
        helps={
            "evaluate-every": "rounds between evaluations of u (loss on training, accuracy on test data)",
            "train-loss-samples": "training samples that F(u) is taken over, the same each time (0: all)",
        },
    ),
}


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong between settings that are each valid."""
    problems = at_most(values, ("min-replies", "num-clients"), ("min-available-nodes", "num-clients"))
    clients = values["num-clients"]
    group = {"sd-feel": "num-servers", "hierfavg": "num-servers", "feel": "clients-per-round"}
    key = group.get(values["method"])
    if key is not None and values[key] > clients:
        problems.append(f"{key} = {values[key]}; valid is 1 to num-clients = {clients}")
    feel = values["method"] == "feel"
    block, name = (values["tau1"], "tau1") if feel else (values["tau1"] * values["tau2"], "tau1 tau2")
    if values["iterations"] % block:
        problems.append(f"iterations = {values['iterations']}; valid is a multiple of {block} ({name})")
    if values["method"] == "sd-feel":
        try:
            validate_topology(values["topology"], values["num-servers"])
        except ValueError as error:
            problems.append(str(error))
    if values["clusters"] == "group" and values["method"] not in ("sd-feel", "hierfavg"):
        problems.append(
            f"clusters = 'group'; valid is 'contiguous' with method = {values['method']!r}, which has no "
            "clusters"
        )
    if values["edge-servers"] != "emulated" and values["method"] != "sd-feel":
        problems.append(
            f"edge-servers = {values['edge-servers']!r}; valid is 'emulated' with method = "
            f"{values['method']!r}: only sd-feel has edge servers that gossip"
        )
    problems += _timing_problems(values)
    return problems + training_problems(values) + _peer_problems(values) + _sum_problems(values)


def _timing_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with slow clients and probes."""
    # Where time is real, clients are as slow as they are.
    places = {
        "stragglers": ("emulated",),
        "probe-rounds": EDGE_SERVERS,
    }
    problems = [
        f"{key} = {values[key]!r}; valid is {SETTINGS[key].default!r} but for method = 'sd-feel' with "
        f"edge-servers = {' or '.join(map(repr, valid))}"
        for key, valid in places.items()
        if values[key] != SETTINGS[key].default
        and (values["method"] != "sd-feel" or values["edge-servers"] not in valid)
    ]
    if values["probe-rounds"] and values["secure-sum"]:
        problems.append(
            f"probe-rounds = {values['probe-rounds']}; valid with secure-sum is 0: they are each client's"
        )
    return problems


def _peer_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the settings of an edge server that is an orchestrator of its own."""
    if values["edge-servers"] != DIRECT:
        return [
            f"{key} = {values[key]!r}; valid is {setting.default!r} where edge-servers is not {DIRECT!r}"
            for key, setting in PEER_SETTINGS.items()
            if values[key] != setting.default
        ]
    if values["num-servers"] > values["num-clients"]:
        return []
    problems, servers, peers = [], values["num-servers"], peer_addresses(values)
    if len(peers) != servers:
        problems.append(
            f"peers = {values['peers']!r}; valid is host:port of each of the {servers} edge servers, "
            "separated by commas ('hedgerow deploy local --level E3' starts them all on one machine)"
        )
    problems += credential_problems(values)
    if values["partition"] == OWN:
        problems.append(
            f"partition = {OWN!r}; valid is one of a data set with edge-servers = {DIRECT!r}: servers would "
            "each make another model of what their own nodes tell"
        )
    problems += _budget_problems(values)
    if values["edge"] >= servers:
        problems.append(f"edge = {values['edge']}; valid is 0 to {servers - 1}, as num-servers = {servers}")
    if values["clusters"] == "group" and not values["min-available-nodes"]:
        problems.append(
            "min-available-nodes = 0; valid with clusters = 'group' and edge-servers = 'direct' is how many "
            "nodes this server waits for: whoever comes is its client"
        )
    if values["edge"] < servers and values["clusters"] != "group":
        own, rule = len(_own_clients(values)), parse_aggregation(values["aggregation"])
        if values["min-available-nodes"] > own:
            problems.append(
                f"min-available-nodes = {values['min-available-nodes']}; valid is at most {own}, the clients "
                f"of edge server {values['edge']}"
            )
        if own < rule.least:
            problems.append(
                f"aggregation = {values['aggregation']!r}; valid with {rule.least} clients or more in each "
                f"cluster, and edge server {values['edge']} has {own}"
            )
    return problems


def _budget_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what speaks against the budget of a run of several edge servers."""
    budget = Budget.parse(values["stop-after"])
    if budget is None or budget.of in ("iterations", "sim-seconds"):
        return []
    return [
        f"stop-after = {values['stop-after']!r}; valid with edge-servers = {DIRECT!r} is iterations=N or "
        "sim-seconds=S: servers that send unlike amounts would end after unlike rounds"
    ]


def _own_clients(values: Mapping[str, Any]) -> list[int]:
    """Return the partition ids of the clients of the edge server that this is."""
    servers = contiguous_clusters(values["num-clients"], values["num-servers"])
    return [client for client, server in enumerate(servers) if server == values["edge"]]


def _credentials(values: Mapping[str, Any]) -> PeerCredentials | None:
    files = credential_files(values)
    return None if files is None else PeerCredentials(*files)


def _sum_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what speaks against sums that hide their nodes."""
    problems = []
    if values["secure-sum"] and values["edge-servers"] == "nodes":
        problems.append("edge-servers = 'nodes'; valid with secure-sum is 'emulated'")
    smallest = largest = values["clients-per-round"] if values["method"] == "feel" else values["num-clients"]
    if values["method"] in ("sd-feel", "hierfavg"):
        smallest, largest = smallest // values["num-servers"], -(-smallest // values["num-servers"])
    if values["clusters"] == "group":  # How large clusters are, the nodes that come say.
        smallest, largest = values["num-clients"], 0
    return problems + sum_problems(values, smallest, largest)


read = reader(SETTINGS, _problems)


def num_nodes(values: Mapping[str, Any]) -> int:
    """Return the nodes of the federation: the clients, and the edge servers where they are nodes."""
    clients: int = values["num-clients"]
    return clients + values["num-servers"] if values["edge-servers"] == "nodes" else clients


def quorum(values: Mapping[str, Any]) -> int:
    """Return how many nodes must be there when the run starts: clients, and every edge server that is one.

    Of an edge server with a SuperLink of its own it is its own clients that count.
    """
    if values["edge-servers"] == DIRECT:
        return int(values["min-available-nodes"]) or len(_own_clients(values))
    later: int = values["num-clients"] - (values["min-available-nodes"] or values["num-clients"])
    return num_nodes(values) - later


def local_steps(values: Mapping[str, Any]) -> int:
    """Return the local iterations of one round: tau1, and tau1 tau2 for FedAvg."""
    tau1: int = values["tau1"]
    return tau1 * values["tau2"] if values["method"] == "fedavg" else tau1


def build_strategy(
    values: Mapping[str, Any],
    *,
    num_params: int,
    flops_per_iteration: float,
    roster: Roster | None = None,
    on_round_end: Sequence[RoundCallback] = (),
) -> ClusteredStrategy:
    """Return the strategy that the settings describe.

    Parameters
    ----------
    values : Mapping[str, Any]
        From ``read``.
    num_params : int
        Trainable parameters of the trained net, for the simulated clock.
    flops_per_iteration : float
        Floating-point operations of one local iteration of the trained net, for the simulated clock.
    roster : Roster or None (default: None)
        The nodes, where they were asked before.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Told of each round.
    """
    system: System = preset(
        values["latency-preset"], num_params=num_params, flops_per_iteration=flops_per_iteration
    )
    options: ClusteredOptions = {
        "participation": values["participation"],
        "seed": values["seed"],
        "fraction_evaluate": 0.0,
        "min_train_nodes": values["min-replies"],
        "min_available_nodes": values["min-available-nodes"] or values["num-clients"],
        "num_clients": values["num-clients"],
        "roster": roster,
        "registry": Registry.named(values["registry"]),
        "system": system,
        "on_round_end": on_round_end,
        "aggregation": values["aggregation"],
        "secure_sum": secure_sum_of(values),
        "max_weight_ratio": values["max-weight-ratio"],
        "max_update_norm_ratio": values["max-update-norm-ratio"],
        "quarantine_after": values["quarantine-after"],
        "max_loss_ratio": values["max-loss-ratio"],
    }
    # A server of its own knows no other's clients.
    direct: ClusteredOptions = {**options, "num_clients": 0, "min_available_nodes": quorum(values)}
    clusters: Chosen = "group" if values["clusters"] == "group" else None
    match values["method"]:
        case "sd-feel" if values["edge-servers"] == DIRECT:
            return EdgeServerSDFeel(
                edge=values["edge"],
                peers=peer_addresses(values),
                topology=values["topology"],
                tau1=values["tau1"],
                tau2=values["tau2"],
                alpha=values["alpha"],
                exact_if_complete=values["exact-if-complete"],
                credentials=_credentials(values),
                listen=values["peer-listen"],
                peer_timeout=values["peer-timeout"],
                partitions=None if values["clusters"] == "group" else frozenset(_own_clients(values)),
                **direct,
            )
        case "sd-feel":
            return _emulated(values, clusters, options)
        case "hierfavg":
            return HierFAvg(
                num_servers=values["num-servers"],
                clusters=clusters,
                tau1=values["tau1"],
                tau2=values["tau2"],
                **options,
            )
        case "feel":
            return Feel(clients_per_round=values["clients-per-round"], tau1=values["tau1"], **options)
        case _:
            return FedAvg(local_steps=local_steps(values), **options)


def _emulated(values: Mapping[str, Any], clusters: Chosen, options: ClusteredOptions) -> SDFeel:
    """Return SD-FEEL with all its edge servers in one strategy."""
    return SDFeel(
        num_servers=values["num-servers"],
        clusters=clusters,
        topology=values["topology"],
        tau1=values["tau1"],
        tau2=values["tau2"],
        alpha=values["alpha"],
        exact_if_complete=values["exact-if-complete"],
        edge_servers=values["edge-servers"],
        stragglers=Stragglers.parse(values["stragglers"]),
        probe_rounds=values["probe-rounds"],
        **options,
    )
