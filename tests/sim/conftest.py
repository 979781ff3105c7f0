"""Made-up run folders with known numbers, and a small app."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.sim.tiny_app import MakeApp, write_app

from hedgerow.sim import AppSpec, find_app

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Writes a run folder: a round costs 10 iterations, 0.5 simulated s, 1e6 bits, 2e5 bytes, 1 real s."""

    def write(
        name: str,
        losses: Sequence[float | None],
        *,
        seed: int = 0,
        finished: bool = True,
        environment: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {"app": "made-up", "run": {"seed": seed, **settings}, "environment": environment or {}}
        (folder / "config.json").write_text(json.dumps(config))
        lines = []
        for n, loss in enumerate(losses):
            record = {
                "round": n,
                "train": {"consensus-error": n / 100} if n else {},
                "evaluate": {},
                "central": {} if loss is None else {"loss": loss, "accuracy": 1 - loss / 4},
                "iterations": 10 * n,
                "bits": 1_000_000 * n,
                "payload_bytes": 200_000 * n,
                "sim_seconds": 0.5 * n,
                "wall_seconds": 1.0,
            }
            lines.append(json.dumps(record) + "\n")
        (folder / "rounds.jsonl").write_text("".join(lines))
        if finished:
            (folder / "summary.json").write_text("{}")
        return folder

    return write


@pytest.fixture
def write_sweep(tmp_path: Path, write_run: WriteRun) -> Callable[..., Path]:
    """Writes a sweep folder from {label: {seed: losses}}."""

    def write(runs: Mapping[str, Mapping[int, Sequence[float | None]]], name: str = "made") -> Path:
        (tmp_path / name).mkdir()
        for label, seeds in runs.items():
            for seed, losses in seeds.items():
                write_run(f"{name}/{label}/seed-{seed}", losses, seed=seed, method=label)
        asked = {
            "title": "Made up",
            "realism": "numbers by hand",
            "x": ["sim-seconds"],
            "y": ["loss"],
            "seeds": sorted({seed for seeds in runs.values() for seed in seeds}),
            "variants": [{"label": label, "folder": label, "settings": {}} for label in runs],
        }
        (tmp_path / name / "sweep.json").write_text(json.dumps(asked))
        return tmp_path / name

    return write


@pytest.fixture
def make_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeApp]:
    """Writes an app; its modules are forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    modules = set(sys.modules)

    def make(package: str = "tinyapp", extra: str = "", folder: str = "app") -> Path:
        return write_app(tmp_path / folder, package, extra)

    yield make
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("tinyapp", "other_app"):
            del sys.modules[name]


@pytest.fixture
def tiny(make_app: MakeApp) -> AppSpec:
    return find_app(make_app())
