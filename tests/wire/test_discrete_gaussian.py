"""Discrete Gaussian noise: its distribution, its stream, and what sums of it promise."""

import math

import numpy as np
import pytest
from scipy.stats import chisquare

from hedgerow.wire.discrete_gaussian import MAX_DEVIATION, CoinFlips, concentration, discrete_gaussian


def flips(key: int = 0) -> CoinFlips:
    return CoinFlips(key.to_bytes(32))


def pvalue(drawn: np.ndarray, sigma: int) -> float:
    """Return how well numbers fit the discrete Gaussian."""
    middle = np.arange(-3 * sigma, 3 * sigma + 1)
    everything = np.arange(-40 * sigma, 40 * sigma + 1)
    weights = np.exp(-(middle**2) / (2 * sigma**2)) / np.exp(-(everything**2) / (2 * sigma**2)).sum()
    observed = np.array([(drawn == value).sum() for value in middle])
    observed, expected = (
        np.append(observed, len(drawn) - observed.sum()),
        np.append(weights, 1 - weights.sum()),
    )
    return float(chisquare(observed, expected * len(drawn)).pvalue)


@pytest.mark.parametrize("sigma", [1, 3, 10])
def test_numbers_have_the_probabilities_of_the_discrete_gaussian(sigma: int) -> None:
    # A right sampler fails once in 10^4 keys; the keys are fixed.
    assert pvalue(discrete_gaussian(sigma, 60_000, flips(sigma)), sigma) > 1e-4
    # A normal that is rounded is noticed.
    assert sigma > 1 or pvalue(np.rint(np.random.default_rng(0).normal(0.0, sigma, 60_000)), sigma) < 1e-4


@pytest.mark.parametrize("sigma", [1_000, 2**20, MAX_DEVIATION])
def test_wide_noise_has_its_moments(sigma: int) -> None:
    drawn = discrete_gaussian(sigma, 40_000, flips(7)) / sigma
    # Five standard errors.
    assert abs(drawn.mean()) < 5 / 200
    assert abs((drawn**2).mean() - 1) < 5 * math.sqrt(2 / 40_000)
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / 40_000)


def test_a_key_gives_one_stream_and_the_operating_system_another_each_time() -> None:
    np.testing.assert_array_equal(discrete_gaussian(99, 50, flips(1)), discrete_gaussian(99, 50, flips(1)))
    assert not np.array_equal(discrete_gaussian(99, 50, flips(1)), discrete_gaussian(99, 50, flips(2)))
    assert not np.array_equal(discrete_gaussian(99, 50, CoinFlips()), discrete_gaussian(99, 50, CoinFlips()))


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**31 - 1, 2**62])
def test_integers_below_a_bound_are_uniform(bound: int) -> None:
    drawn = flips(3).below(bound, 20_000)
    assert drawn.min() >= 0
    assert drawn.max() < bound
    assert abs(drawn.mean() - (bound - 1) / 2) <= 5 * bound / math.sqrt(12 * 20_000)


def test_a_sum_of_noises_costs_what_one_gaussian_of_their_variance_does() -> None:
    # Theorem 1 of Kairouz et al.: with sigma = 50 and 10 shares tau is nothing.
    assert concentration(7.0, 50, 10, 10**6) == pytest.approx(7.0**2 / (2 * 10 * 50**2), rel=1e-12)
    # With narrow noise it is not: sigma = 1, two shares, tau = 10 exp(-pi^2).
    tau = 10 * math.exp(-(math.pi**2))
    expected = (1 / math.sqrt(2) + tau * math.sqrt(100)) ** 2 / 2
    assert concentration(1.0, 1, 2, 100) == pytest.approx(expected, rel=1e-12)


def test_the_bound_holds_for_a_sum_whose_distribution_is_computed() -> None:
    """Renyi divergences of the exact distribution of a sum, by convolution, against alpha rho."""
    sigma, shares, shift = 2, 3, 1
    values = np.arange(-60, 61)
    one = np.exp(-(values**2) / (2.0 * sigma**2))
    one /= one.sum()
    total = one
    for _ in range(shares - 1):
        total = np.convolve(total, one)
    p, q = total[shift:], total[:-shift]
    seen = (p > 1e-250) & (q > 1e-250)
    rho = concentration(shift, sigma, shares, 1)
    for alpha in (1.5, 2.0, 5.0):
        terms = np.exp(alpha * np.log(p[seen]) + (1 - alpha) * np.log(q[seen]))
        divergence = math.log(float(terms.sum())) / (alpha - 1)
        assert divergence <= alpha * rho * (1 + 1e-9)
        assert divergence >= 0.99 * alpha * shift**2 / (2 * shares * sigma**2)
