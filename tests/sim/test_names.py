"""The room's public names are there, and cost nothing until they are used."""

import subprocess
import sys

import pytest

import hedgerow.sim


def test_every_public_name_is_there() -> None:
    assert [name for name in hedgerow.sim.__all__ if getattr(hedgerow.sim, name).__name__ != name] == []


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"module 'hedgerow\.sim' has no attribute 'Grid'"):
        hedgerow.sim.Grid  # noqa: B018


def test_the_import_alone_brings_neither_flower_nor_torch() -> None:
    code = "import sys, hedgerow.sim; print(sorted({'flwr', 'torch', 'numpy'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
