"""The registered apps, each with what its common tests need: a small run, its methods."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.registry import REGISTRY, Registered

from hedgerow.sim import AppSpec, LoadedApp, find_app, load_app, plan_run, read_rounds, run_app

APPS = Path(__file__).parents[2] / "flower_apps"


@dataclass(frozen=True)
class AppCase:
    """One app."""

    registered: Registered

    @property
    def name(self) -> str:
        """The app's package."""
        return self.registered.app.replace("-", "_")

    @property
    def small(self) -> Mapping[str, Any]:
        return self.registered.small

    def small_for(self, partition: object) -> dict[str, Any]:
        """The small run's settings that a run with this partition reads."""
        unread = {key for key, one in self.settings.SETTINGS.items() if one.own_data is (partition != "own")}
        return {key: value for key, value in self.small.items() if key not in unread}

    @property
    def learnt(self) -> str:
        return self.registered.learnt

    @property
    def repeats(self) -> bool:
        return self.registered.repeats

    @cached_property
    def settings(self) -> ModuleType:
        return import_module(f"{self.name}.settings")

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The names of the app's methods: the words of the setting that names one, or the app's own."""
        key = self.registered.method
        return (*self.settings.SETTINGS[key].kind.values, *self.registered.others) if key else (self.name,)

    @property
    def method(self) -> str:
        """The method of a run whose settings name none."""
        return str(self.defaults[self.registered.method]) if self.registered.method else self.name

    def named(self, method: str) -> dict[str, Any]:
        """The setting that names a method; none where the app has one."""
        return {self.registered.method: method} if self.registered.method else {}

    @cached_property
    def rounds(self) -> Mapping[str, int]:
        """How many rounds the small run of each method has; empty where that is not known."""
        rounds = self.registered.rounds
        return dict.fromkeys(self.methods, rounds) if isinstance(rounds, int) else rounds or {}

    @cached_property
    def folder(self) -> Path:
        return APPS / self.registered.app

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
        overrides = [
            f"{key}={json.dumps(value)}"
            for key, value in {**self.small_for(changes.get("partition")), **changes}.items()
        ]
        plan = plan_run(self.spec, [*overrides, f"output-dir={json.dumps(str(parent))}"])
        run_app(self.loaded, plan, strict=strict, node_configs=node_configs)
        (folder,) = set(parent.iterdir()) - before
        rounds = read_rounds(folder)
        assert all(record.pop("wall_seconds") >= 0 for record in rounds)
        return rounds


Run = Callable[..., list[dict[str, Any]]]


def losses(rounds: list[dict[str, Any]]) -> list[float]:
    return [record["central"]["loss"] for record in rounds if record["central"]]


CASES = tuple(map(AppCase, REGISTRY))
SD_FEEL, SIMILARITY_FREE, FEDMUD, CEPS, HSGD = CASES[:5]
