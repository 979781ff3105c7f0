"""HSGD's constants from messages alone, and the intervals that are chosen by them."""

from typing import Any

import numpy as np
import pytest
from tests.oracles.hsgd import Group as Patients
from tests.oracles.test_hsgd_oracle import START, TOLERANCE, ScalarModel
from tests.strategies.hsgd.nodes import Parties, run
from tests.strategies.hsgd.test_failures import Silent
from tests.strategies.hsgd.test_strategy import LAYOUTS, hsgd, toy

from hedgerow.strategies import Adaptive, Probing
from hedgerow.strategies.hsgd.adaptive import device_variance
from hedgerow.strategies.hsgd.exchange import Group, Local, Theta
from hedgerow.strategies.hsgd.theory import Estimates, Pace, choose_eta, choose_same_interval, eta_max


def observed(parties: Parties, probing: Probing, **options: Any) -> Estimates:
    adaptive = Adaptive(iterations=100, apply=False, probing=probing)
    strategy = hsgd(parties, adaptive=adaptive, **options)
    run(strategy, parties, START, 1)
    assert strategy.seen is not None
    return strategy.seen


@LAYOUTS
def test_the_toys_secant_loss_and_gradient_are_golden(edges: bool) -> None:
    seen = observed(toy(edges=edges), Probing(steps=1, batches=1))
    assert seen.rho == pytest.approx(1.8678620774, abs=TOLERANCE)  # of its first group
    assert abs(seen.F0 - 0.4325) < TOLERANCE
    assert seen.gradient2 == pytest.approx(0.8171640625, abs=TOLERANCE)


def test_the_largest_variance_of_the_toy_is_golden() -> None:
    seen = observed(toy(), Probing(steps=1, batches=1))
    # V_1 of the second group, whose batch is its one person, at the first point.
    assert seen.delta**2 == pytest.approx(1.6576562500, abs=TOLERANCE)


def test_an_edge_tells_the_golden_variance_of_its_devices() -> None:
    ids = ("a", "b", "c")
    own = {one: np.array([after]) for one, after in zip(ids, (0.43, 0.4375, 0.38), strict=True)}
    group = Local(Group(0, 0, ids, {}, hosted=False), Theta(*START), ids, own)
    total, count = device_variance(group, 0.1, np.array([-0.23125]))
    assert (total / count, count) == (pytest.approx(0.0704557292, abs=TOLERANCE), 3)


def variance(edges: bool) -> float:
    """Return delta^2 of twelve people whose devices' gradients vary the most, in batches of three."""
    rng = np.random.default_rng(0)
    people = Patients(1.0, np.full(12, 1e-3), rng.normal(size=12), rng.normal(size=12))
    seen = observed(
        Parties(ScalarModel(), [people], edges),
        Probing(steps=1, batches=60, aggregate="mean"),
        participation=3 / 12,
    )
    return seen.delta**2


def test_the_spread_of_means_gives_that_of_single_devices() -> None:
    assert variance(edges=True) == pytest.approx(variance(edges=False), rel=0.35)


@LAYOUTS
def test_an_estimate_leaves_the_model_alone(edges: bool) -> None:
    parties = toy(edges=edges)
    watched, _, _ = run(hsgd(parties, adaptive=Adaptive(10, apply=False)), parties, START, 2)
    parties = toy(edges=edges)
    plain, _, _ = run(hsgd(parties), parties, START, 2)
    assert watched.tobytes() == plain.tobytes()


def test_the_round_that_estimates_tells_the_figures() -> None:
    parties = toy()
    adaptive = Adaptive(100, replan_every=2, apply=False, probing=Probing(1, 1))
    _, ends, _ = run(hsgd(parties, adaptive=adaptive), parties, START, 3)
    assert [("rho" in end.train, "delta-g" in end.train) for end in ends[1:]] == [
        (True, True), (False, False), (True, True),
    ]  # fmt: skip


def test_estimates_are_booked_and_take_time() -> None:
    parties = toy(dtype="float32")
    strategy = hsgd(parties, adaptive=Adaptive(10, apply=False, probing=Probing(2, 3)))
    run(strategy, parties, START, 1)
    # 3 points of a fixed batch and 3 random ones, and the round itself, each 72 bytes by (19).
    assert strategy.ledger.total().nominal_bits / 8 == 72 * (3 * 4 + 1)


def test_strategy_2_chooses_the_interval_and_the_user_keeps_eta() -> None:
    parties = toy()
    strategy = hsgd(parties, learning_rate=1e-3, adaptive=Adaptive(500, probing=Probing(2, 2)))
    _, ends, _ = run(strategy, parties, START, 1)
    assert strategy.seen is not None
    P = choose_same_interval(strategy.seen, eta=1e-3, T=500)
    assert P > 1
    assert (ends[-1].train["P"], ends[-1].train["Q"], ends[-1].train["eta"]) == (P, P, 1e-3)
    assert ends[-1].iterations == P


def test_eta_is_capped() -> None:
    parties = toy()
    strategy = hsgd(parties, learning_rate=0.1, adaptive=Adaptive(500, probing=Probing(2, 2)))
    _, ends, _ = run(strategy, parties, START, 1)
    assert strategy.seen is not None
    assert ends[-1].train["eta"] == min(0.1, eta_max(strategy.seen.rho, 1)) < 0.1


ASKED = Pace(1, 1, 0.01, 0)


def test_strategy_3_chooses_eta() -> None:
    known = Estimates(2.3, 5.0, 0.5, gradient2=1.0)
    choice = Adaptive(4000, eta="strategy3").choose(known, ASKED, 0)
    assert choice == Pace(2, 2, choose_eta(known, P=2, Q=2, gradient2=1.0), 0)


def test_the_printed_power_gives_the_printed_interval() -> None:
    seen = Estimates(2.3, 0.5, 0.5, gradient2=1.0)
    assert Adaptive(4000).choose(seen, ASKED, 0).P == 20
    assert Adaptive(4000, eta_power=2).choose(seen, ASKED, 0).P == 2


def test_without_variance_the_cap_alone_limits_the_interval() -> None:
    assert Adaptive(4000).choose(Estimates(2.3, 5.0, 0.0, gradient2=1.0), ASKED, 0).P == 2
    assert Adaptive(4000).choose(Estimates(2.3, 0.5, 0.0, gradient2=1.0), ASKED, 3999).P == 1


def test_a_halved_rate_goes_on_being_halved() -> None:
    parties = toy()
    adaptive = Adaptive(60, replan_every=1, probing=Probing(1, 1))
    strategy = hsgd(parties, learning_rate=1e-3, halving_period=4, adaptive=adaptive)
    _, ends, _ = run(strategy, parties, START, 3)
    begins = [0, *(end.iterations for end in ends[1:-1])]
    told = [end.train["eta"] for end in ends[1:]]
    assert told == pytest.approx([1e-3 / 2 ** (t // 4) for t in begins])


def test_a_group_that_does_not_answer_leaves_everything_as_it_was() -> None:
    parties = toy(sabotage=Silent(*(("exchange", 1, (1 << 40) + (1 << 16) + n) for n in range(1, 99))))
    strategy = hsgd(parties, 2, 1, adaptive=Adaptive(500, probing=Probing(1, 1)))
    _, ends, _ = run(strategy, parties, START, 1)
    assert strategy.seen is None
    assert (ends[-1].train["P"], ends[-1].train["Q"], ends[-1].train["eta"]) == (2, 1, 0.1)
