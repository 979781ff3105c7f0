"""Fixtures that every room's tests may use."""

import atexit
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hedgerow.sim import flower_identity as identity
from hedgerow.wire import process

# Each app's folder is a root of its own, as for Flower.
sys.path[1:1] = [
    str(file.parent) for file in sorted(Path(__file__).parents[1].glob("flower_apps/*/pyproject.toml"))
]

# The same examples in every run: what one run finds, every run finds.
# A loaded machine draws slowly, which says nothing of the code.
settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")

# Handlers that tests call themselves, some when they are collected, are those of simulated nodes.
_NODES = ExitStack()
_NODES.enter_context(process.simulated())
atexit.register(_NODES.close)


def pytest_configure(config: pytest.Config) -> None:
    """Start no garbage collection while tests are collected, which makes little garbage."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests on one process, where they share what they make once, if no other group does."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of later searches for garbage; Flower makes one per reply."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def quick_folders() -> Iterator[None]:
    """Run folders that no power cut endangers, and one look at this checkout's state for all runs.

    Tests of the disk replace ``os`` in the modules that they test.
    """
    name = "hedgerow.sim.runs.recorder._git_state"
    real = resolve_name(name.replace(".recorder.", ".recorder:"))

    @cache
    def of_this_checkout(folder: Path) -> Any:
        return real(folder)

    def git_state(folder: Path) -> Any:
        inside = folder.resolve().is_relative_to(Path(__file__).parents[1])
        return of_this_checkout(folder) if inside else real(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, git_state)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def flower_identity() -> Iterator[int]:
    """Lets a test build ``flwr.app.Message``; its value is the run id."""
    with identity(run_id=1):
        yield 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Take away what makes this process a simulation; the value is a folder for a policy and FLWR_HOME."""
    monkeypatch.setattr(process, "_open", 0)
    monkeypatch.delenv("HEDGEROW_NODE_POLICY", raising=False)
    monkeypatch.delenv("HEDGEROW_DATA_DIR", raising=False)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nodes have keys of their own, which no seed determines; Flower's home is the value."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    for module in ("gossip.stored_node", "links", "node_state"):
        monkeypatch.setattr(f"hedgerow.clients.{module}.is_simulated", lambda: False)
    return tmp_path


@pytest.fixture(autouse=True)
def flowers_log() -> Iterator[None]:
    """Flower's log as it was: ``hedgerow run --quiet`` is for a process of its own."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write an importable module, which is forgotten with the test."""
    written = []

    def write(name: str, source: str) -> None:
        folder = tmp_path / "modules"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        written.append(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)
