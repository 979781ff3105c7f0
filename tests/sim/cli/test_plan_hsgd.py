"""``hedgerow plan hsgd``: intervals, their cost, and what they rest on."""

import json
from pathlib import Path

import pytest
from tests.sim.cli.command_line import APPS, cells, hedgerow

# Setting B of the planning goldens: the MIMIC-III sizes are the defaults.
HSGD = ("plan", "hsgd", "--rho", "0.5", "--delta", "0.5", "--loss-gap", "2.3")
HSGD_APP = APPS / "hsgd"


def test_an_hsgd_plan_chooses_the_intervals_and_their_cost() -> None:
    result = hedgerow(*HSGD, "--target", "0.5", "--gradient2", "1")
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "Q* with eta^3") == ["19.5789"]
    assert cells(result.stdout, "largest P that eta admits") == ["25"]
    assert cells(result.stdout, "P = Q") == ["20"]
    assert cells(result.stdout, "12", "12")[:2] == ["0.4964", "1446.41"]
    assert float(cells(result.stdout, "eta* at P = Q")[0]) <= 1 / (8 * 20 * 0.5)


def test_an_hsgd_plan_says_that_a_target_is_infeasible() -> None:
    result = hedgerow("plan", "hsgd", "--rho", "5", "--delta", "0.5", "--loss-gap", "2.3", "--target", "0.1")
    assert result.exit_code == 0
    assert cells(result.stdout, "2")[1:] == ["infeasible", "infeasible"]
    assert "Infeasible: no P and Q" in result.stdout


def write_observed_run(folder: Path, *, observed: bool) -> Path:
    folder.mkdir()
    told = {"rho": 0.5, "delta-g": 0.5, "F0": 2.3, "gradient2": 1.0} if observed else {}
    rounds = [{"round": 0, "train": {}}, {"round": 1, "train": {"loss": 1.0, **told}}]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rounds))
    return folder


def test_an_hsgd_plan_takes_its_constants_from_an_observing_run(tmp_path: Path) -> None:
    run = write_observed_run(tmp_path / "run", observed=True)
    result = hedgerow("plan", "hsgd", "--from-run", run, "--rho", "1")
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "rho") == ["1", "given"]
    assert cells(result.stdout, "delta") == ["0.5", "measured"]
    assert cells(result.stdout, "gradient2") == ["1", "measured"]


def test_an_hsgd_plan_takes_its_sizes_from_the_app() -> None:
    result = hedgerow(*HSGD, "--app", HSGD_APP, "-c", "participation=0.5 iterations=200 learning-rate=0.05")
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "T") == ["200", "set"]
    assert cells(result.stdout, "eta") == ["0.05", "set"]
    # 4 groups of 114 people, 57 in a batch; encoders 15 x 16 + 16 + 16 x 7 + 7, head 14 x 16 + 16 + 16 + 1.
    (P,) = cells(result.stdout, "P = Q")
    scalars = 4 * 200 / int(P) * (375 + 57 * 375 + 257 + 2 * 57 * 7)
    assert float(cells(result.stdout, "cost (19), MB")[0]) == pytest.approx(4 * scalars / 1e6, rel=1e-5)


def test_a_run_without_estimates_says_how_to_make_one_with_them(tmp_path: Path) -> None:
    result = hedgerow("plan", "hsgd", "--from-run", write_observed_run(tmp_path / "run", observed=False))
    assert result.exit_code == 2
    assert '-c "adaptive=observe"' in result.stderr
