"""Every check accepts what it says is valid, and names key, value and what is valid for the rest."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest

from hedgerow.wire.checks import (
    at_least,
    in_range,
    int_at_least,
    int_between,
    is_real,
    not_negative,
    one_of,
    positive,
    probability,
)

NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, True, "1", None, np.float32("nan"), 1j]


@pytest.mark.parametrize(
    ("check", "inside", "outside", "valid"),
    [
        (partial(at_least, 2), [2, 3, np.int64(2), 2**70], [1, -3, 2.0, np.float64(2)], "an integer >= 2"),
        # What travels is Python's integer.
        (partial(int_at_least, 2), [2], [1, 2.0, np.int64(2)], "an integer >= 2"),
        (partial(int_between, 2, 4), [2, 4], [1, 5, 2.0, np.int64(2)], "an integer from 2 to 4"),
        (positive, [1, 1e-300, np.float32(0.5), 10**300], [0, -0.0, -1], "a finite number > 0"),
        (not_negative, [0, -0.0, 1e300], [-1e-300, -1], "a finite number >= 0"),
        (probability, [0.5, 1e-300, np.float64(0.9)], [0, 1, -0.5, 2], r"a number in \(0, 1\)"),
    ],
)
def test_numbers_are_held_to_their_range(
    check: Callable[..., None], inside: list[Any], outside: list[Any], valid: str
) -> None:
    for value in inside:
        check(x=value)
    for value in [*outside, *NO_NUMBERS]:
        with pytest.raises(ValueError, match=rf"^x must be {valid}, got "):
            check(ok=inside[0], x=value)


def test_a_range_is_closed_or_open_at_each_end() -> None:
    in_range("x", 0.0, 0.0, 1.0)
    in_range("x", 1, 0.0, 1.0, open_below=True)
    in_range("x", 0.0, 0.0, 1.0, open_above=True)
    with pytest.raises(ValueError, match=r"^x must be a number in \(0, 1\], got 0\.0$"):
        in_range("x", 0.0, 0.0, 1.0, open_below=True)
    with pytest.raises(ValueError, match=r"^x must be a number in \[0, 1\), got 1\.0$"):
        in_range("x", 1.0, 0.0, 1.0, open_above=True)
    for value in (-0.1, 1.1, *NO_NUMBERS):
        with pytest.raises(ValueError, match=r"^x must be a number in \[0, 1\], got "):
            in_range("x", value, 0.0, 1.0)


def test_names_are_listed_and_other_kinds_of_numbers_are_not_real() -> None:
    one_of("mode", "b", ("a", "b"))
    with pytest.raises(ValueError, match=r"^mode must be one of a, b, got 'c'$"):
        one_of("mode", "c", iter(("a", "b")))
    assert not is_real(Fraction(1, 2))
    assert is_real(np.float16(2))
