"""Temporary evaluation mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hedgerow.kept_values import values_kept


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode without gradients; restore each module's mode and kept values."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), values_kept(model):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
