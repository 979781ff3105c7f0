"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from flwr.app import UserConfigValue

from hedgerow.clients import TASK_TEXTS
from hedgerow.sim.runs.serverapp import RUN_SETTINGS
from hedgerow.sim.runs.settings import (
    Setting,
    choice,
    flag,
    in_range,
    number,
    read_settings,
    refuse,
    text,
    whole,
)
from hedgerow.strategies import FedAvg, Feel, HierFAvg, SDFeel
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.strategies.sd_feel.clusters import ClusteredOptions, ClusteredStrategy
from hedgerow.strategies.sd_feel.strategy import EDGE_SERVERS
from hedgerow.strategies.sd_feel.theory import PRESETS, System, preset
from hedgerow.strategies.topology import TOPOLOGIES, validate_topology

__all__ = ["SETTINGS", "build_strategy", "local_steps", "num_nodes", "read"]

_POSITIVE = number("a finite number > 0", lambda v: isfinite(v) and v > 0)

SETTINGS: Mapping[str, Setting] = {
    "method": choice("sd-feel", "hierfavg", "feel", "fedavg"),
    "iterations": whole(1),
    "num-clients": whole(1),
    "num-servers": whole(1),
    "topology": text(f"one of {', '.join(TOPOLOGIES)}"),
    "tau1": whole(1),
    "tau2": whole(1),
    "alpha": whole(0),
    "participation": in_range(0.0, 1.0, open_below=True),
    "clients-per-round": whole(1),
    "exact-if-complete": flag(),
    "edge-servers": choice(*EDGE_SERVERS),
    **{key: text(valid, check) for key, (valid, check) in TASK_TEXTS.items()},
    "learning-rate": _POSITIVE,
    "batch-size": whole(1),
    "seed": whole(0),
    "latency-preset": choice(*PRESETS),
    "training-mode": choice("auto", "loop", "stack"),
    "stack-nodes": whole(0),
    **RUN_SETTINGS,
}


def read(run_config: Mapping[str, UserConfigValue]) -> dict[str, Any]:
    """Return the settings, checked one by one and against each other.

    Raises
    ------
    SettingsError
        Naming every bad key, its value and what is valid.
    """
    values = read_settings(run_config, SETTINGS)
    problems = []
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
    if values["edge-servers"] == "nodes" and values["method"] != "sd-feel":
        problems.append(
            f"edge-servers = 'nodes'; valid is 'emulated' with method = {values['method']!r}: "
            "only sd-feel has edge servers that gossip"
        )
    refuse(problems)
    return values


def num_nodes(values: Mapping[str, Any]) -> int:
    """Return the nodes of the federation: the clients, and the edge servers where they are nodes."""
    clients: int = values["num-clients"]
    return clients + values["num-servers"] if values["edge-servers"] == "nodes" else clients


def local_steps(values: Mapping[str, Any]) -> int:
    """Return the local iterations of one round: tau1, and tau1 tau2 for FedAvg."""
    tau1: int = values["tau1"]
    return tau1 * values["tau2"] if values["method"] == "fedavg" else tau1


def build_strategy(
    values: Mapping[str, Any],
    *,
    num_params: int,
    flops_per_iteration: float,
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
        "min_available_nodes": values["num-clients"],
        "system": system,
        "on_round_end": on_round_end,
    }
    match values["method"]:
        case "sd-feel":
            return SDFeel(
                num_servers=values["num-servers"],
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
                num_servers=values["num-servers"], tau1=values["tau1"], tau2=values["tau2"], **options
            )
        case "feel":
            return Feel(clients_per_round=values["clients-per-round"], tau1=values["tau1"], **options)
        case _:
            return FedAvg(local_steps=local_steps(values), **options)
