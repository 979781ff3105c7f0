"""The suite's apps, each with what its common tests need: bad values, a small run, its methods."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import ceps.settings
import fedmud.settings
import hsgd.settings
import sd_feel.settings
import similarity_free.settings
from hedgerow.sim import AppSpec, LoadedApp, find_app, load_app, plan_run, read_rounds, run_app

APPS = Path(__file__).parents[2] / "flower_apps"

# Bad values of the keys that every app has.
_COMMON: dict[str, Any] = {
    "dataset": "mnist-9",
    "data-dir": 3,
    "partition": "dirichlet(-1)",
    "model": "resnet-9000",
    "num-clients": 0,
    "seed": -1,
    "evaluate-every": 0,
    "train-loss-samples": -1,
    "round-timeout": 0,
    "min-replies": -1,
    "stop-after": "sim-seconds=-1",
    "engine": "ray",
    "workers": -1,
    "ray": "ray://head:10001",
    "output-dir": 1,
    "checkpoint-every": 0,
    "checkpoint-nodes": "sometimes",
    "resume": 3,
    "quiet": 1,
}
# Of those of apps whose nodes may have data of their own.
_OWN: dict[str, Any] = {
    "classes": "one",
    "standardise": "both",
    "holdout": 1.0,
    "min-available-nodes": -1,
    "registry": "nowhere.toml",
}
# Of those of apps whose server averages.
_BOUNDS: dict[str, Any] = {"max-update-norm-ratio": 0.5, "quarantine-after": -1, "max-loss-ratio": -1}
# Of those of apps whose servers tell each other something.
_PEERS: dict[str, Any] = {
    "peers": 1,
    "peer-listen": 1,
    "peer-timeout": 0.0,
    "peer-ca": 1,
    "peer-certificate": 1,
    "peer-key": 1,
}
# And of those of apps whose nodes train ordinary models in mini-batches.
_TRAINING: dict[str, Any] = {
    **_COMMON,
    **_OWN,
    **_BOUNDS,
    "max-weight-ratio": 0.5,
    "scaling": "huge",
    "device": "abacus",
    "batch-size": 0,
    "training-mode": "magic",
    "stack-nodes": -1,
    "precision": "fp8",
    "compile": 1,
}


@dataclass(frozen=True)
class AppCase:
    """One app.

    ``bad`` has a bad value of each key; ``late`` are keys that are judged together with others; ``small`` is
    a run of a second or two, of ``rounds`` rounds where they are known; ``method`` is the key that names one
    of ``methods``, ``learnt`` what the title says is learnt; ``repeats``: whether a failed round is made
    again.
    """

    name: str
    settings: ModuleType
    bad: Mapping[str, Any]
    small: Mapping[str, Any]
    method: str
    methods: tuple[str, ...]
    rounds: Mapping[str, int]
    late: frozenset[str] = field(default_factory=frozenset)
    learnt: str = "mnist-5k"
    repeats: bool = True

    @cached_property
    def folder(self) -> Path:
        return APPS / self.name.replace("_", "-")

    @cached_property
    def spec(self) -> AppSpec:
        return find_app(self.folder)

    @cached_property
    def defaults(self) -> dict[str, Any]:
        return dict(self.spec.config)

    @cached_property
    def loaded(self) -> LoadedApp:
        return load_app(self.folder)

    def run(
        self,
        parent: Path,
        *,
        strict: bool = False,
        node_configs: list[dict[str, Any]] | None = None,
        **changes: Any,
    ) -> list[dict[str, Any]]:
        """Run with changed settings; return the rounds, without what they took in real seconds."""
        before = set(parent.iterdir())
        overrides = [f"{key}={json.dumps(value)}" for key, value in {**self.small, **changes}.items()]
        plan = plan_run(self.spec, [*overrides, f"output-dir={json.dumps(str(parent))}"])
        run_app(self.loaded, plan, strict=strict, node_configs=node_configs)
        (folder,) = set(parent.iterdir()) - before
        rounds = read_rounds(folder)
        assert all(record.pop("wall_seconds") >= 0 for record in rounds)
        return rounds


Run = Callable[..., list[dict[str, Any]]]


def losses(rounds: list[dict[str, Any]]) -> list[float]:
    return [record["central"]["loss"] for record in rounds if record["central"]]


_SUMS = {"secure-sum": "yes", "sum-clip": 0.0, "sum-threshold": 0.5, "sum-min-nodes": 2}
_SUM_NOISE = {
    "upload-clip": -1.0,
    "upload-noise-multiplier": 1e-4,
    "noise-delta": 1.0,
    "noise-source": "dice",
}

SD_FEEL = AppCase(
    name="sd_feel",
    settings=sd_feel.settings,
    bad={
        **_TRAINING,
        "aggregation": "krum(-1)",
        "method": "sgd",
        "iterations": 0,
        "num-servers": 0,
        "clusters": "stars",
        "topology": "moebius",
        "tau1": 0,
        "tau2": -1,
        "alpha": -1,
        "participation": 0.0,
        "clients-per-round": 0,
        "exact-if-complete": 1,
        "edge-servers": "balloons",
        "edge": -1,
        "adopt": 1,
        **_PEERS,
        "monitor": 1,
        "edge-rounds": "sometimes",
        "max-staleness": -1,
        "stragglers": "transient(2,10)",
        "mobility": 1.5,
        "probe-rounds": -1,
        **_SUMS,
        **_SUM_NOISE,
        "learning-rate": 0.0,
        "latency-preset": "hopeful",
    },
    late=frozenset({"topology"}),
    small={
        "num-clients": 6,
        "num-servers": 3,
        "clients-per-round": 4,
        "tau1": 2,
        "tau2": 2,
        "iterations": 8,
        "model": "logistic",
        "evaluate-every": 1,
    },
    method="method",
    methods=("sd-feel", "hierfavg", "feel", "fedavg"),
    rounds={"sd-feel": 4, "hierfavg": 4, "feel": 4, "fedavg": 2},
)

_SIMILARITY_FREE = ("fedavg", "fedprox", "ef-fedavg", "ef-fedprox", "fedpaq")
SIMILARITY_FREE = AppCase(
    name="similarity_free",
    settings=similarity_free.settings,
    bad={
        **_TRAINING,
        "aggregation": "krum(-1)",
        **_SUMS,
        **_SUM_NOISE,
        "augmentation": "mirrors",
        "algorithm": "sgd",
        "num-rounds": 0,
        "local-iters": 0,
        "compressor": "zip",
        "schedule": "cosine",
        "fixed-c": 0.0,
        "diminishing-c": -1.0,
        "diminishing-nu": 0.5,
        "decay-start": 0.0,
        "decay-factor": 1.0,
        "decay-stage": 0,
        "schedule-drives": "all",
        "inner-lr": "fast",
        "inner-steps": 0,
        "inner-tol": 1.0,
        "inner-batch": "some",
        "weighting": "fair",
        "probe-rounds": -1,
    },
    small={
        "num-clients": 5,
        "num-rounds": 3,
        "local-iters": 3,
        "inner-steps": 5,
        "model": "logistic",
        "partition": "iid",
        "evaluate-every": 1,
    },
    method="algorithm",
    methods=_SIMILARITY_FREE,
    rounds=dict.fromkeys(_SIMILARITY_FREE, 3),
)

FEDMUD = AppCase(
    name="fedmud",
    settings=fedmud.settings,
    bad={
        **_TRAINING,
        "aggregation": "krum(-1)",
        **_SUMS,
        **_SUM_NOISE,
        "method": "sgd",
        "num-rounds": 0,
        "clients-per-round": 0,
        "learning-rate": -0.1,
        "local-epochs": 0,
        "ratio": 1.5,
        "budget": "none",
        "reset-interval": 0,
        "init-a": -1.0,
        "augmentation": "mirrors",
        "layout": "round",
        "view": "window",
        "tight": 1,
        "skip-front": -1,
        "skip-back": -1,
        "rand-k-scale": 1,
        "measure-bias": 1,
        "sync": "never",
        "weighting": "fair",
    },
    late=frozenset(),
    small={
        "num-clients": 4,
        "clients-per-round": 2,
        "num-rounds": 3,
        "batch-size": 250,
        "training-mode": "loop",
        "model": "mlp",
        "skip-front": 0,
        "ratio": 0.25,
        "evaluate-every": 1,
        "partition": "iid",
        "train-loss-samples": 200,
    },
    method="method",
    methods=fedmud.settings.METHODS,
    rounds=dict.fromkeys(fedmud.settings.METHODS, 3),
)

_CEPS = ceps.settings.METHODS
CEPS = AppCase(
    name="ceps",
    settings=ceps.settings,
    bad={
        **_COMMON,
        **_OWN,
        **_PEERS,
        "site": -1,
        "aggregation": "krum(1)",
        "method": "sgd",
        "iterations": 0,
        "topology": 3,
        "participation": 0.0,
        "sparsity": 0,
        "codec": "zip",
        "measurements": -1,
        "expand": "wide",
        "compand": "exp",
        "gamma": 1.0,
        "decoder": "omp",
        "phi": "fourier",
        "phi-density": 0.1,
        "phi-owner": "hub",
        "stragglers": 1,
        "interval-low": 0,
        "interval-high": 0,
        "mu": 0.0,
        "sigma-rule": "guess",
        "c": 0.0,
        "privacy": "some",
        "epsilon": 0.0,
        "delta": 1.0,
        "sensitivity": 0.0,
        "clip": 0.0,
        "noise-source": "dice",
        "learning-rate": 0.0,
        "momentum": 1.0,
        "rho": -1.0,
        "local-steps": 0,
        "bits": -1,
        "top-k": -1,
        "step-gamma": 2.0,
        "contraction": -0.1,
        "budget": 0.0,
        "sealed": 1,
        "monitor": 1,
        "tolerance": -1.0,
        "problem": "sudoku",
        "features": 0,
        "noise": -1.0,
        "samples-low": 0,
        "samples-high": 0,
        "class-0": -1,
        "class-1": -1,
        "libsvm": 3,
        "l2": -1.0,
    },
    small={
        "num-clients": 5,
        "iterations": 12,
        "topology": "complete",
        "features": 60,
        "sparsity": 3,
        "measurements": 90,
        "samples-low": 30,
        "samples-high": 60,
        "interval-low": 2,
        "interval-high": 4,
        "local-steps": 3,
        "learning-rate": 0.02,
    },
    method="method",
    methods=_CEPS,
    rounds={},
    learnt="linear",
    repeats=False,
)

HSGD = AppCase(
    name="hsgd",
    settings=hsgd.settings,
    bad={
        **_COMMON,
        **_BOUNDS,
        "training-mode": "stack",
        "method": "sgd",
        "tdcd": "mixed",
        "num-groups": 0,
        "layout": "rows",
        "patients-per-group": -1,
        "participation": 0.0,
        "iterations": 0,
        "global-interval": 0,
        "local-interval": 0,
        "learning-rate": 0.0,
        "halving-period": -1,
        "mu": -1.0,
        "sealed": 1,
        "aggregation": "krum(-1)",
        "device-aggregation": "clipped(0)",
        **{key: _SUMS[key] for key in ("secure-sum", "sum-clip", "sum-threshold", "sum-min-nodes")},
        "sum-min-devices": 2,
        "upload-clip": -1.0,
        "upload-noise-multiplier": -1.0,
        "clip": -1.0,
        "noise-multiplier": -1.0,
        "noise-delta": 1.0,
        "noise-source": "dice",
        "adaptive": "always",
        "replan-every": -1,
        "eta-power": 4,
        "probe-steps": 0,
        "probe-batches": 0,
        "probe-batch": -1,
        "probe-aggregate": "median",
        "final-loss": "low",
        "compute-seconds": -1.0,
        "raw-bytes-per-group": -1.0,
        "raw-seconds": -1.0,
        "holdout": 1.0,
        "min-available-nodes": -1,
        "registry": "nowhere.toml",
        "standardise": "some",
        "classes": "one",
        "class-weights": "-1,1",
        "rematch-every": -1,
        "predict": 3,
        "specificity": 2.0,
    },
    # Groups of TDCD that stay apart need as many nodes as every other method.
    small={
        "num-groups": 2,
        "num-clients": 4,
        "tdcd": "isolated",
        "patients-per-group": 10,
        "participation": 0.4,
        "iterations": 8,
        "global-interval": 4,
        "local-interval": 2,
        "evaluate-every": 1,
    },
    method="method",
    methods=hsgd.settings.METHODS,
    rounds={},
    learnt="breast-cancer",
)

CASES = (SD_FEEL, SIMILARITY_FREE, FEDMUD, CEPS, HSGD)
