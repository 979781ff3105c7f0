"""A run's settings, checked whole before any work starts.

An app declares each key of its run config with what is valid; reading them gives one error that lists
every bad key with its value and what it may be.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import UserConfigValue

__all__ = [
    "Setting",
    "SettingsError",
    "choice",
    "flag",
    "in_range",
    "number",
    "read_settings",
    "refuse",
    "text",
    "whole",
]


class SettingsError(ValueError):
    """One or more settings are not valid; the message lists them all."""


@dataclass(frozen=True)
class Setting:
    """One key of a run config.

    Parameters
    ----------
    valid : str
        What is valid, for people: "an integer >= 1".
    read : Callable[[UserConfigValue], Any]
        Returns the value to use; raises ValueError, TypeError or OverflowError if it is not valid.
    """

    valid: str
    read: Callable[[UserConfigValue], Any]


def whole(least: int) -> Setting:
    """Return a setting that takes integers >= ``least``."""

    def read(value: UserConfigValue) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError
        return value

    return Setting(f"an integer >= {least}", read)


def number(valid: str, holds: Callable[[float], bool]) -> Setting:
    """Return a setting that takes numbers for which ``holds`` is true."""

    def read(value: UserConfigValue) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
            raise ValueError
        return float(value)

    return Setting(valid, read)


def in_range(low: float, high: float, *, open_below: bool = False) -> Setting:
    """Return a setting that takes numbers in [low, high], or (low, high]."""
    bracket = "(" if open_below else "["
    return number(
        f"a number in {bracket}{low:g}, {high:g}]",
        lambda v: (low < v if open_below else low <= v) and v <= high,
    )


def choice(*names: str) -> Setting:
    """Return a setting that takes one of some words."""

    def read(value: UserConfigValue) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return Setting("one of " + ", ".join(repr(name) for name in names), read)


def flag() -> Setting:
    """Return a setting that takes true or false."""

    def read(value: UserConfigValue) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    return Setting("true or false", read)


def text(valid: str, check: Callable[[str], object] = lambda _: None) -> Setting:
    """Return a setting that takes text; ``check`` raises ValueError with its own words if it must."""

    def read(value: UserConfigValue) -> str:
        if not isinstance(value, str):
            raise ValueError
        check(value)
        return value

    return Setting(valid, read)


def refuse(problems: Sequence[str]) -> None:
    """Raise one SettingsError with all problems; return where there are none."""
    if problems:
        raise SettingsError("Bad settings:\n" + "\n".join(f"  - {problem}" for problem in problems))


def read_settings(
    run_config: Mapping[str, UserConfigValue], settings: Mapping[str, Setting]
) -> dict[str, Any]:
    """Return every setting's value; the engine's own keys, ``fault-…``, may stand beside the app's.

    Raises
    ------
    SettingsError
        If a key is missing, not valid or unknown: one error for all of them.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, setting in settings.items():
        if key not in run_config:
            problems.append(f"{key} is missing; valid is {setting.valid}")
            continue
        try:
            values[key] = setting.read(run_config[key])
        except (ValueError, TypeError, OverflowError) as error:
            because = f" ({error})" if str(error) else ""
            problems.append(f"{key} = {run_config[key]!r}; valid is {setting.valid}{because}")
    problems += [
        f"{key} = {run_config[key]!r} is not a setting of this app; there are: {', '.join(sorted(settings))}"
        for key in sorted(set(run_config) - set(settings))
        if not key.startswith("fault-")
    ]
    refuse(problems)
    return values
