"""Checks of parameters: an error names the parameter, what it must be, and its value."""

import ast
import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

# Of ``plain_name``.
_BETWEEN = str.maketrans("", "", "-_ ")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name, as a question; empty if there is none."""
    plain = {plain_name(one): one for one in known}
    near = get_close_matches(plain_name(name[:200]), plain, n=1)
    return f"did you mean {plain[near[0]]!r}?" if near else ""


def plain_name(name: str) -> str:
    """Return a name without case, hyphens, underscores and spaces."""
    return name.casefold().translate(_BETWEEN)


def require(key: str, value: object, valid: str, holds: bool) -> None:
    """Raise ValueError unless ``holds``: ``{key} must be {valid}, got {value!r}``."""
    if not holds:
        raise ValueError(f"{key} must be {valid}, got {value!r}")


def at_least(least: int, **numbers: int) -> None:
    """Raise ValueError unless each number is an integer >= ``least``, Python's or numpy's."""
    _integers(int | np.integer, least, numbers)


def int_at_least(least: int, **numbers: int) -> None:
    """Raise ValueError unless each is a Python integer >= ``least``, as messages and records require."""
    _integers(int, least, numbers)


def int_between(least: int, most: int, **numbers: int) -> None:
    """Raise ValueError unless each is a Python integer from ``least`` to ``most``."""
    for key, number in numbers.items():
        whole = isinstance(number, int) and not isinstance(number, bool)
        require(key, number, f"an integer from {least} to {most}", whole and least <= number <= most)


def is_real(value: object) -> bool:
    """Return whether this is a finite number, Python's or numpy's."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


def positive(**numbers: float) -> None:
    """Raise ValueError unless each number is finite and > 0."""
    for key, number in numbers.items():
        require(key, number, "a finite number > 0", is_real(number) and number > 0)


def not_negative(**numbers: float) -> None:
    """Raise ValueError unless each number is finite and >= 0."""
    for key, number in numbers.items():
        require(key, number, "a finite number >= 0", is_real(number) and number >= 0)


def probability(**numbers: float) -> None:
    """Raise ValueError unless each number lies in (0, 1)."""
    for key, number in numbers.items():
        require(key, number, "a number in (0, 1)", is_real(number) and 0 < number < 1)


def in_range(
    key: str, value: float, low: float, high: float, open_below: bool = False, open_above: bool = False
) -> None:
    """Raise ValueError unless ``value`` lies in [low, high], without the ends that are open."""
    above = is_real(value) and (low < value if open_below else low <= value)
    holds = above and (value < high if open_above else value <= high)
    ends = "(" if open_below else "[", ")" if open_above else "]"
    require(key, value, f"a number in {ends[0]}{low:g}, {high:g}{ends[1]}", holds)


def one_of(key: str, value: object, names: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of the names."""
    known = tuple(names)
    require(key, value, f"one of {', '.join(known)}", value in known)


def _integers(kinds: Any, least: int, numbers: Mapping[str, object]) -> None:
    for key, number in numbers.items():
        whole = isinstance(number, kinds) and not isinstance(number, bool)
        require(key, number, f"an integer >= {least}", whole and number >= least)  # type: ignore[operator]


# How large and small the inputs of a formula may be, so that its powers and quotients stay in float64.
SMALLEST, LARGEST = 1e-18, 1e18
ORDINARY = f"0, or a number whose size is from {SMALLEST:g} to {LARGEST:g}"


def is_ordinary(value: float) -> bool:
    """Whether a number is 0 or of such a size; NaN is not."""
    return is_real(value) and (value == 0 or SMALLEST <= abs(value) <= LARGEST)


def check_ordinary(**numbers: float) -> None:
    """Raise ValueError unless each number is ordinary."""
    for key, value in numbers.items():
        require(key, value, ORDINARY, is_ordinary(value))


def made_of(text: str, kinds: Mapping[str, Callable[..., T]]) -> T | None:
    """Return what a text such as ``adam(lr=0.01)`` makes of the kind that it names; None for an empty text.

    ValueError if there is no such kind, it takes no such value or needs another, or a value is not valid.
    """
    if not text:
        return None
    name, values = named_call(text)
    if name not in kinds:
        raise ValueError(f"there is no {name!r}; {did_you_mean(name, kinds)}".rstrip("; "))
    known = signature(kinds[name]).parameters
    if unknown := [key for key in values if key not in known]:
        raise ValueError(f"{name} has no {unknown[0]!r}; it has {', '.join(known)}")
    missing = [key for key, one in known.items() if one.default is one.empty and key not in values]
    if missing:
        raise ValueError(f"{name} must be given {' and '.join(missing)}")
    return kinds[name](**values)


def named_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a text such as ``adam(lr=0.01)``; a name alone has none.

    ValueError unless it is a name with keyword arguments whose values are numbers, True, False or texts, in
    1,000 characters.
    """
    try:
        found = ast.parse(text.strip() if len(text) <= 1000 else "", mode="eval").body
        called = found if isinstance(found, ast.Call) else ast.Call(found, [], [])
        arguments = {str(one.arg): ast.literal_eval(one.value) for one in called.keywords if one.arg}
        whole = not called.args and len(arguments) == len(called.keywords)
        whole = whole and all(isinstance(value, int | float | str) for value in arguments.values())
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        whole = False
    if not whole or not isinstance(called.func, ast.Name):
        raise ValueError(
            "it must be a name with named values (numbers, or texts in quotes), such as 'adam(lr=0.01)', got "
            f"{text!r:.200}"
        )
    return called.func.id, arguments
