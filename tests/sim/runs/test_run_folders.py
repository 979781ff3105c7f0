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
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sim.runs.disk import Watched

from hedgerow.sim import (
    CheckpointError,
    RunRecorder,
    load_checkpoint,
    read_checkpoint,
    read_config,
    read_rounds,
    save_checkpoint,
)
from hedgerow.sim.runs import durable
from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.folder import Lock, parse_rounds, write_json
from hedgerow.sim.runs.recorder import RunFolderError
from hedgerow.wire import Clock

CONFIG = {"run": {"seed": 1}, "environment": {}}
ERRORS = (RunFolderError, CheckpointError)


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


def test_a_killed_run_goes_on_from_its_latest_checkpoint(run: Path) -> None:
    assert resumed(run) == ([1, 2, 3, 4], 4)


# Generations


def test_a_checkpoint_says_of_which_run_and_rounds_it_is(run: Path) -> None:
    about = read_checkpoint(run / "checkpoint" / "latest.npz").about
    assert about["round"] == 4
    assert about["rounds"]["bytes"] == len(b"".join((run / "rounds.jsonl").read_bytes().splitlines(True)[:4]))
    assert read_checkpoint(run / "checkpoint" / "previous.npz").about["round"] == 2


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "a bit":
        path.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    elif how == "empty":
        path.touch()
    elif how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)


HOW = ("cut", "a bit", "empty", "a folder", "a pipe", "gone")


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_newer_checkpoint_is_passed_over_with_a_warning(
    run: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        "hedgerow.sim.runs.generations._logger.warning", lambda text, *values: warnings.append(text % values)
    )
    spoil(run / "checkpoint" / "latest.npz", how)
    assert resumed(run) == ([1, 2], 2)
    assert len(warnings) == 1
    assert "the checkpoint before it is taken" in warnings[0]
    # From then on it is the latest.
    assert resumed(run) == ([1, 2], 2)
    assert len(warnings) == 1


@pytest.mark.parametrize("how", HOW[:-1])
def test_two_damaged_checkpoints_are_one_error_that_names_both(run: Path, how: str) -> None:
    for name in ("latest.npz", "previous.npz"):
        spoil(run / "checkpoint" / name, how)
    with pytest.raises(
        CheckpointError, match=r"latest.npz is not a checkpoint.*previous.npz is not a checkpoint"
    ):
        resumed(run)


def test_a_checkpoint_of_a_later_format_is_not_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr("hedgerow.sim.runs.checkpoint.FORMAT", 3)
        save_checkpoint(run / "checkpoint" / "latest.npz", {"round": 4, "parts": {}})
    with pytest.raises(CheckpointError, match=r"has format 3; this version of hedgerow reads 1 and 2"):
        resumed(run)


def of_before(path: Path) -> None:
    """Write a checkpoint as the code before manifests did: no manifest, all else alike."""
    with np.load(path) as stored:
        members = {name: stored[name] for name in stored.files if name != "manifest.json"}
    path.unlink()
    np.savez(path, **members)


def test_a_run_of_the_code_before_goes_on(run: Path) -> None:
    shutil.rmtree(run / "checkpoint" / "previous.npz", ignore_errors=True)
    of_before(run / "checkpoint" / "latest.npz")
    assert resumed(run) == ([1, 2, 3, 4], 4)


def test_a_run_of_the_code_before_needs_its_rounds_too(run: Path) -> None:
    of_before(run / "checkpoint" / "latest.npz")
    lines = (run / "rounds.jsonl").read_text().splitlines(keepends=True)
    (run / "rounds.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(RunFolderError, match="its rounds up to 4 are not those of"):
        resumed(run)


# What is not this run's


def test_arrays_of_another_checkpoint_are_damage(run: Path) -> None:
    latest, previous = (run / "checkpoint" / name for name in ("latest.npz", "previous.npz"))
    with np.load(latest) as new, np.load(previous) as old:
        mixed = {name: old[name] if name == "array-0" else new[name] for name in new.files}
    previous.unlink()
    latest.unlink()
    np.savez(latest, **mixed)
    with pytest.raises(CheckpointError, match=r"array-0 is not what was written \(SHA-256\)"):
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
    shutil.copy(other / "checkpoint" / "latest.npz", run / "checkpoint" / "latest.npz")
    with pytest.raises(CheckpointError, match=r"it was written under another config\.json"):
        resumed(run)


def test_rounds_of_another_run_are_refused(run: Path) -> None:
    lines = (run / "rounds.jsonl").read_text().replace("0.0", "0.5", 1)
    (run / "rounds.jsonl").write_text(lines)
    with pytest.raises(RunFolderError, match="its rounds up to 4 are not those of"):
        resumed(run)


@pytest.mark.parametrize(
    ("clock", "shown"), [({"seconds": float("nan")}, "nan"), (float("inf"), "inf"), ("late", "'late'")]
)
def test_a_clock_out_of_joint_is_refused(run: Path, clock: Any, shown: str) -> None:
    path = run / "checkpoint" / "latest.npz"
    found = read_checkpoint(path)
    found.state["parts"]["strategy"]["clock"] = clock
    save_checkpoint(path, found.state, found.about)
    with pytest.raises(CheckpointError, match=f"a clock of strategy that shows {shown} seconds"):
        resumed(run)


@pytest.mark.parametrize("parts", [{"strategy": {}}, {"strategy": 3}, [], None])
def test_a_state_that_is_none_is_refused(run: Path, parts: Any) -> None:
    path = run / "checkpoint" / "latest.npz"
    save_checkpoint(path, {"round": 4, "parts": parts}, read_checkpoint(path).about)
    with pytest.raises(
        CheckpointError, match=r"holds a state that strategy does not take|not the checkpoint of a run"
    ):
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
        (lambda data: data[:60], "its rounds up to 4 are not those of"),
        (lambda data: b"", "its rounds up to 4 are not those of"),
        (lambda data: data + data, "line 6, is damaged: round 1 stands after round 5"),
        (lambda data: b"\n".join(data.split(b"\n")[1:]), "its rounds up to 4 are not those of"),
        (lambda data: data.replace(b'"round": 2', b'"round": 3'), "line 3, is damaged"),
        (lambda data: data.replace(b'{"round": 2', b'{"round" 2'), "line 2, is damaged"),
        (lambda data: data[:30] + b"\xff" + data[31:], "is damaged"),
        (lambda data: data.replace(b"round", b"sound"), "line 1, is damaged: it has no round"),
        (lambda data: b"[1]\n" + data, "line 1, is damaged: it holds a list"),
    ],
)
def test_damaged_rounds_are_one_clear_error(run: Path, spoilt: Spoil, says: str) -> None:
    file = run / "rounds.jsonl"
    file.write_bytes(spoilt(file.read_bytes()))
    with pytest.raises(RunFolderError, match=says):
        resumed(run)


@pytest.mark.parametrize("how", ["a folder", "a pipe", "gone"])
def test_what_stands_in_place_of_the_rounds_is_one_clear_error(run: Path, how: str) -> None:
    spoil(run / "rounds.jsonl", how)
    says = r"rounds\.jsonl: (not a regular file|No such file|Is a directory)"
    for reads in (read_rounds, resumed):
        with pytest.raises(RunFolderError, match=says):
            reads(run)
    assert not (run / "rounds.jsonl").is_file()


@pytest.mark.parametrize("how", [how for how in HOW if how != "a bit"])
def test_what_stands_in_place_of_the_config_is_one_clear_error(run: Path, how: str) -> None:
    spoil(run / "config.json", how)
    for reads in (read_config, resumed):
        with pytest.raises(RunFolderError, match=r"config.json"):
            reads(run)


@pytest.mark.parametrize("text", ["[]", "3", '{"run": 3}', "[" * 100_000])
def test_a_config_that_is_none_is_refused(run: Path, text: str) -> None:
    (run / "config.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"config\.json is damaged"):
        read_config(run)


def test_a_config_that_was_changed_is_not_the_runs(run: Path) -> None:
    changed = {**json.loads((run / "config.json").read_text()), "realism": "other"}
    (run / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"it was written under another config\.json"):
        resumed(run)


# Links


@pytest.mark.parametrize(
    "name", ["rounds.jsonl", "config.json", "rounds.jsonl.partial", "lock", "checkpoint"]
)
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    """Somebody put the link there before the run began, or while it ran."""
    target, folder = tmp_path / "target", tmp_path / "run"
    folder.mkdir()
    out = None if name == "lock" else recorder(folder)
    if name == "checkpoint":
        target.mkdir()
    else:
        target.write_text("precious")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    try:
        out = out or recorder(folder)
        play(out, range(1, 6))
        out.close()
        resumed(folder)
    except ERRORS:
        pass
    finally:
        if out is not None:
            out.close()
    assert not list(target.iterdir()) if name == "checkpoint" else target.read_text() == "precious"


def test_a_file_in_place_of_a_link_is_new(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_file(tmp_path / "link", lambda file: file.write(b"new"))
    assert ((tmp_path / "link").read_text(), (tmp_path / "target").read_text()) == ("new", "precious")
    assert not (tmp_path / "link").is_symlink()


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
        with pytest.raises(RunFolderError, match=rf"is in use: process {other.pid} writes this run"):
            resumed(run)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    finally:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    assert (run / "lock").exists()
    assert resumed(run) == ([1, 2, 3, 4], 4)
    assert not (run / "lock").exists()


def test_a_new_run_is_locked_too_and_free_at_its_end(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    with pytest.raises(RunFolderError, match=f"process {os.getpid()} writes this run"):
        recorder(tmp_path)
    first.finish({})
    recorder(tmp_path).close()
    with pytest.raises(RuntimeError, match="boom"), recorder(tmp_path).guard():
        raise RuntimeError("boom")
    recorder(tmp_path).close()


def test_of_many_that_begin_at_once_one_writes(tmp_path: Path) -> None:
    held: list[RunRecorder] = []
    refused: list[str] = []

    def begin() -> None:
        try:
            held.append(recorder(tmp_path))
        except RunFolderError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=begin) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 15)
    assert all("is in use" in text for text in refused)
    held[0].close()


def test_a_run_that_is_just_beginning_is_in_use_and_one_that_was_killed_then_is_begun_anew(
    tmp_path: Path,
) -> None:
    other = Lock(tmp_path)
    (tmp_path / "config.json.partial").write_text("{")
    with pytest.raises(RunFolderError, match="is in use"):
        recorder(tmp_path)
    other.release()
    recorder(tmp_path).close()
    assert not (tmp_path / "config.json.partial").exists()


def test_what_another_run_wrote_meanwhile_is_seen_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(folder: Path) -> Lock:
        (folder / "config.json").write_text('{"run": {"seed": 2}}')
        return Lock(folder)

    monkeypatch.setattr("hedgerow.sim.runs.recorder.Lock", meanwhile)
    with pytest.raises(RunFolderError, match="had other settings"):
        recorder(tmp_path)


def test_a_folder_of_other_files_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(RunFolderError, match="is not the folder of a run"):
        recorder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_where_there_are_no_locks_a_run_goes_on_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    out = recorder(tmp_path)
    play(out, range(1, 5))
    out.close()
    assert resumed(tmp_path) == ([1, 2, 3, 4], 4)


def test_where_there_are_no_hard_links_a_run_has_two_checkpoints_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(durable, "os", Watched(link=no_links))
    out = recorder(tmp_path)
    play(out, range(1, 6))
    out.close()
    spoil(tmp_path / "checkpoint" / "latest.npz", "cut")
    assert resumed(tmp_path) == ([1, 2], 2)


# Full and read-only disks


@pytest.mark.parametrize("call", ["write", "fsync", "open", "replace", "mkdir", "link", "unlink"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
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
        if (folder / "checkpoint" / "latest.npz").exists():
            rounds, at = resumed(folder)
            assert rounds == list(range(1, at + 1))
            assert at == load_checkpoint(folder / "checkpoint" / "latest.npz")["round"]
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
        with pytest.raises(RunFolderError, match=r"latest.npz: File too large"), out.guard():
            play(out, range(4, 6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["latest.npz"]
    assert resumed(tmp_path) == ([1, 2], 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file system of its own")
def test_a_run_on_a_full_file_system_goes_on_once_there_is_room(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    try:
        folder = tmp_path / "run"
        folder.mkdir()
        strategy = Strategy(5000)
        out = recorder(folder, strategy)
        play(out, range(1, 4))
        (tmp_path / "filler").write_bytes(bytes(os.statvfs(tmp_path).f_bavail * 4096))
        with pytest.raises(RunFolderError, match="No space left on device"), out.guard():
            play(out, range(4, 6))
        (tmp_path / "filler").unlink()
        assert resumed(folder) == ([1, 2], 2)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(RunFolderError, match="Read-only file system"):
            resumed(folder)
        assert [record["round"] for record in read_rounds(folder)] == [1, 2]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
