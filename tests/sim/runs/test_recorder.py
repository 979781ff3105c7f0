"""A run's folder tells what determined the run and what came of it, even if it was killed."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hedgerow.sim import CheckpointError, RunRecorder, load, load_checkpoint, read_rounds
from hedgerow.sim.runs import recorder as module
from hedgerow.sim.runs.durable import Lines, write_file
from hedgerow.sim.runs.folder import new_run_folder
from hedgerow.sim.runs.recorder import RunFolderError, environment


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


# Records


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


@hypothesis_settings(deadline=None, max_examples=10)
@given(st.dictionaries(st.text(), st.floats(allow_nan=False)))
def test_whatever_a_metric_is_called_a_round_is_one_line(
    tmp_path_factory: pytest.TempPathFactory, central: dict[str, float]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    RunRecorder(folder, {}).on_round_end(Round(1, central))
    assert [r["central"] for r in read_rounds(folder)] == [central]


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


def test_a_checkpoint_of_another_engine_names_it(tmp_path: Path) -> None:
    first = RunRecorder(tmp_path, {"environment": {"engine": "flower-simulation"}}, checkpoint_every=1)
    first.keep_state(strategy=Part(7), nodes=Part(8))
    play(first, range(2))
    first.close()
    second = RunRecorder(tmp_path, {})
    second.keep_state(strategy=Part())
    with pytest.raises(CheckpointError, match=r"the state of nodes, .*, --engine flower$"):
        second.resume()


def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    stateful(tmp_path, seed=1, tau1=2)
    with pytest.raises(ValueError, match=r"other settings: seed was 1 and is 2; tau1 was 2 and is 3"):
        stateful(tmp_path, seed=2, tau1=3)


def test_a_setting_that_is_no_number_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    for _ in range(2):
        stateful(tmp_path, **{"fault-corrupt": float("nan")})


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
        "The run to resume had other settings: codec, which the run did not have, must be its default, "
        "'none', got 'onebit'; fault-dropout, which the run did not have, must be left out, got 0.5; "
        "gone was 2 and is None"
    )


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (
            3,
            r"format must be an integer from 1 to 2, or left out for 1, got 3; it was written by",
        ),
        (0, "format must be an integer from 1 to 2, or left out for 1, got 0$"),
    ],
)
def test_a_format_that_is_not_known_is_refused(tmp_path: Path, said: object, match: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"format": said, "run": {}}))
    (tmp_path / "rounds.jsonl").touch()
    with pytest.raises(RunFolderError, match=match):
        RunRecorder(tmp_path, {"run": {}})
    with pytest.raises(RunFolderError, match=match):
        load([tmp_path])


@pytest.mark.parametrize("key", ["iterations", "monitor", "peers", "peer-ca", "ray", "stop-after", "workers"])
def test_what_does_not_determine_the_rounds_so_far_may_change(tmp_path: Path, key: str) -> None:
    stateful(tmp_path, **{key: 1})
    stateful(tmp_path, **{key: 2})


def test_a_runs_folder_is_its_own_below_the_parent_or_the_users_output_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [new_run_folder("new/runs", "app") for _ in range(3)]
    assert len(set(folders)) == 3
    assert {folder.parent for folder in folders} == {tmp_path / "new" / "runs"}
    monkeypatch.setenv("HEDGEROW_OUTPUT_DIR", str(tmp_path / "named"))
    assert new_run_folder("runs", "app").parent == tmp_path / "named" / "runs"
    assert new_run_folder(tmp_path / "runs", "app").parent == tmp_path / "runs"


def test_a_link_in_a_runs_folder_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("the user's own")
    for name in ("summary.json.partial", "summary.json"):
        (tmp_path / name).symlink_to(victim)
        write_file(tmp_path / "summary.json", lambda file: file.write(b"{}"))
        assert victim.read_text() == "the user's own"
        assert (tmp_path / "summary.json").read_bytes() == b"{}"
        assert not (tmp_path / "summary.json").is_symlink()
        (tmp_path / "summary.json").unlink()
    (tmp_path / "rounds.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match=r"rounds\.jsonl"):
        Lines(tmp_path / "rounds.jsonl")


def test_what_decides_on_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    found = environment()
    assert found["torch"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["torch"]["version"] == torch.__version__
    assert {type(found["torch"][name]) for name in ("mkl", "onednn")} == {bool}
    assert found["threads"] == {
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": None,
    }


def test_the_processors_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Made-up CPU @ 3 GHz\nmodel name\t: Made-up CPU @ 3 GHz\n")
    monkeypatch.setattr(module, "_CPUINFO", info)
    assert environment()["cpu"] == "Made-up CPU @ 3 GHz"
    info.unlink()
    assert environment()["cpu"] != "Made-up CPU @ 3 GHz"


# As imported; conftest.py has one that looks once.
GIT_STATE = module._git_state


def test_without_git_the_environment_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_git_state", GIT_STATE)

    def no_git(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    found = environment(app=tmp_path)
    assert (found["git"], found["app-git"]) == (None, None)


def test_the_repository_of_the_app_is_told_from_the_suites(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.strip()

    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    app = tmp_path / "apps" / "mine"
    app.mkdir(parents=True)
    git("init")
    # Without a commit there is no state to tell.
    assert environment(app=app)["app-git"] is None
    (app / "app.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert environment(app=app)["app-git"] == {"commit": commit, "modified": False}
    (app / "app.py").write_text("2")
    found = environment(app=app)
    assert found["app-git"] == {"commit": commit, "modified": True}
    assert found["git"] != found["app-git"]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (
            ["/x/bin/hedgerow", "run", "sd-feel", "-c", "seed=1 tau1=2"],
            "hedgerow run sd-feel -c 'seed=1 tau1=2'",
        ),
        (["/x/hedgerow/sim/__main__.py", "run", "x"], "hedgerow run x"),
        (["/x/train.py", "--password", "secret"], "train.py"),
        ([], ""),
    ],
)
def test_the_command_is_recorded_of_hedgerow_and_no_argument_of_another_program(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.sys, "argv", arguments)
    assert environment()["command"] == command
