"""The examples run as they stand, and do what they say."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from hedgerow.sim.engine.grid import InProcessGrid

pytestmark = pytest.mark.usefixtures("flower_identity")

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def run(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        example: dict[str, Any] = runpy.run_path(str(EXAMPLES / name))
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        example["server_app"](InProcessGrid(example["client_app"], example["NODES"]), context)


def accuracy(output: str) -> float:
    return float(output.splitlines()[0].removeprefix("accuracy "))


def test_sd_feel_runs_over_an_app_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    run("sd_feel_any_app.py")
    output = capsys.readouterr().out
    output = output[output.index("accuracy") :]
    assert accuracy(output) > 0.9
    assert "40 iterations" in output


def test_compressed_runs_over_an_app_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    run("compressed_any_app.py")
    output = capsys.readouterr().out
    output = output[output.index("accuracy") :]
    assert accuracy(output) > 0.9
    sent, dense = (int(word) for word in output.split() if word.isdigit())
    assert sent < dense / 4
