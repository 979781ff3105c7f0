"""``hedgerow plan sd-feel --from-run``: schedules by what a run measured."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.sim.cli.command_line import cells, hedgerow

from hedgerow.sim import find_app, plan_run

PROBE = {
    "curvature": 2.0,
    "gradient-variance": 0.5,
    "gradient-dissimilarity": 0.125,
    "gradient2": 0.25,
    "sum-m2": 0.04,
    "zeta": 0.5,
    "iteration-seconds": 0.001,
    "parameters": 1_000,
}


def write_run(folder: Path, *probes: dict[str, Any]) -> Path:
    folder.mkdir()
    rounds: list[dict[str, Any]] = [{"round": 0, "train": {}, "central": {"loss": 2.0}}]
    rounds += [{"round": k, "train": probe, "central": {}} for k, probe in enumerate(probes, 1)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rounds))
    settings = {"learning-rate": 0.01, "topology": "ring", "num-servers": 4, "num-clients": 20}
    (folder / "config.json").write_text(json.dumps({"app": "sd_feel", "run": settings}))
    return folder


def test_a_plan_takes_its_constants_from_a_probed_run(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", PROBE, {**PROBE, "curvature": 3.0, "gradient2": 0.2}, {"train-loss": 1.0}
    )
    result = hedgerow("plan", "sd-feel", "--from-run", run)
    assert result.exit_code == 0, result.output
    assert [cells(result.stdout, key)[:2] for key in ("smoothness", "sigma2", "kappa2", "delta")] == [
        ["3", "measured"], ["0.5", "measured"], ["0.125", "measured"], ["2", "assumed"]
    ]  # fmt: skip
    assert cells(result.stdout, "learning-rate")[:2] == ["0.01", "the run's"]
    assert cells(result.stdout, "||grad F(u)||^2")[:2] == ["0.2", "measured"]
    assert "ring of 4: zeta = 0.500000" in result.stdout


def test_what_is_given_goes_before_what_was_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", PROBE)
    given = ("--smoothness", "1.5", "--kappa2", "0", "--topology", "complete", "--num-servers", "5")
    told = hedgerow("plan", "sd-feel", "--from-run", run, *given).stdout
    assert cells(told, "smoothness")[:2] == ["1.5", "given"]
    assert cells(told, "kappa2")[:2] == ["0", "given"]
    assert "complete of 5: zeta = 0.000000" in told


def test_a_plan_by_hand_with_the_same_numbers_is_the_same(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {**PROBE, "sum-m2": 0.05, "iteration-seconds": 0.01384})
    numbers = ("--learning-rate", "0.01", "--smoothness", "2", "--sigma2", "0.5", "--kappa2", "0.125")
    system = ("--delta", "2", "--num-clients", "20", "--num-params", "1000")
    graph = ("--topology", "ring", "--num-servers", "4")
    by_hand = hedgerow("plan", "sd-feel", *numbers, *system, *graph).stdout
    measured = hedgerow("plan", "sd-feel", "--from-run", run, *graph).stdout
    schedules = [line for line in by_hand.splitlines() if line.startswith("│")]
    assert len(schedules) == 10
    assert all(line in measured for line in schedules)


def test_the_plan_ends_with_a_command_that_the_app_takes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", PROBE)
    told = hedgerow("plan", "sd-feel", "--from-run", run, "--target", "2").stdout
    (command,) = (shlex.split(line) for line in told.splitlines() if line.startswith("hedgerow run"))
    planned = plan_run(find_app("sd-feel"), [command[4], f"output-dir={tmp_path}"])
    assert planned.run_config["learning-rate"] == 0.01


@pytest.mark.parametrize(("probes", "lacks"), [((), "probes"), (({"train-loss": 1.0},), "probes")])
def test_a_run_without_probes_says_how_to_make_one(tmp_path: Path, probes: Any, lacks: str) -> None:
    result = hedgerow("plan", "sd-feel", "--from-run", write_run(tmp_path / "run", *probes))
    assert result.exit_code == 2
    assert f"has no {lacks}" in result.stderr
    assert '-c "probe-rounds=5"' in result.stderr
