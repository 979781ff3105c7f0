import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.hsgd import Group, Theta, draw, run

from hedgerow.strategies.hsgd.theory import (
    Estimates,
    Sizes,
    bound,
    choose_eta,
    choose_local_interval,
    choose_same_interval,
    eta_2,
    eta_max,
    gradient_variance,
    halved_eta,
    interval_max,
    iterations,
    lambda_min,
    paper_bytes,
    plans,
    q_star,
    round_parts,
    round_seconds,
)

# The two settings of the golden values, Delta F = 2.3 at eta = 0.01 and T = 4000.
A = Estimates(2.3, rho=5.0, delta=0.5)
B = replace(A, rho=0.5)
RUN: dict[str, Any] = {"eta": 0.01, "T": 4000}
MIMIC = [Sizes(33, 3_584, 3_584, 16, 16, 29)] * 10

CONSTANTS = st.builds(
    Estimates, st.floats(0.1, 5), st.floats(0.1, 10), st.floats(0.05, 2), final_loss=st.just(0.0)
)
ETA = st.floats(1e-4, 0.1)
INTERVALS = st.integers(1, 20)


def descent(known: Estimates, *, P: int, Q: int, eta: float, gradient2: float) -> float:
    """Return the bound on the change of F in one global interval, (24), as a function of eta, (26)."""
    variance = known.delta**2
    a, b = 24 * Q**2 * P * known.rho**2 * variance, 3 * P**2 * known.rho * variance
    return a * eta**3 + b * eta**2 - P / 4 * gradient2 * eta


def gamma(known: Estimates, P: float, Q: float) -> float:
    return bound(known, P=P, Q=Q, **RUN)


# The bound.


@pytest.mark.parametrize(("P", "Q", "golden"), [(1, 1, 0.44), (2, 1, 0.59), (2, 2, 0.77)])
def test_the_bound_is_golden(P: int, Q: int, golden: float) -> None:
    assert gamma(A, P, Q) == pytest.approx(golden, abs=1e-9)


@given(CONSTANTS, st.integers(1, 8), st.integers(1, 4), ETA, st.floats(0.01, 10))
@settings(deadline=None)
def test_the_bound_is_the_sum_of_what_intervals_may_lose(
    known: Estimates, Q: int, ratio: int, eta: float, gradient2: float
) -> None:
    P, rounds = Q * ratio, 10
    loss = descent(known, P=P, Q=Q, eta=eta, gradient2=gradient2)
    noise = loss + eta * P / 4 * gradient2
    # Summed over the rounds: Delta F >= eta P / 4 sum ||grad F||^2 - R noise.
    mean = (known.loss_gap / rounds + noise) * 4 / (eta * P)
    assert bound(known, P=P, Q=Q, eta=eta, T=P * rounds) == pytest.approx(mean, rel=1e-9)


class Linear:
    """y_hat = theta_0 + theta_1 x_1 + theta_2 x_2 with squared loss, theta_0 a bias."""

    def encode1(self, theta1: np.ndarray, x1: np.ndarray) -> np.ndarray:
        return (x1 @ theta1)[:, None]

    encode2 = encode1

    def hospital(self, bias: Any, theta1: Any, x1: Any, Z2: Any, y: Any) -> Any:
        error = bias + x1 @ theta1 + Z2[:, 0] - y
        return np.atleast_1d(error.mean()), error @ x1 / len(y)

    def device(self, bias: Any, Z1: Any, theta2: Any, x2: Any, y: Any) -> Any:
        return (bias + Z1[:, 0] + x2 @ theta2 - y) @ x2 / len(y)


@pytest.mark.parametrize(("P", "Q"), [(1, 1), (2, 1), (4, 2), (4, 4), (10, 5), (20, 20)])
def test_training_on_iid_groups_stays_below_the_bound(P: int, Q: int) -> None:
    M, K, T, batch = 4, 200, 400, 8
    rng = np.random.default_rng(P * 100 + Q)
    x = rng.uniform(-1, 1, (M * K, 5))
    y = 1 + x @ rng.normal(size=5) + 0.3 * rng.normal(size=M * K)
    ones = np.hstack([np.ones((M * K, 1)), x])
    rows = np.arange(M * K).reshape(M, K)
    groups = [Group(1 / M, x[r, :3], x[r, 3:], y[r]) for r in rows]
    start = Theta(np.zeros(1), np.zeros(3), np.zeros(2))
    rho = float((ones**2).sum(axis=1).max())
    eta = eta_max(rho, P)
    choose = draw(1, batch / K, [K] * M)
    states = run(Linear(), start, groups, P=P, Q=Q, T=T, eta=lambda _: eta, choose=choose).states

    def error(theta: Theta) -> np.ndarray:
        return ones @ np.concatenate(theta) - y

    squared = [float(np.sum((ones.T @ error(s.virtual) / len(y)) ** 2)) for s in states[:-1:P]]
    each = error(start)[:, None] * ones[:, 4:]  # the devices' block, at its noisiest
    delta = math.sqrt(gradient_variance(each, each.mean(axis=0)))
    losses = [float(np.mean(error(s.virtual) ** 2) / 2) for s in (states[0], states[-1])]
    known = Estimates(losses[0], rho, delta, final_loss=losses[1])
    assert np.mean(squared) <= bound(known, P=P, Q=Q, eta=eta, T=T)


# The conditions.


def test_the_caps_and_the_largest_intervals_are_golden() -> None:
    caps = [eta_max(A.rho, P) for P in (1, 2, 4, 20)]
    assert caps == pytest.approx([0.025, 0.0125, 0.00625, 0.00125], abs=1e-12)
    assert [interval_max(known.rho, 0.01) for known in (A, B)] == [2, 25]


@given(st.floats(0.01, 100), st.integers(1, 10_000))
@settings(deadline=None)
def test_the_cap_of_an_interval_admits_that_interval(rho: float, P: int) -> None:
    assert interval_max(rho, eta_max(rho, P)) == P


@given(st.integers(1, 1000), st.integers(1, 50))
@settings(deadline=None)
def test_iterations_are_rounded_up_to_whole_intervals(T: int, P: int) -> None:
    assert iterations(T, P) % P == 0
    assert 0 <= iterations(T, P) - T < P


# Strategy 1.


@pytest.mark.parametrize(
    ("P", "target", "golden"),
    [
        (2, 1.0, 0.7145896010),
        (2, 0.6, 1.8516401995),
        (2, 0.54, 4.8989794856),
        (4, 1.0, 2.3763541031),
        (2, 0.5, math.inf),
        (8, 1.2, math.inf),
    ],
)
def test_the_least_ratio_is_golden(P: int, target: float, golden: float) -> None:
    assert lambda_min(A, P=P, target=target, **RUN) == pytest.approx(golden, abs=1e-9)


@pytest.mark.parametrize(
    ("P", "target", "Q"), [(2, 1.0, 2), (2, 0.6, 1), (2, 0.54, None), (4, 1.0, 1), (8, 1.2, None)]
)
def test_the_local_interval_is_the_largest_divisor_that_reaches_the_target(
    P: int, target: float, Q: int | None
) -> None:
    assert choose_local_interval(A, P=P, target=target, **RUN) == Q


@given(CONSTANTS, INTERVALS, ETA, st.floats(0.1, 10))
@settings(deadline=None)
def test_the_least_ratio_meets_the_target_exactly(
    known: Estimates, P: int, eta: float, target: float
) -> None:
    least = lambda_min(known, P=P, eta=eta, T=1000, target=target)
    if math.isfinite(least):
        assert bound(known, P=P, Q=P / least, eta=eta, T=1000) == pytest.approx(target, rel=1e-6)


@given(CONSTANTS, INTERVALS, ETA, st.floats(0.1, 10))
@settings(deadline=None)
def test_no_other_divisor_is_cheaper_and_reaches_the_target(
    known: Estimates, P: int, eta: float, target: float
) -> None:
    chosen = choose_local_interval(known, P=P, eta=eta, T=1000, target=target)
    bounds = {Q: bound(known, P=P, Q=Q, eta=eta, T=1000) for Q in range(1, P + 1) if P % Q == 0}
    # Where a divisor meets the target exactly, either side of the last bit is right.
    assert chosen is None or bounds[chosen] <= target * (1 + 1e-9)
    assert not [Q for Q, value in bounds.items() if (chosen or 0) < Q and value <= target * (1 - 1e-9)]


# Strategy 2.


@pytest.mark.parametrize(
    ("known", "power", "golden"),
    [(A, 3, 1.9578900207), (A, 2, 0.1957890021), (B, 3, 19.5789002072), (B, 2, 1.9578900207)],
)
def test_the_best_equal_interval_is_golden(known: Estimates, power: Any, golden: float) -> None:
    assert q_star(known, eta_power=power, **RUN) == pytest.approx(golden, abs=5e-10)


@pytest.mark.parametrize(("power", "intervals"), [(3, (2, 20)), (2, (1, 2))])
def test_the_equal_intervals_are_golden_also_with_the_printed_power(
    power: Any, intervals: tuple[int, int]
) -> None:
    assert tuple(choose_same_interval(known, eta_power=power, **RUN) for known in (A, B)) == intervals


def product(known: Estimates, Q: float, eta: float) -> float:
    return bound(known, P=Q, Q=Q, eta=eta, T=1000) / Q


@given(CONSTANTS, ETA)
@settings(deadline=None)
def test_the_interval_minimises_bound_times_cost(known: Estimates, eta: float) -> None:
    star = q_star(known, eta=eta, T=1000)
    slope = -4 * known.loss_gap / (eta * star**2) + 96 * (known.rho * eta * known.delta) ** 2 * 1000
    assert slope == pytest.approx(0, abs=1e-9 * 4 * known.loss_gap / (eta * star**2))  # (20)
    here = product(known, star, eta)
    assert here < product(known, 0.9 * star, eta)
    assert here < product(known, 1.1 * star, eta)


@given(CONSTANTS, st.integers(1, 40))
@settings(deadline=None)
def test_the_equal_interval_is_the_best_integer_under_the_cap(known: Estimates, most: int) -> None:
    eta = eta_max(known.rho, most)
    chosen = choose_same_interval(known, eta=eta, T=1000)
    best = min(product(known, Q, eta) for Q in range(1, most + 1))
    assert 1 <= chosen <= most
    assert product(known, chosen, eta) == pytest.approx(best, rel=1e-12)


def test_an_interval_is_no_longer_than_the_run() -> None:
    assert choose_same_interval(replace(B, delta=1e-6), eta=0.01, T=7) == 7


# Strategy 3.


@pytest.mark.parametrize(
    ("P", "Q", "golden"),
    [
        (1, 1, 1 / 60),
        (2, 2, 1 / 120),
        (4, 4, 1 / 240),
        (2, 1, 0.012200846793),
        (4, 1, 0.007491495713),
        (4, 2, 0.006100423396),
        (10, 5, 0.002440169359),
        (20, 10, 0.001220084679),
        (20, 5, 0.001498299143),
    ],
)
def test_the_minimising_learning_rate_is_golden(P: int, Q: int, golden: float) -> None:
    assert eta_2(A, P=P, Q=Q, gradient2=1.0) == pytest.approx(golden, abs=1e-12)


@pytest.mark.parametrize(
    ("P", "Q", "golden"),
    [(1, 1, 0.0166666667), (2, 1, 0.0122008468), (4, 1, 0.00625), (20, 5, 0.00125)],
)
def test_the_chosen_learning_rate_is_golden(P: int, Q: int, golden: float) -> None:
    assert choose_eta(A, P=P, Q=Q, gradient2=1.0) == pytest.approx(golden, abs=5e-11)


@pytest.mark.parametrize("Q", [1, 2, 4])
def test_the_guaranteed_descent_is_golden(Q: int) -> None:
    best = eta_2(A, P=Q, Q=Q, gradient2=1.0)
    assert descent(A, P=Q, Q=Q, eta=best, gradient2=1.0) == pytest.approx(-0.0024305556, abs=5e-11)


@given(CONSTANTS, INTERVALS, st.integers(1, 5), st.floats(0.01, 10))
@settings(deadline=None)
def test_the_minimising_learning_rate_is_a_root_and_a_minimum(
    known: Estimates, Q: int, ratio: int, gradient2: float
) -> None:
    P = Q * ratio
    best = eta_2(known, P=P, Q=Q, gradient2=gradient2)
    a, b = 24 * Q**2 * P * (known.rho * known.delta) ** 2, 3 * P**2 * known.rho * known.delta**2
    c = P / 4 * gradient2
    assert 3 * a * best**2 + 2 * b * best - c == pytest.approx(0, abs=1e-9 * c)
    values = [descent(known, P=P, Q=Q, eta=s * best, gradient2=gradient2) for s in (0.9, 1, 1.1)]
    assert values[1] == min(values) < 0


@given(CONSTANTS, INTERVALS, st.integers(1, 5), st.floats(0.01, 10))
@settings(deadline=None)
def test_the_learning_rate_times_the_local_interval_depends_on_the_ratio_alone(
    known: Estimates, Q: int, ratio: int, gradient2: float
) -> None:
    unit = choose_eta(known, P=ratio, Q=1, gradient2=gradient2)
    assert Q * choose_eta(known, P=Q * ratio, Q=Q, gradient2=gradient2) == pytest.approx(unit, rel=1e-12)
    gain, unit_gain = (
        descent(known, P=q * ratio, Q=q, eta=eta_2(known, P=q * ratio, Q=q, gradient2=1.0), gradient2=1.0)
        for q in (Q, 1)
    )
    assert gain == pytest.approx(unit_gain, rel=1e-9)


def test_exact_gradients_are_held_by_the_cap_alone() -> None:
    exact = replace(A, delta=0.0)
    assert eta_2(exact, P=2, Q=1, gradient2=1.0) == math.inf
    assert choose_eta(exact, P=2, Q=1, gradient2=1.0) == eta_max(A.rho, 2)


@pytest.mark.parametrize(
    ("t", "golden"),
    [(0, 0.01), (499, 0.01), (500, 0.005), (999, 0.005), (1000, 0.0025), (2600, 0.0003125)],
)
def test_the_halved_learning_rate_is_golden(t: int, golden: float) -> None:
    assert halved_eta(t, eta0=0.01, period=500) == golden


# The plan.


@pytest.mark.parametrize(
    ("target", "pair"),
    [(0.25, (1, 1)), (0.3, (4, 4)), (0.4, (8, 8)), (0.5, (12, 12)), (0.6, (15, 15)), (0.9, (23, 23))],
)
def test_the_plan_is_golden(target: float, pair: tuple[int, int]) -> None:
    found = plans(target, B, MIMIC, **RUN)[0]
    assert pair == (found.P, found.Q)


def test_the_plans_bound_cost_and_iterations_are_golden() -> None:
    found = plans(0.5, B, MIMIC, **RUN)[0]
    assert found.bound == pytest.approx(0.4964, abs=1e-9)
    assert found.bytes == pytest.approx(1_446_413_333 + 1 / 3, rel=1e-12)
    assert found.iterations == 4008


def test_a_large_hospital_encoder_makes_a_longer_global_interval_cheaper() -> None:
    found = plans(0.5, B, [replace(sizes, hospital=5_000_000) for sizes in MIMIC], **RUN)[0]
    assert (found.P, found.Q) == (16, 4)


@given(CONSTANTS, st.floats(0.05, 5), st.integers(1, 12))
@settings(deadline=None, max_examples=30)
def test_every_plan_keeps_every_condition_and_the_cheapest_is_first(
    known: Estimates, target: float, most: int
) -> None:
    groups = [*MIMIC[:2], replace(MIMIC[0], batch=3)]
    eta = eta_max(known.rho, most)
    rows = plans(target, known, groups, eta=eta, T=500)
    pairs = {(P, Q) for P in range(1, most + 1) for Q in range(1, P + 1) if P % Q == 0}
    reaching = {pair for pair in pairs if bound(known, P=pair[0], Q=pair[1], eta=eta, T=500) <= target}
    assert {(row.P, row.Q) for row in rows} == reaching
    for row in rows:
        assert row.P % row.Q == row.iterations % row.P == 0
        assert eta <= eta_max(known.rho, row.P) * (1 + 1e-12)
        cost = sum(paper_bytes(sizes, P=row.P, Q=row.Q, T=500) for sizes in groups)
        assert row.bytes == pytest.approx(cost, rel=1e-12)
    assert [row.bytes for row in rows] == sorted(row.bytes for row in rows)
    assert plans(target, known, groups, eta=eta, T=500, most=3) == rows[:3]


def test_long_intervals_are_planned_from_all_pairs_up_to_a_limit() -> None:
    # Where Q costs nothing in (17), the cheapest are the longest intervals that the bound lets through.
    known = replace(B, delta=1e-3)
    eta, T = eta_max(known.rho, 10**5), 10**5
    target = bound(known, P=65_432, Q=65_432, eta=eta, T=T)
    rows = plans(target, known, MIMIC, eta=eta, T=T, most=5)
    assert [(row.P, row.Q) for row in rows] == [(P, P) for P in range(65_432, 65_427, -1)]
    with pytest.raises(ValueError, match="must be at most 131072"):
        plans(target, known, MIMIC, eta=eta_max(known.rho, 10**6), T=10**6)


def test_the_plans_seconds_are_the_slowest_groups() -> None:
    large = replace(MIMIC[0], head=20_000)
    found = plans(0.5, B, [MIMIC[0], large], eta=0.01, T=4000, compute_seconds=0.05)[0]
    alone = round_seconds(round_parts(large), P=found.P, Q=found.Q, compute_seconds=0.05)
    assert found.seconds == pytest.approx(alone * 4000 / found.P, rel=1e-12)
