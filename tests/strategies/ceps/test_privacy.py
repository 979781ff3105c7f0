"""Accounts of noisy gradients: the paper's numbers, and an accountant's against independent values."""

import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from hedgerow.strategies import Privacy
from hedgerow.strategies.ceps.privacy import (
    GradientReport,
    calibrated_multiplier,
    claimed_total,
    noise_variance,
    numerical_epsilon,
    releases,
)
from hedgerow.wire import gaussian_delta, gaussian_epsilon, zcdp, zcdp_epsilon

# Claims of the paper


@pytest.mark.parametrize(
    ("epsilon", "variance", "deviation"),
    [
        (0.1, 1.8325814637, 1.3537287261),
        (0.25, 0.2932130342, 0.5414914905),
        (0.5, 0.0733032585, 0.2707457452),
        (0.75, 0.0325792260, 0.1804971635),
        (1.0, 0.0183258146, 0.1353728726),
        (2.0, 0.0045814537, 0.0676864363),
    ],
)
def test_golden_variances_of_equation_13(epsilon: float, variance: float, deviation: float) -> None:
    assert noise_variance(epsilon, 0.5, 0.1) == pytest.approx(variance, abs=1e-10)
    multiplier = Privacy("paper", epsilon, 0.5, sensitivity=0.1).noise_multiplier
    assert 0.1 * multiplier == pytest.approx(deviation, abs=1e-10)


@pytest.mark.parametrize(
    ("periods", "epsilon", "delta", "total", "total_delta"),
    [
        (1, 0.5, 0.5, 0.9130656466, 1.0),
        (2, 0.5, 0.5, 1.4812758819, 1.5),
        (3, 0.5, 0.5, 1.9927488962, 2.0),
        (10, 0.1, 1e-6, 1.7674290543, 1.1e-5),
        (100, 0.1, 1e-6, 6.3082309505, 1.01e-4),
    ],
)
def test_golden_claims_of_theorem_3(
    periods: int, epsilon: float, delta: float, total: float, total_delta: float
) -> None:
    claimed = claimed_total(epsilon, delta, periods)
    assert claimed == (pytest.approx(total, abs=1e-9), pytest.approx(total_delta, rel=1e-12))


def test_the_papers_mode_guarantees_nothing_whatever_it_claims() -> None:
    report = Privacy("paper", 0.5, 0.5).report(2)
    assert not report.guaranteed
    assert report.epsilon == report.zcdp_epsilon == report.rho == report.step_epsilon == math.inf
    assert report.step == (0.5, 0.5)
    assert str(report).startswith("no guarantee")
    assert "vacuous" in str(report)


# Accountants


def test_golden_zcdp_of_a_release_and_of_a_run() -> None:
    privacy = Privacy("sound", 0.1, 1e-6)
    assert zcdp(privacy.noise_multiplier) == pytest.approx(1.780797e-4, rel=1e-6)
    assert zcdp(privacy.noise_multiplier) == pytest.approx(0.1**2 / (4 * math.log(1.25e6)), rel=1e-12)
    report = privacy.report(100, 1.01e-4)
    assert report.zcdp_epsilon == pytest.approx(0.82735, abs=5e-6)
    assert report.claimed_epsilon == pytest.approx(6.30823, abs=5e-6)


# From privacy-loss distributions of the Gaussian mechanism (dp-accounting 0.6.0, interval 1e-5).
NUMERICAL = pytest.mark.parametrize(
    ("multiplier", "count", "delta", "epsilon"),
    [
        (53.0, 100, 1.01e-4, 0.5628570360),
        (3.73, 1, 1e-5, 1.0001859597),
        (5.0, 25, 1e-5, 4.3771780959),
    ],
)


@NUMERICAL
def test_dp_accounting_says_the_same_where_it_is_installed(
    multiplier: float, count: int, delta: float, epsilon: float
) -> None:
    pytest.importorskip("dp_accounting")
    assert numerical_epsilon(multiplier, count, delta) == pytest.approx(epsilon, abs=2e-3)
    privacy = Privacy("sound", delta=delta)
    report = privacy.report(count, numerical=True)
    assert report.numerical_epsilon == pytest.approx(report.epsilon, rel=1e-6)
    assert "dp-accounting" in str(report)


def test_more_releases_than_can_be_composed_are_accounted_for_exactly_alone() -> None:
    report = Privacy("sound").report(10**9, numerical=True)
    assert report.numerical_epsilon is None
    assert math.isfinite(report.epsilon)


def test_without_dp_accounting_the_exact_epsilon_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    report = Privacy("sound").report(3, numerical=True)
    assert report.numerical_epsilon is None
    assert "dp-accounting" not in str(report)


def test_a_record_holds_the_claim_what_is_guaranteed_and_what_it_is_of() -> None:
    kinds = ("claimed-epsilon", "claimed-delta", "epsilon", "zcdp-epsilon", "delta", "releases-epsilon")
    sound = Privacy("sound").report(3)
    assert set(sound.metrics()) == {*kinds, "releases"}
    assert sound.metrics()["releases"] == 3
    assert sound.releases_epsilon == sound.epsilon < math.inf
    assert sound.covers in str(sound)
    paper = Privacy("paper", noise_source="entropy").report(3)
    assert set(paper.metrics()) == {*kinds, "releases", "unprotected-kept-gradients"}
    assert paper.metrics()["epsilon"] == paper.releases_epsilon == math.inf


@pytest.mark.parametrize("path", sorted(GradientReport.reasons))
def test_an_unprotected_path_makes_epsilon_infinite_and_is_told(path: str) -> None:
    report = Privacy("sound").report(3, unprotected=[path])
    assert not report.guaranteed
    assert report.epsilon == report.zcdp_epsilon == report.step_epsilon == report.rho == math.inf
    assert report.releases_epsilon == Privacy("sound").report(3).epsilon
    assert report.metrics()[f"unprotected-{path}"] == 1
    assert report.reasons[path] in str(report)
    # As a run's folder writes and reads it.
    assert json.loads(json.dumps(report.metrics())) == report.metrics()


def test_noise_from_a_known_seed_is_no_guarantee() -> None:
    report = Privacy("sound", noise_source="seed").report(3)
    assert (report.guaranteed, report.epsilon, report.unprotected) == (False, math.inf, ("seeded-noise",))
    assert Privacy("sound", noise_source="entropy").report(3) == Privacy("sound").report(3)


@pytest.mark.parametrize(("epsilon", "count"), [(0.5, 2**31 - 1), (1e6, 1)])
def test_what_is_too_large_to_compute_is_bounded_from_above(epsilon: float, count: int) -> None:
    report = Privacy("sound", epsilon).report(count)
    assert 500 < report.epsilon <= report.zcdp_epsilon
    assert report.claimed_epsilon > 500


@NUMERICAL
def test_exact_epsilons_are_those_of_a_numerical_accountant(
    multiplier: float, count: int, delta: float, epsilon: float
) -> None:
    assert gaussian_epsilon(math.sqrt(count) / multiplier, delta) == pytest.approx(epsilon, abs=2e-6)


def test_delta_is_the_hockey_stick_divergence_of_two_gaussians() -> None:
    mu, epsilon = 0.8, 0.6
    x = np.linspace(-12, 12, 400_001)
    excess = np.maximum(norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x), 0)
    assert gaussian_delta(mu, epsilon) == pytest.approx(np.trapezoid(excess, x), rel=1e-7)


@settings(deadline=None)
@given(mu=st.floats(1e-3, 20), delta=st.floats(1e-12, 0.1))
def test_the_exact_epsilon_attains_delta_and_is_below_zcdps(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    assert 0 <= epsilon <= zcdp_epsilon(mu**2 / 2, delta)
    assert gaussian_delta(mu, epsilon) <= delta * (1 + 1e-6)
    if epsilon > 0:
        assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)


def test_much_noise_costs_nothing_at_a_generous_delta() -> None:
    assert gaussian_epsilon(0.01, 0.1) == 0.0


@settings(deadline=None)
@given(epsilon=st.floats(0.01, 20), delta=st.floats(1e-10, 0.1), count=st.integers(1, 1000))
def test_the_least_noise_of_a_run_gives_exactly_its_epsilon(epsilon: float, delta: float, count: int) -> None:
    multiplier = calibrated_multiplier(epsilon, delta, count)
    assert gaussian_epsilon(math.sqrt(count) / multiplier, delta) == pytest.approx(epsilon, rel=1e-6)


def test_a_privacy_for_a_run_costs_what_was_asked_for() -> None:
    privacy = Privacy.for_run(2.0, 1e-5, 40, clip=3.0)
    report = privacy.report(40)
    assert (privacy.mode, privacy.clip) == ("sound", 3.0)
    assert report.guaranteed
    assert report.epsilon == pytest.approx(2.0, rel=1e-9)
    assert privacy.report(20).epsilon < 2.0 < privacy.report(80).epsilon


def test_more_releases_cost_more_and_never_more_than_zcdp_says() -> None:
    reports = [Privacy("sound", 0.5, 1e-5).report(count) for count in (1, 2, 5, 50)]
    epsilons = [report.epsilon for report in reports]
    assert epsilons == sorted(set(epsilons))
    assert all(report.epsilon < report.zcdp_epsilon for report in reports)
    # What eq. (13) is calibrated for, it more than keeps.
    assert reports[0].epsilon == reports[0].step_epsilon < 0.5


@pytest.mark.parametrize(
    ("iterations", "kappa", "count"), [(1, 10, 1), (10, 10, 1), (11, 10, 2), (61, 10, 7), (28, 12, 3)]
)
def test_a_node_releases_a_gradient_at_the_start_and_one_a_communication(
    iterations: int, kappa: int, count: int
) -> None:
    assert releases(iterations, kappa) == count


def test_without_noise_there_is_nothing_to_account_for() -> None:
    with pytest.raises(ValueError, match="mode must be 'paper' or 'sound', got 'none'"):
        Privacy().report(3)


def test_a_source_of_noise_is_told_only_where_it_is_chosen() -> None:
    assert "noise-source" not in Privacy("sound").instructions()
    assert Privacy("sound", noise_source="seed").instructions()["noise-source"] == "seed"
