"""``hedgerow sweep``: what it tells while it runs, and what it exits with."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sim.cli.command_line import SD_FEEL, hedgerow

from hedgerow.sim.runs import sweep as sweep_module
from hedgerow.sim.runs.sweep import Job, Outcome


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(f"app = {json.dumps(str(SD_FEEL))}\nseeds = [0, 1]\n[grid]\ntau1 = [1]\n")
    return file


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Lets a sweep's runs end at once, as the test says."""
    say: dict[str, Any] = {"status": "finished"}

    def run_all(queue: list[Job], app: Path, *, jobs: int, threads: int) -> Any:
        say["jobs"] = jobs
        for job in queue:
            if isinstance(say["status"], BaseException):
                raise say["status"]
            yield Outcome(job, say["status"], 3.0, "" if say["status"] == "finished" else "see the log")

    monkeypatch.setattr(sweep_module, "_run_all", run_all)
    return say


def test_a_dry_run_lists_and_leaves_nothing(sweep_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = hedgerow("sweep", sweep_file, "--out", out, "--dry-run")
    assert result.exit_code == 0
    assert result.stdout == (
        f"run   tau1=1, seed 0  ->  {out / 'tau1=1' / 'seed-0'}\n"
        f"run   tau1=1, seed 1  ->  {out / 'tau1=1' / 'seed-1'}\n"
    )
    assert not out.exists()


def test_a_sweep_tells_each_run_and_what_is_left(
    sweep_file: Path, tmp_path: Path, no_runs: dict[str, Any]
) -> None:
    result = hedgerow("sweep", sweep_file, "--out", tmp_path / "out", "--jobs", 1)
    assert result.exit_code == 0
    assert no_runs["jobs"] == 1
    assert result.stdout == (
        "[1/2] tau1=1, seed 0: finished after 3 s; about 3 s left\n"
        "[2/2] tau1=1, seed 1: finished after 3 s; about 0 s left\n"
        f"Sweep folder: {tmp_path / 'out'}\n"
    )


@pytest.mark.parametrize(("options", "jobs"), [((), 1), (("--jobs", 2), 2)])
def test_flowers_engine_has_one_run_at_a_time_by_default(
    sweep_file: Path, tmp_path: Path, no_runs: dict[str, Any], options: tuple[str, ...], jobs: int
) -> None:
    result = hedgerow("sweep", sweep_file, "--out", tmp_path / "out", "--engine", "flower", *options)
    assert result.exit_code == 0
    assert no_runs["jobs"] == jobs


@pytest.mark.slow
def test_a_sweep_on_flowers_engine(sweep_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--out", out, "--engine", "flower", "--seeds", "0", "-c", "num-rounds=2 model=logistic")
    result = hedgerow("sweep", sweep_file, *options, "--nodes", 4)
    assert result.exit_code == 0, result.output
    environment = json.loads((out / "tau1=1/seed-0/config.json").read_text())["environment"]
    assert environment["engine"] == "flower-simulation"
    assert "\x1b" not in (out / "tau1=1/seed-0.log").read_text()
    assert "kept" in hedgerow("sweep", sweep_file, *options, "--nodes", 4).stdout
    assert hedgerow("table", out).exit_code == 0
    assert "tau1=1/seed-0" in hedgerow("runs", out).stdout


def test_a_sweep_with_a_failure_exits_with_1(
    sweep_file: Path, tmp_path: Path, no_runs: dict[str, Any]
) -> None:
    no_runs["status"] = "failed"
    result = hedgerow("sweep", sweep_file, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "Failed: tau1=1, seed 1: see the log" in result.stderr


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupted_sweep_says_how_to_go_on(
    sweep_file: Path, tmp_path: Path, no_runs: dict[str, Any], stop: BaseException, code: int
) -> None:
    no_runs["status"] = stop
    result = hedgerow("sweep", sweep_file, "--out", tmp_path / "out")
    assert result.exit_code == code
    assert f"start it again to go on in {tmp_path / 'out'}" in result.stderr
