"""The global generators of Python, NumPy and torch, from which other projects' apps draw.

Hedgerow's own code never draws from them (``wire/seeds.py``). A run seeds them once for its server; each
handler finds them seeded for its message, so that its draws depend neither on other nodes, nor on their
order, nor on the process in which it runs.

What of a run does not follow from its seed is collected in words for its log and its ``summary.json``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from logging import INFO
from typing import Any

import numpy as np
import torch
from flwr.common import log

from hedgerow.torch_generator import TORCH_GENERATOR

# Of another project's app, which nobody can look into.
_HIDDEN = (
    "draws from the operating system (numpy.random.default_rng() without a seed, secrets, uuid4)",
    "draws in threads that the app starts",
    "with several workers or on a resume: what the app keeps in variables of its modules",
)
_HASHES = "the order of Python sets of texts, unless PYTHONHASHSEED is set"
_GPU = "kernels on a GPU, unless torch.use_deterministic_algorithms(True) is called"
_NOISE = "noise from the operating system; noise-source = 'seed' repeats"
WHICH_ARE_LATE = "which replies are late: real seconds count"
LEGACY = "the order in which Flower's legacy server sums the replies"

# NumPy's global generator takes seeds of 32 bits.
_WORD = 2**32


def draw_seed() -> int:
    """Return a seed from the operating system, short enough to be typed."""
    return random.SystemRandom().randrange(_WORD // 2)


def seed_generators(seed: int) -> None:
    """Seed the global generators; ``seed`` is in [0, 2^63), of which NumPy uses the lowest 32 bits."""
    random.seed(seed)
    np.random.seed(seed % _WORD)  # noqa: NPY002  # The generator that such apps use.
    with TORCH_GENERATOR:  # Thirty times faster than torch.manual_seed, which notes a traceback for devices.
        torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def message_key(seed: int, round: int, partition_id: int, kind: str, count: int = 0) -> int:
    """Return the key in [0, 2^63) of a message's draws: those of its fate, and those of its handler.

    ``count`` numbers the messages of one kind to one node in one round.
    """
    text = f"{seed} {round} {partition_id} {count} {kind}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def drawn() -> Callable[[], bool]:
    """Return a function that says whether anything was drawn on the CPU since now."""

    def state() -> tuple[Any, ...]:
        _, words, *rest = np.random.get_state()  # noqa: NPY002
        with TORCH_GENERATOR:
            cpu = torch.get_rng_state()
        return random.getstate(), np.array(words).tobytes(), *rest, cpu.numpy().tobytes()

    before = state()
    return lambda: state() != before


class Generators:
    """The global generators as a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return their state: JSON values and ndarrays."""
        version, words, gauss = random.getstate()
        with TORCH_GENERATOR:
            cpu = torch.get_rng_state()
        state: dict[str, Any] = {
            "python": [version, np.array(words, np.uint32), gauss],
            "numpy": list(np.random.get_state()),  # noqa: NPY002
            "torch": cpu.numpy(),
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = [one.numpy() for one in torch.cuda.get_rng_state_all()]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; those of GPUs only if there are as many."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
        with TORCH_GENERATOR:
            torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
        devices = state.get("cuda", [])
        if devices and torch.cuda.device_count() == len(devices):
            torch.cuda.set_rng_state_all([torch.from_numpy(one.copy()) for one in devices])


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the global generators back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with TORCH_GENERATOR:
        cpu = torch.get_rng_state()
    ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if ready else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        with TORCH_GENERATOR:
            torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)


class Unrepeated:
    """Collects what a run does not repeat, and logs each once.

    Parameters
    ----------
    seed : int
        The run's seed.
    settings : Mapping[str, Any]
        The run config.
    foreign : bool (default: False)
        Whether it is another project's app.
    """

    def __init__(self, seed: int, settings: Mapping[str, Any], *, foreign: bool = False) -> None:
        self.seed = seed
        self._found: list[str] = []
        fixed = os.environ.get("PYTHONHASHSEED", "random") != "random"
        known = [*_HIDDEN, *(() if fixed else (_HASHES,))] if foreign else []
        noisy = settings.get("privacy") == "sound" or any(
            key.endswith("noise-multiplier") and value for key, value in settings.items()
        )
        if noisy and settings.get("noise-source") == "entropy":
            known.append(_NOISE)
        device = str(settings.get("device", ""))
        if torch.cuda.is_available() and (foreign or device.startswith(("cuda", "auto"))):
            known.append(_GPU)
        self.add(*known)

    def add(self, *reasons: str) -> None:
        """Add and log reasons that are new."""
        new = [reason for reason in reasons if reason not in self._found]
        self._found += new
        if new:
            log(INFO, "This run repeats with seed %d, except for: %s.", self.seed, "; ".join(new))

    def summary(self) -> dict[str, list[str]]:
        """Return the entry of ``summary.json``: nothing if everything repeats."""
        return {"not-repeatable": self._found} if self._found else {}
