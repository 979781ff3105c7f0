"""A run that is stopped after any single write goes on to the same end, and never from half a state."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sim.runs.disk import Disk, KilledError

from hedgerow.sim import (
    CheckpointError,
    RunRecorder,
    load_checkpoint,
    read_config,
    read_rounds,
)
from hedgerow.sim.runs import durable
from hedgerow.sim.runs.recorder import RunFolderError

ROUNDS = 4
EVERY = 2
CONFIG = {"run": {"seed": 1}, "environment": {}}


@dataclass
class Round:
    round: int
    total: float


class Sum:
    """A strategy whose state is a function of the round alone."""

    def __init__(self) -> None:
        self.value = np.zeros(40)

    def step(self, n: int) -> float:
        self.value = self.value + n * np.arange(40.0)
        return float(self.value[1])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


def go(recorder: RunRecorder, strategy: Sum, first: int) -> None:
    for n in range(first, ROUNDS + 1):
        recorder.on_round_end(Round(n, strategy.step(n)))
    recorder.finish({"status": "completed"}, {"w": strategy.value})


def run(folder: Path) -> None:
    """Run from the start, or go on."""
    recorder, strategy = RunRecorder(folder, CONFIG, checkpoint_every=EVERY), Sum()
    try:
        recorder.keep_state(strategy=strategy)
        begun = (folder / "checkpoint").exists()
        if begun:
            recorder.resume()
        go(recorder, strategy, recorder.rounds[-1]["round"] + 1 if begun else 1)
    finally:
        recorder.close()


def results(folder: Path) -> tuple[Any, ...]:
    with np.load(folder / "model.npz", allow_pickle=False) as model:
        return read_rounds(folder), read_config(folder), model["w"].tolist()


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs something, stopped after so many changes of the disk."""

    def start(
        what: Callable[[Path], object], begun: Path | None = None, after: int | None = None
    ) -> Disk | None:
        folder = tmp_path / f"run-{after}"
        folder.mkdir()
        disk = Disk(folder, after)
        if begun is not None:
            for path in sorted(begun.rglob("*")):
                place = folder / path.relative_to(begun)
                place.mkdir() if path.is_dir() else place.write_bytes(path.read_bytes())
            for path in (*folder.rglob("*"), folder):
                descriptor = os.open(path, os.O_RDONLY)
                disk._synced(descriptor)
                os.close(descriptor)
        with monkeypatch.context() as patched:
            patched.setattr(durable, "os", disk)
            try:
                what(folder)
            except KilledError:
                return disk
        return disk if after is None else None

    return start


def aftermaths(disk: Disk) -> dict[str, Path]:
    name = disk.folder.name
    return {
        "killed": disk.after_a_kill(disk.folder.with_name(f"{name}-killed")),
        "bytes lost": disk.after_a_power_cut(disk.folder.with_name(f"{name}-bytes"), names_too=False),
        "names lost": disk.after_a_power_cut(disk.folder.with_name(f"{name}-names"), names_too=True),
    }


def test_a_run_stopped_after_any_write_goes_on_to_the_same_end(
    stopped: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stopped(run)
    assert {"open", "write", "fsync", "replace", "mkdir"} == set(whole.done)
    expected = results(whole.folder)
    resumed = 0
    for after in range(1, whole.count):
        for what, folder in aftermaths(stopped(run, after=after)).items():
            try:
                read_config(folder)
                load_checkpoint_of(folder)
            except (CheckpointError, RunFolderError):
                # Nothing had been promised yet: no second checkpoint was begun.
                assert EVERY not in promised(whole.done[:after]), (after, what)
                continue
            run(folder)
            assert results(folder) == expected, (after, what)
            resumed += 1
    assert resumed > whole.count


def load_checkpoint_of(folder: Path) -> None:
    """Raise CheckpointError where a run has none."""
    found = [folder / "checkpoint" / name for name in ("latest.safetensors", "previous.safetensors")]
    load_checkpoint(next((path for path in found if path.exists()), found[0]))


def promised(done: list[str]) -> list[int]:
    """Return the round of the first checkpoint once its folder was synced after its rename."""
    begun = done.index("mkdir") if "mkdir" in done else len(done)
    rest = done[begun:]
    if "replace" not in rest:
        return []
    return [EVERY] if "fsync" in rest[rest.index("replace") :] else []


def test_going_on_can_be_stopped_after_any_write_too(stopped: Callable[..., Any]) -> None:
    """The folder to go on with has rounds after its checkpoint, a torn line and a damaged checkpoint."""
    whole = stopped(run)
    expected = results(whole.folder)
    begun = stopped(run, after=whole.count - 1).folder
    with (begun / "rounds.jsonl").open("a") as file:
        file.write('{"round": 9')
    assert (begun / "checkpoint" / "previous.safetensors").exists()
    latest = begun / "checkpoint" / "latest.safetensors"
    latest.write_bytes(latest.read_bytes()[:-99])
    for after in range(1, 1000):
        disk = stopped(run, begun, after)
        if disk is None:
            assert after > 30
            return
        for what, folder in aftermaths(disk).items():
            run(folder)
            assert results(folder) == expected, (after, what)
