"""Images as published, in bytes, their scaling, and random flips and crops of each mini-batch.

Augmentation is that of the experiments of A. Beikmohammadi, S. Khirirat, S. Magnússon (flips) and, for CIFAR,
of S. Li et al., FedMUD (crops of the image padded by 4, and flips). Unlike there, images are already
standardised, so the padding is the mean colour and not black.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

AUGMENTATIONS = ("none", "flips", "crops-and-flips")
_BORDER = 4

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


def check_augmentation(name: str, input_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless samples of this shape can be augmented like this."""
    if name not in AUGMENTATIONS:
        raise ValueError(f"augmentation must be one of {', '.join(AUGMENTATIONS)}, got {name!r}")
    if name != "none" and len(input_shape) != 3:
        raise ValueError(
            f"augmentation must be 'none' with samples of shape {input_shape}, which are not images "
            f"(channels, height, width), got {name!r}"
        )


def augmented(x: Tensor, name: str, stream: np.random.Generator) -> Tensor:
    """Return randomly flipped and cropped images, as new tensors.

    Parameters
    ----------
    x : Tensor
        (samples, channels, height, width).
    name : str
        ``"none"`` returns ``x`` itself; ``"flips"``: each image with probability 1/2; ``"crops-and-flips"``:
        each is padded by 4 pixels of zeros, cropped to its own size at random, then flipped or not.
    stream : numpy.random.Generator
        The source of the draws: on the CPU, whatever the device.
    """
    check_augmentation(name, tuple(x.shape[1:]))
    if name == "none":
        return x
    if name == "crops-and-flips":
        x = _cropped(x, stream)
    flip = torch.from_numpy(stream.random(len(x)) < 0.5).to(x.device)
    return torch.where(flip[:, None, None, None], x.flip(-1), x)


def _cropped(x: Tensor, stream: np.random.Generator) -> Tensor:
    n, _, height, width = x.shape
    corners = torch.from_numpy(stream.integers(0, 2 * _BORDER + 1, (n, 2))).to(x.device)
    padded = functional.pad(x, (_BORDER,) * 4)
    rows = corners[:, :1] + torch.arange(height, device=x.device)  # (samples, height)
    columns = corners[:, 1:] + torch.arange(width, device=x.device)  # (samples, width)
    which = torch.arange(n, device=x.device)[:, None, None]
    return (
        padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
        .permute(0, 3, 1, 2)
        .contiguous()
    )
