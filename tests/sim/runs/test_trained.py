"""The trained model of every app, and of a copy by ``hedgerow new``, is evaluated and used in plain torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.flower_apps.cases import CASES, CEPS, AppCase
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import load_model, plan_run, read_model, read_rounds, run_app


def trained(case: AppCase, parent: Path, **settings: Any) -> Path:
    asked = {**case.small, "quiet": True, **settings}
    plan = plan_run(
        case.spec, [*(f"{k}={json.dumps(v)}" for k, v in asked.items()), f"output-dir='{parent}'"]
    )
    run_app(case.loaded, plan)
    (folder,) = parent.iterdir()
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_saved_model_is_that_of_the_last_evaluation(case: AppCase, tmp_path: Path) -> None:
    folder = trained(case, tmp_path)
    shown = hedgerow("predict", case.spec.folder, folder)
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    if case is CEPS:
        assert list(told) == [f"partition-{i}" for i in range(case.small["num-clients"])]
        assert all(np.isfinite(one["loss"]) for one in told.values())
        assert read_model(folder / "nodes" / "partition-1")["w"].shape == (case.small["features"],)
        return
    last = read_rounds(folder)[-1]["central"]
    assert told.keys() <= last.keys()
    for key, value in told.items():
        assert last[key] == pytest.approx(value, rel=1e-6)
    model = load_model(folder)
    for name, array in read_model(folder).items():
        assert torch.equal(model.state_dict()[name], torch.from_numpy(np.array(array)))


def test_a_network_of_a_node_is_loaded_by_its_number(tmp_path: Path) -> None:
    network = {"problem": "network", "model": "logistic", "partition": "iid", "sparsity": 100}
    folder = trained(CEPS, tmp_path, **network)
    model = load_model(folder, node=2)
    assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    told = json.loads(hedgerow("predict", CEPS.spec.folder, folder).stdout)
    assert set(told["partition-2"]) == {"accuracy"}


def test_a_copys_model_is_used_too(tmp_path: Path) -> None:
    """In a process of its own, because the copy's package has the app's name."""
    code = """
from hedgerow.sim.cli import app
import sys
for command in (["new", "fedmud", "mine"], ["run", "mine", "-q", "-c", "num-rounds=1"]):
    try:
        app(command)
    except SystemExit as end:
        assert not end.code
import glob, torch
from hedgerow.sim import load_model
(run,) = glob.glob("runs/*")
model = load_model(run, "mine")
with torch.no_grad():
    assert model(torch.zeros(2, 64)).argmax(1).shape == (2,)
app(["predict", "mine", run])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"accuracy"' in done.stdout


def test_a_strangers_app_is_refused(tmp_path: Path) -> None:
    shown = hedgerow("predict", Path(__file__).parents[1] / "torch_app", tmp_path)
    assert shown.exit_code == 2
    assert "APP must be one of the suite's or a copy of one" in shown.stderr
