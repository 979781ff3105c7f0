"""Comparisons are paired by seed, say how sure they are, and never invent a number."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hedgerow.sim import Run, load
from hedgerow.sim.runs.compare import (
    Paired,
    at_budget,
    budget_table,
    common_budget,
    higher_is_better,
    paired_difference,
    t_interval,
    target_table,
    to_target,
)

WriteRun = Callable[..., Path]
numbers = st.floats(-1e3, 1e3, allow_nan=False)


@pytest.fixture
def run(write_run: WriteRun) -> Run:
    return load([write_run("a", [2.0, None, 1.5, None, 1.0, None])]).runs[0]


# One run


def test_the_value_at_a_budget_is_the_last_evaluation_within_it(run: Run) -> None:
    point = at_budget(run, "iterations", 39, "loss")
    assert point == (2, 20.0, 1.5)


def test_a_budget_that_is_spent_exactly_counts(run: Run) -> None:
    point = at_budget(run, "iterations", 40, "loss")
    assert point is not None
    assert point.y == 1.0


def test_a_budget_that_a_run_never_spent_has_no_value(run: Run) -> None:
    assert at_budget(run, "iterations", 50, "loss") is not None
    assert at_budget(run, "iterations", 51, "loss") is None


@pytest.mark.parametrize(("target", "cost"), [(2.5, 0.0), (1.5, 1.0), (1.2, 2.0), (0.9, None)])
def test_a_loss_target_is_reached_from_above(run: Run, target: float, cost: float | None) -> None:
    assert to_target(run, "sim-seconds", "loss", target) == cost


@pytest.mark.parametrize(("target", "cost"), [(0.5, 0.0), (0.6, 1.0), (0.75, 2.0), (0.9, None)])
def test_an_accuracy_target_is_reached_from_below(run: Run, target: float, cost: float | None) -> None:
    assert to_target(run, "sim-seconds", "accuracy", target) == cost


def test_a_diverged_loss_reaches_no_target(write_run: WriteRun) -> None:
    diverged = load([write_run("d", [2.0, nan, nan])]).runs[0]
    assert to_target(diverged, "rounds", "loss", 1.0) is None


def test_scores_are_better_when_higher() -> None:
    assert higher_is_better("test-accuracy")
    assert not higher_is_better("test-loss")


# Statistics


@given(st.lists(numbers, min_size=2, max_size=8))
@settings(deadline=None)
def test_the_interval_is_students(values: list[float]) -> None:
    low, high = t_interval(values)
    error = stats.sem(values)
    if error == 0:
        assert low == pytest.approx(values[0]) == high
        return
    expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
    assert (low, high) == pytest.approx(expected)


def test_one_value_has_no_interval() -> None:
    assert t_interval([3.0]) == (-inf, inf)


def test_differences_are_paired_over_common_seeds() -> None:
    paired = paired_difference({0: 1.0, 1: 2.0, 7: 99.0}, {1: 1.5, 0: 0.5, 8: -99.0})
    assert paired == Paired(0.5, 0.5, 0.5, 2)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.floats(-1e6, 1e6))
@settings(deadline=None)
def test_one_seed_is_never_significant(value: float, reference: float) -> None:
    assert not paired_difference({0: value}, {0: reference}).significant


def test_no_common_seed_gives_no_difference() -> None:
    paired = paired_difference({0: 1.0}, {1: 1.0})
    assert isnan(paired.mean)
    assert (paired.seeds, paired.significant) == (0, False)


@given(st.dictionaries(st.integers(0, 5), numbers, min_size=2), st.dictionaries(st.integers(0, 5), numbers))
@settings(deadline=None)
def test_a_difference_changes_its_sign_with_the_reference(a: dict[int, float], b: dict[int, float]) -> None:
    one, other = paired_difference(a, b), paired_difference(b, a)
    assert one.seeds == other.seeds == len(a.keys() & b.keys())
    if one.seeds:
        assert (one.mean, one.low, one.high) == pytest.approx((-other.mean, -other.high, -other.low))


# Tables


@pytest.fixture
def sweep(write_sweep: WriteRun) -> Path:
    return write_sweep(
        {
            "SD-FEEL": {0: [2.0, 1.0, 0.5], 1: [2.0, 1.1, 0.6], 2: [2.0, 1.2, 0.7]},
            "FedAvg": {0: [2.0, 1.3, 0.8], 1: [2.0, 1.4, 0.91], 2: [2.0, 1.5, 0.99]},
            "twin": {0: [2.0, 1.0, 0.5], 1: [2.0, 1.1, 0.6], 2: [2.0, 1.2, 0.7]},
        }
    )


def test_the_budget_table(sweep: Path) -> None:
    assert budget_table(load([sweep]), "sim-seconds", "loss", 1.0).splitlines() == [
        "### loss at sim-seconds = 1",
        "",
        "| variant | loss, mean ± sd | evaluated at | difference from SD-FEEL [95 % interval] "
        "| differs | seeds |",
        "|---|---:|---:|---:|---|---:|",
        "| SD-FEEL | 0.6 ± 0.1 | 1 | reference |  | 3 of 3 |",
        # Differences 0.3, 0.31, 0.29: mean 0.3, sd 0.01, t(2) = 4.3027, half width 0.024842.
        "| FedAvg | 0.9 ± 0.095 | 1 | +0.3 [+0.2752, +0.3248] | yes | 3 of 3 |",
        "| twin | 0.6 ± 0.1 | 1 | +0 [+0, +0] | no | 3 of 3 |",
    ]


def test_the_target_table(sweep: Path) -> None:
    assert target_table(load([sweep]), "iterations", "accuracy", 0.8).splitlines() == [
        "### iterations to accuracy >= 0.8",
        "",
        "| variant | iterations, mean ± sd | difference from SD-FEEL [95 % interval] | differs | reached |",
        "|---|---:|---:|---|---:|",
        "| SD-FEEL | 20 ± 0 | reference |  | 3 of 3 |",
        "| FedAvg | n/a | n/a | n/a | 1 of 3 |",
        "| twin | 20 ± 0 | +0 [+0, +0] | no | 3 of 3 |",
    ]


def test_a_table_shows_what_else_is_asked_for_where_its_value_was_measured(sweep: Path) -> None:
    links = "payload-bytes client->server"
    results = load([sweep])
    runs = [
        replace(
            run,
            rounds=[
                {**r, "by_link": {"client->server": {"payload_bytes": 7 * r["round"]}}} for r in run.rounds
            ],
        )
        for run in results.runs
    ]
    asked = replace(results, runs=runs, columns=["iterations", links, "accuracy"])
    table = budget_table(asked, "rounds", "loss", 1).splitlines()
    assert table[2].startswith(
        f"| variant | loss, mean ± sd | evaluated at | iterations | {links} | accuracy | "
    )
    assert table[4].startswith("| SD-FEEL | 1.1 ± 0.1 | 1 | 10 | 7 | ")
    assert "iterations" not in budget_table(asked, "rounds", "loss", 1, []).splitlines()[2]
    with pytest.raises(ValueError, match="column 'payload-bytes node->moon'; valid is"):
        budget_table(asked, "rounds", "loss", 1, ["payload-bytes node->moon"])


def test_one_seed_is_told_as_unknown(write_sweep: WriteRun) -> None:
    folder = write_sweep({"A": {0: [2.0, 1.0]}, "B|C": {0: [2.0, 0.5]}})
    assert budget_table(load([folder]), "rounds", "loss", 1).splitlines()[-2:] == [
        "| A | 1 | 1 | reference |  | 1 of 1 |",
        "| B\\|C | 0.5 | 1 | -0.5 [n/a] | unknown: 1 seed | 1 of 1 |",
    ]


def test_runs_that_ended_before_the_budget_are_counted_out(write_sweep: WriteRun) -> None:
    folder = write_sweep(
        {"A": {0: [2.0, 1.0], 1: [2.0, 1.0]}, "B": {0: [2.0, 0.5], 1: [2.0]}, "C": {0: [2.0]}}
    )
    assert budget_table(load([folder]), "rounds", "loss", 1).splitlines()[-2:] == [
        "| B | 0.5 | 1 | -0.5 [n/a] | unknown: 1 seed | 1 of 2 |",
        "| C | n/a | n/a | n/a | n/a | 0 of 1 |",
    ]


def test_a_diverged_run_shows_in_the_table(write_sweep: WriteRun) -> None:
    folder = write_sweep({"A": {0: [2.0, 1.0], 1: [2.0, 1.0]}, "B": {0: [2.0, nan], 1: [2.0, inf]}})
    row = budget_table(load([folder]), "rounds", "loss", 1).splitlines()[-1]
    assert row == "| B | nan ± nan | 1 | +nan [+nan, +nan] | no | 2 of 2 |"


def test_the_common_budget_is_what_every_run_spent(write_sweep: WriteRun) -> None:
    folder = write_sweep({"A": {0: [2.0, 1.0, 0.5]}, "B": {0: [2.0, None]}})
    assert common_budget(load([folder]), "sim-seconds") == 0.5
