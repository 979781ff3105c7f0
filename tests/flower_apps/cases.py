"""The suite's apps, each with what its common tests need: a small run, its methods."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class AppCase:
    """One app.

    ``small`` is a run of a second or two, of ``rounds`` rounds where they are known; ``method`` is the key
    that names one of ``methods``, ``learnt`` what the title says is learnt; ``repeats`` says whether a round
    that fails is made again.
    """

    name: str
    settings: ModuleType
    small: Mapping[str, Any]
    method: str
    methods: tuple[str, ...]
    rounds: Mapping[str, int]
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


SD_FEEL = AppCase(
    name="sd_feel",
    settings=sd_feel.settings,
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
    small={
        "num-clients": 4,
        "clients-per-round": 2,
        "num-rounds": 3,
        "batch-size": 250,
        "local-epochs": 1,
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
