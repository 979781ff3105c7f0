"""Checks of parameters: an error names the parameter, its value and what is valid."""

import math

import numpy as np

__all__ = ["at_least", "is_number"]


def at_least(least: int, **numbers: int) -> None:
    """Raise ValueError unless each number is an integer >= ``least``, Python's or numpy's."""
    for key, number in numbers.items():
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not whole or number < least:
            raise ValueError(f"{key} must be an integer >= {least}, got {number!r}")


def is_number(value: object) -> bool:
    """Whether this is a finite number, Python's or numpy's."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def described(value: object) -> str:
    """Return what a value is, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"
