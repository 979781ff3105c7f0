"""Whole numbers as fields of a few bits each, the highest bit of the first field first."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bytes_of", "from_bits", "index_width", "to_bits"]


def index_width(size: int) -> int:
    """Return ceil(log2 size), the bits of an index below ``size`` >= 1."""
    return (size - 1).bit_length()


def bytes_of(bits: int) -> int:
    """Return the bytes that hold so many bits."""
    return -(-bits // 8)


def to_bits(numbers: NDArray[np.integer[Any]], width: int) -> NDArray[np.uint8]:
    """Return the lowest ``width`` bits, 0 to 32, of each number (k,), as zeros and ones (k width,)."""
    bits = np.unpackbits(numbers.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)  # (k, 32)
    return bits[:, 32 - width :].ravel()


def from_bits(bits: NDArray[np.uint8], width: int) -> NDArray[np.int64]:
    """Return the numbers (k,) of zeros and ones (k width,), ``width`` >= 1: the inverse of ``to_bits``."""
    padded = np.zeros((bits.size // width, 32), np.uint8)
    padded[:, 32 - width :] = bits.reshape(-1, width)
    return np.packbits(padded, axis=1).view(">u4")[:, 0].astype(np.int64)
