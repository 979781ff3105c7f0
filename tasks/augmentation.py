"""Random flips and crops of images in each mini-batch.

As in the experiments of A. Beikmohammadi, S. Khirirat, S. Magnússon (flips) and, for CIFAR, of S. Li et al.,
FedMUD (crops of the image padded by 4, and flips). Unlike there, images are already standardised, so the
padding is the mean colour and not black.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["AUGMENTATIONS", "augmented", "check_augmentation"]

AUGMENTATIONS = ("none", "flips", "crops-and-flips")
_BORDER = 4


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
