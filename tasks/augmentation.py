"""Random flips and crops of images, for training: what the set-ups of papers on images do to each mini-batch.

As in the experiments of A. Beikmohammadi, S. Khirirat, S. Magnússon (flips) and, for CIFAR, of S. Li et al.,
FedMUD (crops of the image padded by 4, and flips). Differs: images are standardised already, so that a border
is the mean colour and not black.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["AUGMENTATIONS", "augmented", "check_augmentation"]

AUGMENTATIONS = ("none", "flips", "crops-and-flips")
_BORDER = 4


def check_augmentation(name: str, input_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless samples of a shape can be augmented so."""
    if name not in AUGMENTATIONS:
        raise ValueError(f"augmentation must be one of {', '.join(AUGMENTATIONS)}, got {name!r}")
    if name != "none" and len(input_shape) != 3:
        raise ValueError(
            f"augmentation must be 'none' with samples of shape {input_shape}, which are no images "
            f"(channels, height, width), got {name!r}"
        )


def augmented(x: Tensor, name: str, stream: np.random.Generator) -> Tensor:
    """Return images, each flipped left to right or not and moved by up to 4 pixels, as new tensors.

    Parameters
    ----------
    x : Tensor
        (samples, channels, height, width).
    name : str
        ``"none"`` returns ``x`` itself; ``"flips"``: each image with probability 1/2; ``"crops-and-flips"``:
        each is cut to its own size out of the image with 4 pixels of zeros around it, then flipped or not.
    stream : numpy.random.Generator
        Where draws come from: on the CPU, whatever the device.
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
