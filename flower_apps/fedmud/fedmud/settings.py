"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from flwr.app import UserConfigValue
from torch import nn

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
from hedgerow.strategies import EF21P, FedBAT, FedHM, FedLMT, FedMUD, FedPara
from hedgerow.strategies.fedmud.compressed_layers import CompressedLayers
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.wire.lowrank import BUDGETS, LAYOUTS

__all__ = ["METHODS", "SETTINGS", "build_strategy", "read"]

_POSITIVE = number("a finite number > 0", lambda v: 0 < v < inf)
_VARIANTS = {
    "fedavg": "dense",
    "fedmud": "mud",
    "fedmud+f": "mud+f",
    "fedmud+aad": "mud+aad",
    "fedmud+bkd": "mud+bkd",
    "fedmud+bkd+f": "mud+bkd+f",
    "fedmud+bkd+aad": "mud+bkd+aad",
}
METHODS = (*_VARIANTS, "fedlmt", "fedpara", "fedhm", "ef21-p", "fedbat")

SETTINGS: Mapping[str, Setting] = {
    "method": choice(*METHODS),
    "num-rounds": whole(1),
    "num-clients": whole(1),
    "clients-per-round": whole(1),
    "learning-rate": _POSITIVE,
    "local-epochs": whole(1),
    "batch-size": whole(1),
    "ratio": in_range(0.0, 1.0, open_below=True),
    "budget": choice(*BUDGETS),
    "reset-interval": whole(1),
    "init-a": _POSITIVE,
    "layout": choice(*LAYOUTS),
    "tight": flag(),
    "skip-front": whole(0),
    "skip-back": whole(0),
    "rand-k-scale": flag(),
    "measure-bias": flag(),
    "sync": choice("catchup", "dense", "broadcast"),
    "weighting": choice("num-examples", "num-batches", "uniform"),
    **{key: text(valid, check) for key, (valid, check) in TASK_TEXTS.items()},
    "seed": whole(0),
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
    for key, most in (("clients-per-round", "num-clients"), ("min-replies", "clients-per-round")):
        if values[key] > values[most]:
            problems.append(f"{key} = {values[key]}; valid is up to {most} = {values[most]}")
    refuse(problems)
    return values


def build_strategy(
    values: Mapping[str, Any], model: nn.Module, *, on_round_end: Sequence[RoundCallback] = ()
) -> CompressedLayers:
    """Return the strategy that the settings describe, for one model.

    Parameters
    ----------
    values : Mapping[str, Any]
        From ``read``.
    model : nn.Module
        Whose Linear and Conv2d layers are compressed.
    on_round_end : Sequence[Callable[[RoundEnd], None]] (default: ())
        Told of each round.
    """
    options: dict[str, Any] = {
        "sync": values["sync"],
        "weighting": values["weighting"],
        "num_clients_per_round": values["clients-per-round"],
        "learning_rate": values["learning-rate"],
        "local_epochs": values["local-epochs"],
        "batch_size": values["batch-size"],
        "skip_front": values["skip-front"],
        "skip_back": values["skip-back"],
        "seed": values["seed"],
        "fraction_evaluate": 0.0,
        "min_train_nodes": values["min-replies"],
        "min_available_nodes": values["num-clients"],
        "on_round_end": on_round_end,
    }
    budget = {"ratio": values["ratio"], "budget": values["budget"]}
    match values["method"]:
        case "fedlmt":
            return FedLMT.for_model(model, init_a=values["init-a"], **budget, **options)
        case "fedpara":
            return FedPara.for_model(model, init_a=values["init-a"], **budget, **options)
        case "fedhm":
            return FedHM.for_model(model, **budget, **options)
        case "ef21-p":
            return EF21P.for_model(model, ratio=values["ratio"], scale=values["rand-k-scale"], **options)
        case "fedbat":
            return FedBAT.for_model(model, **options)
        case method:
            return FedMUD.for_model(
                model,
                variant=_VARIANTS[method],
                reset_interval=values["reset-interval"],
                init_a=values["init-a"],
                layout=values["layout"],
                tight=values["tight"],
                measure_bias=values["measure-bias"],
                **budget,
                **options,
            )
