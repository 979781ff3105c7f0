"""The size of a message between two nodes, without the code that decodes it.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", section III: 64 + d bits
for a one-bit message, against 64 n for a dense one. Ours: sparse and quantised vectors.
A relay needs only this table; it must not be able to decode payloads.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from hedgerow.wire.checks import int_at_least


@dataclass(frozen=True)
class PayloadSizes:
    """The size of payloads if all have the same, for a ``Router``.

    Parameters
    ----------
    message_bits : int
        Information bits of one directed message, >= 0.
    max_bytes : int
        Bytes of the largest payload, >= 0; larger ones are lost.
    per_receiver : bool (default: False)
        Whether a sender encodes separately for each receiver, or once for all.
    """

    message_bits: int
    max_bytes: int
    per_receiver: bool = False

    def __post_init__(self) -> None:
        int_at_least(0, message_bits=self.message_bits, max_bytes=self.max_bytes)

    def bits(self, payload: bytes) -> int:
        """Return the information bits of any payload."""
        return self.message_bits


@dataclass(frozen=True)
class PayloadCoding:
    """The coding of a method's messages, from which their size follows."""

    # ``1bcs`` (a norm and d signs), ``sparse16``, ``sparse32``, ``sparse64`` (s values and indices),
    # ``dense32``, ``dense64`` (n values) or ``quantised<b>`` (a scale and n values of b bits, 2 to 16).
    codec: str
    # Model dimension n, >= 1.
    dim: int
    # s of a vector, 1 to n; needed by the sparse codecs.
    sparsity: int | None = None
    # d, >= 1; needed by ``1bcs``.
    measurements: int | None = None
    # Vectors per message, >= 1.
    vectors: int = 1
    # Whether a sender encodes separately for each receiver.
    per_receiver: bool = False

    def __post_init__(self) -> None:
        int_at_least(1, dim=self.dim, vectors=self.vectors)
        if self.sparsity is not None:
            int_at_least(1, sparsity=self.sparsity)
            if self.sparsity > self.dim:
                raise ValueError(f"sparsity must be from 1 to dim = {self.dim}, got {self.sparsity!r}")
        if self.measurements is not None:
            int_at_least(1, measurements=self.measurements)
        _ = self.sizes

    @property
    def told(self) -> str:
        """The codec's name in the nodes' settings; a quantiser needs the number of vectors."""
        several = self.vectors > 1 and self.codec.startswith("quantised")
        return f"{self.codec}x{self.vectors}" if several else self.codec

    @cached_property
    def sizes(self) -> PayloadSizes:
        """The size of a message; each vector is padded to whole bytes."""
        bits = self._vector_bits
        return PayloadSizes(self.vectors * bits, self.vectors * -(-bits // 8), self.per_receiver)

    @property
    def _vector_bits(self) -> int:
        if self.codec == "1bcs":
            return 64 + _needed("measurements", self.measurements, self.codec)
        if match := re.fullmatch("dense(32|64)", self.codec):
            return int(match[1]) * self.dim
        if match := re.fullmatch("sparse(16|32|64)", self.codec):
            # ceil(log2) of the number of entries of all vectors, which have consecutive indices.
            index = (self.vectors * self.dim - 1).bit_length()
            return _needed("sparsity", self.sparsity, self.codec) * (int(match[1]) + index)
        if (match := re.fullmatch("quantised([0-9]+)", self.codec)) and 2 <= int(match[1]) <= 16:
            return 32 + int(match[1]) * self.dim
        raise ValueError(
            "codec must be one of 1bcs, sparse16, sparse32, sparse64, dense32, dense64, quantised<b> with "
            f"b from 2 to 16, got {self.codec!r}"
        )


def _needed(key: str, value: int | None, codec: str) -> int:
    if value is None:
        raise ValueError(f"{key} must be an integer >= 1 with codec {codec!r}")
    return value
