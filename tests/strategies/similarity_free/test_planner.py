"""A plan is what the theory admits and promises, and says what it assumed."""

import inspect
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hedgerow.strategies import Fixed
from hedgerow.strategies.similarity_free.planner import (
    Estimate,
    Source,
    estimates,
    estimates_from_rounds,
    plan,
)
from hedgerow.strategies.similarity_free.theory import AlgorithmName, Mode, bound_fixed, max_step


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9)


KNOWN = estimates(2, 0.25, initial_loss=2.3, delta_inf=0.5)


def test_no_argument_of_a_plan_is_about_similarity() -> None:
    asked = "known num_rounds epsilon local_iters contraction nu decay_factor num_nodes num_params"
    assert {*asked.split(), "message_bits", "mode"} == set(inspect.signature(plan).parameters)
    assert set(inspect.signature(max_step).parameters) == {"algorithm", "L", "contraction", "mode"}


def test_heterogeneity_changes_bounds_and_no_admissible_step() -> None:
    alike, different = (
        plan(replace(KNOWN, delta_inf=Estimate(delta, Source.GIVEN))) for delta in (0.0, 50.0)
    )
    assert [row.max_step for row in alike] == [row.max_step for row in different]
    assert all(one.bound < other.bound for one, other in zip(alike, different, strict=True))


def test_a_plan_has_a_row_for_each_algorithm_and_schedule() -> None:
    rows = plan(KNOWN)
    names = [(row.algorithm, row.schedule.name) for row in rows]
    assert names == list(product(AlgorithmName, ("fixed", "diminishing", "step-decay")))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("num_rounds", [4, 50, 400, 5000])
def test_planned_steps_are_admissible(mode: Mode, num_rounds: int) -> None:
    for row in plan(KNOWN, num_rounds=num_rounds, contraction=0.1, mode=mode):
        assert row.schedule(0) <= row.max_step * (1 + 1e-12)


def test_the_local_step_of_the_fedavg_family_is_T_times_smaller() -> None:
    for row in plan(KNOWN, local_iters=30):
        assert row.max_local_step == close(row.max_step / (1 if row.algorithm.proximal else 30))


def test_the_fixed_schedule_of_a_plan_is_the_best_that_theorem_1_knows() -> None:
    row = plan(KNOWN, num_rounds=400)[0]
    assert isinstance(row.schedule, Fixed)
    for factor in (0.9, 1.1):
        assert row.theorem < bound_fixed(row.constants, 2.3, Fixed(factor * row.schedule.c, 400))
    assert row.bound <= row.theorem


def test_uplink_counts_dense_and_compressed_messages() -> None:
    for row in plan(KNOWN, contraction=0.01, num_params=1000, message_bits=640, num_nodes=3):
        assert row.uplink_bits == row.rounds * 3 * (640 if row.algorithm.error_feedback else 32_000)
    assert all(row.uplink_bits is None for row in plan(KNOWN))


def test_less_accuracy_needs_fewer_rounds() -> None:
    strict, loose = (plan(KNOWN, epsilon=epsilon) for epsilon in (0.1, 1.0))
    assert all(one.rounds >= other.rounds for one, other in zip(strict, loose, strict=True))


def test_a_plan_needs_a_complete_stage() -> None:
    with pytest.raises(ValueError, match="num_rounds must be an integer >= 4, got 3"):
        plan(KNOWN, num_rounds=3)


def test_every_row_says_what_was_assumed() -> None:
    for row in plan(KNOWN):
        assert row.estimates.assumed() == {
            "V0": "V0 <= f(x^0), loss non-negative",
            "R": "no V_k above V_0",
        }


def test_what_is_given_is_not_assumed() -> None:
    assert estimates(2, 0.25, initial_loss=2.3, delta_inf=0.5, V0=1.0, R=3.0).assumed() == {}


def rounds_of(losses: list[float]) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = [
        {"round": k, "train": {"train-loss": 1.0}, "central": {"loss": loss}} for k, loss in enumerate(losses)
    ]
    rounds[0]["train"] = {}
    rounds[1]["train"] |= {"curvature": 3.0, "gradient-variance": 0.5}
    rounds[2]["train"] |= {"curvature": 5.0, "gradient-variance": 0.25}
    return rounds


def test_a_probed_run_gives_the_inputs() -> None:
    known = estimates_from_rounds(rounds_of([2.0, 2.5, 1.5]))
    assert (known.L.value, known.sigma2.value) == (5.0, 0.5)
    assert (known.delta_inf.value, known.V0.value, known.R.value) == (1.5, 2.0, 2.5)
    assert known.L.source is known.sigma2.source is Source.MEASURED
    assert known.assumed().keys() == {"delta_inf", "V0", "R"}


def test_what_is_given_replaces_what_a_run_measured() -> None:
    known = estimates_from_rounds(rounds_of([2.0, 2.5, 1.5]), L=7, sigma2=1, delta_inf=0, V0=1, R=9)
    assert [getattr(known, name) for name in ("L", "sigma2", "delta_inf", "V0", "R")] == [
        Estimate(number, Source.GIVEN) for number in (7, 1, 0, 1, 9)
    ]


def test_a_given_gap_larger_than_any_loss_bounds_the_potential() -> None:
    assert estimates_from_rounds(rounds_of([2.0, 2.5, 1.5]), V0=4).R.value == 4


def test_a_run_without_probes_is_refused_with_all_that_it_lacks() -> None:
    rounds = [{"round": 1, "train": {"train-loss": 1.0}, "central": {}}]
    with pytest.raises(ValueError, match="probe-rounds=5") as error:
        estimates_from_rounds(rounds)
    for lacking in ("'curvature'", "'gradient-variance'", "central 'loss',", "central 'loss' of round 0"):
        assert lacking in str(error.value)
    assert estimates_from_rounds(rounds, L=2, sigma2=1, delta_inf=0, V0=1).R.value == 1


def test_losses_below_zero_bound_nothing() -> None:
    with pytest.raises(ValueError, match=r"losses must never be negative, got -0\.5"):
        estimates_from_rounds(rounds_of([2.0, 1.0, -0.5]))


def test_a_run_that_diverged_is_refused() -> None:
    rounds = rounds_of([2.0, 2.5, 1.5])
    rounds[2]["train"]["curvature"] = math.nan
    with pytest.raises(ValueError, match="L must be a finite number > 0, got nan"):
        estimates_from_rounds(rounds)
