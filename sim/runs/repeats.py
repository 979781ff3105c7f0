"""What of a run does not follow from its seed, in words for its log and its ``summary.json``."""

import os
from collections.abc import Mapping
from logging import INFO
from typing import Any

import torch
from flwr.common import log

__all__ = ["LEGACY", "WHICH_ARE_LATE", "Unrepeated"]

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
