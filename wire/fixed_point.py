"""Fixed-point numbers, multiples of 2^-96 modulo 2^384, so that sums under masks are exact.

The sum of 10^9 squares of any float32 fits.
"""

from collections.abc import Sequence
from math import ldexp

_BITS, _FRACTION = 384, 96
_NUMBER = _BITS // 8
_MODULUS = 1 << _BITS


def fixed_point(value: float) -> int:
    """Return a finite number as the nearest multiple of 2^-96."""
    return round(ldexp(value, _FRACTION))


def from_fixed_point(number: int) -> float:
    """Return the value of a sum of such numbers, modulo 2^384."""
    return _signed(number) / (1 << _FRACTION)


def fixed_point_square(number: int) -> int:
    """Return the square of a fixed-point number, rounded down."""
    return number * number >> _FRACTION


def squared_deviations(total: int, squares: int, count: int) -> float:
    """Return the exact sum of squared deviations of ``count`` values from their mean.

    ``total`` is the values' sum and ``squares`` that of their squares, fixed-point; count >= 1.
    """
    total, squares = _signed(total), _signed(squares)
    return max(0.0, ((squares << _FRACTION) * count - total * total) / (count << 2 * _FRACTION))


def _signed(number: int) -> int:
    number %= _MODULUS
    return number - _MODULUS if number >> (_BITS - 1) else number


def joined(numbers: Sequence[int]) -> bytes:
    """Return numbers modulo 2^384 as bytes, 48 per number."""
    return b"".join((number % _MODULUS).to_bytes(_NUMBER, "little") for number in numbers)


def split(coded: bytes, count: int) -> list[int]:
    """Return ``count`` numbers from their bytes; ValueError for another length."""
    if not isinstance(coded, bytes) or len(coded) != count * _NUMBER:
        raise ValueError(f"masked sums must have {count * _NUMBER} bytes, got {len(coded)}")
    return [int.from_bytes(coded[i : i + _NUMBER], "little") for i in range(0, len(coded), _NUMBER)]
