"""Runs in MLflow, TensorBoard and Weights & Biases, read back with what they wrote."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flwr.serverapp.strategy import FedAvg
from tests.sim.cli.command_line import SD_FEEL, hedgerow
from tests.sim.runs import quickstarts as apps
from tests.sim.tiny_app import MakeApp

from hedgerow.sim import FaultModel, Simulation, simulate
from hedgerow.sim.runs import trackers
from hedgerow.sim.runs.trackers import TRACKERS, scalars_of

ALL = ("mlflow", "tensorboard", "wandb")


class Runs(NamedTuple):
    place: Path
    first: Simulation
    rest: Simulation


def run(rounds: int, **options: Any) -> Simulation:
    return simulate(
        FedAvg,
        apps.numpy_app(),
        4,
        initial_arrays=apps.numpy_arrays(),
        num_rounds=rounds,
        quiet=True,
        timeout=5.0,
        faults={0: FaultModel(dropout=1.0)},
        **options,
    )


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A run of two rounds with every tracker, and two more rounds of it from another folder."""
    place = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_DIR"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        patch.chdir(place)
        first = run(2, output_dir="runs", checkpoint_every=1, run_config={"lr": 0.5}, track=ALL)
        (place / "elsewhere").mkdir()
        patch.chdir(place / "elsewhere")
        rest = run(4, resume=first.folder, checkpoint_every=1, run_config={"lr": 0.5}, track=ALL)
        yield Runs(place, first, rest)


def test_every_tracker_took_every_call(tracked: Runs) -> None:
    assert tracked.rest.folder is not None
    said = json.loads((tracked.rest.folder / "trackers.json").read_text())
    assert {name: about["failed-calls"] for name, about in said.items()} == dict.fromkeys(ALL, 0)


def test_mlflow_has_the_rounds_of_both_parts_in_one_run(
    tracked: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient((tracked.place / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("FedAvg")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["lr"] == "0.5"
    assert found.data.params["seed"] == "0"
    assert found.data.params["hedgerow.nodes"] == "4"

    def history(tag: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, tag)]

    rounds = tracked.rest.rounds
    assert [end["round"] for end in rounds] == [1, 2, 3, 4]
    assert history("evaluate/loss") == [(end["round"], end["evaluate"]["loss"]) for end in rounds]
    assert history("cost/payload_bytes") == [(end["round"], end["payload_bytes"]) for end in rounds]
    assert history("replies/lost") == [(number, 2.0) for number in (1, 2, 3, 4)]
    assert history("lost/no reply") == history("replies/lost")
    assert not (tracked.place / "elsewhere" / "mlruns").exists()


def test_the_trained_model_is_a_version_in_mlflows_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HEDGEROW_MLFLOW_MODEL", "ward")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        done = run(1, output_dir="runs", track=["mlflow"])
        assert done.folder is not None
        said = json.loads((done.folder / "trackers.json").read_text())
        assert said["mlflow"]["failed-calls"] == 0
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    versions = client.search_model_versions("name = 'ward'")
    assert sorted(int(version.version) for version in versions) == [1, 2]
    newest = max(versions, key=lambda version: int(version.version))
    assert newest.run_id == said["mlflow"]["run_id"]
    kept = Path(newest.source.removeprefix("file://"))
    assert (kept / "model.safetensors").read_bytes() == (done.folder / "model.safetensors").read_bytes()


def test_tensorboard_has_the_rounds_of_both_parts_in_one_log(tracked: Runs) -> None:
    scalars = events(tracked.rest.folder)
    rounds = tracked.rest.rounds
    assert [step for step, _ in scalars["evaluate/loss"]] == [1, 2, 3, 4]
    assert [value for _, value in scalars["evaluate/loss"]] == pytest.approx(
        [end["evaluate"]["loss"] for end in rounds]
    )
    assert {tag: series[-1][0] for tag, series in scalars.items()} == dict.fromkeys(scalars_of(rounds[-1]), 4)


def events(folder: Path | None) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert folder is not None
    log = accumulator.EventAccumulator(str(folder / "tensorboard"))
    log.Reload()
    return {tag: [(e.step, e.value) for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def test_an_app_of_the_suite_is_tracked(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    small = "num-clients=4 num-servers=2 iterations=10 batch-size=4 evaluate-every=10"
    shown = hedgerow(
        "run", SD_FEEL, "-c", f"{small} quiet=true output-dir='{tmp_path}'", "--track", "tensorboard"
    )
    assert shown.exit_code == 0, shown.output
    (folder,) = tmp_path.iterdir()
    last = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    series = events(folder)
    assert series["central/loss"][-1] == (last["round"], pytest.approx(last["central"]["loss"]))
    assert series["cost/bits"][-1] == (last["round"], last["bits"])


# What goes wrong


class Broken:
    """A tracker that takes the first calls only."""

    identity: Mapping[str, Any] = {"id": 1}

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.asked = 0
        self.status = ""

    def on_round_end(self, server_round: int, scalars: Mapping[str, float]) -> None:
        self.asked += 1
        self.calls -= 1
        if self.calls < 0:
            raise ConnectionError("nobody\x1b[2J there")

    def end(self, status: str) -> None:
        self.status = status


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Broken]:
    def put(calls: int) -> Broken:
        made = Broken(calls)
        monkeypatch.setattr(trackers, "TRACKERS", {**TRACKERS, "tensorboard": lambda run: made})
        return made

    return put


def test_a_tracker_that_fails_costs_one_warning_and_is_counted(
    broken: Callable[[int], Broken], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = broken(1)
    with caplog.at_level(logging.WARNING, "flwr"):
        done = run(6, output_dir=tmp_path, track=["tensorboard"])
    assert len(done.rounds) == 6
    assert done.folder is not None
    warnings = [r.getMessage() for r in caplog.records if "tensorboard" in r.getMessage()]
    assert warnings == [
        "tensorboard failed to log part of the run (ConnectionError: nobody\\x1b[2J there). "
        "The run continues."
    ]
    said = json.loads((done.folder / "trackers.json").read_text())
    assert said == {"tensorboard": {"failed-calls": 5, "id": 1}}
    # It is given up after three failures: each may be a wait.
    assert made.asked == 4
    assert made.status == "completed"


def test_a_missing_package_is_one_error_before_the_run(
    make_app: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    shown = hedgerow("run", make_app(), "--nodes", 3, "--track", "wandb")
    assert shown.exit_code == 2
    assert "--track wandb: wandb is not installed; pip install 'hedgerow[wandb]'" in shown.stderr
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="track: wandb: wandb is not installed"):
        run(1, track=["wandb"])


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("train/loss", "train/loss"),
        ("train/../../x", "train/_.._x"),
        ("lost/error 2", "lost/error 2"),
    ],
)
def test_a_name_that_a_node_chose_is_no_path(name: str, plain: str) -> None:
    assert trackers._plain_name(name) == plain
