"""The process's global generators of torch, NumPy and Python: saved, seeded and restored.

The suite's own draws use generators of their own. A user's model may draw from the global ones in its forward
pass: dropout, noise layers, stochastic depth.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hedgerow.torch_generator import TORCH_GENERATOR


class GlobalDraws(NamedTuple):
    """The states of all global generators at one moment."""

    cpu: Tensor
    cuda: list[Tensor]  # of each device; empty before CUDA is first used
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> "GlobalDraws":
        """Return the current states."""
        ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if ready else []
        numpys = np.random.get_state()  # noqa: NPY002
        with TORCH_GENERATOR:
            cpu = torch.get_rng_state()
        return cls(cpu, cuda, numpys, random.getstate())

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
        with TORCH_GENERATOR:
            torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)  # noqa: NPY002
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


def seed_global_draws(seed: int) -> None:
    """Seed all global generators; ``seed`` from 0 to 2**63 - 1."""
    with TORCH_GENERATOR:
        torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
