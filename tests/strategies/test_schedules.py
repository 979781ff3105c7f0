import doctest
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.strategies import Diminishing, Fixed, Schedule, StepDecay, schedules
from hedgerow.strategies.schedules import SCHEDULES, schedule, theory_stage_len

STEPS = st.floats(1e-6, 1e3)
ANY_SCHEDULE = st.one_of(
    st.builds(Fixed, STEPS, st.integers(1, 10_000)),
    st.builds(Diminishing, STEPS, st.floats(0.501, 0.999)),
    st.builds(StepDecay, STEPS, st.floats(1.01, 10), st.integers(20, 1000)),
)


def test_the_examples_in_the_documentation_are_true() -> None:
    assert doctest.testmod(schedules).failed == 0


def test_fixed_is_c_over_the_root_of_the_rounds() -> None:
    assert Fixed(c=2, num_rounds=400).values(400).tolist() == [0.1] * 400


DIMINISHING = {
    0: 0.8,
    1: 0.561777950295,
    9: 0.247223634601,
    49: 0.108796590313,
    99: 0.076399406882,
    199: 0.053649377752,
    399: 0.037673796835,
}


@pytest.mark.parametrize(("k", "step"), DIMINISHING.items())
def test_diminishing_has_the_golden_steps(k: int, step: float) -> None:
    assert Diminishing(c=0.8, nu=0.51)(k) == pytest.approx(step, rel=0, abs=5e-13)


STEP_DECAY = {
    49: 0.8,
    50: 0.4,
    99: 0.4,
    100: 0.2,
    199: 0.1,
    200: 0.05,
    349: 0.0125,
    350: 0.00625,
    399: 0.00625,
}


@pytest.mark.parametrize(("k", "step"), STEP_DECAY.items())
def test_step_decay_has_the_golden_steps(k: int, step: float) -> None:
    assert StepDecay(gamma0=0.8, decay_factor=2, stage_len=50)(k) == step


@settings(deadline=None)
@given(ANY_SCHEDULE)
def test_steps_are_positive_and_never_increase(steps: Schedule) -> None:
    values = steps.values(200)
    assert values.dtype == np.float64
    assert np.all(values > 0)
    assert all(later <= earlier for earlier, later in pairwise(values))


@settings(deadline=None)
@given(ANY_SCHEDULE)
def test_a_step_is_the_same_float_alone_and_among_all(steps: Schedule) -> None:
    assert [steps(k) for k in range(50)] == steps.values(50).tolist()


def test_numpy_parameters_are_written_as_plain_numbers() -> None:
    assert str(Diminishing(np.float64(0.8), np.float64(0.51))) == "diminishing(c=0.8, nu=0.51)"


def test_a_fixed_schedule_goes_on_past_its_rounds() -> None:
    assert Fixed(c=1, num_rounds=4)(100) == 0.5


def test_a_schedule_is_made_by_name() -> None:
    assert SCHEDULES == ("diminishing", "fixed", "step-decay")
    made = schedule("step-decay", gamma0=0.8, decay_factor=2, stage_len=50)
    assert made == StepDecay(0.8, 2, 50)


@pytest.mark.parametrize(
    ("num_rounds", "decay_factor", "length"),
    [(16, 2, 8), (256, 2, 64), (65536, 2, 8192), (400, 2, 93), (10_000, 100, 10_000), (3**9, 3, 4374)],
)
def test_the_stage_length_of_theorem_3(num_rounds: int, decay_factor: float, length: int) -> None:
    assert theory_stage_len(num_rounds, decay_factor) == length


def test_the_last_stage_of_theorem_3_is_decay_factor_over_the_root_of_the_rounds() -> None:
    steps = StepDecay(gamma0=0.3, decay_factor=2, stage_len=theory_stage_len(256, 2))
    assert steps(255) == pytest.approx(0.3 * 2 / math.sqrt(256))
