"""The room's public names are there, and cost nothing until they are used."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import hedgerow.wire


def test_every_public_name_is_that_of_a_module_which_lists_it_too() -> None:
    for name in hedgerow.wire.__all__:
        parts = [import_module(f"hedgerow.wire.{module}") for module in hedgerow.wire._MODULES]
        there = [getattr(part, name) for part in parts if name in part.__all__]
        assert there
        assert all(one is getattr(hedgerow.wire, name) for one in there)


def test_no_module_has_a_public_name_and_another_name_is_not_there() -> None:
    assert [name for name in hedgerow.wire.__all__ if find_spec(f"hedgerow.wire.{name}")] == []
    with pytest.raises(AttributeError, match=r"module 'hedgerow\.wire' has no attribute 'Grid'"):
        hedgerow.wire.Grid  # noqa: B018


def test_the_import_alone_brings_neither_flower_nor_torch() -> None:
    code = "import sys, hedgerow.wire; print(sorted({'flwr', 'torch', 'numpy'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_constant_is_on_the_page_of_the_room() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/wire.md").read_text()
    assert [name for name in hedgerow.wire.__all__ if name.isupper() and f"`{name}`" not in page] == []
