"""The settings of buffered asynchronous rounds."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from hedgerow.wire.checks import int_at_least, one_of
from hedgerow.wire.printable import quoted

STALENESS = ("sqrt", "none")


@dataclass(frozen=True)
class Buffer:
    """The buffer of J. Nguyen et al. (2022): a round is one update of the model by K replies.

    Parameters
    ----------
    size : int
        Replies K of an update, >= 1.
    concurrency : int or None (default: None)
        Nodes at work at a time, >= 1; each has one message at most. None for as many as the method asks in
        a round.
    staleness : {"sqrt", "none"} (default: "sqrt")
        The factor s(tau) on an update that the model has moved on from tau times: 1 / sqrt(1 + tau), or 1.
    max_staleness : int or None (default: None)
        A reply with a larger tau is counted as lost (``too stale``), >= 0; None for no bound.
    """

    size: int
    concurrency: int | None = None
    staleness: str = "sqrt"
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        int_at_least(1, size=self.size)
        one_of("staleness", self.staleness, STALENESS)
        if self.concurrency is not None:
            int_at_least(1, concurrency=self.concurrency)
        if self.max_staleness is not None:
            int_at_least(0, max_staleness=self.max_staleness)

    @classmethod
    def of(cls, value: object) -> Buffer | None:
        """Return the buffer of an option: None, its size, or a Buffer; ValueError for another value."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return cls(value)
        raise ValueError(f"buffer must be None, an integer >= 1, or a Buffer, got {quoted(value)}")

    def factor(self, tau: int) -> float:
        """Return s(tau), in (0, 1]."""
        return 1 / sqrt(1 + tau) if self.staleness == "sqrt" else 1.0
