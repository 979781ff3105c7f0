"""Quadratics as an ordinary model, loss and samples, so that the real training code meets closed forms."""

from collections.abc import Sequence

import numpy as np
import torch
from tests.oracles.similarity_free import Q2, Quadratic
from torch import Tensor, nn


class Point(nn.Module):
    """A sample is (h, c), the output sqrt(h) (w - c): half its square is (w - c)^T diag(h) (w - c) / 2."""

    def __init__(self, size: int = 2, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.chunk(2, dim=-1)
        return torch.as_tensor(h.sqrt() * (self.w - c))


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().sum(-1) / 2


def samples(problems: Sequence[Quadratic], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """One sample a problem, whose H is diagonal; the targets mean nothing."""
    x = torch.as_tensor(np.array([[*np.diag(p.H), *p.c] for p in problems])).to(dtype)
    return x, torch.zeros(len(problems), dtype=torch.int64)


def point(*values: float, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=dtype)}


Q2_X, Q2_Y = samples(Q2)
