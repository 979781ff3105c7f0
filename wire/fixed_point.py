"""Fixed-point numbers, multiples of 2^-96 modulo 2^384, so that sums under masks are exact.

The sum of 10^9 squares of any float32 fits.
"""

from collections.abc import Sequence
from math import ldexp

__all__ = ["fixed_point", "from_fixed_point", "joined", "split"]

_BITS, _FRACTION = 384, 96
_NUMBER = _BITS // 8
_MODULUS = 1 << _BITS


def fixed_point(value: float) -> int:
    """Return a finite number as the nearest multiple of 2^-96."""
    return round(ldexp(value, _FRACTION))


def from_fixed_point(number: int) -> float:
    """Return the value of a sum of such numbers, modulo 2^384."""
    number %= _MODULUS
    return (number - _MODULUS if number >> (_BITS - 1) else number) / (1 << _FRACTION)


def joined(numbers: Sequence[int]) -> bytes:
    """Return numbers modulo 2^384 as bytes, 48 per number."""
    return b"".join((number % _MODULUS).to_bytes(_NUMBER, "little") for number in numbers)


def split(coded: bytes, count: int) -> list[int]:
    """Return ``count`` numbers from their bytes; ValueError for another length."""
    if not isinstance(coded, bytes) or len(coded) != count * _NUMBER:
        raise ValueError(f"masked sums must have {count * _NUMBER} bytes, got {len(coded)}")
    return [int.from_bytes(coded[i : i + _NUMBER], "little") for i in range(0, len(coded), _NUMBER)]
