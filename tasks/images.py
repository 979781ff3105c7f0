"""Images as published, in bytes, and their scaling."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SCALINGS", "Images", "pixel_constants", "scaled", "standardise"]

SCALINGS = ("standard", "unit")

_BLOCKS = 64


class Images(NamedTuple):
    """Pixels 0..255 in (N, C, H, W) and labels in (N,), for training and test."""

    x_train: NDArray[np.uint8]
    y_train: NDArray[np.uint8]
    x_test: NDArray[np.uint8]
    y_test: NDArray[np.uint8]


def scaled(images: Images, scaling: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return both pixel sets: ``standard`` as ``standardise`` does, ``unit`` divided by 255.

    Raises
    ------
    ValueError
        For any other name.
    """
    if scaling == "standard":
        return standardise(images)
    if scaling == "unit":
        return (
            (images.x_train / np.float32(255)).astype(np.float32),
            (images.x_test / np.float32(255)).astype(np.float32),
        )
    raise ValueError(f"scaling must be one of {', '.join(SCALINGS)}, got {scaling!r}")


def pixel_constants(images: Images, scaling: str) -> tuple[list[float], list[float]]:
    """Return what ``scaled`` subtracts from each channel's pixels (0 to 255), and divides them by."""
    channels = range(images.x_train.shape[1])
    if scaling == "unit":
        return [0.0 for _ in channels], [255.0 for _ in channels]
    found = [_mean_and_deviation(images.x_train[:, channel]) for channel in channels]
    return [mean for mean, _ in found], [deviation for _, deviation in found]


def standardise(images: Images) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return both pixel sets with the training set's mean 0 and standard deviation 1 in each channel."""
    train = np.empty(images.x_train.shape, np.float32)
    test = np.empty(images.x_test.shape, np.float32)
    for channel in range(images.x_train.shape[1]):
        value_of = _standardised_levels(images.x_train[:, channel])  # (256,)
        train[:, channel] = value_of[images.x_train[:, channel]]
        test[:, channel] = value_of[images.x_test[:, channel]]
    return train, test


def _standardised_levels(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    mean, deviation = _mean_and_deviation(pixels)
    return ((np.arange(256, dtype=np.float64) - mean) / deviation).astype(np.float32)


def _mean_and_deviation(pixels: NDArray[np.uint8]) -> tuple[float, float]:
    # From the histogram: exact, without a float64 copy of the set. In blocks, because bincount converts its
    # input to eight bytes per pixel.
    histogram = sum(np.bincount(block.ravel(), minlength=256) for block in np.array_split(pixels, _BLOCKS))
    level = np.arange(256, dtype=np.float64)
    mean = np.average(level, weights=histogram)
    deviation = np.sqrt(np.average((level - mean) ** 2, weights=histogram))
    # A constant channel becomes zeros.
    return float(mean), float(deviation) or 1.0
