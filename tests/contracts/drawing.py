"""Models whose forward passes draw, as a run names them."""

import torch
from torch import Tensor, nn

from hedgerow.tasks import SplitModel


class Noise(nn.Module):
    """Draws in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a network with dropout and noise."""
    size = torch.Size(input_shape).numel()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(size, 8), nn.ReLU(), nn.Dropout(0.5), Noise(), nn.Linear(8, num_classes)
    )


class Head(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, outputs))

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        logits: Tensor = self.layers(torch.cat([z1, z2], -1))
        return logits


def split(hospital_shape: tuple[int, ...], device_shape: tuple[int, ...], num_classes: int) -> SplitModel:
    """Return a model in three pieces, each with dropout."""
    hospital, device = (
        nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 3), nn.Dropout(0.2))
        for shape in (hospital_shape, device_shape)
    )
    return SplitModel(Head(1 if num_classes == 2 else num_classes), hospital, device, 3, 3)
