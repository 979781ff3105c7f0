"""The global generators of Python, NumPy and torch, from which other projects' apps draw.

Hedgerow's own code never draws from them (``wire/seeds.py``). A run seeds them once for its server; each
handler finds them seeded for its message, so that its draws depend neither on other nodes, nor on their
order, nor on the process in which it runs.

What of a run does not follow from its seed is collected in words for its log and its ``summary.json``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from logging import INFO
from typing import Any

import torch
from flwr.common import log

from hedgerow.global_draws import GlobalDraws

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


def draw_seed() -> int:
    """Return a seed from the operating system, short enough to be typed."""
    return random.SystemRandom().randrange(2**31)


class Generators:
    """The global generators as a part of a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return their state: JSON values and ndarrays."""
        return GlobalDraws.now().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; those of GPUs only if there are as many."""
        GlobalDraws.of_state_dict(state).restore()


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
