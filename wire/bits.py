"""Integers packed into fields of a few bits, most significant bit first."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.records import PayloadError

Bytes = NDArray[np.uint8]


def index_width(size: int) -> int:
    """Return ceil(log2 size), the bits of an index below ``size`` >= 1."""
    return (size - 1).bit_length()


def bytes_of(bits: int) -> int:
    """Return the number of bytes for ``bits`` bits."""
    return -(-bits // 8)


def to_bits(numbers: NDArray[np.integer[Any]], width: int) -> Bytes:
    """Return the lowest ``width`` bits, 0 to 32, of each number (k,), as zeros and ones (k width,)."""
    bits = np.unpackbits(numbers.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)  # (k, 32)
    return bits[:, 32 - width :].ravel()


def from_bits(bits: Bytes, count: int, width: int) -> NDArray[np.int64]:
    """Return ``count`` numbers from ``count * width`` zeros and ones: the inverse of ``to_bits``."""
    padded = np.zeros((count, 32), np.uint8)
    padded[:, 32 - width :] = bits.reshape(count, width)
    return np.packbits(padded, axis=1).view(">u4")[:, 0].astype(np.int64)


def packed(numbers: NDArray[np.integer[Any]], width: int) -> Bytes:
    """Return the lowest ``width`` bits of each number packed into bytes, padded with zeros."""
    return np.packbits(to_bits(numbers, width))


def bits_in(coded: Bytes, count: int) -> Bytes:
    """Return the first ``count`` bits of bytes; PayloadError ``bad padding`` if a later one is set."""
    bits = np.unpackbits(coded)
    if bits[count:].any():
        raise PayloadError("bad padding", "the bits after the last field are not zero")
    return bits[:count]
