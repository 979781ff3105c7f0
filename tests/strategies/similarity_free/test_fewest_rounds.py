"""No first step that is admissible needs fewer rounds, by the bound summed round by round."""

import math
from bisect import bisect_left

import numpy as np
import pytest

from hedgerow.strategies import Diminishing, StepDecay
from hedgerow.strategies.schedules import theory_stage_len
from hedgerow.strategies.similarity_free.fewest_rounds import (
    bound_constant_steps,
    fewest_diminishing,
    fewest_fixed,
    fewest_step_decay,
)
from hedgerow.strategies.similarity_free.theory import (
    Constants,
    bound_any,
    max_step,
    system_constants,
)

V0 = math.log(10)
CONSTANTS = system_constants("fedavg", 2, sigma2=0.25, delta_inf=V0)
LIMIT = max_step("fedavg", 2)
NO_GROWTH = Constants(0.0, 0.5, 3.0)


def rounds_any(constants, V0, schedule, *, epsilon):
    """Return the first number of rounds at which the bound for any steps is <= epsilon."""
    return bisect_left(
        range(10**5), True, lo=1, key=lambda K: bound_any(constants, V0, schedule.values(K)) <= epsilon
    )


@pytest.mark.parametrize("constants", [CONSTANTS, NO_GROWTH])
def test_equal_steps_sum_in_closed_form(constants: Constants) -> None:
    stages = [(0.2, 7), (0.1, 30), (0.003, 400)]
    steps = np.concatenate([np.full(n, step) for step, n in stages])
    assert bound_constant_steps(constants, V0, stages) == pytest.approx(
        bound_any(constants, V0, steps), rel=1e-12
    )


@pytest.mark.parametrize("constants", [CONSTANTS, NO_GROWTH])
@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_one_step_reaches_epsilon_in_these_rounds_and_in_no_fewer(
    constants: Constants, epsilon: float
) -> None:
    rounds, step = fewest_fixed(constants, V0, epsilon=epsilon, max_step=LIMIT)
    assert step <= LIMIT
    assert bound_any(constants, V0, np.full(int(rounds), step)) <= epsilon * (1 + 1e-9)
    for other in (step, 0.9 * step, min(1.1 * step, LIMIT)):
        assert bound_any(constants, V0, np.full(int(rounds) - 1, other)) > epsilon


def test_fewer_rounds_are_promised_than_by_the_theorems() -> None:
    rounds, _ = fewest_fixed(CONSTANTS, V0, epsilon=0.1, max_step=LIMIT)
    # A scan over steps by an independent program gave 133,012; Theorem 1 says 189,299.
    assert 132_000 < rounds <= 133_012


def test_falling_steps_in_blocks_are_those_round_by_round() -> None:
    rounds, c = fewest_diminishing(CONSTANTS, V0, nu=0.75, epsilon=2.0, max_step=LIMIT)
    exact = rounds_any(CONSTANTS, V0, Diminishing(c, 0.75), epsilon=2.0)
    assert rounds == pytest.approx(exact, rel=0.01)
    for other in (0.8 * c, min(1.2 * c, LIMIT)):
        assert rounds_any(CONSTANTS, V0, Diminishing(other, 0.75), epsilon=2.0) >= exact


def test_cut_steps_reach_epsilon_in_these_rounds() -> None:
    rounds, step = fewest_step_decay(CONSTANTS, V0, decay_factor=2.0, epsilon=1.0, max_step=LIMIT)
    schedule = StepDecay(step, 2.0, theory_stage_len(int(rounds), 2.0))
    assert bound_any(CONSTANTS, V0, schedule.values(int(rounds))) <= 1.0


def test_what_cannot_be_reached_takes_for_ever() -> None:
    hopeless = Constants(1e4, 1e-9, 1e9)
    assert fewest_diminishing(hopeless, V0, nu=0.75, epsilon=1e-6, max_step=1.0)[0] == math.inf
    assert fewest_step_decay(hopeless, V0, decay_factor=2.0, epsilon=1e-6, max_step=1.0)[0] == math.inf
