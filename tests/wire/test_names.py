"""The public names of a room are there, and cost nothing until they are used."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hedgerow.sim
import hedgerow.wire


def test_every_public_name_is_that_of_the_modules_which_have_it() -> None:
    for name in hedgerow.wire.__all__:
        parts = [import_module(f"hedgerow.wire.{module}") for module in hedgerow.wire._MODULES]
        there = [getattr(part, name) for part in parts if hasattr(part, name)]
        assert there
        assert all(one is getattr(hedgerow.wire, name) for one in there)


def test_no_module_of_the_wire_has_a_public_name() -> None:
    assert [name for name in hedgerow.wire.__all__ if find_spec(f"hedgerow.wire.{name}")] == []


def test_every_public_name_of_the_engine_is_there() -> None:
    assert [name for name in hedgerow.sim.__all__ if getattr(hedgerow.sim, name).__name__ != name] == []


@pytest.mark.parametrize("room", [hedgerow.wire, hedgerow.sim])
def test_another_name_is_not_there_and_the_import_alone_brings_neither_flower_nor_torch(room: Any) -> None:
    with pytest.raises(AttributeError, match=f"module '{room.__name__}' has no attribute 'Grid'"):
        room.Grid  # noqa: B018
    code = f"import sys, {room.__name__}; print(sorted({{'flwr', 'torch', 'numpy'}} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_constant_is_on_the_page_of_the_room() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/wire.md").read_text()
    assert [name for name in hedgerow.wire.__all__ if name.isupper() and f"`{name}`" not in page] == []
