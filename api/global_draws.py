"""The process's global generators of torch, NumPy and Python: saved, seeded and restored.

The suite's own draws use generators of their own (``wire/seeds.py``). A user's model may draw from the global
ones in its forward pass (dropout, noise layers, stochastic depth), and so may another project's app anywhere.
"""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# To take around every call that reads, sets or seeds torch's generator on the CPU. torch holds its mutex
# while it makes the tensor of a state, in which Python's garbage collector may hand the interpreter to
# a thread that waits for the mutex: both would wait for ever. A thread waits for this lock without the
# interpreter.
TORCH_GENERATOR = threading.Lock()


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
        """Whether anything has been drawn since, but on devices that were first used since."""
        now = GlobalDraws.now()
        return not (
            torch.equal(self.cpu, now.cpu)
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

    def state_dict(self) -> dict[str, Any]:
        """Return the states for a checkpoint: JSON values and ndarrays."""
        version, words, gauss = self.python
        state: dict[str, Any] = {
            "python": [version, np.array(words, np.uint32), gauss],
            "numpy": list(self.numpy),
            "torch": self.cpu.numpy(),
        }
        return state | ({"cuda": [device.numpy() for device in self.cuda]} if self.cuda else {})

    @classmethod
    def of_state_dict(cls, state: Mapping[str, Any]) -> "GlobalDraws":
        """Return the states of a checkpoint; those of devices only if there are as many here."""
        version, words, gauss = state["python"]
        devices = state.get("cuda", [])
        if torch.cuda.device_count() != len(devices):
            devices = []
        cpu, *cuda = (torch.from_numpy(one.copy()) for one in (state["torch"], *devices))
        return cls(cpu, cuda, tuple(state["numpy"]), (version, tuple(words.tolist()), gauss))

    @classmethod
    @contextmanager
    def restored(cls) -> Iterator["GlobalDraws"]:
        """Restore the current states on leaving."""
        before = cls.now()
        try:
            yield before
        finally:
            before.restore()


def seed_global_draws(seed: int, *, later: bool = False) -> None:
    """Seed all global generators; ``seed`` from 0 to 2**63 - 1, of which NumPy uses the lowest 32 bits.

    ``later`` seeds devices that are first used afterwards as well, which takes longer.
    """
    with TORCH_GENERATOR:  # Thirty times faster than torch.manual_seed, which notes a traceback for devices.
        torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized() or (later and torch.cuda.is_available()):  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
