"""Checks of parameters and data: an error names the parameter, its value and what is valid."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def at_least(least: int, **numbers: int) -> None:
    """Raise ValueError unless each number is an integer >= ``least``, Python's or numpy's."""
    for key, number in numbers.items():
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not whole or number < least:
            raise ValueError(f"{key} must be an integer >= {least}, got {number!r}")


def is_number(value: object) -> bool:
    """Return whether this is a finite number, Python's or numpy's."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def described(value: object) -> str:
    """Return a description of a value, for messages."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"


def check_labels(key: str, y: NDArray[Any], num_classes: int) -> None:
    """Raise ValueError unless these are int64 labels (N,) of that many classes, N >= 1."""
    if not isinstance(y, np.ndarray) or y.dtype != np.int64 or y.ndim != 1 or not y.size:
        raise ValueError(f"{key} must be a non-empty int64 array (N,), got {described(y)}")
    if y.min() < 0 or y.max() >= num_classes:
        raise ValueError(f"{key} must be from 0 to {num_classes - 1}, got {y.min()} to {y.max()}")


def check_inputs(key: str, x: NDArray[Any], count: int, *, integers: bool = False) -> None:
    """Raise ValueError unless these are finite float32 inputs (count, ...), or integers if ``integers``."""
    taken = isinstance(x, np.ndarray) and (x.dtype == np.float32 or (integers and x.dtype.kind in "iu"))
    if not taken or x.ndim < 2 or len(x) != count or not x.size:
        or_ints = ", or one of integers" if integers else ""
        raise ValueError(
            f"{key} must be a non-empty float32 array ({count}, ...){or_ints}, got {described(x)}"
        )
    check_axes(key, x)
    if x.dtype == np.float32 and not np.isfinite(x.sum(dtype=np.float64)):
        raise ValueError(f"{key} must be finite, got NaN or infinity")


def check_sources(key: str, sources: NDArray[Any], count: int) -> None:
    """Raise ValueError unless these are names or integers (count,), one for each sample."""
    named = isinstance(sources, np.ndarray) and sources.dtype.kind in "iuU"
    if not named or sources.shape != (count,):
        raise ValueError(
            f"{key} must be an array of names or integers ({count},), one for each sample, got "
            f"{described(sources)}"
        )


def check_axes(key: str, x: NDArray[Any]) -> None:
    """Raise ValueError if these are images with the channels last; the suite's are (N, C, H, W)."""
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] > 4 and x.shape[2] > 4:
        raise ValueError(
            f"{key} must be images (N, C, H, W), got shape {x.shape}, which is (N, H, W, C): "
            "x.transpose(0, 3, 1, 2) changes the order"
        )
