"""Whatever is public refuses a bad argument in one line that names it and its value, and takes a good one.

``CASES`` has what is called, a call that is valid, and the range of each parameter, from which bad and good
values are derived. A parameter that an app's setting is of has the setting's range. ``TOGETHER`` has values
that are each valid and do not go together.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from tempfile import NamedTemporaryFile
from types import ModuleType
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from tests.flower_apps.cases import CASES as APPS
from tests.flower_apps.cases import AppCase
from torch import nn

from hedgerow.clients import LocalWork
from hedgerow.clients.policy import read_policy
from hedgerow.sim import Setting, SettingsError
from hedgerow.sim.runs.kinds import LARGEST, SMALLEST
from hedgerow.sim.runs.plan import toml_text
from hedgerow.strategies import (
    Adaptive,
    EmbeddingNoise,
    FederatedStrategy,
    Monitor,
    Privacy,
    Site,
    UploadNoise,
)

INF, NAN = math.inf, math.nan
# From here on an end of a setting only keeps a run small enough; what it is a parameter of has none.
LARGE = 2**20


# Ranges


@dataclass(frozen=True)
class Range:
    """Values that are valid, each end among them, and values that are not, just outside of each end."""

    good: tuple[Any, ...]
    bad: tuple[Any, ...]

    def __or__(self, more: "Range") -> "Range":
        """Return the range of what one of two takes."""
        good = (*self.good, *more.good)
        return Range(good, tuple(one for one in (*self.bad, *more.bad) if not any(one is g for g in good)))


NO_NUMBER: tuple[Any, ...] = ("x", None, True, [1], NAN, INF, -INF)


def integer(low: int, high: float = INF) -> Range:
    """Return the range of integers from ``low`` to ``high``."""
    good = (low, low + 1 if high == INF else high)
    return Range(good, (low - 1, float(low), low + 0.5, *(() if high == INF else (high + 1,)), *NO_NUMBER))


def real(low: float = -INF, high: float = INF, opened: str = "") -> Range:
    """Return the range of numbers from ``low`` to ``high``; ``opened`` has the ends that are not in it."""
    inside = {"low": math.nextafter(low, INF) if low else 1e-9, "high": math.nextafter(high, -INF)}
    good, bad = [], []
    for end, value, beyond in (("low", low, -INF), ("high", high, INF)):
        if not math.isinf(value):
            good.append(inside[end] if end in opened else value)
            bad.append(value if end in opened else math.nextafter(value, beyond))
    return Range((*good, *([low + 1.0] if high == INF and low > -INF else [])), (*bad, *NO_NUMBER))


def one_of(*names: Any) -> Range:
    """Return the range of some words."""
    return Range(names, (f"{names[0]}x", "", 1.5, *(() if None in names else (None,))))


def text(good: Iterable[str], bad: Iterable[str]) -> Range:
    """Return the range of texts that something reads."""
    return Range(tuple(good), tuple(bad))


NONE, ZERO = Range((None,), ()), Range((0,), ())
COUNT, COUNT_OR_0 = integer(1), integer(0)
POSITIVE, NOT_NEGATIVE = real(0, opened="low"), real(0)
# A ratio that small layers can reach, too.
REACHED = Range((0.96, 1.0), real(0, 1, "low").bad)
SHARE, OPEN_SHARE, UNIT = real(0, 1, "low"), real(0, 1, "low high"), real(0, 1)
RATIO = real(1) | ZERO
RULES = text(
    ["mean", "median", "trimmed-mean(0.1)", "clipped(1)"],
    ["", "mode", "krum", "mean(1)", "median(", "trimmed-mean", "trimmed-mean(0.5)", "trimmed-mean(nan)",
     "krum(-1)", "krum(1.5)", "krum(1,2)", "multi-krum(1)", "multi-krum(1,0)", "clipped(0)", "clipped(inf)",
     "clipped(1e)"],
)  # fmt: skip
COMPRESSORS = text(
    ["identity", "topk(0.1)", "topk(3)", "randk(0.1)", "sign", "ternary"],
    ["", "top-k", "topk", "topk()", "topk(0)", "topk(0.0)", "topk(1.5)", "topk(-1)", "topk(nan)", "topk(.)",
     "topk(0.1,dense)", "Sign", "identity()", "None", "randk", "randk(0)", "randk(1.5)", "topk(0.1,packed)",
     "randk(0.1,round=-1)", "topk(0.1,round=1)", "randk(0.1,round=\u0661)", "randk(0.1,round=99999999999)",
     f"topk({'9' * 10_000})", f"topk(0.{'1' * 10_000}x)", f"randk(0.1,round={'9' * 10_000})"],
)  # fmt: skip


def of_setting(setting: Setting) -> Range | None:
    """Return the range of a parameter that a setting is of: the setting's, without what keeps runs small."""
    values, whole = setting.kind.values, isinstance(setting.default, int)
    if isinstance(values, tuple):
        # Parameters that are true or false are taken for what they are.
        return None if values == (False, True) else one_of(*values)
    if values is None:
        return None
    low, high = values.low, values.high if values.high < min(LARGE, LARGEST) else INF
    if whole:
        found = integer(int(low), high)
    elif low == SMALLEST:
        found = NOT_NEGATIVE if values.zero else POSITIVE
    else:
        opened = " ".join(
            end for end, is_open in (("low", values.open_below), ("high", values.open_above)) if is_open
        )
        found = real(low, high, opened) | (ZERO if values.zero else Range((), ()))
    return found


# What is called


@dataclass(frozen=True)
class Case:
    """What is public or where that is found, a valid call of it, and the ranges of its parameters.

    ``names`` has what an error calls a parameter where that is not its own name.
    """

    what: str | Callable[..., Any]
    good: Mapping[str, Any]
    ranges: Mapping[str, Range]
    names: Mapping[str, str] = field(default_factory=dict)

    def call(self, **changes: Any) -> Any:
        what = resolve_name(f"hedgerow.{self.what}") if isinstance(self.what, str) else self.what
        return what(**{**self.good, **changes})


CASES: dict[str, Case] = {}


def case(
    path: str,
    good: Mapping[str, Any] | None = None,
    /,
    *,
    settings: ModuleType | None = None,
    only: Iterable[str] = (),
    names: Mapping[str, str] | None = None,
    **ranges: Range,
) -> None:
    """Add a case; parameters ``only`` have the ranges of the settings of the same names."""
    for parameter in only:
        found = of_setting(settings.SETTINGS[parameter.replace("_", "-")])
        assert found is not None, parameter
        ranges.setdefault(parameter, found)
    assert path not in CASES
    CASES[path] = Case(path, good or {}, ranges, names or {})


def reads(path: str, named: str, good: Iterable[str], bad: Iterable[str], parameter: str = "text") -> None:
    """Add what reads a text; an error calls the text ``named``."""
    found = text(good, bad)
    case(path, {parameter: found.good[0]}, names={parameter: named}, **{parameter: found})


SD_FEEL, SIMILARITY_FREE, FEDMUD, CEPS, HSGD = (app.settings for app in APPS[:5])


# fmt: off
# Strategies: what every one takes, and what each adds.

OPTIONS: dict[str, Range] = {
    "seed": COUNT_OR_0,
    "fraction_evaluate": UNIT,
    "min_train_nodes": COUNT_OR_0,
    "min_available_nodes": COUNT,
    "num_clients": COUNT_OR_0 | NONE,
    "max_repeats": COUNT_OR_0,
    "max_weight_ratio": RATIO,
    "max_update_norm_ratio": RATIO,
    "max_loss_ratio": RATIO,
    "quarantine_after": COUNT_OR_0,
}
case("strategies:Federation", {"min_available_nodes": 1}, **OPTIONS)

CLUSTERED = {"num_servers": 2, "min_available_nodes": 4}
case("strategies:SDFeel", CLUSTERED, settings=SD_FEEL,
    only=("tau1", "tau2", "alpha", "participation", "probe_rounds"),
    names={"tau1": "local_steps"}, num_servers=integer(1, 4), edge_servers=one_of("emulated", "nodes"),
    aggregation=RULES, topology=text(["path", "ring"], ["moebius", "", "torus(3,3)"]))
case("strategies:FedAvg", {}, local_steps=COUNT, participation=SHARE, aggregation=RULES)
case("strategies:HierFAvg", CLUSTERED, settings=SD_FEEL, only=("tau1", "tau2"),
    names={"tau1": "local_steps"}, num_servers=integer(1, 4))
case("strategies:Feel", {"min_available_nodes": 6}, names={"tau1": "local_steps"}, tau1=COUNT,
    clients_per_round=integer(1, 6))
PEERS = ["127.0.0.1:1", "127.0.0.1:2"]
case("strategies:EdgeServerSDFeel", {"edge": 0, "peers": PEERS, "topology": "complete"}, settings=SD_FEEL,
    only=("tau1", "tau2", "alpha"), names={"tau1": "local_steps"}, edge=integer(0, 1),
    peer_timeout=POSITIVE, lost_after=POSITIVE)
case("strategies:Stragglers", {"lasting": True, "probability": 0.1, "slowdown": 2.0}, probability=SHARE,
    slowdown=real(1, 1e6))
reads("strategies.sd_feel.simulated_time:Stragglers.parse", "stragglers",
    ["", "transient(0.1,2)", "lasting(1,1)"],
    ["transient(0,2)", "transient(0.1)", "lasting(0.1,0.5)", "slow(0.1,2)", "lasting(a,2)"])

case("strategies:SimilarityFree", {"schedule": resolve_name("hedgerow.strategies.schedules:Fixed")(1, 4)},
    settings=SIMILARITY_FREE,
    only=("local_iters", "batch_size", "schedule_drives", "weighting", "probe_rounds"),
    operator=one_of("gradient", "prox"), compressor=COMPRESSORS, aggregation=RULES)
case("strategies:Buffer", {"size": 1}, size=COUNT, concurrency=COUNT | NONE,
    staleness=one_of("sqrt", "none"), max_staleness=COUNT_OR_0 | NONE)
case("strategies:InnerSolver", {}, steps=COUNT, tol=real(0, 1, "high"), batch=one_of("fixed", "fresh"))
case("strategies.schedules:Fixed", {"c": 1, "num_rounds": 4}, c=POSITIVE, num_rounds=COUNT)
case("strategies.schedules:Diminishing", {"c": 1, "nu": 0.6}, c=POSITIVE, nu=real(0.5, 1, "low high"))
case("strategies.schedules:StepDecay", {"gamma0": 1, "decay_factor": 2, "stage_len": 1}, gamma0=POSITIVE,
    decay_factor=real(1, opened="low"), stage_len=COUNT)
case("strategies.schedules:theory_stage_len", {"num_rounds": 16, "decay_factor": 2},
    num_rounds=integer(2), decay_factor=real(1, opened="low"))

LAYERS = tuple(resolve_name("hedgerow.wire.layers:LayerShape")(key, shape) for key,
    shape in (("a", (8, 6)), ("b", (8, 8)), ("c", (6, 8)), ("d", (4, 6))))
LAYERED = {"layers": LAYERS, "num_parameters": sum(layer.size for layer in LAYERS), "min_available_nodes": 5,
    "ratio": 0.95}
TRAINING = {"learning_rate": POSITIVE | NONE, "local_epochs": COUNT, "batch_size": COUNT,
    "skip_front": COUNT_OR_0, "skip_back": COUNT_OR_0, "num_clients_per_round": integer(1, 5) | NONE,
    "ratio": REACHED}
LAYERED_SETTINGS = ("budget", "sync", "weighting")
for name, more in (
    ("FedMUD", ("layout",)),
    ("LoRA", ()),
    ("FedExLoRA", ()),
    ("FedLMT", ("view",)),
    ("FedPara", ("view",)),
    ("FedHM", ("view",)),
    ("EF21P", ()),
    ("FedBAT", ()),
):
    case(f"strategies:{name}", LAYERED, settings=FEDMUD, only=(*LAYERED_SETTINGS, *more), **TRAINING)
for name in ("FedMUD", "LoRA", "FedExLoRA", "FedLMT", "FedPara"):
    CASES[f"strategies:{name}"].ranges["init_a"] = POSITIVE | NONE
CASES["strategies:FedMUD"].ranges["reset_interval"] = COUNT
CASES["strategies:LoRA"].ranges["reset_interval"] = COUNT | NONE
CASES["strategies:FedMUD"].ranges["variant"] = one_of("mud", "mud+f", "mud+aad", "mud+bkd",
    "mud+bkd+aad")

GRAPH = nx.path_graph(6)
GOSSIP = {"dim": 16, "topology": GRAPH, "min_available_nodes": 6}
DIRECTED = ["directed-ring", "one-peer-exponential", "directed-out(3)"]
BASELINES: dict[str, dict[str, Range]] = {
    "DPSGD": {"local_steps": COUNT, "participation": SHARE, "sparsity": COUNT | NONE},
    "DFedAvgM": {
        "local_steps": COUNT,
        "participation": SHARE,
        "momentum": real(0, 1, "high"),
        "bits": integer(2, 16) | NONE,
    },
    "DFedSAM": {"local_steps": COUNT, "participation": SHARE, "rho": NOT_NEGATIVE},
    "DCDPSGD": {"bits": integer(2, 16)},
    "ChocoSGD": {
        "local_steps": COUNT,
        "step_gamma": SHARE | NONE,
        "delta": SHARE | NONE,
        "bits": integer(2, 16) | NONE,
    },
    "BEER": {"step_gamma": SHARE | NONE, "delta": SHARE | NONE, "bits": integer(2, 16) | NONE},
    "SGP": {"local_steps": COUNT},
    "Matcha": {"budget": SHARE},
}
for name, more_ranges in BASELINES.items():
    case(
        f"strategies:{name}",
        {**GOSSIP, "step_gamma": 0.5} if "step_gamma" in more_ranges else GOSSIP,
        settings=CEPS,
        only=("learning_rate",),
        names={"bits": "bits|codec|width"},
        dim=COUNT,
        num_iterations=COUNT | NONE,
        **more_ranges,
        **({} if name == "SGP" else {"topology": text(["ring"], ["moebius", *DIRECTED])}),
    )
case("strategies:DPDSGT", {**GOSSIP, "privacy": Privacy("sound")}, settings=CEPS, only=("learning_rate",),
    dim=COUNT, topology=text(["ring"], ["moebius", *DIRECTED]))
case("strategies:CEPS", {**GOSSIP, "sparsity": 3, "topology": "ring"}, settings=CEPS,
    only=("participation", "codec", "mu", "sigma_rule", "c"), dim=integer(3), sparsity=integer(1, 16),
    measurements=COUNT | NONE, interval=COUNT | Range(((2, 4), [2, 4]), ()),
    sigma_d=one_of("samples", "bits"),
    num_iterations=COUNT | NONE,
    aggregation=text(["mean", "median", "trimmed-mean(0.1)", "clipped(1)"],
        ["krum(1)", "geometric-median", "median(1)", "clipped(0)", ""]),
    topology=text(["ring"], ["moebius", *DIRECTED]))
case("strategies:OneBitCode", {}, settings=CEPS,
    only=("expand", "compand", "gamma", "decoder", "phi", "phi_density", "phi_owner"))
case("strategies:Monitor", {"sparsity": 3}, sparsity=COUNT, tol=POSITIVE | NONE)
case("strategies:Site", {"own": 0, "peers": PEERS}, own=integer(0, 1), timeout=POSITIVE,
    lost_after=POSITIVE, names={"own": "own|site"})
case("strategies:PayloadSizes", {"message_bits": 1, "max_bytes": 1}, message_bits=COUNT_OR_0,
    max_bytes=COUNT_OR_0)
case("strategies.ceps.matcha:Activation", {"graph": GRAPH}, budget=SHARE)
case("strategies.ceps.matcha:activation_probabilities",
    {"laplacians": np.zeros((1, 2, 2)), "budget": 0.5}, budget=SHARE)
case("wire.links.peers:PeerChannel",
    {"me": 0, "addresses": PEERS, "neighbours": [], "run": "r", "layout": "l", "largest": 1},
    me=integer(0, 1), largest=COUNT, lost_after=POSITIVE)
case("strategies:Privacy", {}, settings=CEPS, only=("epsilon", "delta", "sensitivity", "clip"),
    mode=one_of("none", "paper", "sound"), noise_source=one_of("entropy", "seed", None))

case("strategies:HSGD", {}, settings=HSGD,
    only=("participation", "halving_period", "mu"),
    names={"global_interval": "P", "local_interval": "Q", "device_aggregation": "aggregation"},
    method=one_of("hsgd", "jfl", "tdcd"), global_interval=COUNT, local_interval=integer(1, 1),
    learning_rate=NOT_NEGATIVE, num_groups=COUNT | NONE, fraction_evaluate=real(0, 0),
    aggregation=RULES,
    device_aggregation=RULES | NONE)
case("strategies:ModelledSystem", {}, compute_seconds=NOT_NEGATIVE, original_groups=COUNT,
    raw_bytes=NOT_NEGATIVE, raw_seconds=NOT_NEGATIVE)
NOISE = {"clip": 1.0, "multiplier": 1.0}
for name in ("EmbeddingNoise", "UploadNoise"):
    case(
        f"strategies:{name}",
        NOISE,
        clip=POSITIVE,
        multiplier=POSITIVE,
        delta=OPEN_SHARE,
        source=one_of("entropy", "seed"),
    )
case("strategies:SumNoise", NOISE, clip=POSITIVE, multiplier=real(1e-3, 1e6), delta=OPEN_SHARE,
    source=one_of("entropy", "seed"), unprotected=Range(((), ("own-data",)), (("luck",),)))
case("strategies:SecureSum", {}, clip=POSITIVE, threshold=real(2 / 3, 1, "high"), min_nodes=integer(3, 255))
case("strategies:Adaptive", {"iterations": 1}, iterations=COUNT, replan_every=COUNT_OR_0,
    eta=one_of("keep", "strategy3"), eta_power=Range((2, 3), (1, 4, 2.5, "x", None)))
case("strategies:Probing", {}, steps=COUNT, batches=COUNT, batch=COUNT | NONE,
    aggregate=one_of("max", "mean"), final_loss=real(-1e300, 1e300) | NONE)
case("strategies.hsgd:OwnDataSetup", {"build": lambda *_: None, "model": "mlp"}, settings=HSGD,
    only=("holdout", "rematch_every", "specificity"),
    standardise=Range(("federated", "none", (0.0, 1.0)), ("x", (0.0, 0.0), (NAN, 1.0))),
    class_weights=Range(("none", "balanced", (1.0, 2.0)), ("x", (), (1.0, 0.0), (INF,))))
# What theory computes before a run.


def made(path: str, *arguments: Any, **keywords: Any) -> Any:
    """Return what something public returns, as an argument of another."""
    return resolve_name(f"hedgerow.{path}")(*arguments, **keywords)


def calls(
    module: str,
    *,
    names: Mapping[str, str] | None = None,
    **functions: tuple[Mapping[str, Any], Mapping[str, Range]],
) -> None:
    """Add functions of a module, each with a valid call and its ranges."""
    for name, (good, ranges) in functions.items():
        case(f"{module}:{name}", good, names=names, **ranges)


ESTIMATES = made("strategies.hsgd.theory:Estimates", 2.3, 0.5, 0.5)
SIZES = made("strategies.hsgd.theory:Sizes", 33, 3584, 3584, 16, 16, 29)
PARTS = made("strategies.hsgd.theory:RoundParts", 1.0, 1.0, 1.0)
PQT = {"P": 2, "Q": 2, "T": 4}
calls("strategies.hsgd.theory", eta_max=({"rho": 1.0, "P": 1}, {"rho": POSITIVE, "P": real(1)}),
    interval_max=({"rho": 1.0, "eta": 0.1}, {"rho": POSITIVE, "eta": POSITIVE}),
    bound=({"known": ESTIMATES, "eta": 0.1, **PQT},
        {"P": POSITIVE, "Q": POSITIVE, "eta": POSITIVE, "T": COUNT}),
    eta_2=({"known": ESTIMATES, "P": 2, "Q": 2, "gradient2": 1.0}, {"gradient2": NOT_NEGATIVE}),
    iterations=({"T": 4, "P": 2}, {"T": COUNT, "P": COUNT}),
    lambda_min=({"known": ESTIMATES, "P": 2, "eta": 0.01, "T": 4, "target": 1.0},
        {"target": POSITIVE, "eta": POSITIVE}),
    q_star=({"known": ESTIMATES, "eta": 0.01, "T": 4},
        {"eta": POSITIVE, "T": COUNT, "eta_power": Range((2, 3), (1, 4))}),
    choose_same_interval=({"known": ESTIMATES, "eta": 0.01, "T": 4},
        {"eta": Range((0.01,), POSITIVE.bad), "T": COUNT}),
    choose_local_interval=({"known": ESTIMATES, "P": 2, "eta": 0.01, "T": 4, "target": 1e3},
        {"P": Range((2,), COUNT.bad)}),
    choose_eta=({"known": ESTIMATES, "P": 2, "Q": 2, "gradient2": 1.0}, {"gradient2": POSITIVE}),
    halved_eta=({"t": 1, "eta0": 0.1, "period": 10},
        {"t": COUNT_OR_0, "eta0": POSITIVE, "period": COUNT}),
    plans=({"target": 1e3, "known": ESTIMATES, "groups": [SIZES], "eta": 0.01, "T": 4},
        {"target": POSITIVE, "eta": real(0, opened="low"), "compute_seconds": NOT_NEGATIVE}))
calls("strategies.hsgd.theory",
    Sizes=(
        {"head": 1, "hospital": 1, "device": 1, "hospital_encoding": 1, "device_encoding": 1,
            "batch": 1},
        dict.fromkeys(("head", "hospital", "device", "hospital_encoding", "device_encoding", "batch"),
            COUNT)),
    paper_bytes=({"sizes": SIZES, "method": "tdcd", **PQT},
        {"P": integer(2, 2), "Q": Range((1, 2), COUNT.bad), "T": Range((2, 4), COUNT.bad),
            "raw_bytes": NOT_NEGATIVE, "method": one_of("hsgd", "jfl")}),
    traffic=({"sizes": SIZES, "P": 2, "Q": 2, "T": 4}, {"Q": integer(1, 2)}),
    round_parts=({"sizes": SIZES}, {"method": one_of("hsgd", "jfl", "tdcd")}),
    round_seconds=({"parts": PARTS, "P": 2, "Q": 2, "compute_seconds": 0.1},
        {"compute_seconds": NOT_NEGATIVE}))
case("strategies.hsgd.theory:Estimates", {"F0": 2.0, "rho": 1.0, "delta": 1.0},
    F0=real(0, opened="low"), rho=POSITIVE, delta=NOT_NEGATIVE,
    final_loss=Range((0.0, -1e3), (2.0, *NO_NUMBER)))

SYSTEM = made("strategies.sd_feel.theory:preset", "paper-text")
PROBLEM = made(
    "strategies.sd_feel.theory:ProblemConstants", delta=1, smoothness=1, sigma2=1, kappa2=0.25, sum_m2=0.02
)
CONSTANTS = made("strategies.sd_feel.theory:bound_constants", 1, 1, 1, 0.5)
SCHEMES = one_of("sd-feel", "hierfavg", "feel", "fedavg")
calls("strategies.sd_feel.theory", names={"name": "preset"},
    preset=({"name": "paper-text"}, {"name": one_of("paper-text")}),
    System=({"num_params": 1, "compute": SYSTEM.compute}, {"num_params": COUNT, "num_servers": COUNT}),
    block_seconds=({"scheme": "sd-feel", "system": SYSTEM, "tau1": 1},
        {"scheme": SCHEMES, "tau1": COUNT, "tau2": COUNT, "alpha": COUNT_OR_0}),
    round_seconds=({"scheme": "sd-feel", "system": SYSTEM, "tau1": 1}, {"tau1": COUNT}),
    inter_seconds=({"scheme": "sd-feel", "system": SYSTEM}, {"alpha": COUNT_OR_0}),
    latency=({"scheme": "sd-feel", "system": SYSTEM, "K": 4, "tau1": 1}, {"K": COUNT_OR_0}),
    traffic=({"scheme": "sd-feel", "K": 0, "tau1": 1, "num_clients": 1},
        {"K": COUNT_OR_0, "tau1": COUNT, "num_clients": COUNT, "num_servers": COUNT,
            "num_edges": COUNT_OR_0}),
    ProblemConstants=({"delta": 1, "smoothness": 1, "sigma2": 1, "kappa2": 0.25, "sum_m2": 0.02},
        {"delta": NOT_NEGATIVE, "sigma2": NOT_NEGATIVE, "kappa2": NOT_NEGATIVE, "smoothness": POSITIVE,
            "sum_m2": SHARE}),
    bound_constants=({"tau1": 1, "tau2": 1, "alpha": 1, "zeta": 0.5},
        {"tau1": COUNT, "tau2": COUNT, "alpha": COUNT, "zeta": real(0, 1, "high")}),
    eta_max=({"smoothness": 1.0, "V3": 1.0}, {"smoothness": POSITIVE, "V3": NOT_NEGATIVE}),
    bound=({"problem": PROBLEM, "constants": CONSTANTS, "eta": 0.1, "K": 1},
        {"eta": POSITIVE, "K": COUNT}),
    plans=(
        {"target": 1.0, "problem": PROBLEM, "system": SYSTEM, "eta": 0.005, "zeta": 0.5, "tau1": [1],
            "tau2": [1], "alpha": [1]},
        {"target": Range((1.0,), real(0, opened="low").bad), "eta": Range((0.001,), POSITIVE.bad),
            "zeta": Range((0.0, 0.5), real(0, 1, "high").bad)}))

KNOWN = made("strategies.similarity_free.theory:Constants", 2, 0.5, 3)
FIXED, DECAY = made("strategies.schedules:Fixed", 1, 4), made("strategies.schedules:StepDecay", 1, 2, 4)
FAMILY = one_of("fedavg", "ef-fedavg")
calls("strategies.similarity_free.theory",
    max_step=({"algorithm": "fedavg", "L": 1},
        {"algorithm": FAMILY, "L": POSITIVE, "contraction": SHARE,
            "mode": one_of("corrected", "printed")}), omega=({"contraction": 1}, {"contraction": SHARE}),
    system_constants=({"algorithm": "fedavg", "L": 1, "sigma2": 0, "delta_inf": 0},
        {"algorithm": FAMILY, "sigma2": NOT_NEGATIVE, "delta_inf": NOT_NEGATIVE, "local_iters": COUNT}),
    Constants=({"b1": 1, "b2": 1, "b3": 1}, {"b1": NOT_NEGATIVE, "b2": POSITIVE, "b3": NOT_NEGATIVE}),
    bound_any=({"constants": KNOWN, "V0": 1, "steps": [0.1]},
        {"V0": NOT_NEGATIVE, "steps": Range(([0.1],), ([], [0.1, 0.0], [INF]))}),
    bound_fixed=({"constants": KNOWN, "V0": 1, "schedule": FIXED}, {"V0": NOT_NEGATIVE}),
    bound_step_decay=({"constants": KNOWN, "R": 1, "schedule": DECAY, "num_rounds": 8},
        {"R": NOT_NEGATIVE}),
    best_c_fixed=({"constants": KNOWN, "V0": 1}, {"V0": POSITIVE, "num_rounds": COUNT}),
    rounds_fixed=({"constants": KNOWN, "V0": 1, "c": 1, "epsilon": 0.1},
        {"c": POSITIVE, "epsilon": POSITIVE}),
    uplink_bits_to_accuracy=({"rounds": 1, "num_nodes": 1, "message_bits": 32},
        {"num_nodes": COUNT, "message_bits": COUNT}))
case("strategies.similarity_free.planner:estimates", {"L": 1, "sigma2": 1, "initial_loss": 2}, L=POSITIVE,
    sigma2=NOT_NEGATIVE, initial_loss=POSITIVE)

calls("strategies.fedmud.init_width",
    step_gain=({"variant": "mud", "init_a": 0.1},
        {"variant": one_of("mud", "mud+aad"), "init_a": POSITIVE, "rank": COUNT}))
RING = made("strategies.topology:mixing", nx.cycle_graph(4), np.ones(4))
case("strategies:mixing", {"graph": nx.cycle_graph(4), "sizes": [1, 1, 1, 1]},
    sizes=Range(([1, 2, 3, 4],), ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 0.0], [1.0, 2.0, 3.0, -4.0], 5.0)))
CASES["RING.gossip"] = Case(RING.gossip, {"models": np.zeros((4, 2)), "alpha": 1}, {"alpha": COUNT_OR_0})
case("strategies.topology:validate_topology", {"name": "ring", "num_nodes": 6},
    names={"name": "topology"},
    name=text(["ring", "regular(3)", "torus(2,3)", "bipartite", "erdos-renyi(1)"],
        ["moebius", "", "ring(3)", "ring()", "regular", "regular(6)", "regular(1)",
            "regular(2.5)", "erdos-renyi(0)", "erdos-renyi(1.1)", "erdos-renyi(0.1.2)",
            "geometric(0)", "torus(2,4)", "torus(10)", "torus(2.5,4)"]))


# What travels.

reads("wire.robust_means:parse_aggregation", "aggregation", RULES.good, RULES.bad)
reads("wire.compress:parse_compressor", "compressor", COMPRESSORS.good, COMPRESSORS.bad)
reads("wire.compress:validate_compressor", "compressor", COMPRESSORS.good,
    (*COMPRESSORS.bad, "randk(0.1,round=3)"))
case("wire.vector_codecs:parse_codec", {"name": "1bcs", "s": 3, "d": 9}, names={"name": "codec|width"},
    name=text(["1bcs", "sparse32", "dense64", "quantised8", "quantised2x9"],
        ["dense", "sparse8", "", f"topk({'9' * 10_000})"]), s=COUNT, d=COUNT, gamma=real(1, 1e100, "low"),
    phi_density=real(0.5, 1))
for name in ("TopK", "RandK"):
    case(f"wire.compress:{name}", {"fraction": 0.1}, fraction=SHARE)
CASES["TopK(count)"] = Case("wire.compress:TopK", {"count": 1}, {"count": COUNT})
CASES["RandK(round)"] = Case("wire.compress:RandK", {"fraction": 0.1},
    {"round": integer(0, 10**10 - 1) | NONE})
case("wire.compress:rand_k", {"size": 30, "keep": 1, "seed": 0, "round": 1, "partition_id": 0},
    keep=integer(1, 30))
case("wire.vector_codecs:Dense", {}, width=Range((32, 64), (16, 0, "x", None)))
case("wire.vector_codecs:Quantised", {}, width=integer(2, 16))
case("wire.vector_codecs:Sparse", {"s": 1}, s=COUNT, width=Range((16, 32, 64), (8, 0, "x", None)))
case("wire.onebit:OneBit", {"s": 2, "d": 12}, settings=CEPS, only=("expand", "compand", "decoder", "phi"),
    s=COUNT, d=COUNT, gamma=real(1, 1e100, "low"), phi_density=real(0.5, 1), memory_limit=COUNT_OR_0)
case("wire.sensing:GaussianSensing", {"seed": (1,), "d": 5, "n": 5}, d=COUNT, n=COUNT, density=SHARE,
    memory_limit=COUNT_OR_0, seed=Range(((0,), (1, 2)), ((), (1, -1))))
case("wire.thresholding:project", {"v": np.ones(3), "s": 1}, s=COUNT)
CASES["Rates"] = Case(lambda rate: made("wire.clock:Rates", {"a->b": rate}), {"rate": 1.0},
    {"rate": POSITIVE}, {"rate": "a->b"})
CASES["Rates.seconds"] = Case(made("wire.clock:Rates", {"a->b": 1.0}).seconds,
    {"bits": 1.0, "link": "a->b"}, {"bits": NOT_NEGATIVE, "link": one_of("a->b")})
case("wire.clock:Compute", {"flops_per_iteration": 1.0, "flops_per_second": 1.0},
    flops_per_iteration=POSITIVE, flops_per_second=POSITIVE)
CASES["Compute.seconds"] = Case(made("wire.clock:Compute", 1.0, 1.0).seconds, {"iterations": 1},
    {"iterations": NOT_NEGATIVE})
CASES["Clock.advance"] = Case(made("wire.clock:Clock").advance, {"seconds": 1.0}, {"seconds": NOT_NEGATIVE})
case("wire.layers:LayerShape", {"key": "conv", "shape": (3, 4)},
    shape=Range(((3, 4), (3, 4, 5, 6)), ((3,), (3, 4, 5), (3, 0), (1, 2, 3, 4, 5))),
    names={"shape": "conv"})
PLAN = {"layers": LAYERS, "num_parameters": 1000, "variant": "mud", "skip_front": 1, "skip_back": 1,
    "ratio": 0.95}
CASES["Factorisation.plan"] = Case("wire.lowrank:Factorisation.plan", PLAN,
    {"variant": one_of("mud", "mud+f", "dense"), "budget": one_of("model", "layer"),
        "layout": one_of("flat", "tiled"), "view": one_of("buffer", "convolutions"), "ratio": REACHED,
        "init_a": POSITIVE, "skip_front": COUNT_OR_0,
        "num_parameters": integer(sum(layer.size for layer in LAYERS))})
for path in ("generator", "torch_generator"):
    case(
        f"wire.seeds:{path}",
        {"seed": 0, "purpose": made("wire.seeds:Purpose", 1)},
        seed=COUNT_OR_0,
        round=COUNT_OR_0,
        partition_id=COUNT_OR_0,
    )
case("wire.elias_fano:index_bits", {"size": 4, "count": 1}, size=integer(1, 2**31 - 1), count=integer(0, 4))
MOST_DEVIATION = resolve_name("hedgerow.wire.discrete_gaussian:MAX_DEVIATION")
case("wire.discrete_gaussian:discrete_gaussian",
    {"deviation": 1, "count": 3, "flips": made("wire.discrete_gaussian:CoinFlips", bytes(32))},
    deviation=integer(1, MOST_DEVIATION))


# What is learnt.

reads("tasks:validate_scheme", "partition",
    ["iid", "dirichlet(0.5)", "shards(2)", "labels(1)", "ring(2)", "with-replacement(5)",
        "capped-dirichlet(0.3)", "source", "source(0.7)", "source(1)"],
    ["", "random", "dirichlet(0.5", "iid(3)", "iid()", "dirichlet", "dirichlet(0)", "dirichlet(-1)",
        "capped-dirichlet", "dirichlet(nan)", "dirichlet(inf)", "shards", "shards(0)", "labels(1.5)",
        "with-replacement", "source()", "source(0)", "source(1.1)", "source(nan)"],
    parameter="scheme")
reads("tasks:validate_group_scheme", "partition", ["iid", "pairs(4, 2)", "rates(1.0)", "sites"],
    ["shards(2)", "iid(3)", "pairs(3, 2)", "pairs(nan, 2)", "pairs(4, a)", "rates(0)", ""],
    parameter="scheme")
LABELS = np.arange(12) % 3
case("tasks:partition", {"scheme": "iid", "labels": LABELS, "num_partitions": 3, "seed": 0},
    num_partitions=integer(1, 12), seed=COUNT_OR_0)
case("tasks:group_split", {"scheme": "iid", "labels": LABELS, "num_groups": 3, "seed": 0},
    num_groups=integer(1, 12), seed=COUNT_OR_0,
    names={"num_groups": "num-groups"})
case("tasks:build_model", {"name": "mlp", "input_shape": (1, 28, 28), "num_classes": 10, "seed": 0},
    name=one_of("mlp", "logistic"), input_shape=Range(((5,), (1, 28, 28)), ((), (0, 3))),
    num_classes=integer(2), seed=COUNT_OR_0, dropout=real(0, 0), names={"name": "model"})
CASES["build_model(lenet)"] = Case("tasks:build_model",
    {"name": "lenet", "input_shape": (1, 28, 28), "num_classes": 10, "seed": 0},
    {"dropout": real(0, 1, "high"), "input_shape": Range(((1, 28, 28),), ((1, 15, 28), (784,)))})
case("tasks:split_model",
    {"name": "mlp", "hospital_shape": (3,), "device_shape": (3,), "num_classes": 2, "seed": 0},
    name=one_of("mlp", "auto"), hospital_shape=Range(((1,),), ((), (0,))),
    device_shape=Range(((1,),), ((), (0,))), num_classes=integer(2), seed=COUNT_OR_0,
    names={"name": "model"})
CASES["split_model(cnn)"] = Case("tasks:split_model",
    {"name": "cnn", "hospital_shape": (1, 8, 8), "device_shape": (1, 8, 8), "num_classes": 2, "seed": 0},
    {"hospital_shape": Range(((1, 8, 8),), ((1, 7, 28), (64,)))}, {"hospital_shape": "shape"})
CASES["split_model(lstm)"] = Case("tasks:split_model",
    {"name": "lstm", "hospital_shape": (3, 2), "device_shape": (3, 2), "num_classes": 2, "seed": 0},
    {"hospital_shape": Range(((3, 2),), ((3,), (1, 8, 8)))}, {"hospital_shape": "shape"})
case("tasks:SplitModel",
    {"head": nn.Linear(2, 1), "hospital": nn.Linear(1, 1), "device": nn.Linear(1, 1),
        "hospital_encoding": 1, "device_encoding": 1}, hospital_encoding=COUNT, device_encoding=COUNT)
case("tasks:check_augmentation", {"name": "none", "input_shape": (3, 8, 8)}, name=one_of("none", "flips"),
    names={"name": "augmentation"})
case("tasks:load", {"name": "mnist-5k"}, name=one_of("mnist-5k"), names={"name": "dataset"})
case("tasks.regression:LinearData", {}, n=integer(10), s=integer(1, 1000), noise=NOT_NEGATIVE,
    samples=Range(((1, 1), (4, 5)), ((5, 4), (0, 1))))
case("tasks.regression:linear_part",
    {"data": made("tasks.regression:LinearData", n=4, s=2, samples=(2, 3)), "node": 0, "seed": 0},
    node=COUNT_OR_0, seed=COUNT_OR_0)
case("tasks:evaluate",
    {"model": nn.Linear(4, 3), "x": torch.ones(2, 4), "y": torch.zeros(2, dtype=torch.int64)},
    batch_size=COUNT)


# Nodes.

reads("clients:parse_inner_lr", "inner-lr", ["auto:0.1", "fixed:1"],
    ["", "0.1", "auto", "auto:", "auto:0", "fixed:-1", "fixed:nan", "fixed:inf", "other:0.1"])
reads("clients:resolve_device", "device", ["auto", "cpu"],
    ["", "abacus", "gpu", "cuda:x", "cuda:-1", "meta", "mkldnn"], parameter="name")
ONE, X, Y = np.array([0]), torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
case("clients.similarity_free.proximal:ProximalWork",
    {"start": {}, "x": X, "y": Y, "batches": [ONE], "gamma": 0.1, "inner_lr": 0.1, "steps": 3},
    gamma=POSITIVE, inner_lr=POSITIVE, steps=COUNT, tol=real(0, 1, "high"))
LINEAR = nn.Linear(3, 2)


def work(batches: list[np.ndarray]) -> list[LocalWork]:
    return [LocalWork(LINEAR.state_dict(), X, Y, batches, 0.1)]


case("clients:local_sgd", {"model": LINEAR, "works": []}, mode=one_of("auto", "loop", "stack"),
    max_nodes=COUNT | NONE)
case("clients:LocalSGD", {}, warm_up=real(0, 1), accumulate=COUNT)
case("clients:LocalAdamW", {}, warm_up=real(0, 1), accumulate=COUNT, weight_decay=real(0, 1),
    beta1=real(0, 1, "high"), beta2=real(0, 1, "high"), eps=POSITIVE)
case("clients.training.arithmetic:Arithmetic", {}, precision=one_of("float32", "bf16"), compiled=COUNT_OR_0)
case("clients.training.batches:epoch_batches",
    {"part": np.arange(4), "seed": 0, "round": 0, "partition_id": 0, "epochs": 1, "batch_size": 1},
    epochs=COUNT, batch_size=COUNT, shortest=COUNT)
case("clients:LogisticRegression", {"A": np.ones((2, 2)), "y": np.ones(2)}, lam=NOT_NEGATIVE)
SPLIT = made("tasks:split_model", "mlp", (1,), (1,), 2, 0)
case("clients:Party",
    {"role": "hospital", "group": 0, "ids": ["a"], "x": torch.zeros(1, 1), "y": torch.zeros(1),
        "model": SPLIT}, role=one_of("hospital", "device", "edge"), group=COUNT_OR_0)


# Whoever runs a federation.

case("sim.deploy.certificates:check_sizes", {"nodes": 1, "days": 1}, nodes=integer(0, 10_000),
    days=integer(1, 3650), edges=integer(1, 1000))
case("sim.runs.live:LiveProgress", {"num_rounds": 1, "quiet": True}, num_rounds=COUNT)
case("sim.engine.workers:check_workers", {"workers": 1, "real_time": False}, workers=integer(0, 1024))
case("sim:InProcessGrid", {"client_app": made("clients:BatchClientApp", {}), "num_nodes": 1},
    num_nodes=COUNT | Range((np.int64(2),), ()), max_in_flight=COUNT | NONE)
case("sim:FaultModel", {}, dropout=UNIT, corrupt_rate=UNIT, slowdown=real(1),
    corrupt=one_of("nan", "shape", None))


def keys_of(read: Callable[[Mapping[str, Any]], object]) -> Callable[..., object]:
    """Return what takes the keys of a config as arguments."""
    return lambda **keys: read(keys)


def policy(**keys: Any) -> object:
    """Read a policy of these keys."""
    with NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(toml_text(keys))
        file.flush()
        return read_policy(Path(file.name))


def in_toml(found: Range) -> Range:
    """Return the range without what no TOML file can have."""
    return Range(found.good, tuple(bad for bad in found.bad if bad is not None))


TRUE_OR_FALSE = Range((True, False), (1, "x", 0.5))
POSITIVE_KEY, COUNT_KEY = in_toml(POSITIVE), in_toml(COUNT)
CASES["policy"] = Case(policy, {},
    {"messages": Range((["train"],), (["train."], "train", 3)),
        "imports": Range((["a:b"],), (["shutil"], "a:b")), "share-state": TRUE_OR_FALSE,
        "monitor": TRUE_OR_FALSE,
        **dict.fromkeys(("max-hellos", "max-restores", "max-pooled", "max-unprotected"),
            in_toml(COUNT_OR_0)), **dict.fromkeys(("max-bytes", "max-memory"), COUNT_KEY),
        "max-seconds": POSITIVE_KEY, "secure-sums": in_toml(one_of("allowed", "required")),
        "privacy": in_toml(one_of("none", "paper", "sound")),
        "noise-source": in_toml(one_of("entropy", "seed")), "delta": in_toml(OPEN_SHARE)})
CASES["sound policy"] = Case(policy, {"privacy": "sound"},
    dict.fromkeys(("min-noise-multiplier", "max-clip", "max-epsilon-per-release", "max-epsilon"),
        POSITIVE_KEY))
CASES["faults"] = Case(keys_of(resolve_name("hedgerow.sim:FaultModel").from_run_config), {},
    {"fault-dropout": Range((0.0, 1.0, "0.5"), (-0.1, 1.5, "often", True, NAN)),
        "fault-corrupt-rate": Range((0.0, 1.0), (-0.1, 2.0)),
        "fault-slowdown": Range((1.0,), (0.5, "x", NAN)),
        "fault-delay": Range(("uniform:1,2", 3), ("gamma:1", "uniform:5", "uniform:5,1", -1)),
        "fault-stragglers": Range(("1,2",), ("one",)), "fault-crash": Range(("3:1",), ("3", "3:0")),
        "fault-corrupt": Range(("nan",), ("evil",)), "fault-tolerance": Range((), (1,))})


FIXED_AT = Case(FIXED, {"k": 0}, {"k": COUNT_OR_0})
CASES.update({
    "Fixed()": FIXED_AT,
    "Fixed.values": Case(FIXED.values, {"num_rounds": 1}, {"num_rounds": COUNT}),
    "strategies.schedules:schedule": Case("strategies.schedules:schedule",
        {"kind": "fixed", "c": 1, "num_rounds": 4}, {}),
    "SimilarityFree.named": Case("strategies:SimilarityFree.named",
        {"algorithm": "fedavg", "schedule": FIXED}, {}),
    "SDFeel.check_num_rounds": Case(made("strategies:SDFeel", tau2=2).check_num_rounds,
        {"num_rounds": 2}, {}),
})


# The settings of apps. Of those that are texts, some that are bad; all others are derived.

BAD_TEXTS: Mapping[str, tuple[Any, ...]] = {
    "dataset": ("mnist-9", "x:"),
    "partition": ("dirichlet(-1)", "pairs(a,b)", "rates(nan)", ""),
    "model": ("resnet-9000",),
    "scaling": ("huge",),
    "device": ("abacus",),
    "aggregation": ("krum(-1)", "mode"),
    "device-aggregation": ("clipped(0)",),
    "stop-after": ("sim-seconds=-1", "rounds=3", "bits=nan", "bits="),
    "registry": ("nowhere.toml",),
    "classes": ("1", "a,a", "a,,b", "0", str(2**20 + 1)),
    "standardise": ("", "both", "1", "0,0", "nan,1", "0,inf", "1,2,3", "0,-1"),
    "class-weights": ("-1,1", "x", ""),
    "compressor": COMPRESSORS.bad[:20],
    "inner-lr": ("fast", "auto:0"),
    "stragglers": ("transient(2,10)", "slow(0.1,2)"),
    "topology": ("moebius", "ring(2)"),
    "output-dir": ("/dev/null/x", "\0"),
    "data-dir": ("~nosuchuser",),
}


def bad_settings(app: AppCase, key: str) -> list[Any]:
    """Return values that a key of an app does not take."""
    setting: Setting = app.settings.SETTINGS[key]
    values, default = setting.kind.values, setting.default
    if values is None:
        return [1, True, *BAD_TEXTS.get(key, ())]
    if isinstance(values, tuple):
        return [one for one in one_of(*values).bad if one is not None] + [1] * (values == (False, True))
    opened = "low " * values.open_below + "high" * values.open_above
    whole = isinstance(default, int)
    ends = integer(int(values.low), values.high) if whole else real(values.low, values.high, opened)
    good = 0.0 if values.zero else None
    return [bad for bad in ends.bad if bad not in (None, [1]) and bad != good]


# What does not go together.


def settings_of(app: AppCase) -> Callable[..., object]:
    """Return what reads the settings of an app, of which some are changed."""
    return keys_of(lambda changes: app.settings.read({**app.defaults, **changes}))


SETTINGS_CASES = {f"{app.name} settings": Case(settings_of(app), {}, {}) for app in APPS}
CASES.update(SETTINGS_CASES)
FEW_MODELS = {"edge_servers": "nodes", "topology": "complete", "clusters": [0] * 4 + [1] * 4}
HALVES = {"role": "hospital", "ids": ["a", "b"], "x": torch.zeros(2, 1), "y": torch.zeros(2)}
SITES = ["127.0.0.1:1", "127.0.0.1:2"]
ONE_SITE = {"num_clients": 6, "min_available_nodes": 3}
SOUND = {"privacy": "sound"}
UNDIRECTED = [
    ({"method": method, "topology": topology}, f"topology must be .*ring-chords.*got '{re.escape(topology)}'")
    for method in sorted(set(CEPS.METHODS) - {"sgp", "sgp-dn"}) for topology in DIRECTED
]
PLAIN_MEANS = "adaptive must be 'off' with an aggregation but 'mean', got 'observe'"

TOGETHER: dict[str, list[tuple[dict[str, Any], str]]] = {
    "strategies:Federation": [
        ({"num_clients": 2, "min_available_nodes": 3},
            "num_clients must be 0 .*, or at least min_available_nodes = 3, got 2"),
    ],
    "strategies:FedAvg": [
        ({"aggregation": "median", "secure_sum": True}, "must be 'mean' with secure_sum"),
        ({"secure_sum": "yes"}, "must be True, False or SecureSum"),
    ],
    "strategies:SDFeel": [
        ({"num_servers": 3, "min_available_nodes": 2}, "num_servers must be from 1 to 2, .*got 3"),
        ({"clusters": "groups"}, "clusters must be a server .* or 'group', got 'groups'"),
        ({"clusters": [0, 0]}, r"clusters must name each server from 0 to 1, got \[0\]"),
        ({"clusters": [0, 0, 1, 1], "num_clients": 5, "topology": [(0, 1)]}, "num_clients must be 4, got 5"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"probe_rounds": 1, "secure_sum": True}, "probe_rounds must be 0 with secure_sum, got 1"),
        ({"edge_servers": "nodes", "secure_sum": True}, "must be False where edge servers are nodes"),
        ({**FEW_MODELS, "aggregation": "krum(0)"}, "where edge servers are nodes must be mean, .*few"),
        ({**FEW_MODELS, "aggregation": "multi-krum(0,1)"}, "must be mean, .*few models"),
        ({**FEW_MODELS, "aggregation": "geometric-median"}, "must be mean, .*few models"),
        ({"num_servers": 4, "topology": "ring", "num_clients": 20, "aggregation": "krum(3)"},
            "needs 9 clients; the smallest cluster has 5"),
    ],
    "strategies:HierFAvg": [
        ({"secure_sum": True}, "secure_sum needs 3 clients in each cluster; the smallest has 2"),
        ({"edge_servers": "nodes"}, "edge_servers"),
    ],
    "SDFeel.check_num_rounds": [({"num_rounds": 3}, "num_rounds must be a multiple of tau2 = 2, got 3")],
    "strategies:Feel": [
        ({"clients_per_round": 9}, "clients_per_round must be from 1 to 6, got 9"),
        ({"pool": [7], "clients_per_round": 1}, r"pool must hold .*got \[7\]"),
    ],
    "SimilarityFree.named": [({"compressor": "sign"}, "fedavg takes none, ef-fedavg does")],
    "strategies.schedules:schedule": [
        ({"kind": "constant"}, "schedule must be one of diminishing, fixed, step-decay, got 'constant'"),
        ({"kind": "diminishing"}, "schedule 'diminishing' must have exactly c, nu.*got c, num_rounds"),
        ({"nu": 1}, "schedule 'fixed' must have exactly c, num_rounds, got c, num_rounds, nu"),
    ],
    "strategies:SimilarityFree": [
        ({"aggregation": "median", "secure_sum": True}, "must be 'mean' with secure_sum"),
        ({"compressor": "topk(0.1)", "secure_sum": True}, "must be 'identity' or 'randk.*with secure_sum"),
        ({"compressor": "randk(0.1)", "secure_sum": True}, "secure_sum must be False with error_feedback"),
        ({"compressor": "sign", "secure_sum": True}, "compressor must be .* with secure_sum, got 'sign'"),
        ({"probe_rounds": 2, "secure_sum": True}, "probe_rounds must be 0 with secure_sum, got 2"),
        ({"min_available_nodes": 2, "secure_sum": True}, "secure_sum needs 3 workers; there are 2"),
    ],
    "strategies:FedMUD": [
        ({"skip_front": 3}, r"skip_front \+ skip_back must be .*got 4"),
        ({"num_clients_per_round": 6},
            "num_clients_per_round must be from 1 to 5, the number of clients, got 6"),
        ({"seed": 2**63}, r"seed must be an integer < 2\^63, got 9223372036854775808"),
        ({"num_clients_per_round": 3, "aggregation": "krum(1)"},
            r"at most 3 updates, .*krum\(1\)', which needs 5"),
        ({"variant": "mud", "aggregation": "median"}, "must be 'mean', .*both factors of 'mud' are trained"),
        ({"variant": "mud+bkd", "aggregation": "median"},
            r"must be 'mean', .*both factors of 'mud\+bkd' are trained"),
        ({"measure_bias": True, "secure_sum": True}, "measure_bias reconstructs"),
        ({"aggregation": "median", "variant": "mud+aad", "secure_sum": True},
            "must be 'mean' with secure_sum"),
        ({"secure_sum": True}, "sync must be 'dense' with secure_sum, got 'catchup'"),
        ({"num_clients_per_round": 2, "secure_sum": True, "sync": "dense"},
            "secure_sum needs 3 nodes in a round; there are 2"),
    ],
    **{
        f"strategies:{name}": [
            ({"skip_front": 3}, r"skip_front \+ skip_back must be .*got 4"),
            ({"aggregation": "median"}, f"aggregation must be 'mean', got 'median': .*{why}"),
        ]
        for name, why in {
            "FedLMT": "both factors of 'lmt' are trained",
            "FedPara": "both factors of 'para' are trained",
            "EF21P": "each node sends other entries",
            "FedBAT": "signs drawn by chance",
        }.items()
    },
    "strategies:CEPS": [
        ({"sparsity": 17}, "sparsity must be from 1 to dim = 16, got 17"),
        ({"codec": "quantised8"}, "codec must be .*got 'quantised8'"),
        ({"interval": (5, 4)}, "interval must be .*got 4"),
        ({"privacy": Privacy("sound")},
            "sigma_rule must be 'fixed_c' with privacy mode 'sound', got 'paper'"),
        ({"site": Site(0, SITES[:1] * 2), **ONE_SITE}, "twice"),
        ({"site": Site(0, [f"127.0.0.1:{1 + i}" for i in range(7)]), **ONE_SITE}, "at most 6"),
        ({"site": Site(0, SITES), "monitor": Monitor(3), **ONE_SITE}, "monitor"),
        ({"site": Site(0, SITES), "stragglers": True, **ONE_SITE}, "first that reply"),
        ({"site": Site(0, SITES), **ONE_SITE, "min_available_nodes": 4},
            "min_available_nodes must be from 1 to 3, .*got 4"),
        ({"site": Site(0, [SITES[0], "far:2"]), **ONE_SITE}, "certificates"),
        ({"secure_sum": True}, "no parameter 'secure_sum'"),
    ],
    "strategies:OneBitCode": [
        ({"phi": "srht", "phi_density": 0.5}, "phi_density must be 1 with phi = 'srht', got 0.5"),
    ],
    "strategies:DPSGD": [
        ({"topology": nx.DiGraph(GRAPH)}, "topology must be .*got a DiGraph"),
        ({"dynamic": True, "participation": 0.5}, "participation must be 1 in a dynamic network, got 0.5"),
        ({"dynamic": True}, "topology must be the name of a random one, or None, in a dynamic network, got "),
    ],
    "strategies:SGP": [
        ({"topology": "one-peer"}, "topology must be .*got 'one-peer'"),
        ({"topology": nx.DiGraph(GRAPH), "dynamic": True}, "topology must be .*got "),
        ({"topology": "one-peer-exponential", "dynamic": True}, "topology must be .*got "),
    ],
    **{
        f"strategies:{name}": [
            ({"bits": None, "top_k": 17}, "top_k must be an integer from 1 to dim = 16, got 17"),
            ({"top_k": 1}, "bits must be None with top_k, got 8"),
            ({"bits": 2, "step_gamma": None}, "step_gamma must be .* with bits = 2 and dim = 16"),
        ]
        for name in ("ChocoSGD", "BEER")
    },
    "strategies.ceps.matcha:Activation": [
        ({"graph": nx.empty_graph(1)}, "num_nodes must be an integer >= 2, got 1"),
    ],
    "wire.links.peers:PeerChannel": [
        ({"neighbours": [0]}, r"neighbours must be from 0 to 1, without 0, got \[0\]"),
        ({"addresses": [SITES[0], "hub"]}, "an address of a peer must be host:port, got 'hub'"),
        ({"addresses": [SITES[0], "127.0.0.1:70000"]}, "must be host:port"),
        ({"addresses": [SITES[0], "10.0.0.1:1"]}, "give each peer a certificate"),
        ({"addresses": SITES[:1] * 2}, "must differ, got '127.0.0.1:1' twice"),
        ({"listen": "0.0.0.0:1"}, "give each peer a certificate"),
    ],
    "strategies:HSGD": [
        ({"global_interval": 3, "local_interval": 2}, "P must be a multiple of Q = 2, got 3"),
        ({"fraction_evaluate": 1.0}, "fraction_evaluate"),
        ({"num_clients": 4, "min_available_nodes": 2}, "num_clients must be min_available_nodes = 2, got 4"),
        ({"method": "jfl", "aggregate": False}, "aggregate must be True in jfl"),
        ({"system": made("strategies:ModelledSystem", original_groups=3)},
            "original_groups must be 1 .*got 3"),
        ({"system": made("strategies:ModelledSystem", raw_bytes=1.0)}, "raw_bytes must be 0 .*got 1.0"),
        ({"aggregate": False, "adaptive": Adaptive(10)},
            "adaptive must be None with aggregate=False"),
        ({"upload_noise": UploadNoise(1, 1), "adaptive": Adaptive(10)},
            "adaptive must be None with upload_noise"),
        ({"upload_noise": UploadNoise(1, 1), "noise": EmbeddingNoise(1, 1, source="seed")},
            "upload_noise must have the source of noise, 'seed', got 'entropy'"),
        ({"aggregation": "krum(1)", "num_groups": 4}, r"'krum\(1\)', which needs 5 groups; num_groups is 4"),
        ({"aggregation": "median", "adaptive": Adaptive(4)},
            "adaptive must be None .*'median': .*plain means"),
        ({"secure_sum": True}, "no parameter 'secure_sum'"),
    ],
    "strategies.hsgd.theory:choose_same_interval": [({"eta": 0.5}, "eta must be at most .*got 0.5")],
    "strategies.hsgd.theory:plans": [
        ({"groups": []}, r"groups must hold the sizes of at least one group, got \[\]"),
        ({"most": 0}, "most must be an integer >= 1, got 0"),
        ({"T": 2**21, "eta": 2.0**-23}, "T or .* must be at most .*got T 2097152 and eta"),
    ],
    "strategies.hsgd.theory:q_star": [
        ({"known": made("strategies.hsgd.theory:Estimates", 2.3, 0.5, 0.0)},
            "delta must be a finite number > 0, got 0.0"),
    ],
    "strategies.hsgd.theory:paper_bytes": [
        ({"P": 3}, "P must be a multiple of Q = 2, got 3"),
        ({"method": "hsgd", "raw_bytes": 1.0}, "raw_bytes must be 0 for hsgd, .*got 1.0"),
    ],
    "strategies.hsgd.theory:round_parts": [
        ({"rates": made("wire.clock:Rates", {"device->edge": 1e6})},
            "link must be one of 'device->edge', got 'edge->device'"),
    ],
    "strategies.hsgd.theory:round_seconds": [({"P": 3}, "P must be a multiple of Q = 2, got 3")],
    "strategies.hsgd.theory:eta_2": [({"P": 3}, "P must be a multiple of Q = 2, got 3")],
    "strategies.hsgd.theory:traffic": [({"P": 4, "T": 6}, "T must be a multiple of P = 4, got 6")],
    "strategies.sd_feel.theory:preset": [
        ({"name": "honest"}, "'honest' needs .*num_params and flops_per_iteration.*, got None and None"),
        ({"name": "honest", "num_params": 5}, "flops_per_iteration, both > 0, got 5 and None"),
    ],
    "strategies.sd_feel.theory:block_seconds": [
        ({"scheme": "fedavg",
            "system": replace(SYSTEM, rates=made("wire.clock:Rates", {"client->edge": 1.0}))},
            "link must be one of 'client->edge', got 'client->cloud'"),
    ],
    "strategies.sd_feel.theory:traffic": [
        ({"K": 9, "tau1": 2, "tau2": 2}, "K must be a multiple of 4, .*got 9"),
    ],
    "strategies.sd_feel.theory:plans": [
        ({"tau1": []}, "tau1 must have at least one integer >= 1"),
        ({"alpha": [0]}, "alpha must be an integer >= 1, got 0"),
    ],
    "strategies.similarity_free.theory:system_constants": [
        ({"algorithm": "fedprox", "local_iters": 2}, "local_iters must be 1 for fedprox, .*got 2"),
    ],
    "strategies.similarity_free.theory:bound_step_decay": [
        ({"num_rounds": 3}, "num_rounds must be at least stage_len = 4, .*got 3"),
    ],
    "strategies.similarity_free.planner:estimates": [({"R": 1}, "R must be a finite number >= V0, 2, got 1")],
    "strategies.topology:validate_topology": [
        ({"name": name, "num_nodes": nodes}, f"{word} must .*got ")
        for name, nodes, word in (
            ("regular(3)", 7, "topology"), ("bipartite", 5, "topology"), ("ring-chords", 5, "topology"),
            ("ring-chords", 2, "topology"), ("torus(2,4)", 10, "topology"), ("torus(10)", 10, "topology"),
            ("fig2a", 10, "topology"), ("ring", 0, "num_nodes"),
        )
    ],
    "wire.vector_codecs:parse_codec": [
        ({"gama": 5}, "gama"),
        ({"name": "quantised1"}, "width must be an integer from 2 to 16, got 1"),
        ({"name": "quantised17"}, "width must be an integer from 2 to 16, got 17"),
    ],
    "wire.compress:TopK": [
        ({"fraction": None}, "either fraction or count must be given, got None and None"),
        ({"count": 1}, "either fraction or count must be given, got .* and 1"),
    ],
    "Factorisation.plan": [
        ({"skip_front": 3}, r"skip_front \+ skip_back must be less than 4, .*got 4"),
        ({"variant": "mud+bkd", "view": "convolutions"},
            r"view must be .* with 'mud\+bkd', .*got 'convolutions'"),
    ],
    "tasks:partition": [
        ({"labels": np.zeros((3, 2), int)}, r"labels must be .*got int64 of shape \(3, 2\)"),
        ({"labels": np.zeros(3)}, "labels must be .*got float64"),
        ({"labels": np.zeros(0, int)}, r"labels must be .*got int64 of shape \(0,\)"),
        ({"scheme": "labels(2)", "labels": np.arange(100) % 10},
            "3 partitions of 2 classes cannot hold all 10"),
        ({"scheme": "labels(4)"}, r"'labels\(4\)': k must be in 1\.\.3"),
        ({"scheme": "labels(1)", "labels": np.repeat([0, 1], [30, 1]), "num_partitions": 6},
            "2 of 6 partitions of 31 samples have no sample"),
        ({"scheme": "shards(5)"}, r"'shards\(5\)' must give at most 12 shards, one per sample, got 5 \* 3"),
        ({"scheme": "ring(2)", "labels": np.arange(10), "num_partitions": 8},
            "num_partitions must be at least 9"),
        ({"num_partitions": 13}, r"with-replacement\(n\)"),
        ({"scheme": "source"}, "'source': the data set has no sources"),
        ({"scheme": "source(0.5)", "sources": np.arange(12) % 4},
            r"'source\(0.5\)': num_partitions must be at least 4, the number of sources, got 3"),
        ({"scheme": "source", "sources": np.zeros(11, int)},
            r"sources must be an array of names or integers \(12,\), .*got int64 of shape \(11,\)"),
    ],
    "tasks:group_split": [
        ({"scheme": "pairs(4, 2)", "num_groups": 3}, "at most 12 samples .*3 groups of 6 samples"),
        ({"scheme": "pairs(4, 2)", "labels": np.zeros(9, int), "num_groups": 1},
            r"at least 2 classes \(there are 1\)"),
        ({"labels": np.zeros((3, 3), int)}, r"labels must have the shape \(N,\) .*got \(3, 3\)"),
    ],
    "tasks:build_model": [
        ({"name": "cnn10", "input_shape": (3, 28, 28)},
            r"input_shape must be \(C, H, W\) with H, W >= 32 for cnn10, got \(3, 28, 28\)"),
        ({"dropout": 0.5}, "dropout must be 0 with mlp, .*got 0.5"),
    ],
    "tasks:check_augmentation": [
        ({"name": "flips", "input_shape": (30,)}, "augmentation must be 'none' .*got 'flips'"),
    ],
    "tasks:evaluate": [
        ({"x": torch.ones(0, 4), "y": torch.zeros(0)}, "x and y must .*got 0 and 0"),
        ({"y": torch.zeros(3)}, "x and y must .*got 2 and 3"),
    ],
    "clients:LogisticRegression": [
        ({"y": np.array([1.0, -1.0])}, "y must have the labels 0 and 1, got .*-1.0"),
    ],
    "clients:local_sgd": [
        ({"works": work([ONE, ONE[:0]])}, r"works\[0\].batches\[1\] must be indices 0 to 1, got none"),
        ({"works": work([np.array([1, 2])])}, r"batches\[0\] must be indices 0 to 1, got 1 to 2"),
        ({"works": work([np.array([-1])])}, r"batches\[0\] must be indices 0 to 1, got -1 to -1"),
    ],
    "clients.similarity_free.proximal:ProximalWork": [
        ({"batches": [ONE] * 2}, "batches must be 1, or one per step, 3, got 2"),
    ],
    "clients.training.batches:epoch_batches": [
        ({"part": np.arange(0)}, "must have at least 1 sample to train on, got 0"),
    ],
    "clients:Party": [
        ({"ids": ["a", "b"]}, "numbers of rows, .*got 2, 1 and 1"),
        ({**HALVES, "ids": ["a", "a"]}, "ids must have each id once, got 1 twice"),
        ({**HALVES, "role": "device"}, "a device must have one person, got 2"),
        ({"x": torch.zeros(1, 1, dtype=torch.float64)},
            "x must be of the model's type torch.float32, got torch.float64"),
    ],
    "sim.engine.workers:check_workers": [
        ({"workers": 2, "real_time": True}, "workers must be 1 with real time.*, got 2"),
    ],
    "sim:InProcessGrid": [
        ({"num_nodes": 2, "node_configs": [{}]}, "node_configs must have one config for each of 2 nodes")
    ],
    "policy": [
        ({"monitr": True}, "unknown key 'monitr'; did you mean 'monitor'"),
        ({"max-epsilon": 3.0}, "privacy must be 'sound' with max-epsilon, got 'none'"),
        ({**SOUND, "monitor": True}, "must be false with privacy = 'sound'"),
        ({**SOUND, "noise-source": "seed"}, "must be 'entropy' with privacy = 'sound'"),
    ],
    "ceps settings": [
        *UNDIRECTED,
        ({"method": "sgp", "topology": "directed-out(16)"}, r"directed-out\(k\) with 2 <= k < num_nodes"),
        ({"method": "sgp", "topology": "directed-moebius"},
            "topology must be one of bipartite, .*directed-ring"),
        ({"method": "sgp-dn", "topology": "one-peer-exponential"},
            "topology must be one of bipartite.*whose graph changes"),
        ({"method": "sgp", "aggregation": "median"},
            "aggregation must be 'mean' with method = 'sgp'.*, got 'median'"),
        ({"topology": "erdos-renyi(0)"}, r"topology must be .*got 'erdos-renyi\(0\)' on 16 nodes"),
        ({"problem": "logistic", "class-0": 1}, "class-1 must be another class than class-0, got 1"),
    ],
    "fedmud settings": [
        ({"method": "fedmud", "view": "convolutions"},
            "view must be 'buffer' but for method = fedlmt, fedpara, fedhm, got 'convolutions'"),
    ],
    "hsgd settings": [
        ({"num-clients": 5}, "num-clients must be 8: 4 hospitals and 4 edges, got 5"),
        ({"method": "tdcd", "tdcd": "merged"}, "num-clients must be 2: 1 hospitals and 1 edges, got 8"),
        ({"local-interval": 3}, "global-interval must be a multiple of local-interval = 3, got 4"),
        ({"iterations": 9}, "iterations must be a multiple of global-interval = 4, got 9"),
        ({"clip": 1.0}, "noise-multiplier must be > 0 with clip = 1.0, got 0.0"),
        ({"method": "tdcd", "tdcd": "isolated", "adaptive": "observe"},
            "adaptive must be 'off' with tdcd = 'isolated', got 'observe'"),
        ({"aggregation": "krum(1)"},
            r"aggregation must be a rule of at most num-groups = 4 groups.*, got 'krum\(1\)'"),
        ({"aggregation": "median", "adaptive": "observe"}, PLAIN_MEANS),
    ],
}
for name in (*sorted(BASELINES.keys() - {"SGP", "DPSGD"}), "DPDSGT"):
    TOGETHER.setdefault(f"strategies:{name}", []).append(
        ({"topology": nx.DiGraph(GRAPH)}, "topology must be .*got a DiGraph"))
for name in ("EF21P", "FedBAT", "FedHM"):
    TOGETHER.setdefault(f"strategies:{name}", []).append(
        ({"secure_sum": True}, "secure_sum must be False with this method"))
TOGETHER["strategies:FedHM"].append(({"skip_back": 9}, r"skip_front \+ skip_back must be .*got 10"))
# fmt: on


# The property


def complaints(call: Callable[[], object], *words: str) -> list[str]:
    """Return what is wrong with how a call is refused: in one line that has all words, each a pattern."""
    try:
        call()
    except (ValueError, TypeError) as error:
        said = str(error).removeprefix("Bad settings:\n")
    else:
        return ["is not refused"]
    wrong = ["more than a line"] if "\n" in said else []
    wrong += [f"says nothing of {one}" for one in words if not re.search(one, said)]
    return [f"{one}: {said}" for one in wrong]


def value_of(value: Any) -> str:
    """Return a pattern of what an error says of a value; of a long one, its beginning."""
    said = repr(value)
    return re.escape(said[:60]) if len(said) > 60 else rf"(?<![\w.-]){re.escape(said)}(?![\w.])"


every_case = pytest.mark.parametrize("path", [path for path, one in CASES.items() if one.ranges])


@every_case
def test_a_bad_value_is_refused_by_its_name_and_value(path: str) -> None:
    one, wrong = CASES[path], {}
    for parameter, values in one.ranges.items():
        name = rf"(^|\W)({one.names.get(parameter, parameter)})\b"
        for bad in values.bad:
            wrong[f"{parameter}={bad!r}"] = complaints(
                partial(one.call, **{parameter: bad}), name, value_of(bad)
            )
    assert not {call: found for call, found in wrong.items() if found}


@every_case
def test_the_ends_of_a_range_are_valid(path: str) -> None:
    wrong = {}
    for parameter, values in CASES[path].ranges.items():
        for good in values.good:
            try:
                CASES[path].call(**{parameter: good})
            except Exception as error:
                wrong[f"{parameter}={good!r}"] = repr(error)
    assert not wrong


@pytest.mark.parametrize("path", TOGETHER)
def test_what_does_not_go_together_is_refused_with_the_reason(path: str) -> None:
    call = CASES[path].call
    wrong = {words: complaints(partial(call, **changes), words) for changes, words in TOGETHER[path]}
    assert not {words: found for words, found in wrong.items() if found}


STRATEGIES = [
    path
    for path, one in CASES.items()
    if isinstance(one.what, str)
    and isinstance(kind := resolve_name(f"hedgerow.{one.what}"), type)
    and issubclass(kind, FederatedStrategy)
]


@pytest.mark.parametrize("path", STRATEGIES)
def test_every_strategy_refuses_what_all_do(path: str) -> None:
    wrong = {
        f"{option}={bad!r}": complaints(partial(CASES[path].call, **{option: bad}), option, value_of(bad))
        for option, values in OPTIONS.items()
        for bad in values.bad[:3]
    }
    assert not {call: found for call, found in wrong.items() if found}


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_a_bad_setting_is_refused_by_its_key_and_value(app: AppCase) -> None:
    read = SETTINGS_CASES[f"{app.name} settings"].call
    for key in app.settings.SETTINGS:
        bad_ones = bad_settings(app, key)
        assert bad_ones
        for bad in bad_ones:
            with pytest.raises(SettingsError) as error:
                read(**{key: bad})
            first, problem, *_ = str(error.value).splitlines()
            assert first == "Bad settings:"
            assert re.match(rf"  - {key} must be \S.*, got {value_of(bad)}", problem)


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_all_bad_settings_are_in_one_error(app: AppCase) -> None:
    bad = {key: bad_settings(app, key)[0] for key in app.settings.SETTINGS}
    with pytest.raises(SettingsError) as error:
        app.settings.read(bad)
    first, *problems = str(error.value).splitlines()
    assert first == "Bad settings:"
    assert [problem.removeprefix("  - ").split(" must be ")[0] for problem in problems] == list(bad)
