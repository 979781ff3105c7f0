"""A run on a deployment of its own."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from tests.sim.tiny_app import write_app

from hedgerow.sim import AppSpec, InProcessGrid, find_app, plan_run, read_rounds
from hedgerow.sim.deploy import local, recorded
from hedgerow.sim.deploy.local import deploy_local
from hedgerow.sim.runs.metered_grid import Meter, MeteredGrid
from hedgerow.sim.runs.simulate import server_context


@pytest.mark.parametrize("writes", [True, False])
def test_an_app_that_writes_no_run_folder_is_recorded(
    writes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_app(tmp_path / "app")
    spec = find_app(tmp_path / "app")
    deployment = MagicMock()
    monkeypatch.setattr(local, "Deployment", deployment)
    monkeypatch.setattr(local, "follow", lambda _: 0)
    deploy_local(spec, plan_run(spec, [], num_nodes=2), records=None if writes else tmp_path / "out")
    env = deployment.call_args.kwargs["env"]
    if writes:
        assert not env
        return
    assert json.loads(env["HEDGEROW_RECORD"])[0] == spec.name
    assert json.loads(env["HEDGEROW_RECORD"])[-1] == str(tmp_path / "out")
    # Flower's programs of this environment are still found.
    assert str(Path(sys.executable).parent) in env["PATH"].split(os.pathsep)[1:]


def called(app: ServerApp, output_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a ServerApp on a grid that is not the engine's, as Flower's program does."""
    monkeypatch.setenv("HEDGEROW_RECORD", json.dumps(["moons", "1.0", str(output_dir), str(output_dir)]))
    monkeypatch.setattr(ServerApp, "__call__", ServerApp.__call__)
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    @client.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"loss": 1.5, "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    with InProcessGrid(client, 2) as grid:
        program = lambda: app(Remote(grid), server_context(grid, {"lr": 0.5}))  # noqa: E731
        monkeypatch.setattr(recorded, "flower_program", lambda command: program)
        recorded.main()


class Remote(MeteredGrid):
    """A grid that is not the engine's."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid, Meter(), lambda: None)


def test_a_recorded_run_of_a_deployment_is_one_of_hedgerow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord({"w": Array(np.zeros(3))})
        FedAvg(min_available_nodes=2, weighted_by_key="num-examples").start(grid, arrays, num_rounds=2)

    called(app, tmp_path, monkeypatch)
    (folder,) = tmp_path.iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert (config["app"], config["nodes"], config["run"]) == ("moons", 2, {"lr": 0.5})
    assert config["environment"]["engine"] == "flower-deployment"
    assert config["time"] == "real"
    assert "seed" not in config
    assert [one["round"] for one in read_rounds(folder)] == [1, 2]
    assert (folder / "model.npz").is_file()
    assert not (folder / "checkpoint").exists()


@pytest.mark.parametrize(("code", "keep", "told"), [(1, False, True), (1, True, False), (0, False, False)])
def test_a_failed_run_whose_logs_are_gone_says_what_keeps_them(
    code: int,
    keep: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = AppSpec("tiny-app", tmp_path / "app", {}, {}, None)
    monkeypatch.setattr(local, "Deployment", MagicMock())
    monkeypatch.setattr(local, "follow", lambda _: code)
    assert deploy_local(spec, plan_run(spec, [], num_nodes=2), keep_logs=keep) == code
    assert ("--keep-logs" in capsys.readouterr().err) == told
