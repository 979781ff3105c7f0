"""A sweep runs what its file asks for, once, and nothing that its file does not ask for."""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hedgerow.sim import plan_sweep, read_sweep
from hedgerow.sim.runs import sweep as sweep_module
from hedgerow.sim.runs.sweep import Job, Outcome, run_sweep
from sd_feel import settings as sd_feel_settings

# Stands for `hedgerow run`: what the sweep sees of a run, without its seconds of imports.
RUNNER = """
import json, os, pathlib, sys, time, tomllib
config = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())
print("the app says hello", flush=True)
folder = pathlib.Path(config["resume"] or pathlib.Path(config["output-dir"]) / "run")
folder.mkdir(exist_ok=True)
record = {"pid": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS"), "resume": config["resume"]}
record["from"] = time.time()
engine = sys.argv[sys.argv.index("--engine") + 1].replace("flower", "flower-simulation")
(folder / "config.json").write_text(json.dumps({"run": config, "environment": {"engine": engine}}))
if config["tau1"] == 13:
    sys.exit(3)
if config["tau1"] == 99:
    (folder / "pid").write_text(str(os.getpid()))
    time.sleep(60)
time.sleep(0.2)
record["to"] = time.time()
(folder / "record.json").write_text(json.dumps(record))
if config["tau1"] != 14:
    (folder / "summary.json").write_text("{}")
"""

WriteToml = Callable[[str], Path]


@pytest.fixture
def quick_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    command = [sys.executable, "-S", str(runner)]
    monkeypatch.setattr(sweep_module, "_command", lambda app, settings: [*command, str(settings)])


def go(file: Path, out: Path, *, jobs: int = 2, engine: str = "inprocess", **options: Any) -> list[Outcome]:
    sweep = read_sweep(file)
    return run_sweep(sweep, plan_sweep(sweep, out, engine=engine), out, jobs=jobs, **options)


def record(out: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / run / "record.json").read_text())
    return found


# The runs


@pytest.mark.usefixtures("quick_runs")
def test_sweep_json_says_what_was_asked_and_how_it_went(write_toml: WriteToml, tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(write_toml("title = 'T'\nrealism = 'R'\nseeds = [0, 1]\ngrid = {tau1 = [1]}"), out)
    told = json.loads((out / "sweep.json").read_text())
    assert (told["title"], told["realism"], told["seeds"], told["jobs"]) == ("T", "R", [0, 1], 2)
    assert told["variants"] == [{"label": "tau1=1", "folder": "tau1=1", "settings": {"tau1": 1}}]
    assert [run["status"] for run in told["runs"]] == ["finished", "finished"]
    assert told["run-seconds"]["sum"] >= told["run-seconds"]["longest"] >= 0.2


@pytest.mark.usefixtures("quick_runs")
def test_runs_share_the_cores(write_toml: WriteToml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "cores", lambda: 7)
    out = tmp_path / "out"
    go(write_toml("seeds = [0, 1, 2, 3]"), out, jobs=2)
    records = [record(out, f"all/seed-{seed}") for seed in range(4)]
    assert {entry["threads"] for entry in records} == {"3"}
    at_once = [sum(r["from"] <= entry["from"] < r["to"] for r in records) for entry in records]
    assert max(at_once) == 2


@pytest.mark.usefixtures("quick_runs")
def test_seeds_can_be_added(write_toml: WriteToml, tmp_path: Path) -> None:
    go(write_toml("seeds = [0]"), tmp_path / "out")
    outcomes = go(write_toml("seeds = [0, 1]"), tmp_path / "out")
    assert [outcome.status for outcome in outcomes] == ["kept", "finished"]


@pytest.mark.usefixtures("quick_runs")
def test_a_finished_run_is_kept_where_only_what_changes_no_result_is_other(
    write_toml: WriteToml, tmp_path: Path
) -> None:
    file = write_toml("base = {tau2 = 2}")
    go(file, tmp_path / "out")
    (job,) = plan_sweep(read_sweep(file), tmp_path / "out", ["workers=2 checkpoint-every=3"])
    assert job.kept


@pytest.mark.usefixtures("quick_runs")
def test_a_finished_run_with_other_settings_is_an_error(write_toml: WriteToml, tmp_path: Path) -> None:
    out = tmp_path / "out"
    go(write_toml("base = {tau2 = 2}"), out)
    with pytest.raises(ValueError, match=r"seed-0 was run with tau2 = 2, now 3; remove it or choose"):
        plan_sweep(read_sweep(write_toml("base = {tau2 = 3}")), out)


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize(("first", "then"), [("inprocess", "flower"), ("flower", "inprocess")])
def test_a_sweep_does_not_mix_engines(
    write_toml: WriteToml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, then: str
) -> None:
    out, file = tmp_path / "out", write_toml("base = {iterations = 20}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [outcome.status for outcome in go(file, out, engine=first)] == ["finished"]
    assert record(out, "all/seed-0")["threads"] == (None if first == "flower" else "1")
    assert [outcome.status for outcome in go(file, out, engine=first)] == ["kept"]
    (out / "all/seed-0/checkpoint").mkdir()
    (out / "all/seed-0/checkpoint/latest.safetensors").touch()
    for length in (20, 30):
        with pytest.raises(ValueError, match=f"was run on engine {first}, now {then}; remove it or choose"):
            go(write_toml(f"base = {{iterations = {length}}}"), out, engine=then)


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("engine", ["inprocess", "flower", None])
def test_only_a_run_of_the_same_engine_goes_on(
    write_toml: WriteToml, tmp_path: Path, engine: str | None
) -> None:
    out, file = tmp_path / "out", write_toml("")
    begun = interrupted(plan_sweep(read_sweep(file), out)[0])
    if engine is None:
        (begun / "config.json").write_text("{")
    go(file, out, engine=engine or "inprocess")
    assert record(out, "all/seed-0")["resume"] == (str(begun) if engine == "inprocess" else "")


def test_a_sweep_that_flowers_engine_cannot_run_is_refused(write_toml: WriteToml, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fault-\* must be used with"):
        plan_sweep(read_sweep(write_toml("base = {fault-dropout = 0.1}")), tmp_path, engine="flower")


def test_a_strangers_folder_is_not_touched(write_toml: WriteToml, tmp_path: Path) -> None:
    (tmp_path / "out" / "all" / "seed-0").mkdir(parents=True)
    with pytest.raises(ValueError, match="is not a finished run of a sweep"):
        plan_sweep(read_sweep(write_toml("")), tmp_path / "out")


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize(
    ("tau1", "why"), [(13, "exit code 3, see "), (14, "0 finished run folders, not 1, see ")]
)
def test_a_failure_costs_its_run_only(write_toml: WriteToml, tmp_path: Path, tau1: int, why: str) -> None:
    out = tmp_path / "out"
    outcomes = go(write_toml(f"base = {{iterations = {10 * tau1}}}\ngrid = {{tau1 = [{tau1}, 5]}}"), out)
    assert [outcome.status for outcome in outcomes] == ["failed", "finished"]
    assert outcomes[0].error == f"{why}{out / f'tau1={tau1}' / 'seed-0.log'}"
    assert (out / f"tau1={tau1}" / "seed-0.failed").is_dir()
    assert not (out / f"tau1={tau1}" / "seed-0").exists()


@pytest.mark.usefixtures("quick_runs")
def test_an_interrupt_stops_what_was_started_and_nothing_else(write_toml: WriteToml, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def interrupt(outcome: Outcome) -> None:
        # The long run has started when it has told its number.
        end = time.monotonic() + 10
        while not (out / "tau1=99/seed-0.partial/run/pid").is_file() and time.monotonic() < end:
            time.sleep(0.02)
        raise KeyboardInterrupt

    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as stranger:
        try:
            with pytest.raises(KeyboardInterrupt):
                go(
                    write_toml("base = {iterations = 1980}\ngrid = {tau1 = [5, 99, 6]}"),
                    out,
                    on_end=interrupt,
                )
            assert stranger.poll() is None
        finally:
            stranger.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int((out / "tau1=99/seed-0.partial/run/pid").read_text()), 0)
    assert (out / "tau1=5/seed-0/summary.json").is_file()
    assert not (out / "tau1=6").exists()


@pytest.mark.usefixtures("quick_runs")
def test_an_interrupted_run_goes_on_from_its_checkpoint(write_toml: WriteToml, tmp_path: Path) -> None:
    out, file = tmp_path / "out", write_toml("")
    (job,) = plan_sweep(read_sweep(file), out)
    begun = interrupted(job)
    go(file, out)
    assert record(out, "all/seed-0")["resume"] == str(begun)
    assert tomllib.loads((out / "all/seed-0/settings.toml").read_text())["resume"] == ""


@pytest.mark.usefixtures("quick_runs")
def test_a_finished_run_that_shall_go_further_goes_on(write_toml: WriteToml, tmp_path: Path) -> None:
    out, further = tmp_path / "out", "base = {iterations = 20}"
    go(write_toml("base = {iterations = 10}"), out)
    with pytest.raises(ValueError, match="was run with iterations = 10, now 20"):
        plan_sweep(read_sweep(write_toml(further)), out)  # It has no checkpoint.
    (out / "all/seed-0/checkpoint").mkdir()
    (out / "all/seed-0/checkpoint/latest.safetensors").touch()
    (outcome,) = go(write_toml(further), out)
    assert outcome.status == "finished"
    assert record(out, "all/seed-0")["resume"] == str(out / "all/seed-0.partial/seed-0")
    assert sorted(path.name for path in (out / "all").iterdir()) == ["seed-0", "seed-0.log"]


def interrupted(job: Job) -> Path:
    """Leave what an interrupted run leaves."""
    begun = job.folder.with_name("seed-0.partial") / "run"
    (begun / "checkpoint").mkdir(parents=True)
    (begun / "checkpoint" / "latest.safetensors").touch()
    (begun / "config.json").write_text(json.dumps({"environment": {"engine": "inprocess"}}))
    lines = [f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in job.settings.items()]
    (begun.parent / "settings.toml").write_text("".join(lines))
    return begun


# The real thing


FIGURES = sorted((Path(__file__).parents[3] / "flower_apps" / "sd-feel").glob("figures/*.toml"))
# Trials of step sizes, compared at their ends alone, on one seed that is no figure's.
TRIALS = {path for path in FIGURES if path.stem.startswith("tuning")}


def test_a_plan_holds_every_runs_whole_config(write_toml: WriteToml, tmp_path: Path) -> None:
    sweep = read_sweep(write_toml("seeds = [3]\nbase = {tau2 = 7, iterations = 350}\ngrid = {tau1 = [1, 5]}"))
    plan = plan_sweep(sweep, tmp_path / "out", ["dataset=fashion-mnist"])
    assert [job.folder.relative_to(tmp_path / "out").as_posix() for job in plan] == [
        "tau1=1/seed-3",
        "tau1=5/seed-3",
    ]
    asked = ("tau1", "tau2", "seed", "dataset", "method")
    assert [plan[1].settings[key] for key in asked] == [5, 7, 3, "fashion-mnist", "sd-feel"]


def test_a_variant_may_be_of_another_app(write_toml: WriteToml, tmp_path: Path) -> None:
    file = write_toml("""
        base = {num-clients = 4}
        [[variant]]
        label = "one"
        [[variant]]
        label = "other"
        app = "similarity-free"
        local-iters = 3
    """)
    sweep = read_sweep(file)
    one, other = plan_sweep(sweep, tmp_path / "out")
    assert (one.settings["num-clients"], other.settings["num-clients"]) == (4, 4)
    assert (one.settings["tau1"], other.settings["local-iters"]) == (5, 3)
    assert "tau1" not in other.settings
    assert other.variant.app.endswith("similarity-free")
    file.write_text(f"{file.read_text()}tau1 = 3\n")
    with pytest.raises(ValueError, match="tau1"):
        plan_sweep(read_sweep(file), tmp_path / "out")


@pytest.mark.parametrize(
    ("override", "why"), [("tau1=5", "variants of the sweep file set it"), ("seed=5", "the sweep sets it")]
)
def test_an_override_of_what_is_swept_is_refused(
    write_toml: WriteToml, tmp_path: Path, override: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        plan_sweep(read_sweep(write_toml("grid = {tau1 = [1, 5]}")), tmp_path, [override])


# The figures


@pytest.mark.parametrize("file", sorted({*FIGURES} - TRIALS), ids=lambda path: path.stem)
def test_the_variants_of_a_figure_are_evaluated_at_common_iterations(file: Path, tmp_path: Path) -> None:
    def spacing(job: Job) -> int:
        values = sd_feel_settings.read(job.settings)
        return values.evaluate_every * values.round_iterations

    plan = plan_sweep(read_sweep(file), tmp_path)
    widest = max(map(spacing, plan))
    assert [widest % spacing(job) for job in plan] == [0] * len(plan)
