"""Elias-Fano coding of K ascending indices below d, those of a sparse update: about K (2 + log2(d / K)) bits.

P. Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", 1974; R. Fano, 1971. The
low l = floor(log2(d / K)) bits of each index are stored as they are, and the rest as one bitmap in which the
i-th set bit is at position high_i + i. The size depends only on d and K, so that a budget can be met exactly
and a payload's length can be checked before reading it. It is within 0.6 bits per index of the optimum for K
of d entries. Additions: a bitmap of d bits is sent if that is smaller, and nothing if all d entries are kept.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.bits import bits_in, bytes_of, from_bits, to_bits
from hedgerow.wire.checks import at_least, require
from hedgerow.wire.records import PayloadError

_MAX_SIZE = 2**31 - 1


def index_bits(size: int, count: int) -> int:
    """Return the bits of ``count`` encoded indices.

    Parameters
    ----------
    size : int
        d, 1 to 2^31 - 1: indices are 0 to d - 1.
    count : int
        K, 0 to d.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    _check(size, count)
    if count in (0, size):
        return 0
    return min(size, count * _low(size, count) + _high_bits(size, count))


def most_entries(size: int, bits: int, value_bits: int = 32) -> int:
    """Return the largest K whose values and indices fit in ``bits``; 1 if none does.

    - ``size``: d, as in ``index_bits``.
    - ``value_bits``: Bits of one value, >= 1.
    """
    if size * value_bits <= bits:
        return size
    fitting = bisect_right(range(1, size), bits, key=lambda k: k * value_bits + index_bits(size, k))
    return max(1, fitting)


def encode_indices(indices: NDArray[np.integer], size: int) -> NDArray[np.uint8]:
    """Return the encoded indices, ``ceil(index_bits / 8)`` bytes, padded with zeros.

    Parameters
    ----------
    indices : NDArray of integers (K,)
        Strictly ascending, 0 to d - 1.
    size : int
        d.

    Raises
    ------
    ValueError
        If the indices are invalid.
    """
    found = np.asarray(indices, np.int64)
    count = found.size
    _check(size, count)
    if found.ndim != 1 or (count and not _ascending(found, size)):
        raise ValueError(f"indices must ascend within 0 to {size - 1}, each once, in the shape (K,)")
    if count in (0, size):
        return np.zeros(0, np.uint8)
    if _is_bitmap(size, count):
        return np.packbits(_marked(found, size))
    low = _low(size, count)
    high = _marked((found >> low) + np.arange(count), _high_bits(size, count))
    return np.packbits(np.concatenate([high, to_bits(found, low)]))


def decode_indices(coded: NDArray[np.uint8], count: int, size: int) -> NDArray[np.int64]:
    """Return the ascending indices (K,) from their encoding.

    Raises
    ------
    PayloadError
        If it does not encode ``count`` indices: ``wrong dtype``, ``wrong shape``, ``bad index`` or
        ``bad padding``.
        Nothing larger than a few times d bits is allocated to find out.
    ValueError
        If ``count`` or ``size`` is out of range.
    """
    bits = index_bits(size, count)
    if coded.dtype != np.uint8:
        raise PayloadError("wrong dtype", f"indices are {coded.dtype}, expected uint8")
    if coded.shape != (bytes_of(bits),):
        raise PayloadError("wrong shape", f"indices have {coded.shape}, expected ({bytes_of(bits)},)")
    if count in (0, size):
        return np.arange(count)
    told = bits_in(coded, bits)
    whole = _is_bitmap(size, count)
    length, low = bits if whole else _high_bits(size, count), _low(size, count)
    places = np.flatnonzero(told[:length])
    if places.size != count:
        raise PayloadError("bad index", f"{places.size} indices, expected {count}")
    if whole:
        return places
    rest = from_bits(told[length:], count, low) if low else 0
    found: NDArray[np.int64] = ((places - np.arange(count)) << low) | rest
    if not _ascending(found, size):
        raise PayloadError("bad index", f"indices are not ascending within 0 to {size - 1}")
    return found


def added(vector: NDArray[np.float32], update: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return a vector (d,) plus a sparse update.

    - ``vector``: The vector (d,), which is not modified.
    - ``update``: ``indices``, encoded by ``encode_indices``, and ``values``, float32 (K,).

    Raises
    ------
    PayloadError
        If the update is malformed or does not fit the vector.
    """
    if update.keys() != {"indices", "values"}:
        raise PayloadError("wrong keys", f"{sorted(update)}, expected ['indices', 'values']")
    values, size = update["values"], vector.size
    if values.dtype != np.float32 or values.ndim != 1 or len(values) > size:
        found = f"values are {values.dtype} of shape {values.shape}"
        raise PayloadError("wrong values", f"{found}, expected float32 (K,), K up to {size}")
    moved = vector.copy()
    moved[decode_indices(update["indices"], len(values), size)] += values
    return moved


def _check(size: int, count: int) -> None:
    if type(size) is type(count) is int and 0 <= count <= size and 1 <= size <= _MAX_SIZE:
        return  # The errors below name what is wrong.
    at_least(1, size=size)
    require("size", size, f"an integer from 1 to {_MAX_SIZE}", size <= _MAX_SIZE)
    at_least(0, count=count)
    if count > size:
        raise ValueError(f"count must be from 0 to {size}, the entries to choose from, got {count!r}")


def _low(size: int, count: int) -> int:
    """Return l = floor(log2(d / K))."""
    return (size // count).bit_length() - 1


def _high_bits(size: int, count: int) -> int:
    return count + ((size - 1) >> _low(size, count))


def _is_bitmap(size: int, count: int) -> bool:
    return size <= count * _low(size, count) + _high_bits(size, count)


def _ascending(indices: NDArray[np.int64], size: int) -> bool:
    return bool(indices[0] >= 0 and indices[-1] < size and (indices[1:] > indices[:-1]).all())


def _marked(places: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    marks = np.zeros(length, bool)
    marks[places] = True
    return marks
