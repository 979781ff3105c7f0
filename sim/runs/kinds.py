"""What a setting may be: in words, and as a check."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from typing import Any

from flwr.app import UserConfigValue

__all__ = [
    "NOT_NEGATIVE",
    "POSITIVE",
    "Kind",
    "above",
    "choice",
    "flag",
    "in_range",
    "number",
    "text",
    "whole",
]


@dataclass(frozen=True)
class Kind:
    """What a setting may be.

    Parameters
    ----------
    valid : str
        In words: "an integer >= 1".
    read : Callable[[UserConfigValue], Any]
        Returns the value to use; raises ValueError, TypeError or OverflowError if it is not valid.
    """

    valid: str
    read: Callable[[UserConfigValue], Any]


def whole(least: int) -> Kind:
    """Return the kind of integers >= ``least``."""

    def read(value: UserConfigValue) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError
        return value

    return Kind(f"an integer >= {least}", read)


def number(valid: str, holds: Callable[[float], bool]) -> Kind:
    """Return the kind of numbers for which ``holds`` is true."""

    def read(value: UserConfigValue) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
            raise ValueError
        return float(value)

    return Kind(valid, read)


def above(low: float) -> Kind:
    """Return the kind of finite numbers > ``low``."""
    return number(f"a finite number > {low:g}", lambda v: low < v < inf)


def in_range(low: float, high: float, *, open_below: bool = False, open_above: bool = False) -> Kind:
    """Return the kind of numbers in [low, high], without the ends that are open."""
    return number(
        f"a number in {'(' if open_below else '['}{low:g}, {high:g}{')' if open_above else ']'}",
        lambda v: (low < v if open_below else low <= v) and (v < high if open_above else v <= high),
    )


POSITIVE = above(0)
NOT_NEGATIVE = number("a finite number >= 0", lambda v: 0 <= v < inf)


def choice(*names: str) -> Kind:
    """Return the kind of one of some words."""

    def read(value: UserConfigValue) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return Kind("one of " + ", ".join(repr(name) for name in names), read)


def flag() -> Kind:
    """Return the kind of true or false."""

    def read(value: UserConfigValue) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Kind("true or false", read)


def text(valid: str, check: Callable[[str], object] = lambda _: None) -> Kind:
    """Return the kind of text; ``check`` raises ValueError with its own words if it must."""

    def read(value: UserConfigValue) -> str:
        if not isinstance(value, str):
            raise ValueError
        check(value)
        return value

    return Kind(valid, read)
