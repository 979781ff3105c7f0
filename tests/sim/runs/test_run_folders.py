"""A run's folder that is damaged, in use or on a full disk is one clear error, and never half resumed."""

import errno
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save
from tests.sim.runs.disk import Watched

from hedgerow.sim import (
    CheckpointError,
    RunRecorder,
    load_checkpoint,
    read_checkpoint,
    read_rounds,
    save_checkpoint,
)
from hedgerow.sim.runs import durable
from hedgerow.sim.runs.folder import parse_rounds, write_json
from hedgerow.sim.runs.recorder import RunFolderError
from hedgerow.wire import Clock

CONFIG = {"run": {"seed": 1}, "environment": {}}


@dataclass
class Round:
    round: int
    loss: float = 0.0


class Strategy:
    """Its state is the round, in many numbers."""

    def __init__(self, size: int = 50) -> None:
        self.value, self.clock = np.zeros(size), Clock()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value.copy(), "clock": self.clock.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]
        self.clock.load_state_dict(state["clock"])


def recorder(folder: Path, strategy: Strategy | None = None, every: int = 2) -> RunRecorder:
    out = RunRecorder(folder, CONFIG, checkpoint_every=every)
    out.keep_state(strategy=strategy or Strategy())
    return out


def play(out: RunRecorder, rounds: range) -> None:
    strategy: Any = out._parts["strategy"]
    for n in rounds:
        strategy.value += 1
        out.on_round_end(Round(n))


def resumed(folder: Path) -> tuple[list[int], int]:
    """Go on with a run; return its rounds and the round of its state."""
    strategy = Strategy()
    out = recorder(folder, strategy)
    try:
        out.resume()
    finally:
        out.close()
    return [record["round"] for record in out.rounds], int(strategy.value[0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of rounds 2 and 4, killed in round 6."""
    folder = tmp_path / "run"
    folder.mkdir()
    out = recorder(folder)
    play(out, range(1, 6))
    out.close()
    return folder


# Generations


def test_a_checkpoint_says_of_which_run_and_rounds_it_is(run: Path) -> None:
    about = read_checkpoint(run / "checkpoint" / "latest.safetensors").about
    assert about["round"] == 4
    assert about["rounds"]["bytes"] == len(b"".join((run / "rounds.jsonl").read_bytes().splitlines(True)[:4]))
    assert read_checkpoint(run / "checkpoint" / "previous.safetensors").about["round"] == 2


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "a bit":
        path.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    elif how == "a folder":
        path.mkdir()


HOW = ("cut", "a bit", "a folder", "gone")


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_newer_checkpoint_is_passed_over_with_a_warning(
    run: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        "hedgerow.sim.runs.checkpoint._logger.warning", lambda text, *values: warnings.append(text % values)
    )
    spoil(run / "checkpoint" / "latest.safetensors", how)
    assert resumed(run) == ([1, 2], 2)
    assert len(warnings) == 1
    assert "previous.safetensors" in warnings[0]
    # From then on it is the latest.
    assert resumed(run) == ([1, 2], 2)
    assert len(warnings) == 1


def test_a_checkpoint_of_a_later_format_is_not_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr("hedgerow.sim.runs.checkpoint.FORMAT", 4)
        save_checkpoint(run / "checkpoint" / "latest.safetensors", {"round": 4, "parts": {}})
    with pytest.raises(CheckpointError, match=r"has format 4; this version of hedgerow reads 3"):
        resumed(run)


# What is not this run's


def test_arrays_of_another_checkpoint_are_damage(run: Path) -> None:
    latest, previous = (run / "checkpoint" / name for name in ("latest.safetensors", "previous.safetensors"))
    with safe_open(latest, "numpy") as file:
        told = file.metadata()
    previous.write_bytes(save(load_file(previous), told))
    previous.replace(latest)
    with pytest.raises(CheckpointError, match=r"latest.safetensors is damaged: its SHA-256"):
        resumed(run)


def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    out = RunRecorder(
        other, {"run": {"seed": 1, "checkpoint-every": 9}, "environment": {}}, checkpoint_every=2
    )
    out.keep_state(strategy=Strategy())
    play(out, range(1, 6))
    out.close()
    shutil.copy(other / "checkpoint" / "latest.safetensors", run / "checkpoint" / "latest.safetensors")
    with pytest.raises(CheckpointError, match=r"it was written under another config\.json"):
        resumed(run)


@pytest.mark.parametrize(
    ("clock", "shown"), [({"seconds": float("nan")}, "nan"), (float("inf"), "inf"), ("late", "'late'")]
)
def test_a_clock_out_of_joint_is_refused(run: Path, clock: Any, shown: str) -> None:
    path = run / "checkpoint" / "latest.safetensors"
    found = read_checkpoint(path)
    found.state["parts"]["strategy"]["clock"] = clock
    save_checkpoint(path, found.state, found.about)
    with pytest.raises(CheckpointError, match=f"the clock of strategy must be finite, got {shown} seconds"):
        resumed(run)


# Records


def test_an_infinite_value_is_a_number_of_json_that_is_read_as_infinite(tmp_path: Path) -> None:
    """Of an epsilon, for example; JSON itself has no infinity."""

    def refuse(name: str) -> float:
        raise AssertionError(name)

    (tmp_path / "run").mkdir()
    out = recorder(tmp_path / "run")
    for n, loss in enumerate((math.inf, -math.inf, 0.1), 1):
        out.on_round_end(Round(n, loss))
    out.close()
    data = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    lines = [json.loads(line, parse_constant=refuse) for line in data.splitlines()]
    assert [line["loss"] for line in lines] == [math.inf, -math.inf, 0.1]
    assert parse_rounds(data, "here") == lines
    write_json(tmp_path / "told.json", {"a": [1.5, {"b": math.inf}], "c": "Infinity"})
    told = json.loads((tmp_path / "told.json").read_bytes(), parse_constant=refuse)
    assert told == {"a": [1.5, {"b": math.inf}], "c": "Infinity"}


def test_a_line_that_was_cut_off_is_not_a_round(run: Path) -> None:
    with (run / "rounds.jsonl").open("a") as file:
        file.write('{"round": 6, "cen')
    assert [record["round"] for record in read_rounds(run)] == [1, 2, 3, 4, 5]
    assert resumed(run) == ([1, 2, 3, 4], 4)


Spoil = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        (lambda data: data[:60], "its rounds up to 4 differ from those of"),
        (lambda data: data + data, "line 6, is damaged: round 1 follows round 5"),
        (lambda data: data.replace(b'{"round": 2', b'{"round" 2'), "line 2, is damaged"),
        (lambda data: data[:30] + b"\xff" + data[31:], "is damaged"),
        (lambda data: b"[1]\n" + data, "line 1, is damaged: it must hold a mapping, got a list"),
    ],
)
def test_damaged_rounds_are_one_clear_error(run: Path, spoilt: Spoil, says: str) -> None:
    file = run / "rounds.jsonl"
    file.write_bytes(spoilt(file.read_bytes()))
    with pytest.raises(RunFolderError, match=says):
        resumed(run)


# One writer

HOLDER = """
import sys, time
from pathlib import Path
from hedgerow.sim import RunRecorder
recorder = RunRecorder(Path(sys.argv[1]), {"run": {"seed": 1}, "environment": {}})
print("held", flush=True)
time.sleep(60)
"""


def test_a_run_that_another_process_writes_is_refused_until_that_is_killed(run: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        with pytest.raises(RunFolderError, match="is in use: another process writes this run"):
            resumed(run)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    assert (run / ".lock").exists()
    assert resumed(run) == ([1, 2, 3, 4], 4)


def test_a_new_run_is_locked_too_and_free_at_its_end(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    with pytest.raises(RunFolderError, match="another process writes this run"):
        recorder(tmp_path)
    first.finish({})
    recorder(tmp_path).close()
    with pytest.raises(RuntimeError, match="boom"), recorder(tmp_path).guard():
        raise RuntimeError("boom")
    recorder(tmp_path).close()


# Full and read-only disks


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *((call, errno.ENOSPC) for call in ("write", "open", "replace")),
        *((call, errno.EIO) for call in ("fsync", "mkdir")),
    ],
)
def test_a_disk_that_takes_no_more_is_one_clear_error_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """From the n-th call on nothing is taken; whatever n is, the run can go on, or had no checkpoint yet."""
    said: list[str] = []
    for n in range(1, 1000):
        folder = tmp_path / f"{n}"
        folder.mkdir()
        calls = 0

        def refuses(*arguments: Any, n: int = n, **options: Any) -> Any:
            nonlocal calls
            reading = call == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR)
            calls += not reading
            if calls >= n and not reading:
                raise OSError(code, os.strerror(code))
            return getattr(os, call)(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(durable, "os", Watched(**{call: refuses}))
            try:
                out = recorder(folder)
                with out.guard():
                    play(out, range(1, 6))
                out.finish({}, {"w": np.zeros(3)})
            except RunFolderError as error:
                said.append(str(error))
            else:
                break
        if (folder / "checkpoint" / "latest.safetensors").exists():
            rounds, at = resumed(folder)
            assert rounds == list(range(1, at + 1))
            assert at == load_checkpoint(folder / "checkpoint" / "latest.safetensors")["round"]
    assert said
    assert all(os.strerror(code) in text for text in said)
    assert (folder / "summary.json").exists()


def test_a_file_that_may_not_grow_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    strategy = Strategy()
    out = recorder(tmp_path, strategy)
    play(out, range(1, 4))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        strategy.value = np.full(10_000, 3.0)
        with pytest.raises(RunFolderError, match=r"latest.safetensors: File too large"), out.guard():
            play(out, range(4, 6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["latest.safetensors"]
    assert resumed(tmp_path) == ([1, 2], 2)
