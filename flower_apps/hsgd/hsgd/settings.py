"""The app's settings: what each key may be, and the strategy that they describe."""

import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from flwr.app import UserConfigValue

from hedgerow.sim.runs.serverapp import RUN_SETTINGS
from hedgerow.sim.runs.settings import Setting, choice, in_range, number, read_settings, refuse, text, whole
from hedgerow.strategies import HSGD, Adaptive, EmbeddingNoise, Probing
from hedgerow.strategies.hsgd.costs import Method, Sizes
from hedgerow.strategies.hsgd.groups import batch_size
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.tasks import SPLIT_MODELS, VERTICAL_DATASETS
from hsgd.parties import Parties, deal, merges

__all__ = ["METHODS", "SETTINGS", "build_strategy", "check_size", "group_sizes", "num_rounds", "read"]

METHODS = tuple(str(method) for method in Method)
_POSITIVE = number("a finite number > 0", lambda v: 0 < v < inf)
_NOT_NEGATIVE = number("a finite number >= 0", lambda v: 0 <= v < inf)
# Only the form: how many samples a class has is known when the data are.
_SCHEME = re.compile(r"\s*(iid|(pairs|rates)\s*\([^()]+\))\s*")


def _known_or_import_path(*names: str) -> Setting:
    def check(value: str) -> None:
        if value not in names and ":" not in value:
            raise ValueError(f"unknown name {value!r}")

    return text(f"one of {', '.join(names)}, or an import path 'module:function'", check)


def _scheme(value: str) -> None:
    if not _SCHEME.fullmatch(value):
        raise ValueError(f"unknown scheme {value!r}")


def _power(value: UserConfigValue) -> int:
    power = whole(2).read(value)
    if power > 3:
        raise ValueError
    return int(power)


SETTINGS: Mapping[str, Setting] = {
    "method": choice(*METHODS),
    "tdcd": choice("merged", "isolated"),
    "num-groups": whole(1),
    "layout": choice("edges", "devices"),
    "num-clients": whole(1),
    "patients-per-group": whole(0),
    "participation": in_range(0.0, 1.0, open_below=True),
    "iterations": whole(1),
    "global-interval": whole(1),
    "local-interval": whole(1),
    "learning-rate": _POSITIVE,
    "halving-period": whole(0),
    "mu": _NOT_NEGATIVE,
    "clip": _NOT_NEGATIVE,
    "noise-multiplier": _NOT_NEGATIVE,
    "noise-delta": number("a number in (0, 1)", lambda v: 0 < v < 1),
    "noise-source": choice("entropy", "seed"),
    "adaptive": choice("off", "observe", "strategy2", "strategy2+3"),
    "replan-every": whole(0),
    "eta-power": Setting("3 (the root of (20)) or 2 (as printed)", _power),
    "probe-steps": whole(1),
    "probe-batches": whole(1),
    "probe-batch": whole(0),
    "probe-aggregate": choice("max", "mean"),
    "final-loss": number("a finite number", lambda v: -inf < v < inf),
    "compute-seconds": _NOT_NEGATIVE,
    "raw-bytes-per-group": _NOT_NEGATIVE,
    "raw-seconds": _NOT_NEGATIVE,
    "dataset": _known_or_import_path(*VERTICAL_DATASETS),
    "data-dir": text("a folder, or empty"),
    "partition": text("iid, pairs(n_major, n_minor) or rates(concentration)", _scheme),
    "model": _known_or_import_path("auto", *SPLIT_MODELS),
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
        f"{key} = {values[key]}; valid is a multiple of {divisor} = {values[divisor]}"
        for key, divisor in (("global-interval", "local-interval"), ("iterations", "global-interval"))
        if values[key] % values[divisor]
    ]
    hospitals = 1 if merges(values) else values["num-groups"]
    if values["layout"] == "edges" and values["num-clients"] != 2 * hospitals:
        problems.append(_wrong_size(values, 2 * hospitals, f"{hospitals} hospitals and {hospitals} edges"))
    if bool(values["clip"]) != bool(values["noise-multiplier"]):
        problems.append(
            f"clip = {values['clip']}, noise-multiplier = {values['noise-multiplier']}; valid is both > 0, "
            "or both 0"
        )
    if values["adaptive"] != "off" and values["method"] in ("tdcd", "c-tdcd") and not merges(values):
        problems.append(f"adaptive = {values['adaptive']!r}; valid is 'off' with tdcd = 'isolated'")
    refuse(problems)
    return values


def check_size(values: Mapping[str, Any], parties: Parties) -> None:
    """Raise SettingsError unless the federation has as many nodes as there are parties."""
    if values["num-clients"] != parties.num_nodes:
        M = len(parties.groups)
        what = f"{M} hospitals and {parties.num_nodes - M} {parties.layout}"
        refuse([_wrong_size(values, parties.num_nodes, what)])


def _wrong_size(values: Mapping[str, Any], due: int, what: str) -> str:
    return f"num-clients = {values['num-clients']}; valid is {due}: {what}"


def num_rounds(values: Mapping[str, Any]) -> int:
    """Return the rounds of a run; where P is chosen while it runs, the most that there may be."""
    chosen = values["adaptive"].startswith("strategy2")
    return int(values["iterations"] // (1 if chosen else values["global-interval"]))


def build_strategy(values: Mapping[str, Any], *, on_round_end: Sequence[RoundCallback] = ()) -> HSGD:
    """Return the strategy that the settings describe."""
    merged = merges(values)
    raw = {"raw_bytes": values["raw-bytes-per-group"], "raw_seconds": values["raw-seconds"]} if merged else {}
    return HSGD(
        method=values["method"],
        global_interval=values["global-interval"],
        local_interval=values["local-interval"],
        participation=values["participation"],
        learning_rate=values["learning-rate"],
        halving_period=values["halving-period"],
        mu=values["mu"],
        aggregate=merged or values["method"] not in ("tdcd", "c-tdcd"),
        num_groups=1 if merged else values["num-groups"],
        original_groups=values["num-groups"] if merged else 1,
        noise=_noise(values),
        adaptive=_adaptive(values),
        compute_seconds=values["compute-seconds"],
        **raw,
        seed=values["seed"],
        min_train_nodes=values["min-replies"],
        min_available_nodes=values["num-clients"],
        on_round_end=on_round_end,
    )


def group_sizes(values: Mapping[str, Any]) -> list[Sizes]:
    """Return what each group's messages hold, for a plan."""
    parties = deal(values)
    model = parties.model
    head, hospital, device = (
        sum(parameter.numel() for parameter in piece.parameters())
        for piece in (model.head, model.hospital, model.device)
    )
    e1, e2 = model.hospital_encoding, model.device_encoding
    return [
        Sizes(head, hospital, device, e1, e2, batch_size(values["participation"], len(group)))
        for group in parties.groups
    ]


def _noise(values: Mapping[str, Any]) -> EmbeddingNoise | None:
    if not values["clip"]:
        return None
    return EmbeddingNoise(
        values["clip"], values["noise-multiplier"], values["noise-delta"], values["noise-source"]
    )


def _adaptive(values: Mapping[str, Any]) -> Adaptive | None:
    if values["adaptive"] == "off":
        return None
    return Adaptive(
        values["iterations"],
        values["replan-every"],
        "strategy3" if values["adaptive"] == "strategy2+3" else "keep",
        3 if values["eta-power"] == 3 else 2,
        values["adaptive"] != "observe",
        Probing(
            values["probe-steps"],
            values["probe-batches"],
            values["probe-batch"] or None,
            values["probe-aggregate"],
            values["final-loss"] or None,
        ),
    )
