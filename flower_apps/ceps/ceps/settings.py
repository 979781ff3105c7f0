"""The app's settings: what each key may be, and the strategy that they describe."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
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
from hedgerow.strategies.ceps.baselines import DCDPSGD, DPDSGT, DPSGD, DFedAvgM, DFedSAM, Matcha
from hedgerow.strategies.ceps.strategy import CEPS, OneBitCode
from hedgerow.strategies.gossip.monitor import Monitor
from hedgerow.strategies.gossip.strategy import Gossip
from hedgerow.strategies.privacy import Privacy
from hedgerow.strategies.rounds import RoundCallback

__all__ = ["METHODS", "SETTINGS", "build_strategy", "read"]

METHODS = (
    "ceps",
    "d-psgd",
    "d-psgd-dn",
    "d-psgd-pc",
    "dfedavgm",
    "dfedsam",
    "dcd-psgd",
    "dp-dsgt",
    "matcha",
)
_POSITIVE = number("a finite number > 0", lambda v: 0 < v < inf)
_NOT_NEGATIVE = number("a finite number >= 0", lambda v: 0 <= v < inf)
_TASK = ("dataset", "data-dir", "partition", "model")

SETTINGS: Mapping[str, Setting] = {
    "method": choice(*METHODS),
    "iterations": whole(1),
    "num-clients": whole(1),
    "topology": text("a graph's name, 'regular(8)' or 'ring' for example; empty: regular of degree m / 4"),
    "participation": in_range(0.0, 1.0, open_below=True),
    "sparsity": whole(1),
    "codec": choice("1bcs", "sparse16", "sparse32", "sparse64", "dense32", "dense64"),
    "measurements": whole(0),
    "expand": choice("consistent", "literal"),
    "compand": choice("log", "none"),
    "gamma": number("a finite number > 1", lambda v: 1 < v < inf),
    "decoder": choice("gpsp", "biht"),
    "phi-density": in_range(0.5, 1.0),
    "phi-owner": choice("sender", "receiver"),
    "stragglers": flag(),
    "interval-low": whole(1),
    "interval-high": whole(1),
    "mu": _POSITIVE,
    "sigma-rule": choice("paper", "fixed_c"),
    "c": _POSITIVE,
    "privacy": choice("none", "paper", "sound"),
    "epsilon": _POSITIVE,
    "delta": number("a number in (0, 1)", lambda v: 0 < v < 1),
    "sensitivity": _POSITIVE,
    "clip": _POSITIVE,
    "noise-source": choice("entropy", "seed"),
    "learning-rate": _POSITIVE,
    "momentum": number("a number in [0, 1)", lambda v: 0 <= v < 1),
    "rho": _NOT_NEGATIVE,
    "local-steps": whole(1),
    "bits": whole(0),
    "budget": in_range(0.0, 1.0, open_below=True),
    "monitor": flag(),
    "tolerance": _NOT_NEGATIVE,
    "problem": choice("linear", "logistic", "network"),
    "features": whole(1),
    "noise": _NOT_NEGATIVE,
    "samples-low": whole(1),
    "samples-high": whole(1),
    "class-0": whole(0),
    "class-1": whole(0),
    "libsvm": text("a file in data-dir, or empty"),
    "l2": _NOT_NEGATIVE,
    **{key: text(*TASK_TEXTS[key]) for key in _TASK},
    "seed": whole(0),
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
    problems = [
        f"{low} = {values[low]}; valid is up to {high} = {values[high]}"
        for low, high in (("interval-low", "interval-high"), ("samples-low", "samples-high"))
        if values[low] > values[high]
    ]
    if values["problem"] == "linear" and values["sparsity"] > values["features"]:
        problems.append(f"sparsity = {values['sparsity']}; valid is up to features = {values['features']}")
    if values["privacy"] == "sound" and values["sigma-rule"] == "paper" and values["method"] == "ceps":
        problems.append("sigma-rule = 'paper'; valid with privacy = 'sound' is 'fixed_c'")
    if values["bits"] == 1 or values["bits"] > 16:
        problems.append(f"bits = {values['bits']}; valid is 0 (none) or 2 to 16")
    refuse(problems)
    return values


def build_strategy(
    values: Mapping[str, Any],
    *,
    dim: int,
    monitor: Monitor | None = None,
    on_round_end: Sequence[RoundCallback] = (),
) -> Gossip:
    """Return the strategy that the settings describe, for models of dimension ``dim``."""
    options: dict[str, Any] = {
        "dim": dim,
        "topology": values["topology"] or None,
        "privacy": Privacy(
            values["privacy"],
            values["epsilon"],
            values["delta"],
            values["sensitivity"],
            values["clip"],
            noise_source=values["noise-source"],
        ),
        "num_iterations": values["iterations"],
        "monitor": monitor,
        "seed": values["seed"],
        "min_train_nodes": values["min-replies"],
        "min_available_nodes": values["num-clients"],
        "on_round_end": on_round_end,
    }
    r, rate = values["participation"], values["learning-rate"]
    local = {"learning_rate": rate, "local_steps": values["local-steps"], **options}
    strategies: dict[str, Callable[[], Gossip]] = {
        "ceps": lambda: _ceps(values, options),
        "d-psgd": lambda: DPSGD(**local),
        "d-psgd-dn": lambda: DPSGD(dynamic=True, **local),
        "d-psgd-pc": lambda: DPSGD(participation=r, **local),
        "dfedavgm": lambda: DFedAvgM(
            momentum=values["momentum"], bits=values["bits"] or None, participation=r, **local
        ),
        "dfedsam": lambda: DFedSAM(rho=values["rho"], participation=r, **local),
        "dcd-psgd": lambda: DCDPSGD(learning_rate=rate, bits=values["bits"] or 8, **options),
        "dp-dsgt": lambda: DPDSGT(learning_rate=rate, **options),
        "matcha": lambda: Matcha(learning_rate=rate, budget=values["budget"], **options),
    }
    return strategies[values["method"]]()


def _ceps(values: Mapping[str, Any], options: dict[str, Any]) -> CEPS:
    return CEPS(
        sparsity=values["sparsity"],
        measurements=values["measurements"] or None,
        codec=values["codec"],
        code=OneBitCode(
            expand=values["expand"],
            compand=values["compand"],
            gamma=values["gamma"],
            decoder=values["decoder"],
            phi_density=values["phi-density"],
            phi_owner=values["phi-owner"],
        ),
        participation=values["participation"],
        interval=(values["interval-low"], values["interval-high"]),
        stragglers=values["stragglers"],
        mu=values["mu"],
        sigma_rule=values["sigma-rule"],
        c=values["c"],
        **options,
    )
