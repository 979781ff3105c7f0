"""A node's training device, and the model that the nodes of a process share there."""

import re
from functools import lru_cache

import torch
from torch import nn

from hedgerow.tasks import build_model


def resolve_device(name: str) -> torch.device:
    """Return the device ``cpu``, ``cuda``, ``cuda:1``, …; ``auto`` is CUDA if available, else the CPU.

    ValueError for another name, or a CUDA device that is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # torch.device also takes "meta" and other devices on which nothing can be trained.
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:<index>', got {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be 'auto' or 'cpu' here, got {name!r}: torch finds no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"device must be below cuda:{count} here, got {name!r}: torch finds {count} CUDA devices"
        )
    return device


@lru_cache(maxsize=4)
def shared_model(
    name: str, input_shape: tuple[int, ...], num_classes: int, seed: int, device: torch.device
) -> nn.Module:
    """Return a model on a device, the same object for the same arguments, as scratch space for many nodes."""
    return build_model(name, input_shape, num_classes, seed).to(device)
