"""Initial weights drawn by NumPy: the same on every processor.

torch's own draws (``torch.nn.init``) differ in the last bits from one instruction set to another.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["draw_normal", "draw_uniform", "weight_generator"]

# Random streams are keyed (seed, 0, 0, purpose), as in the whole suite; 1 is the purpose "model".
_PURPOSE = 1


def weight_generator(seed: int) -> np.random.Generator:
    """Return the random stream of a run's initial weights."""
    return np.random.default_rng(np.random.SeedSequence([seed, 0, 0, _PURPOSE]))


def draw_uniform(parameter: Tensor, bound: float, generator: np.random.Generator) -> None:
    """Fill a parameter with draws from U(-bound, bound)."""
    _fill(parameter, bound * (2 * generator.random(tuple(parameter.shape)) - 1))


def draw_normal(parameter: Tensor, deviation: float, generator: np.random.Generator) -> None:
    """Fill a parameter with draws from N(0, deviation^2)."""
    _fill(parameter, deviation * generator.standard_normal(tuple(parameter.shape)))


def _fill(parameter: Tensor, values: np.ndarray) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values))
