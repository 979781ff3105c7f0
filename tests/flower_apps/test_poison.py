"""A fifth of the nodes collude in whole apps on real images: the mean fails, and the right rule holds."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import poison
from benchmarks.poison import (
    APPS,
    NO_ATTACK,
    Job,
    accuracy,
    kept,
    measured,
    with_numbers,
)

ROUNDS = 5


@pytest.mark.parametrize(
    "app", ["sd-feel", *(pytest.param(app, marks=pytest.mark.slow) for app in ("similarity-free", "fedmud"))]
)
def test_a_fifth_of_colluding_nodes_ruins_the_mean_and_not_the_right_rule(app: str) -> None:
    job = Job(app, "iid", "sign-flip", "mean", 0.2, 0)
    honest = accuracy(replace(job, attack=NO_ATTACK), rounds=ROUNDS)
    rule = with_numbers("multi-krum", APPS[app].group, 0.0)
    assert honest > 0.6
    assert accuracy(job, rounds=ROUNDS) < 0.3
    assert accuracy(replace(job, rule=rule), rounds=ROUNDS) > honest - 0.03


@pytest.mark.slow
def test_neighbours_that_collude_cost_the_nodes_of_ceps_more_under_the_mean_than_under_a_rule() -> None:
    job = Job("ceps", "iid", "sign-flip", "mean", 0.2, 0)
    honest = accuracy(replace(job, attack=NO_ATTACK), rounds=ROUNDS)
    assert accuracy(job, rounds=ROUNDS) < honest - 0.1
    assert accuracy(replace(job, rule="trimmed-mean(0.3)"), rounds=ROUNDS) > honest - 0.05


def test_a_sweep_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []

    class Workers:
        def __enter__(self) -> "Workers":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def imap_unordered(self, work: object, jobs: list[Job], chunksize: int) -> list[tuple[Job, float]]:
            asked.extend(jobs)
            return [(job, math.nan if job.attack == "ipm" else 0.5) for job in jobs]

    class Processes:
        def __init__(self, start: str) -> None:
            pass

        def Pool(self, jobs: int, begin: object) -> Workers:
            return Workers()

    monkeypatch.setattr(poison, "get_context", Processes)
    file = tmp_path / "runs.jsonl"
    jobs = [Job("fedmud", "iid", attack, "mean", 0.2, 0) for attack in ("ipm", "alie", "scaling")]
    measured(jobs[:2], 1, file)
    # It was stopped in the middle of a line.
    file.write_text(file.read_text() + file.read_text()[:30])
    found = measured(jobs, 1, file)
    assert asked == jobs
    assert math.isnan(found[jobs[0]])
    assert [found[job] for job in jobs[1:]] == [0.5, 0.5]
    assert len(kept(file)) == 3
    # Another setting is another run.
    monkeypatch.setitem(APPS, "fedmud", replace(APPS["fedmud"], settings="another"))
    measured(jobs[:1], 1, file)
    assert asked == [*jobs, jobs[0]]
