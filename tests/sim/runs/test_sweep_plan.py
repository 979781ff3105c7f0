"""A sweep's runs are checked against the app before any is started."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hedgerow.sim import plan_sweep, read_sweep
from hedgerow.sim.runs.sweep_plan import Job
from sd_feel import settings as sd_feel_settings

FIGURES = sorted((Path(__file__).parents[3] / "flower_apps" / "sd-feel").glob("figures/*.toml"))
# Trials of step sizes, compared at their ends alone, on one seed that is no figure's.
TRIALS = {path for path in FIGURES if path.stem.startswith("tuning")}
WriteToml = Callable[[str], Path]


def test_a_plan_holds_every_runs_whole_config(write_toml: WriteToml, tmp_path: Path) -> None:
    sweep = read_sweep(write_toml("seeds = [3]\nbase = {tau2 = 7, iterations = 350}\ngrid = {tau1 = [1, 5]}"))
    plan = plan_sweep(sweep, tmp_path / "out", ["dataset=fashion-mnist"])
    assert [job.folder.relative_to(tmp_path / "out").as_posix() for job in plan] == [
        "tau1=1/seed-3",
        "tau1=5/seed-3",
    ]
    asked = ("tau1", "tau2", "seed", "dataset", "method")
    assert [plan[1].settings[key] for key in asked] == [5, 7, 3, "fashion-mnist", "sd-feel"]


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
