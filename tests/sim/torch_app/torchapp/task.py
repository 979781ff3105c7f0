"""A small network and two interleaved half-circles for each node."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 16)
        self.out = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def moons(seed: int, samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 2
    angle = torch.pi * torch.rand(samples, generator=generator)
    sign = 1 - 2 * labels
    x = torch.stack([sign * torch.cos(angle) + labels, sign * torch.sin(angle) + labels / 2], dim=1)
    return x + 0.1 * torch.randn(samples, 2, generator=generator), labels


def train(net: Net, data: tuple[torch.Tensor, torch.Tensor], lr: float) -> float:
    x, y = data
    optimiser = torch.optim.SGD(net.parameters(), lr=lr)
    for batch in torch.randperm(len(x)).split(16):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
        loss.backward()
        optimiser.step()
    return loss.item()


def test(net: Net, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    x, y = data
    with torch.no_grad():
        scores = net(x)
    accuracy = (scores.argmax(1) == y).float().mean()
    return float(nn.functional.cross_entropy(scores, y)), float(accuracy)
