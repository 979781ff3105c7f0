"""What is needed of Flower's private parts is looked for, by name and by what it does."""

import importlib
import importlib.util
import subprocess
from collections.abc import Callable
from types import ModuleType
from typing import Any

import flwr.app.message.message
import flwr.client.mod.utils
import flwr.common.constant
import flwr.supercore.run
import pytest
from flwr.clientapp import ClientApp
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor import (
    ExecutionSpec,
    LaunchResult,
    SubprocessExecutor,
    subprocess_executor,
)
from flwr.superlink.grid import InMemoryGrid

from hedgerow.sim.engine import _compat

Breaks = Callable[[pytest.MonkeyPatch], None]


def loaded_anew() -> ModuleType:
    """Run the file as another module, which leaves the one in use as it is."""
    spec = importlib.util.spec_from_file_location("another_compat", _compat.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_installed_flower_has_all_that_is_needed() -> None:
    assert _compat._tries_failed() == []


def test_the_grid_of_flowers_simulation_is_known_by_its_class() -> None:
    assert _compat.is_simulation(InMemoryGrid.__new__(InMemoryGrid))
    assert not _compat.is_simulation(object())


def test_a_superexec_starts_clientapps_by_the_function_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess_executor, "subprocess", subprocess)
    started: list[Any] = []
    _compat.launch_by(lambda command, **options: started.append((command, options)))
    spec = ExecutionSpec(TaskType.CLIENT_APP, "here:1", "secret", True, None, False, 7, False, 1)
    assert SubprocessExecutor().launch(spec) == LaunchResult.accepted()
    options = ["--runtime-api-address", "here:1", "--token", "secret", "--insecure", "--parent-pid", "7"]
    assert started == [(["flwr-clientapp", *options], {})]


def test_a_superexec_that_starts_programs_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(subprocess_executor, "subprocess")
    with pytest.raises(ImportError, match=r"executor\.subprocess\. Tested versions are 1\.41 and 1\.42"):
        _compat.launch_by(lambda command: None)


def _other_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flwr.app.message.message, "make_message", lambda meta, content: None)


def _no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(flwr.common.constant, "SUPERLINK_NODE_ID")


def _mods_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ClientApp.__init__

    def moved(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.__dict__["_all_mods"] = self.__dict__.pop("_mods")

    monkeypatch.setattr(ClientApp, "__init__", moved)


@pytest.mark.parametrize(
    ("breaks", "named"),
    [
        (_other_signature, "make_message with own metadata"),
        (_no_name, r"'SUPERLINK_NODE_ID' from 'flwr\.common\.constant'"),
        (_mods_elsewhere, "_mods"),
    ],
)
def test_a_flower_that_differs_is_refused_with_what_it_lacks(
    breaks: Breaks, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with pytest.raises(
        ImportError, match=rf"^flwr [\d.]+ lacks private names that hedgerow.sim uses: .*{named}"
    ):
        loaded_anew()


def test_another_version_alone_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.99.0")
    loaded_anew()
