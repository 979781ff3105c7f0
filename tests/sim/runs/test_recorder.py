"""A run's folder tells what determined the run and what came of it, even if it was killed."""

import errno
import json
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.sim.runs.disk import Watched

from hedgerow.sim import CheckpointError, RunRecorder, load, load_checkpoint, read_rounds
from hedgerow.sim.runs import durable
from hedgerow.sim.runs.recorder import RESUME_MAY_CHANGE, RunFolderError, new_run_folder


@dataclass
class Round:
    round: int
    central: dict[str, Any] = field(default_factory=dict)
    bits: int = 0
    sim_seconds: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)


# Folders


@pytest.fixture(autouse=True)
def no_folder_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEDGEROW_OUTPUT_DIR", raising=False)


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = [new_run_folder(tmp_path, "app") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() and folder.name.startswith("app-") for folder in folders)


def test_missing_parents_are_made(tmp_path: Path) -> None:
    assert new_run_folder(tmp_path / "a" / "b", "app").parent == tmp_path / "a" / "b"


def test_a_relative_parent_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = new_run_folder("runs", "app")
    assert folder.is_absolute()
    assert folder.parent == tmp_path / "runs"


def test_a_relative_parent_is_taken_from_the_output_directory_where_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEDGEROW_OUTPUT_DIR", str(tmp_path / "named"))
    assert new_run_folder("runs", "app").parent == tmp_path / "named" / "runs"


def test_an_absolute_parent_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEDGEROW_OUTPUT_DIR", str(tmp_path / "named"))
    assert new_run_folder(tmp_path / "runs", "app").parent == tmp_path / "runs"


# Records


def test_the_config_stands_before_the_first_round(tmp_path: Path) -> None:
    RunRecorder(tmp_path, {"run": {"seed": 3}})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["run"] == {"seed": 3}
    assert read_rounds(tmp_path) == []


def test_the_config_says_where_the_run_comes_from(tmp_path: Path) -> None:
    RunRecorder(tmp_path, {})
    assert json.loads((tmp_path / "config.json").read_text())["environment"]["packages"]["hedgerow"]


def test_what_an_app_says_of_its_environment_stands(tmp_path: Path) -> None:
    RunRecorder(tmp_path, {"environment": {"engine": "inprocess"}})
    assert json.loads((tmp_path / "config.json").read_text())["environment"] == {"engine": "inprocess"}


def test_a_round_is_on_disk_when_it_has_ended(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {})
    for n in range(3):
        recorder.on_round_end(Round(n, {"loss": 1 / (n + 1)}, bits=n, rejected={"no reply": n}))
        assert [r["round"] for r in read_rounds(tmp_path)] == list(range(n + 1))
    assert read_rounds(tmp_path) == recorder.rounds
    assert recorder.rounds[2] == {
        "round": 2,
        "central": {"loss": 1 / 3},
        "bits": 2,
        "sim_seconds": 0.0,
        "rejected": {"no reply": 2},
    }


def test_what_a_kill_cut_off_is_not_read(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {})
    recorder.on_round_end(Round(1, {"loss": 0.5}))
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "central": {"los')
    assert [r["round"] for r in read_rounds(tmp_path)] == [1]


@hypothesis_settings(deadline=None, max_examples=30)
@given(st.dictionaries(st.text(), st.floats(allow_nan=False)))
def test_whatever_a_metric_is_called_a_round_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, central: dict[str, float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    RunRecorder(folder, {}).on_round_end(Round(1, central))
    assert [r["central"] for r in read_rounds(folder)] == [central]


def test_the_summary_says_that_the_run_ended(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {})
    recorder.on_round_end(Round(1))
    assert not (tmp_path / "summary.json").exists()
    recorder.finish({"status": "completed"})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "completed"}


def test_nothing_half_written_is_left(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, {})
    recorder.finish({})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "rounds.jsonl", "summary.json"]


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
def test_a_write_that_fails_leaves_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recorder = RunRecorder(tmp_path, {"run": 1}) if name == "summary.json" else None

    def disk_full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "os", Watched(write=disk_full))
    with pytest.raises(RunFolderError, match=f"{name}: No space left on device"):
        recorder.finish({}) if recorder else RunRecorder(tmp_path, {"run": 2})
    assert not (tmp_path / name).exists()


# Interruptions and going on


class Part:
    """Something with a state: a strategy, or a grid."""

    def __init__(self, value: int = 0) -> None:
        self.value = np.full(3, value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def stateful(folder: Path, every: int = 10, **run: Any) -> RunRecorder:
    """Return a recorder with the state of a strategy; Flower's own grid has none."""
    recorder = RunRecorder(folder, {"run": run}, checkpoint_every=every)
    recorder.keep_state(strategy=Part(), engine=object())
    return recorder


def play(recorder: RunRecorder, rounds: range) -> None:
    for n in rounds:
        recorder.on_round_end(Round(n))


def test_a_checkpoint_is_written_every_so_many_rounds_and_not_before_training(tmp_path: Path) -> None:
    recorder = stateful(tmp_path, every=3)
    seen = []
    for n in range(8):
        recorder.on_round_end(Round(n))
        seen.append(load_checkpoint(recorder.checkpoint)["round"] if recorder.checkpoint.exists() else None)
    assert seen == [None, None, None, 3, 3, 3, 6, 6]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupted_run_leaves_a_checkpoint_of_its_last_whole_round(
    tmp_path: Path, error: type[BaseException]
) -> None:
    recorder = stateful(tmp_path)
    with pytest.raises(error), recorder.guard():  # noqa: PT012
        play(recorder, range(6))
        raise error
    assert load_checkpoint(recorder.checkpoint)["round"] == 5
    assert not (tmp_path / "summary.json").exists()


def test_sigterm_ends_a_guarded_run_with_a_checkpoint(tmp_path: Path) -> None:
    recorder = stateful(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, recorder.guard():  # noqa: PT012
        play(recorder, range(3))
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert load_checkpoint(recorder.checkpoint)["round"] == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_in_another_thread_is_guarded_without_a_signal_handler(tmp_path: Path) -> None:
    recorder = stateful(tmp_path)

    def run() -> None:
        with recorder.guard():
            play(recorder, range(3))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    recorder.finish({})
    assert load_checkpoint(recorder.checkpoint)["round"] == 2


def test_a_run_goes_on_from_its_checkpoint_and_strikes_the_rounds_after_it(tmp_path: Path) -> None:
    play(stateful(tmp_path, every=3, seed=1), range(6))
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 6, "cen')
    recorder = stateful(tmp_path, every=3, seed=1)
    recorder.resume()
    assert [r["round"] for r in read_rounds(tmp_path)] == [0, 1, 2, 3]
    play(recorder, range(4, 6))
    assert [r["round"] for r in read_rounds(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert recorder.rounds == read_rounds(tmp_path)


def test_each_part_gets_its_own_state_back(tmp_path: Path) -> None:
    first = RunRecorder(tmp_path, {}, checkpoint_every=1)
    first.keep_state(strategy=Part(7), engine=Part(8))
    play(first, range(2))
    first.close()
    strategy, engine = Part(), Part()
    second = RunRecorder(tmp_path, {})
    second.keep_state(strategy=strategy, engine=engine)
    second.resume()
    assert (strategy.value.tolist(), engine.value.tolist()) == ([7, 7, 7], [8, 8, 8])


def test_a_checkpoint_of_an_engine_that_is_not_there_is_refused(tmp_path: Path) -> None:
    first = RunRecorder(tmp_path, {}, checkpoint_every=1)
    first.keep_state(strategy=Part(), engine=Part())
    play(first, range(2))
    first.close()
    with pytest.raises(CheckpointError, match="holds the state of engine, which this run does not have"):
        stateful(tmp_path).resume()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="is not the folder of a run"):
            RunRecorder(folder, {})


def test_a_finished_run_that_goes_on_has_not_ended(tmp_path: Path) -> None:
    recorder = stateful(tmp_path)
    play(recorder, range(3))
    recorder.finish({}, {"w": np.zeros(2)})
    stateful(tmp_path).resume()
    assert not (tmp_path / "summary.json").exists()


def test_a_run_without_a_checkpoint_cannot_go_on(tmp_path: Path) -> None:
    play(stateful(tmp_path), range(2))
    with pytest.raises(CheckpointError, match="No checkpoint at"):
        stateful(tmp_path).resume()


def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    stateful(tmp_path, seed=1, tau1=2)
    with pytest.raises(ValueError, match=r"other settings: seed was 1 and is 2; tau1 was 2 and is 3"):
        stateful(tmp_path, seed=2, tau1=3)


def older(folder: Path, **run: Any) -> Path:
    """Return the folder of a run of format 1, which knew fewer settings: two rounds and a checkpoint."""
    (folder / "config.json").write_text(json.dumps({"app": "made-up", "run": run, "environment": {}}))
    recorder = stateful(folder, every=1, **run)
    play(recorder, range(3))
    recorder.close()
    return folder


def test_a_run_of_an_older_version_goes_on_with_todays_defaults(tmp_path: Path) -> None:
    folder = older(tmp_path, seed=1)
    before = (folder / "config.json").read_bytes()
    recorder = RunRecorder(folder, {"run": {"seed": 1, "codec": "none"}}, defaults={"codec": "none"})
    recorder.keep_state(strategy=(part := Part(7)))
    recorder.resume()
    assert [record["round"] for record in recorder.rounds] == [0, 1, 2]
    assert part.value.tolist() == [0, 0, 0]
    play(recorder, range(3, 5))
    assert [record["round"] for record in read_rounds(folder)] == [0, 1, 2, 3, 4]
    # Who wrote it first is still told.
    assert (folder / "config.json").read_bytes() == before


def test_what_an_older_version_did_not_know_and_is_not_the_default_is_refused(tmp_path: Path) -> None:
    folder, now = older(tmp_path, seed=1, gone=2), {"seed": 1, "codec": "onebit", "fault-dropout": 0.5}
    with pytest.raises(RunFolderError) as caught:
        RunRecorder(folder, {"run": now}, defaults={"codec": "none"})
    assert str(caught.value) == (
        "The run to go on with had other settings: codec is 'onebit', and the run knew no such setting "
        "(valid is its default, 'none'); fault-dropout is 0.5, and the run knew no such setting "
        "(valid is to leave it out); gone was 2 and is None"
    )


def test_a_new_run_says_its_format(tmp_path: Path) -> None:
    RunRecorder(tmp_path, {"run": {}}).close()
    assert json.loads((tmp_path / "config.json").read_text())["format"] == 2


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (3, r"format = 3; valid is an integer from 1 to 2, or none for 1; a newer Hedgerow wrote it"),
        (0, "format = 0; valid is an integer from 1 to 2, or none for 1$"),
        (True, "format = True; valid is"),
        ("2", "format = '2'; valid is"),
    ],
)
def test_a_format_that_is_not_known_is_refused(tmp_path: Path, said: object, match: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": said, "run": {}}))
    (tmp_path / "rounds.jsonl").touch()
    with pytest.raises(RunFolderError, match=match):
        RunRecorder(tmp_path, {"run": {}})
    with pytest.raises(RunFolderError, match=match):
        load([tmp_path])


@pytest.mark.parametrize("key", RESUME_MAY_CHANGE)
def test_what_does_not_determine_the_rounds_so_far_may_change(tmp_path: Path, key: str) -> None:
    stateful(tmp_path, **{key: 1})
    stateful(tmp_path, **{key: 2})


def test_the_first_config_stays(tmp_path: Path) -> None:
    stateful(tmp_path, iterations=10)
    before = (tmp_path / "config.json").read_text()
    stateful(tmp_path, iterations=20)
    assert (tmp_path / "config.json").read_text() == before


def test_the_final_model_is_read_with_numpy_alone(tmp_path: Path) -> None:
    model = {"fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}
    RunRecorder(tmp_path, {}).finish({}, model)
    with np.load(tmp_path / "model.npz", allow_pickle=False) as stored:
        assert {key: stored[key].tolist() for key in stored.files} == {
            k: v.tolist() for k, v in model.items()
        }
