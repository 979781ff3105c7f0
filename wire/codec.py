"""The protocol of all codecs of vectors: those of updates in records, and those of bytes to neighbours."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from hedgerow.wire.records import PayloadError

Sent = TypeVar("Sent")
Seed = tuple[int, ...]


class Code(Protocol[Sent]):
    """An encoding of vectors (n,) as arrays or bytes.

    ``seed`` is specific to a message. It seeds what both sides draw (the sensing matrix of a one-bit code)
    or what the sender draws (stochastic rounding, as in QSGD). A codec without randomness ignores it.
    """

    def encode(self, v: NDArray[Any], seed: Seed) -> Sent:
        """Return the payload of a vector; ValueError if it is not finite."""

    def decode(self, payload: Sent, size: int, seed: Seed = ()) -> NDArray[Any] | None:
        """Return the vector (size,), None if none was found; PayloadError if the payload is malformed."""

    def bits(self, size: int, payload: Sent | None = None) -> int:
        """Return the paper's count of a message's bits: of this one, or of the longest."""


class Codec(Code[bytes], Protocol):
    """An encoding of vectors (n,) as bytes."""

    def decode_many(
        self, payloads: Sequence[bytes], size: int, seeds: Sequence[Seed]
    ) -> list[NDArray[Any] | None]:
        """Return ``decode`` of each payload, bit for bit; None also if its bytes are malformed.

        The arrays may be shared: do not modify them.
        """
        return [self.decoded(payload, size, seed) for payload, seed in zip(payloads, seeds, strict=True)]

    def decoded(self, payload: bytes, size: int, seed: Seed) -> NDArray[Any] | None:
        """Return ``decode``, None if the bytes are malformed."""
        try:
            return self.decode(payload, size, seed)
        except PayloadError:
            return None
