"""The instruments at the command line: what they print, write and exit with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hedgerow.sim.cli.main import app
from hedgerow.sim.runs import sweep as sweep_module
from hedgerow.sim.runs.sweep import Job, Outcome

WriteRun = Callable[..., Path]
APP = Path(__file__).parents[3] / "flower_apps" / "sd-feel"


def hedgerow(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def made(write_sweep: WriteRun) -> Path:
    return write_sweep({"A": {0: [2.0, 1.0], 1: [2.0, 1.2]}, "B": {0: [2.0, 0.8], 1: [2.0, 1.0]}})


def test_every_command_explains_itself() -> None:
    for command in ("run", "sweep", "plot", "table", "export", "data", "plan"):
        result = hedgerow(command, "--help")
        assert result.exit_code == 0, result.output


# Tables


def test_the_table_of_a_sweep(made: Path) -> None:
    assert hedgerow("table", made, "--budget", "rounds=1", "--target", "accuracy=0.7").stdout == (
        "## Made up\n\n"
        "### loss at rounds = 1\n\n"
        "| variant | loss, mean ± sd | evaluated at | difference from A [95 % interval] | differs | seeds |\n"
        "|---|---:|---:|---:|---|---:|\n"
        "| A | 1.1 ± 0.14 | 1 | reference |  | 2 of 2 |\n"
        "| B | 0.9 ± 0.14 | 1 | -0.2 [-0.2, -0.2] | yes | 2 of 2 |\n\n"
        "### rounds to accuracy >= 0.7\n\n"
        "| variant | rounds, mean ± sd | difference from A [95 % interval] | differs | reached |\n"
        "|---|---:|---:|---|---:|\n"
        "| A | 1 ± 0 | reference |  | 2 of 2 |\n"
        "| B | 1 ± 0 | +0 [+0, +0] | no | 2 of 2 |\n\n"
        "Means and sample standard deviations over seeds. A value at a budget is that of the last evaluation "
        "within it. Differences are paired by seed, with a 95 % Student t interval of their mean, not "
        "corrected for several variants; one seed gives no interval.\n\n"
        "Realism: numbers by hand.\n"
    )


def test_a_table_without_a_budget_takes_the_largest_that_all_spent(made: Path) -> None:
    assert "### loss at sim-seconds = 0.5" in hedgerow("table", made).stdout


def test_a_table_takes_several_metrics_and_costs(made: Path) -> None:
    result = hedgerow("table", made, "--x", "rounds", "--x", "bits", "--y", "loss", "--y", "accuracy")
    titles = [line for line in result.stdout.splitlines() if line.startswith("### ")]
    assert titles == [
        "### loss at rounds = 1",
        "### accuracy at rounds = 1",
        "### loss at bits = 1000000",
        "### accuracy at bits = 1000000",
    ]


def test_a_table_warns_of_what_is_missing(made: Path) -> None:
    (made / "B" / "seed-1" / "summary.json").unlink()
    assert hedgerow("table", made).stderr == "Warning: B, seed 1: not finished, left out\n"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--budget", "rounds"], "--budget 'rounds'; valid is name=number"),
        (["--budget", "epochs=3"], "x = 'epochs'; valid is one of rounds"),
        (["--target", "f1=0.5"], "y = 'f1'; valid in "),
    ],
)
def test_a_bad_option_is_explained(made: Path, options: list[str], error: str) -> None:
    result = hedgerow("table", made, *options)
    assert (result.exit_code, error in result.stderr) == (2, True), result.output


def test_a_folder_that_is_no_run_is_explained(tmp_path: Path) -> None:
    result = hedgerow("plot", tmp_path)
    assert result.exit_code == 2
    assert "neither a run's folder (rounds.jsonl) nor a sweep's" in result.stderr


# Figures and exports


def test_a_plot_goes_into_the_sweeps_folder(made: Path) -> None:
    result = hedgerow("plot", made)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [
        str(made / "made-loss-over-sim-seconds.png"),
        str(made / "made-loss-over-sim-seconds.svg"),
    ]


def test_a_plot_of_single_runs_goes_where_it_is_told(write_run: WriteRun, tmp_path: Path) -> None:
    runs = [write_run("a", [2.0, 1.0], tau1=1), write_run("b", [2.0, 1.0], tau1=2)]
    result = hedgerow(
        "plot", *runs, "--x", "wall-seconds", "--y", "consensus-error", "--out", tmp_path / "c.png"
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "c.png").is_file()
    assert (tmp_path / "c.svg").is_file()


def test_an_export_says_how_many_rows(made: Path, tmp_path: Path) -> None:
    assert hedgerow("export", made, "--csv", tmp_path / "o.csv").stdout == f"{tmp_path / 'o.csv'}: 20 rows\n"


# Sweeps


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(f"app = {json.dumps(str(APP))}\nseeds = [0, 1]\n[grid]\ntau1 = [1]\n")
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


def test_a_sweeps_folder_is_named_for_its_file(
    sweep_file: Path, tmp_path: Path, no_runs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hedgerow("sweep", sweep_file)
    assert (tmp_path / "runs" / "mine" / "sweep.json").is_file()


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


def test_a_bad_sweep_file_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("seeds = 3")
    result = hedgerow("sweep", tmp_path / "bad.toml")
    assert result.exit_code == 2
    assert "app is missing" in result.stderr


# Plans

GIVEN = ("plan", "similarity-free", "--smoothness", "2", "--variance", "0.25")


def write_probed_run(folder: Path, *, probed: bool) -> Path:
    folder.mkdir()
    probes = {"curvature": 4.0, "gradient-variance": 0.5} if probed else {}
    rounds = [
        {"round": 0, "train": {}, "central": {"loss": 2.0}},
        {"round": 1, "train": {"train-loss": 1.0, **probes}, "central": {"loss": 1.5}},
    ]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in rounds))
    return folder


def cells(output: str, *first: str) -> list[str]:
    """Return the other cells of the table row that starts with these."""
    for line in output.splitlines():
        row = [cell.strip() for cell in line.strip("│").split("│")]
        if tuple(row[: len(first)]) == first:
            return row[len(first) :]
    raise AssertionError(f"no row {first} in\n{output}")


def test_a_similarity_free_plan_shows_steps_and_constants() -> None:
    arguments = ("--delta-inf", "0.5", "--initial-gap", "1", "--local-iters", "30")
    result = hedgerow(*GIVEN, *arguments, "--compressor-contraction", "0.1")
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "fedavg") == ["0.204124", "0.00680414", "9.79796", "0.5", "6.01135"]
    assert cells(result.stdout, "ef-fedprox") == ["0.00787426", "0.00787426", "392.988", "0.25", "218.454"]
    assert cells(result.stdout, "R") == ["1", "assumed", "no V_k above V_0"]
    assert "f(x^0)" not in result.stdout


def test_a_similarity_free_plan_shows_the_printed_constants_on_request() -> None:
    result = hedgerow(*GIVEN, "--delta-inf", "0.5", "--compressor-contraction", "0.1", "--printed")
    assert cells(result.stdout, "ef-fedprox")[2:] == ["588", "0.25", "326.625"]


def test_a_similarity_free_plan_says_what_it_assumed() -> None:
    result = hedgerow(*GIVEN)
    assert cells(result.stdout, "V0") == ["2.30259", "assumed", "V0 <= f(x^0), loss non-negative"]
    assert cells(result.stdout, "f(x^0)")[:2] == ["2.30259", "assumed"]
    assert cells(result.stdout, "fedavg", "fixed")[-1] == ""


def test_top_k_sets_contraction_and_bits() -> None:
    result = hedgerow(*GIVEN, "--topk", "0.01", "--num-params", "431080", "--num-nodes", "1")
    assert "contraction 0.00999814" in result.stdout
    dense, compressed = (cells(result.stdout, name, "fixed") for name in ("fedavg", "ef-fedavg"))
    assert float(dense[-1]) / float(dense[-2]) == pytest.approx(32 * 431_080, rel=0.01)
    assert float(compressed[-1]) / float(compressed[-2]) == pytest.approx(64 * 4310, rel=0.01)


def test_a_similarity_free_plan_takes_its_inputs_from_a_probed_run(tmp_path: Path) -> None:
    run = write_probed_run(tmp_path / "run", probed=True)
    result = hedgerow("plan", "similarity-free", "--from-run", run)
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "L")[:2] == ["4", "measured"]
    assert cells(result.stdout, "sigma2")[:2] == ["0.5", "measured"]
    assert [cells(result.stdout, name)[0] for name in ("delta_inf", "V0", "R")] == ["1.5", "2", "2"]


def test_a_run_without_probes_says_how_to_make_one_with_them(tmp_path: Path) -> None:
    run = write_probed_run(tmp_path / "run", probed=False)
    result = hedgerow("plan", "similarity-free", "--from-run", run)
    assert result.exit_code == 2
    assert "train 'curvature', train 'gradient-variance'" in result.stderr
    assert '-c "probe-rounds=5"' in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "similarity-free"), "--smoothness and --variance are needed, or --from-run"),
        ((*GIVEN, "--topk", "0.01"), "--topk 0.01 without --num-params"),
        ((*GIVEN, "--topk", "2", "--num-params", "9"), "fraction is 2.0; valid is a number in (0, 1]"),
        ((*GIVEN, "--topk", "0.5", "--compressor-contraction", "0.5"), "valid is one of them"),
        ((*GIVEN, "--epsilon", "0"), "epsilon is 0.0; valid is a finite number > 0"),
        ((*GIVEN, "--from-run", "nowhere"), "nowhere"),
        ((*GIVEN, "--from-run", "nowhere", "--initial-loss", "1"), "the run has losses"),
    ],
)
def test_bad_options_of_a_similarity_free_plan_are_named(arguments: tuple[str, ...], message: str) -> None:
    result = hedgerow(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


# Setting B of the planning goldens: the MIMIC-III sizes are the defaults.
HSGD = ("plan", "hsgd", "--rho", "0.5", "--delta", "0.5", "--loss-gap", "2.3")
HSGD_APP = APP.parent / "hsgd"


def test_an_hsgd_plan_chooses_the_intervals_and_their_cost() -> None:
    result = hedgerow(*HSGD, "--target", "0.5", "--gradient2", "1")
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "Q* with eta^3") == ["19.5789"]
    assert cells(result.stdout, "largest P that eta admits") == ["25"]
    assert cells(result.stdout, "P = Q") == ["20"]
    assert cells(result.stdout, "12", "12")[:2] == ["0.4964", "1446.41"]
    assert float(cells(result.stdout, "eta* at P = Q")[0]) <= 1 / (8 * 20 * 0.5)


def test_an_hsgd_plan_shows_the_printed_interval_on_request() -> None:
    result = hedgerow(*HSGD, "--eta-power", "2")
    assert cells(result.stdout, "Q* with eta^2") == ["1.95789"]
    assert cells(result.stdout, "P = Q") == ["2"]


def test_an_hsgd_plan_has_strategy_1_for_some_p() -> None:
    result = hedgerow("plan", "hsgd", "--rho", "5", "--delta", "0.5", "--loss-gap", "2.3", "--target", "1.0")
    assert cells(result.stdout, "2") == ["0.0125", "0.71459", "2"]
    assert cells(result.stdout, "4") == ["0.00625", "2.37635", "1, eta too large"]


def test_an_hsgd_plan_says_that_a_target_is_infeasible() -> None:
    result = hedgerow("plan", "hsgd", "--rho", "5", "--delta", "0.5", "--loss-gap", "2.3", "--target", "0.1")
    assert result.exit_code == 0
    assert cells(result.stdout, "2")[1:] == ["infeasible", "infeasible"]
    assert "Infeasible: no P and Q" in result.stdout


def test_an_hsgd_plan_says_that_eta_is_too_large() -> None:
    result = hedgerow("plan", "hsgd", "--rho", "50", "--delta", "0.5", "--loss-gap", "2.3")
    assert cells(result.stdout, "P = Q") == ["infeasible: eta is above 0.0025"]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "hsgd", "--rho", "1"), "--delta, --loss-gap needed, or --from-run"),
        ((*HSGD, "--eta-power", "4"), "--eta-power 4; valid is 3 or 2"),
        ((*HSGD, "--target", "0"), "target is 0.0; valid is a finite number > 0"),
        ((*HSGD, "--batch", "0"), "batch is 0; valid is an integer >= 1"),
        ((*HSGD, "--app", APP), "valid is the app hsgd"),
        ((*HSGD, "--from-run", "nowhere"), "nowhere"),
    ],
)
def test_bad_options_of_an_hsgd_plan_are_named(arguments: tuple[str, ...], message: str) -> None:
    result = hedgerow(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_run_without_estimates_says_how_to_make_one_with_them(tmp_path: Path) -> None:
    result = hedgerow("plan", "hsgd", "--from-run", write_observed_run(tmp_path / "run", observed=False))
    assert result.exit_code == 2
    assert '-c "adaptive=observe"' in result.stderr
