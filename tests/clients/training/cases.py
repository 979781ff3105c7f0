"""Ragged work on small random images, shared by the tests of loop and stack."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from hedgerow.clients import LocalWork

IMAGES = (1, 16, 16)
# The built-in models without batch statistics.
STACKABLE = ("lenet", "cnn-431k", "logistic", "mlp")


def torch_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return build()


def ragged_works(
    model: nn.Module, lengths: Sequence[Sequence[int]], shape: tuple[int, ...] = IMAGES
) -> list[LocalWork]:
    """One node for each entry, which lists its steps' batch lengths; starts and rates differ."""
    stream = np.random.default_rng(7)
    dtype = next(model.parameters()).dtype
    x = torch.as_tensor(stream.normal(size=(40, *shape))).to(dtype)
    y = torch.as_tensor(stream.integers(0, 10, 40))

    def start() -> dict[str, torch.Tensor]:
        noise = {
            key: torch.as_tensor(stream.normal(size=value.shape)) for key, value in model.state_dict().items()
        }
        return {key: value + 0.05 * noise[key].to(value.dtype) for key, value in model.state_dict().items()}

    return [
        LocalWork(start(), x, y, [stream.integers(0, 40, n) for n in node], lr=0.02 * (1 + i % 3))
        for i, node in enumerate(lengths)
    ]
