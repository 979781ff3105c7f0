import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.tasks.images import Images, pixel_constants, scaled, standardise


def images(x_train, x_test):
    return Images(x_train, np.zeros(len(x_train), np.uint8), x_test, np.zeros(len(x_test), np.uint8))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), channels=st.integers(1, 4))
def test_standardised_pixels_are_those_of_the_training_mean_and_deviation(seed, channels):
    rng = np.random.default_rng(seed)
    train = rng.integers(0, 256, (30, channels, 5, 4)).astype(np.uint8)
    test = rng.integers(0, 256, (7, channels, 5, 4)).astype(np.uint8)
    x_train, x_test = standardise(images(train, test))
    mean, deviation = (f(train, axis=(0, 2, 3), keepdims=True) for f in (np.mean, np.std))
    np.testing.assert_allclose(x_train, (train - mean) / deviation, atol=1e-6)
    np.testing.assert_allclose(x_test, (test - mean) / deviation, atol=1e-6)
    assert x_train.dtype == x_test.dtype == np.float32


def test_a_constant_channel_becomes_zeros_and_unit_pixels_are_levels_over_255():
    constant = images(np.full((3, 1, 2, 2), 9, np.uint8), np.full((1, 1, 2, 2), 9, np.uint8))
    assert not standardise(constant)[0].any()
    levels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    x_train, x_test = scaled(images(levels, levels[:, :, :1]), "unit")
    assert np.array_equal(x_train.ravel(), np.arange(256, dtype=np.float32) / np.float32(255))
    assert x_test.shape == (1, 1, 1, 16)
    assert x_train.dtype == x_test.dtype == np.float32
    with pytest.raises(ValueError, match="scaling must be one of standard, unit, got 'half'"):
        scaled(constant, "half")


@pytest.mark.parametrize("scaling", ["standard", "unit"])
def test_the_constants_of_a_scaling_give_its_pixels(scaling):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 200, (6, 3, 4, 4), dtype=np.uint8)
    pixels[:, 2] = 7
    both = images(pixels, pixels[:2])
    mean, std = (np.array(one).reshape(3, 1, 1) for one in pixel_constants(both, scaling))
    for raw, wanted in zip((both.x_train, both.x_test), scaled(both, scaling), strict=True):
        assert (raw - mean) / std == pytest.approx(wanted, abs=1e-6)
