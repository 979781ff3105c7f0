"""The process's global generators of torch, NumPy and Python: saved, restored, and seeded by a stream.

The suite's own draws use generators of their own (``seeds.py``). A user's model may draw from the global ones
in its forward pass: dropout, noise layers, stochastic depth.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hedgerow.wire.seeds import Purpose, seed_words

__all__ = ["GlobalDraws", "seed_global_draws"]


class GlobalDraws(NamedTuple):
    """The states of all global generators at one moment."""

    cpu: Tensor
    cuda: list[Tensor]  # of each device; empty before CUDA is first used
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> "GlobalDraws":
        """Return the current states."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    @property
    def moved(self) -> bool:
        """Whether anything has been drawn since."""
        now = GlobalDraws.now()
        return not (
            torch.equal(self.cpu, now.cpu)
            and len(self.cuda) == len(now.cuda)
            and all(map(torch.equal, self.cuda, now.cuda))
            and self.numpy[2:] == now.numpy[2:]
            and np.array_equal(self.numpy[1], now.numpy[1])
            and self.python == now.python
        )

    def restore(self) -> None:
        """Continue from these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    @classmethod
    @contextmanager
    def restored(cls) -> Iterator["GlobalDraws"]:
        """Restore the current states on leaving."""
        before = cls.now()
        try:
            yield before
        finally:
            before.restore()


def seed_global_draws(seed: int, *, round: int, partition_id: int, purpose: Purpose) -> int:
    """Seed all global generators by a stream, as ``seeds.generator`` does; return the seed that torch got.

    ValueError if a number is negative.
    """
    words = seed_words(seed, round, partition_id, purpose)
    torch.default_generator.manual_seed(words)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(words)
    np.random.seed(words % 2**32)
    random.seed(words)
    return words
