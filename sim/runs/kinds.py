"""Valid values of settings, in words and as a check. The aliases at the end are the types of most fields.

Every number is bounded. Integers are bounded where a size or count would exhaust a machine, and by 2^63, the
limit of Flower's records. Other numbers are at most 1e30 and, if they may not be 0, at least 1e-30: models
are float32, which ends at 1e38, and products of a method's few numbers fit float64.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flwr.app import UserConfigValue

from hedgerow.wire.checks import did_you_mean
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.paths import foreign_path
from hedgerow.wire.printable import LONGEST_PATH, shown

# Limit of Flower's records.
MAX_INT64 = 2**63 - 1
# A run keeps each round's record in memory and writes it as a line: about a gigabyte at this limit.
MAX_ROUNDS = 2**20
# The server keeps some words for each node; methods without sampling also keep a message for each.
MAX_NODES = 2**20
SMALLEST, LARGEST = 1e-30, 1e30


@dataclass(frozen=True)
class NumberRange:
    """Numbers from ``low`` to ``high``, each end open or closed; also 0 if ``zero``."""

    low: float
    high: float
    open_below: bool = False
    open_above: bool = False
    zero: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.low < value if self.open_below else self.low <= value
        below = value < self.high if self.open_above else value <= self.high
        return (above and below) or (self.zero and value == 0)


def _anything(value: Any) -> object:
    return value


@dataclass(frozen=True)
class Kind:
    """The valid values of a setting.

    Parameters
    ----------
    valid : str
        In words: "an integer >= 1".
    values : NumberRange, tuple or None (default: None)
        The valid numbers or names; None for texts.
    read : Callable[[str], Any] (default: none)
        Parses a text; raises ValueError, with or without a message, if it is invalid.
    prefix : str (default: "")
        A text that begins with it need not be one of the names: ``read`` parses the rest.
    """

    valid: str
    values: NumberRange | tuple[UserConfigValue, ...] | None = None
    read: Callable[[Any], object] = _anything
    prefix: str = ""

    def check(self, value: Any) -> None:
        """Raise ValueError if a value of the right type is invalid."""
        if isinstance(self.values, NumberRange) and isinstance(value, str):
            raise ValueError
        prefixed = bool(self.prefix) and isinstance(value, str) and value.startswith(self.prefix)
        if self.values is not None and value not in self.values and not prefixed:
            named = isinstance(value, str) and isinstance(self.values, tuple)
            raise ValueError(did_you_mean(value, [str(name) for name in self.values]) if named else "")  # type: ignore[union-attr]
        try:
            if prefixed or not self.prefix:
                self.read(value.removeprefix(self.prefix) if prefixed else value)
        except (TypeError, OverflowError, RuntimeError) as error:
            raise ValueError(str(error)) from error


def whole(least: int, most: int) -> Kind:
    """Return the kind of integers from ``least`` to ``most``."""
    return Kind(f"an integer from {least} to {_as_text(most)}", NumberRange(least, most))


def _as_text(number: int) -> str:
    """Return a number as text; large powers of two, and one less, as "2^63 - 1"."""
    for power, rest in ((number, ""), (number + 1, " - 1")):
        if power >= 2**20 and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{rest}"
    return str(number)


def number(valid: str, low: float, high: float, **ends: bool) -> Kind:
    """Return the kind of numbers in a ``NumberRange``, with its own description."""
    return Kind(valid, NumberRange(low, high, **ends))


def above(low: float) -> Kind:
    """Return the kind of numbers > ``low``, up to 1e30."""
    return number(f"a number > {low:g}, up to {LARGEST:g}", low, LARGEST, open_below=True)


def in_range(low: float, high: float, *, open_below: bool = False, open_above: bool = False) -> Kind:
    """Return the kind of numbers from ``low`` to ``high``, each end open or closed."""
    return Kind(
        f"a number in {'(' if open_below else '['}{low:g}, {high:g}{')' if open_above else ']'}",
        NumberRange(low, high, open_below, open_above),
    )


def choice(*names: str) -> Kind:
    """Return the kind of a choice between names."""
    return Kind("one of " + ", ".join(repr(name) for name in names), names)


def choice_or(prefix: str, valid: str, check: Callable[[str], object], *names: str) -> Kind:
    """Return the kind of a choice between names, or a prefix and a text that ``check`` does not refuse."""
    return Kind(f"{choice(*names).valid}, or {valid}", names, check, prefix)


def text(valid: str, check: Callable[[str], object] = _anything) -> Kind:
    """Return the kind of texts that ``check`` does not refuse with a ValueError."""
    return Kind(valid, read=check)


def folder(valid: str, *, writable: bool = False) -> Kind:
    """Return the kind of paths, relative or with ``~``, of a folder that exists or could be created."""

    def check(value: str) -> None:
        if "\0" in value or not _encodable(value):
            raise ValueError("it is not a valid file name")
        if wrong := foreign_path(value):
            raise ValueError(wrong)
        try:
            path = Path(value).expanduser()
            nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
        except OSError as error:
            raise ValueError(error.strerror) from error
        except RuntimeError as error:
            raise ValueError("there is no such user") from error
        if not nearest.is_dir():
            raise ValueError(f"{shown(nearest, LONGEST_PATH)} is a file")
        if writable and not os.access(nearest, os.W_OK):
            raise ValueError(f"{shown(nearest, LONGEST_PATH)} is not writable")

    return text(valid, check)


def _encodable(value: str) -> bool:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True


Nodes = Annotated[int, whole(1, MAX_NODES)]
NodesOr0 = Annotated[int, whole(0, MAX_NODES)]
Rounds = Annotated[int, whole(1, MAX_ROUNDS)]
RoundsOr0 = Annotated[int, whole(0, MAX_ROUNDS)]
Steps = Annotated[int, whole(1, MAX_STEPS)]
StepsOr0 = Annotated[int, whole(0, MAX_STEPS)]
Samples = Annotated[int, whole(1, MAX_SAMPLES)]
SamplesOr0 = Annotated[int, whole(0, MAX_SAMPLES)]
Positive = Annotated[float, number(f"a number from {SMALLEST:g} to {LARGEST:g}", SMALLEST, LARGEST)]
NotNegative = Annotated[
    float, number(f"0, or a number from {SMALLEST:g} to {LARGEST:g}", SMALLEST, LARGEST, zero=True)
]
Ratio = Annotated[float, number(f"0, or a number from 1 to {LARGEST:g}", 1, LARGEST, zero=True)]
UnitFraction = Annotated[float, in_range(0.0, 1.0)]
PositiveFraction = Annotated[float, in_range(0.0, 1.0, open_below=True)]
FractionBelow1 = Annotated[float, in_range(0.0, 1.0, open_above=True)]
# The delta of differential privacy.
Delta = Annotated[float, in_range(0.0, 1.0, open_below=True, open_above=True)]
