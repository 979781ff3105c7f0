"""What all codes of vectors have in common: those of updates in records, and those of bytes to neighbours."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from hedgerow.wire.records import PayloadError

__all__ = ["Code", "Codec", "Seed"]

Sent = TypeVar("Sent")
Seed = tuple[int, ...]


class Code(Protocol[Sent]):
    """A code of vectors (n,) as arrays or bytes.

    ``seed`` is the message's own: of what both sides draw (the sensing matrix of a one-bit code) and of what
    the sender draws (stochastic rounding, as in QSGD). A code without randomness ignores it.
    """

    def encode(self, v: NDArray[Any], seed: Seed) -> Sent:
        """Return what is sent of a vector; ValueError if it is not finite."""

    def decode(self, payload: Sent, size: int, seed: Seed = ()) -> NDArray[Any] | None:
        """Return the vector (size,), None if none was found; PayloadError if nothing encodes to this."""

    def bits(self, size: int, payload: Sent | None = None) -> int:
        """Return the paper's count of a message's bits: of this one, or of the longest."""


class Codec(Code[bytes], Protocol):
    """A code of vectors (n,) as bytes."""

    def decode_many(
        self, payloads: Sequence[bytes], size: int, seeds: Sequence[Seed]
    ) -> list[NDArray[Any] | None]:
        """Return ``decode`` of each payload, bit for bit; None where its bytes are malformed too.

        The arrays may be shared: never change them.
        """
        return [self.decoded(payload, size, seed) for payload, seed in zip(payloads, seeds, strict=True)]

    def decoded(self, payload: bytes, size: int, seed: Seed) -> NDArray[Any] | None:
        """Return ``decode``, None where the bytes are malformed."""
        try:
            return self.decode(payload, size, seed)
        except PayloadError:
            return None
