"""What all codes of vectors have in common: those of updates in records, and those of bytes to neighbours."""

from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Code", "Seed"]

Sent = TypeVar("Sent")
Seed = tuple[int, ...]


class Code(Protocol[Sent]):
    """A code of vectors (n,) as arrays or bytes.

    ``seed`` is the message's own: of what both sides draw (the sensing matrix of a one-bit code) and of what
    the sender draws (stochastic rounding, as in QSGD). A code without randomness ignores it.
    """

    def encode(self, v: NDArray[Any], seed: Seed) -> Sent:
        """Return what is sent of a vector; ValueError if it is not finite."""

    def decode(self, payload: Sent, size: int, seed: Seed = ()) -> NDArray[np.floating] | None:
        """Return the vector (size,), None if none was found; PayloadError if nothing encodes to this."""

    def bits(self, size: int, payload: Sent | None = None) -> int:
        """Return the paper's count of a message's bits: of this one, or of the longest."""
