"""A stranger's plain PyTorch app, which knows nothing of seeds or folders: from a run to a plot of seeds."""

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.sim.cli.command_line import hedgerow
from tests.sim.tiny_app import MakeApp

from hedgerow.sim import read_model, read_rounds
from hedgerow.sim.runs import sweep as sweep_module

APP = Path(__file__).parents[1] / "torch_app"


class HereAndNow:
    """A process of a sweep that runs in this one, which has torch and Flower already."""

    pid = -1

    def __init__(self, command: list[str], **options: Any) -> None:
        assert command[1:3] == ["-m", "hedgerow.sim"]
        shown = hedgerow(*command[3:])
        options["stdout"].write(shown.output.encode())
        self.returncode = shown.exit_code

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchapp"]:
        del sys.modules[name]


def run(*arguments: object) -> str:
    shown = hedgerow(*arguments)
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.fixture
def here_and_now(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(sweep_module, "subprocess", SimpleNamespace(Popen=HereAndNow, **names))


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_from_a_run_to_a_plot_of_three_seeds(real: bool, place: Path, request: pytest.FixtureRequest) -> None:
    if not real:
        request.getfixturevalue("here_and_now")
    assert "eval_acc" in run("run", APP, "--nodes", 4, "--seed", 1, "--quiet")
    run("sweep", APP, "--nodes", 4, "--seeds", "0,1,2")
    run("plot", "runs/torch_app", "--y", "eval_loss")
    table = run("table", "runs/torch_app", "--y", "eval_acc")

    assert (place / "runs" / "torch_app" / "torch_app-eval_loss-over-rounds.png").is_file()
    assert "3 of 3" in table
    assert "Realism: every node's work is real" in table
    folders = [place / "runs" / "torch_app" / "torch-app" / f"seed-{seed}" for seed in (0, 1, 2)]
    losses = [read_rounds(folder)[-1]["evaluate"]["eval_loss"] for folder in folders]
    assert len(set(losses)) == 3
    # A seed is a run: what is drawn and what comes of it.
    (single,) = (folder for folder in (place / "runs").iterdir() if folder.name.startswith("torch-app-"))
    one, other = read_model(single), read_model(folders[1])
    assert list(one) == ["hidden.weight", "hidden.bias", "out.weight", "out.bias"]
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
    assert json.loads((folders[2] / "config.json").read_text())["run"]["seed"] == 2
    assert json.loads((folders[2] / "config.json").read_text())["nodes"] == 4

    run("export", "runs/torch_app", "--csv", "out.csv")
    with (place / "out.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {(row["seed"], row["metric"]) for row in rows} == {
        (seed, metric) for seed in "012" for metric in ("train_loss", "eval_loss", "eval_acc")
    }
    wrong = hedgerow("plot", "runs/torch_app")
    assert wrong.exit_code == 2
    assert "y must be a metric of" in wrong.stderr
    assert "(eval_acc, eval_loss, train_loss), got 'loss'" in wrong.stderr

    # What is there is kept; what was asked otherwise is not mistaken for it.
    assert run("sweep", APP, "--nodes", 4, "--seeds", "2,0", "--dry-run").count("kept") == 2
    other_size = hedgerow("sweep", APP, "--nodes", 5)
    assert other_size.exit_code == 2
    assert "was run with 4 nodes, now 5" in other_size.stderr


@pytest.mark.usefixtures("here_and_now")
def test_a_sweep_file_of_an_app_without_a_seed(make_app: MakeApp, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    make_app()
    (tmp_path / "lr.toml").write_text('app = "app"\nseeds = [5]\nnodes = 3\ngrid = {lr = [0.25, 0.5]}\n')
    run("sweep", tmp_path / "lr.toml", "--track", "tensorboard")
    for lr, model in ((0.25, 1.0), (0.5, 2.0)):
        folder = tmp_path / "runs" / "lr" / f"lr={lr}" / "seed-5"
        assert read_model(folder)["0"].tolist() == [model] * 3
        assert any((folder / "tensorboard").iterdir())
        # What the app itself wrote where it was told to.
        assert json.loads((folder / "output" / "result.json").read_text())["nodes"] == 3
        # A run's settings are those of ``hedgerow run -c``.
        assert "seed" not in (folder / "settings.toml").read_text()


def test_a_resumed_run_is_what_it_was(place: Path) -> None:
    run("run", APP, "--nodes", 4, "--seed", 3, "--output-dir", "out", "--real-time", "--quiet")
    (folder,) = (place / "out").iterdir()
    assert sum(end["sim_seconds"] > 0 for end in read_rounds(folder)) == 3
    run("run", APP, "--resume", folder, "-c", "num-server-rounds=4", "--quiet")
    assert [end["round"] for end in read_rounds(folder)] == [1, 2, 3, 4]
    config = json.loads((folder / "config.json").read_text())
    assert (config["run"]["seed"], config["time"]) == (3, "real")
