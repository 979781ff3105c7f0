"""The budget of a run, for comparing methods at equal cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from hedgerow.wire.printable import quoted

# The kinds of budgets, and the attribute of a strategy's ``progress()`` for each.
BUDGETS: Mapping[str, str] = {
    "iterations": "iterations",
    "sim-seconds": "sim_seconds",
    "bits": "bits",
    "payload-bytes": "payload_bytes",
}


@dataclass(frozen=True)
class Budget:
    """The budget of a run: the run ends with the first round after which it is spent.

    Parameters
    ----------
    of : str
        One of ``BUDGETS``: local iterations, simulated seconds, nominal bits or serialized bytes.
    most : float
        The amount, finite and > 0.

    Raises
    ------
    ValueError
        If a field is out of range.
    """

    of: str
    most: float

    def __post_init__(self) -> None:
        if self.of not in BUDGETS:
            raise ValueError(f"budget must be one of {', '.join(BUDGETS)}, got {quoted(self.of)}")
        if not (isfinite(self.most) and self.most > 0):
            raise ValueError(f"budget {self.of} must be a finite number > 0, got {self.most}")

    @classmethod
    def parse(cls, text: str) -> Budget | None:
        """Parse a budget such as ``sim-seconds=60``; None for an empty text.

        Raises
        ------
        ValueError
            If it is not a budget.
        """
        if not text.strip():
            return None
        of, _, most = text.partition("=")
        try:
            number = float(most)
        except ValueError:
            raise ValueError(f"budget must be name=number, as 'sim-seconds=60', got {quoted(text)}") from None
        return cls(of.strip(), number)

    def spent(self, progress: Any) -> bool:
        """Return whether a run has spent it; False if the run does not count this kind."""
        so_far = getattr(progress, BUDGETS[self.of])
        return so_far is not None and so_far >= self.most
