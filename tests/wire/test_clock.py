import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.wire import Clock, Compute, Rates
from hedgerow.wire.clock import shannon_rate

SECONDS = st.floats(0, 1e6)


def test_rates_give_the_seconds_of_a_models_bits() -> None:
    rates = Rates({"client->edge": 5e6, "edge->edge": 50e6})
    assert rates.seconds(32 * 21_840, "client->edge") == pytest.approx(0.139776)
    assert rates.seconds(32 * 21_840, "edge->edge") == pytest.approx(0.0139776)


def test_nothing_takes_no_time() -> None:
    assert Rates({"a->b": 1.0}).seconds(0, "a->b") == 0.0


def test_rates_do_not_follow_a_dictionary_that_changes_later() -> None:
    table = {"a->b": 2.0}
    rates = Rates(table)
    table["a->b"] = -1.0
    assert rates.seconds(1, "a->b") == 0.5


def test_compute_gives_the_papers_seconds_of_an_iteration() -> None:
    assert Compute(138.4e6, 10e9).seconds() == pytest.approx(0.01384)
    assert Compute(138.4e6, 10e9).seconds(5) == pytest.approx(0.0692)


def test_a_clock_starts_at_zero_and_adds_up() -> None:
    clock = Clock()
    assert clock.seconds == 0.0
    assert clock.advance(1.5) == 1.5
    assert clock.advance(0.25) == clock.seconds == 1.75


@settings(deadline=None)
@given(st.lists(SECONDS), st.lists(SECONDS))
def test_a_resumed_clock_is_bit_identical_to_one_that_never_stopped(
    before: list[float], after: list[float]
) -> None:
    whole, first, second = Clock(), Clock(), Clock()
    for seconds in before:
        first.advance(seconds)
    second.load_state_dict(first.state_dict())
    for seconds in after:
        second.advance(seconds)
    for seconds in before + after:
        whole.advance(seconds)
    assert second.seconds == whole.seconds


@pytest.mark.parametrize("state", [{}, {"seconds": -1.0}, {"seconds": math.nan}])
def test_a_clock_refuses_a_state_without_a_valid_time(state: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds"):
        Clock().load_state_dict(state)


def test_the_papers_channel_has_five_megabits_per_second() -> None:
    assert shannon_rate(1e6, 15.0) == pytest.approx(5.0278077e6, rel=1e-8)


def test_a_channel_at_equal_signal_and_noise_carries_one_bit_per_hertz() -> None:
    assert shannon_rate(3.0, 0.0) == pytest.approx(3.0)
