"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from typing import Any

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.common_settings import (
    BOUND_SETTINGS,
    HOLDOUT,
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
)
from hedgerow.sim.runs.kinds import MAX_NODES, MAX_ROUNDS, POSITIVE, choice, flag, in_range, text, whole
from hedgerow.sim.runs.settings import Setting, at_most, override, reader
from hedgerow.strategies import FedAvg, Feel, HierFAvg, SDFeel
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.robust import AGGREGATIONS, parse_aggregation
from hedgerow.strategies.roster import Roster
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy, Clusters
from hedgerow.strategies.sd_feel.strategy import EDGE_SERVERS
from hedgerow.strategies.sd_feel.theory import PRESETS, System, preset
from hedgerow.strategies.sum_settings import secure_sum_of, sum_problems
from hedgerow.strategies.topology import TOPOLOGIES, validate_topology
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS

__all__ = ["SETTINGS", "build_strategy", "local_steps", "num_nodes", "quorum", "read"]

SETTINGS: Mapping[str, Setting] = {
    "method": Setting("sd-feel", choice("sd-feel", "hierfavg", "feel", "fedavg"), "SD-FEEL, or a baseline"),
    "iterations": Setting(300, whole(1, MAX_ROUNDS), "local iterations K, a multiple of tau1 tau2"),
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
        choice(*EDGE_SERVERS),
        "where SD-FEEL's edge servers are: `emulated` in the strategy's state, or `nodes` of their own",
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
    if values["edge-servers"] == "nodes" and values["method"] != "sd-feel":
        problems.append(
            f"edge-servers = 'nodes'; valid is 'emulated' with method = {values['method']!r}: "
            "only sd-feel has edge servers that gossip"
        )
    return problems + _sum_problems(values)


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
    """Return how many nodes must be there when the run starts: clients, and every edge server that is one."""
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
    clusters: Clusters = "group" if values["clusters"] == "group" else None
    match values["method"]:
        case "sd-feel":
            return SDFeel(
                num_servers=values["num-servers"],
                clusters=clusters,
                topology=values["topology"],
                tau1=values["tau1"],
                tau2=values["tau2"],
                alpha=values["alpha"],
                exact_if_complete=values["exact-if-complete"],
                edge_servers=values["edge-servers"],
                **options,
            )
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
