"""``hedgerow plan``: what is chosen by numbers that are given or that a run measured."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sim.cli.command_line import APPS, cells, hedgerow

from hedgerow.sim import find_app, plan_run
from hedgerow.sim.runs.checkpoint import save_arrays

# HSGD: intervals.

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


# SD-FEEL: schedules.

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


def write_sd_feel_run(folder: Path, *probes: dict[str, Any]) -> Path:
    folder.mkdir()
    rounds: list[dict[str, Any]] = [{"round": 0, "train": {}, "central": {"loss": 2.0}}]
    rounds += [{"round": k, "train": probe, "central": {}} for k, probe in enumerate(probes, 1)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rounds))
    settings = {"learning-rate": 0.01, "topology": "ring", "num-servers": 4, "num-clients": 20}
    (folder / "config.json").write_text(json.dumps({"app": "sd_feel", "run": settings}))
    return folder


def test_a_plan_takes_its_constants_from_a_probed_run(tmp_path: Path) -> None:
    run = write_sd_feel_run(
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
    run = write_sd_feel_run(tmp_path / "run", PROBE)
    given = ("--smoothness", "1.5", "--kappa2", "0", "--topology", "complete", "--num-servers", "5")
    told = hedgerow("plan", "sd-feel", "--from-run", run, *given).stdout
    assert cells(told, "smoothness")[:2] == ["1.5", "given"]
    assert cells(told, "kappa2")[:2] == ["0", "given"]
    assert "complete of 5: zeta = 0.000000" in told


def test_a_plan_by_hand_with_the_same_numbers_is_the_same(tmp_path: Path) -> None:
    run = write_sd_feel_run(tmp_path / "run", {**PROBE, "sum-m2": 0.05, "iteration-seconds": 0.01384})
    numbers = ("--learning-rate", "0.01", "--smoothness", "2", "--sigma2", "0.5", "--kappa2", "0.125")
    system = ("--delta", "2", "--num-clients", "20", "--num-params", "1000")
    graph = ("--topology", "ring", "--num-servers", "4")
    by_hand = hedgerow("plan", "sd-feel", *numbers, *system, *graph).stdout
    measured = hedgerow("plan", "sd-feel", "--from-run", run, *graph).stdout
    schedules = [line for line in by_hand.splitlines() if line.startswith("│")]
    assert len(schedules) == 10
    assert all(line in measured for line in schedules)


def test_the_plan_of_sd_feel_ends_with_a_command_that_the_app_takes(tmp_path: Path) -> None:
    run = write_sd_feel_run(tmp_path / "run", PROBE)
    told = hedgerow("plan", "sd-feel", "--from-run", run, "--target", "2").stdout
    (command,) = (shlex.split(line) for line in told.splitlines() if line.startswith("hedgerow run"))
    planned = plan_run(find_app("sd-feel"), [command[4], f"output-dir={tmp_path}"])
    assert planned.run_config["learning-rate"] == 0.01


# The similarity-free family: steps.

GIVEN = ("plan", "similarity-free", "--smoothness", "2", "--variance", "0.25")


def write_probed_run(folder: Path, *, probed: bool) -> Path:
    folder.mkdir()
    probes = {"curvature": 4.0, "gradient-variance": 0.5} if probed else {}
    rounds = [
        {"round": 0, "train": {}, "central": {"loss": 2.0}},
        {"round": 1, "train": {"train-loss": 1.0, **probes}, "central": {"loss": 1.5}},
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rounds))
    settings = {"local-iters": 5, "num-clients": 3, "compressor": "topk(0.01)"}
    (folder / "config.json").write_text(json.dumps({"app": "similarity_free", "run": settings}))
    save_arrays(folder / "model.npz", {"weight": np.zeros((10, 100), np.float32), "seen": np.array(3)})
    return folder


def test_a_similarity_free_plan_shows_steps_and_constants() -> None:
    arguments = ("--delta-inf", "0.5", "--initial-gap", "1", "--local-iters", "30")
    result = hedgerow(*GIVEN, *arguments, "--compressor-contraction", "0.1")
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "fedavg") == ["0.204124", "0.00680414", "9.79796", "0.5", "6.01135"]
    assert cells(result.stdout, "ef-fedprox") == ["0.00787426", "0.00787426", "392.988", "0.25", "218.454"]
    assert cells(result.stdout, "R") == ["1", "assumed", "no V_k above V_0"]
    assert "f(x^0)" not in result.stdout


def test_a_similarity_free_plan_takes_its_inputs_from_a_probed_run(tmp_path: Path) -> None:
    run = write_probed_run(tmp_path / "run", probed=True)
    result = hedgerow("plan", "similarity-free", "--from-run", run)
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "L")[:2] == ["4", "measured"]
    assert cells(result.stdout, "sigma2")[:2] == ["0.5", "measured"]
    assert [cells(result.stdout, name)[0] for name in ("delta_inf", "V0", "R")] == ["1.5", "2", "2"]


def test_the_plan_of_similarity_free_ends_with_commands_that_the_app_takes(tmp_path: Path) -> None:
    run = write_probed_run(tmp_path / "run", probed=True)
    told = hedgerow("plan", "similarity-free", "--from-run", run, "--epsilon", "50").stdout
    commands = [shlex.split(line) for line in told.splitlines() if line.startswith("hedgerow run")]
    assert [command[:4] for command in commands] == [["hedgerow", "run", "similarity-free", "-c"]] * 4
    spec = find_app("similarity-free")
    for command in commands:
        planned = plan_run(spec, [command[4], f"output-dir={tmp_path}"], num_nodes=None, seed=None)
        assert planned.run_config["schedule-drives"] == "round"
    assert "local-iters=5 compressor=topk(0.01)" in commands[2][4]


@pytest.mark.parametrize(
    ("method", "write", "lacks", "remedy"),
    [
        ("hsgd", lambda path: write_observed_run(path, observed=False), "", "adaptive=observe"),
        ("sd-feel", write_sd_feel_run, "has no probes", "probe-rounds=5"),
        (
            "sd-feel",
            lambda path: write_sd_feel_run(path, {"train-loss": 1.0}),
            "has no probes",
            "probe-rounds=5",
        ),
        (
            "similarity-free",
            lambda path: write_probed_run(path, probed=False),
            "train 'curvature', train 'gradient-variance'",
            "probe-rounds=5",
        ),
    ],
)
def test_a_run_that_measured_nothing_says_how_to_make_one_that_does(
    method: str, write: Callable[[Path], Path], lacks: str, remedy: str, tmp_path: Path
) -> None:
    result = hedgerow("plan", method, "--from-run", write(tmp_path / "run"))
    assert result.exit_code == 2
    assert lacks in result.stderr
    assert f'-c "{remedy}"' in result.stderr


def test_the_plan_of_fedmud_says_what_of_a_model_is_factors_in_full_or_at_home() -> None:
    named = ("plan", "fedmud", "--model", "mlp", "--method", "lora", "--layers", "linear1", "--ratio", "0.1")
    told = hedgerow(*named)
    assert told.exit_code == 0, told.output
    assert "linear1.weight" in told.stdout
    assert "as factors, rank" in told.stdout
    assert "0 frozen, never sent; 2,210 in full; 156,800 compressed" in told.stdout
    assert "of what dense training sends" in told.stdout
    unknown = hedgerow(*named[:-3], "linear9")
    assert (unknown.exit_code, "layers must match" in unknown.output) == (2, True)
    small = hedgerow(*named[:-1], "0.001")
    assert (small.exit_code, "ratio must be at least" in small.output) == (2, True)
