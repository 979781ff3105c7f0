"""What a run may spend, so that methods are compared at equal cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from hedgerow.wire.printable import quoted

__all__ = ["BUDGETS", "Budget"]

# What a budget may be of, and the figure of a strategy's ``progress()`` that counts it.
BUDGETS: Mapping[str, str] = {
    "iterations": "iterations",
    "sim-seconds": "sim_seconds",
    "bits": "bits",
    "payload-bytes": "payload_bytes",
}


@dataclass(frozen=True)
class Budget:
    """What a run may spend: its last round is the first after which it has spent so much.

    Parameters
    ----------
    of : str
        One of ``BUDGETS``: local iterations, simulated seconds, nominal bits or serialised bytes.
    most : float
        How much, finite and > 0.

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
        """Return the budget that a text such as ``sim-seconds=60`` names; None for an empty one.

        Raises
        ------
        ValueError
            If it names none.
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
        """Tell whether a run has spent it; never so where what it is of is not known."""
        so_far = getattr(progress, BUDGETS[self.of])
        return so_far is not None and so_far >= self.most
