"""``hedgerow plan similarity-free``: steps, constants and what they rest on."""

import json
import shlex
from pathlib import Path

import numpy as np
from tests.sim.cli.command_line import cells, hedgerow

from hedgerow.sim import find_app, plan_run
from hedgerow.sim.runs.model_files import save_arrays

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


def test_the_plan_ends_with_commands_that_the_app_takes(tmp_path: Path) -> None:
    run = write_probed_run(tmp_path / "run", probed=True)
    told = hedgerow("plan", "similarity-free", "--from-run", run, "--epsilon", "50").stdout
    commands = [shlex.split(line) for line in told.splitlines() if line.startswith("hedgerow run")]
    assert [command[:4] for command in commands] == [["hedgerow", "run", "similarity-free", "-c"]] * 4
    spec = find_app("similarity-free")
    for command in commands:
        planned = plan_run(spec, [command[4], f"output-dir={tmp_path}"], num_nodes=None, seed=None)
        assert planned.run_config["schedule-drives"] == "round"
    assert "local-iters=5 compressor=topk(0.01)" in commands[2][4]


def test_a_run_without_probes_says_how_to_make_one_with_them(tmp_path: Path) -> None:
    run = write_probed_run(tmp_path / "run", probed=False)
    result = hedgerow("plan", "similarity-free", "--from-run", run)
    assert result.exit_code == 2
    assert "train 'curvature', train 'gradient-variance'" in result.stderr
    assert '-c "probe-rounds=5"' in result.stderr
