import math

import pytest

from hedgerow.wire import Clock, Compute, Rates


def test_rates_give_the_seconds_of_a_models_bits_whatever_becomes_of_the_table() -> None:
    table = {"client->edge": 5e6, "edge->edge": 50e6}
    rates = Rates(table)
    table["edge->edge"] = -1.0
    assert rates.seconds(32 * 21_840, "client->edge") == pytest.approx(0.139776)
    assert rates.seconds(32 * 21_840, "edge->edge") == pytest.approx(0.0139776)
    assert rates.seconds(0, "edge->edge") == 0.0


def test_compute_gives_the_papers_seconds_of_an_iteration() -> None:
    assert Compute(138.4e6, 10e9).seconds() == pytest.approx(0.01384)
    assert Compute(138.4e6, 10e9).seconds(5) == pytest.approx(0.0692)


def test_a_clock_starts_at_zero_and_adds_up_and_a_resumed_one_goes_on_bit_for_bit() -> None:
    clock, resumed = Clock(), Clock()
    assert clock.seconds == 0.0
    assert clock.advance(1.1) == 1.1
    resumed.load_state_dict(clock.state_dict())
    assert clock.advance(0.25) == clock.seconds == resumed.advance(0.25) == 1.35


@pytest.mark.parametrize("state", [{}, {"seconds": -1.0}, {"seconds": math.nan}])
def test_a_clock_refuses_a_state_without_a_valid_time(state: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds"):
        Clock().load_state_dict(state)
