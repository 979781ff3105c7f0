"""Noise on a grid: its distribution, what can come out, how far a record moves it, and what that costs."""

from math import inf, sqrt
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, norm

from hedgerow.clients import GradientPrivacy, LinearRegression, noised, privacy_of
from hedgerow.clients.gradient_noise import noise
from hedgerow.clients.grid_noise import GridNoise, noise_key
from hedgerow.strategies import Privacy
from hedgerow.wire import gaussian_delta
from hedgerow.wire.discrete_gaussian import MAX_DEVIATION, deviation_of

GRID = GridNoise.of(5.0, 1.0, 1000, 500)
SIGMA = 5.0 * 2 / 500
KEY = bytes(range(32))


def steps(values: np.ndarray, grid: GridNoise = GRID) -> np.ndarray:
    return np.ldexp(values, -grid.exponent)


# The noise


def test_the_noise_is_normal_of_the_deviation_asked_for_and_a_little_more() -> None:
    xi = GRID(np.zeros(40_000), KEY)
    assert SIGMA <= GRID.deviation * GRID.step <= 1.0003 * SIGMA
    assert abs(xi.mean()) < 5 * SIGMA / 200
    assert xi.var() == pytest.approx(SIGMA**2, rel=5 * sqrt(2 / 40_000))
    # A right sampler fails once in 10^4 keys; the key is fixed.
    assert kstest(xi / (GRID.deviation * GRID.step), norm.cdf).pvalue > 1e-4


def test_the_noise_of_nodes_releases_and_roots_is_independent_and_repeats() -> None:
    keys = [noise_key(root, i, k) for root, i, k in ((7, 0, 0), (7, 0, 1), (7, 1, 0), (7, 11, 0), (8, 0, 0))]
    assert len(set(keys)) == len(keys)
    assert noise_key(7, 0, 0) == keys[0]
    assert noise_key(7, 1, 11) != noise_key(7, 11, 1) != noise_key(7, 111, 1)
    draws = [GRID(np.zeros(20_000), key) for key in keys]
    assert np.abs(np.corrcoef(draws)[~np.eye(len(keys), dtype=bool)]).max() < 0.03
    np.testing.assert_array_equal(GRID(np.zeros(20_000), keys[0]), draws[0])


# The grid


@settings(max_examples=40, deadline=None)
@given(
    st.floats(1e-6, 1e4),
    st.floats(1e-30, 1e30),
    st.integers(1, 20_958),
    st.integers(1, 10**6),
    st.integers(0, 2**32),
)
def test_every_release_is_a_point_of_a_grid_that_float64_has(
    multiplier: float, clip: float, size: int, records: int, seed: int
) -> None:
    grid = GridNoise.of(multiplier, clip, size, records)
    values = np.random.default_rng(seed).normal(0, clip, 20)
    values[:5] = [1e300, -inf, inf, np.nan, 5e-324]
    told = steps(grid(values, KEY), grid)
    assert np.isfinite(told).all()
    assert np.all(told == np.rint(told))
    assert np.abs(told).max() < 2**53
    # Nothing that has the norm of the clip is cut off.
    assert clip / grid.step * 2**12 <= 2**52
    # And back, to the bit.
    assert np.array_equal(np.ldexp(told.astype(np.int64).astype(float), grid.exponent), grid(values, KEY))


def test_what_is_too_large_is_told_as_the_largest_and_what_is_no_number_as_zero() -> None:
    one = GridNoise(-3, 1)
    told = steps(one(np.array([1e300, -inf, np.nan, 2.0**49, 1.06]), KEY), one)
    noise_alone = steps(one(np.zeros(5), KEY), one)
    np.testing.assert_array_equal(told - noise_alone, [2.0**52, -(2.0**52), 0, 2.0**52, 8])


# Mironov's attack, in its simplest form: by which doubles does a sum come?


def reachable(released: np.ndarray, sigma: float) -> np.ndarray:
    """Return which doubles are a double times sigma, rounded: those that noise on zeros can be."""
    near = released / sigma
    candidates = [near, np.nextafter(near, inf), np.nextafter(near, -inf)]
    return np.any([sigma * candidate == released for candidate in candidates], axis=0)


def test_the_lowest_bits_of_floating_point_noise_tell_what_it_is_on_and_those_of_a_grid_do_not() -> None:
    """Two gradients of 400 numbers that differ by 2^-58 in each, 10^-15 of the noise's deviation."""
    sigma, n = 1.5 * 2.0**-6, 400
    gradients = np.zeros(n), np.full(n, 2.0**-58)
    private = GradientPrivacy("sound", sigma**2, sigma * 500 / 10, 500)

    def is_guessed(release: Any) -> list[list[bool]]:
        """Return of 20 releases of each gradient whether all numbers are doubles that noise alone can be."""
        return [[bool(reachable(release(g, k), sigma).all()) for k in range(20)] for g in gradients]

    old = is_guessed(lambda g, k: g + noise(3, 0, k, n, sigma**2))
    assert all(old[0])
    assert not any(old[1])
    released = [[noised(3, 0, k, g, private) for k in range(3)] for g in gradients]
    np.testing.assert_array_equal(*released)
    # Where gradients differ by more, the same points can come out.
    grid = GridNoise.of(private.multiplier, private.clip, n, 500)
    for g in (np.zeros(n), np.full(n, 0.3 * sigma), np.random.default_rng(0).normal(0, sigma, n)):
        points = steps(noised(3, 0, 0, g, private), grid)
        assert np.all(points == np.rint(points))
        # Any remainder is as likely as another, whatever the gradient is.
        assert abs(np.mean(points % 2) - 0.5) < 5 * 0.5 / sqrt(n)


# How far a record moves a release


@pytest.mark.parametrize("records", [1, 7, 400])
@pytest.mark.parametrize("size", [1, 30])
def test_a_record_moves_a_rounded_gradient_by_no_more_than_is_counted(records: int, size: int) -> None:
    """The worst pair of neighbours: clipped gradients in opposite directions, at points between two steps."""
    clip, multiplier = 0.3, 2.0
    grid = GridNoise.of(multiplier, clip, size, records)
    counted = (grid.deviation - 4) / multiplier
    rng = np.random.default_rng(1)
    furthest = 0.0
    for _ in range(40):
        A, b = rng.normal(size=(records, size)) * 10, rng.normal(size=records) * 100
        other_A, other_b = A.copy(), b.copy()
        other_A[-1], other_b[-1] = A[-1], -b[-1]
        w = np.zeros(size)
        told = [
            steps(grid(LinearRegression(*one).gradient(w, clip), KEY), grid)
            for one in ((A, b), (other_A, other_b))
        ]
        moved = [int(step) for step in told[1] - told[0]]
        furthest = max(furthest, sqrt(sum(step**2 for step in moved)))
    assert furthest <= counted
    # And no less than the formula says of the clip itself: the bound is not loose by more than the rounding.
    assert furthest >= 2 * clip / records / grid.step * 0.999 - 2 * sqrt(size)


def test_rounding_alone_moves_two_equal_sensitivities_by_what_is_counted_for_it() -> None:
    """Halves of steps that are rounded apart: the widening sqrt(n), which floating point alone has not."""
    n, grid = 16, GridNoise.of(1000.0, 1.0, 16, 1)
    near = np.full(n, 0.5 * grid.step)
    a, b = near * (1 - 2.0**-50), near * (1 + 2.0**-50)
    moved = np.abs(steps(grid(b, KEY), grid) - steps(grid(a, KEY), grid))
    assert np.linalg.norm(moved) == sqrt(n)
    assert grid.deviation >= 1000.0 * (2.0 / grid.step + 2 * sqrt(n))


def test_one_record_cannot_be_worth_more_than_the_clip_by_overflow_or_underflow() -> None:
    A = np.full((3, 2), 1.0)
    for own in ([1e200, 1e200], [1e-200, 1e-200], [0.0, 0.0]):
        A[0] = own
        with np.errstate(all="ignore"):
            found = LinearRegression(A, np.array([1e300, 0.0, 0.0])).gradient(np.zeros(2), 1.0)
        assert np.linalg.norm(found) <= 1 / 3 * (1 + 1e-12)
    # What is no number counts as nothing, and leaves the others' as they were.
    A[0] = [1e300, 1.0]
    with np.errstate(all="ignore"):
        found = LinearRegression(A, np.array([0.0, 1.0, 1.0])).gradient(np.full(2, 1e200), 1.0)
    assert np.linalg.norm(found) <= 1.0
    assert np.isfinite(found).all()


# What it costs


def discrete_delta(sigma: int, shift: int, epsilon: float) -> float:
    """Return the exact delta of integers with discrete Gaussian noise that a neighbour moves by a shift."""
    y = np.arange(-40 * sigma, 40 * sigma + shift + 1)
    log_p = -(y**2) / (2 * sigma**2)
    log_q = -((y - shift) ** 2) / (2 * sigma**2)
    total = np.exp(-(np.arange(-40 * sigma, 40 * sigma + 1) ** 2) / (2 * sigma**2)).sum()
    return float(np.clip(np.exp(log_p) - np.exp(epsilon + log_q), 0, None).sum() / total)


@pytest.mark.parametrize("gaussian", [0.7, 2.0, 6.5, 40.0])
@pytest.mark.parametrize("shift", [1, 3, 17])
def test_the_exact_privacy_of_integers_is_within_that_of_the_gaussian_that_is_counted(
    gaussian: float, shift: int
) -> None:
    sigma = deviation_of(gaussian)
    for epsilon in (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0):
        assert discrete_delta(sigma, shift, epsilon) <= gaussian_delta(shift / gaussian, epsilon) + 1e-14
    # Without the margin it is not: a discrete Gaussian of the very deviation costs more somewhere.
    grid = np.linspace(0, 2, 80)
    assert max(discrete_delta(2, 1, epsilon) - gaussian_delta(1 / 2, epsilon) for epsilon in grid) > 1e-4


def test_releases_cost_what_is_counted_together_too() -> None:
    """Two releases at the deviation that is used, by convolution of their exact losses."""
    sigma, shift = deviation_of(5.0), 2
    y = np.arange(-30 * sigma, 30 * sigma + 1)
    weights = np.exp(-(y**2) / (2 * sigma**2))
    weights /= weights.sum()
    losses = (shift**2 - 2 * y * shift) / (2 * sigma**2)  # Of each outcome y: ln p(y) - ln p(y - shift).
    both = np.add.outer(losses, losses).ravel()
    masses = np.outer(weights, weights).ravel()
    for epsilon in (0.0, 0.5, 1.5):
        delta = float((masses * np.clip(1 - np.exp(epsilon - both), 0, None)).sum())
        assert delta <= gaussian_delta(shift * sqrt(2) / 5.0, epsilon) + 1e-14


def test_a_gaussian_that_is_rounded_at_random_is_the_discrete_one() -> None:
    """The identity that ``deviation_of`` rests on, by numerical integration."""
    s, r = 4.0, 3.0
    t = np.linspace(-60, 60, 24_001)
    k = np.arange(-90, 91)
    chance = np.exp(-((k[:, None] - t) ** 2) / (2 * r**2))
    np.testing.assert_allclose(chance.sum(0), sqrt(2 * np.pi) * r, rtol=1e-14)
    density = np.exp(-(t**2) / (2 * s**2)) / (s * sqrt(2 * np.pi))
    found = (chance / chance.sum(0) * density).sum(1) * (t[1] - t[0])
    expected = np.exp(-(k**2) / (2 * (s**2 + r**2)))
    np.testing.assert_allclose(found[40:141], (expected / expected.sum())[40:141], rtol=1e-9)


def test_the_noise_is_never_less_than_the_accountant_counts() -> None:
    for epsilon in (0.01, 0.5, 20.0):
        run = Privacy("sound", epsilon, 1e-5, clip=0.7)
        own = privacy_of(ConfigRecord({**run.instructions()}), 123)
        grid = GridNoise.of(own.multiplier, own.clip, 1000, own.records)
        moved = 2 * 0.7 / 123 / grid.step + 2 * sqrt(1000)
        assert grid.deviation**2 - 9 >= (run.noise_multiplier * moved) ** 2


# What is not valid


@pytest.mark.parametrize(
    ("multiplier", "clip", "size"),
    [(2.0**22, 1.0, 2), (1e30, 1.0, 1), (0.0, 1.0, 1), (1.0, 5e-324, 1), (1.0, 1e308, 1)],
)
def test_noise_without_a_grid_is_refused_and_the_widest_that_is_valid_fits(
    multiplier: float, clip: float, size: int
) -> None:
    with pytest.raises(ValueError, match="must be"):
        GridNoise.of(multiplier, clip, size)
    for valid in (1, 1000, 2**30):
        assert 2**22 < GridNoise.of(2.0**22 / sqrt(valid), 1.0, valid).deviation <= MAX_DEVIATION
