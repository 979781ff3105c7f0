"""A run's settings: each key once, with its default, what is valid and one sentence of help.

Everything else follows from an app's ``SETTINGS``: the check of a run config, whole and before any work starts
(one error that lists every bad key with its value and what it may be), and what ``settings_files`` writes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from flwr.app import UserConfigValue

from hedgerow.sim.runs.kinds import Kind

__all__ = [
    "Setting",
    "SettingsError",
    "at_most",
    "did_you_mean",
    "override",
    "read_settings",
    "reader",
    "refuse",
]


class SettingsError(ValueError):
    """One or more settings are not valid; the message lists them all."""


@dataclass(frozen=True)
class Setting:
    """One key of a run config.

    Parameters
    ----------
    default : bool, int, float or str
        Its value where the user says nothing.
    kind : Kind
        What it may be.
    help : str
        What it means, in a sentence of markdown.
    """

    default: UserConfigValue
    kind: Kind
    help: str


def override(
    settings: Mapping[str, Setting],
    *,
    defaults: Mapping[str, UserConfigValue] | None = None,
    helps: Mapping[str, str] | None = None,
) -> dict[str, Setting]:
    """Return the settings with other defaults and other help, where an app has its own.

    Raises
    ------
    KeyError
        If a key is not one of the settings.
    """
    changed = dict(settings)
    for key, default in (defaults or {}).items():
        changed[key] = replace(changed[key], default=default)
    for key, words in (helps or {}).items():
        changed[key] = replace(changed[key], help=words)
    return changed


def refuse(problems: Sequence[str]) -> None:
    """Raise one SettingsError with all problems; return where there are none."""
    if problems:
        raise SettingsError("Bad settings:\n" + "\n".join(f"  - {problem}" for problem in problems))


def at_most(values: Mapping[str, Any], *pairs: tuple[str, str]) -> list[str]:
    """Return what is wrong where the first key of a pair exceeds the second."""
    return [
        f"{key} = {values[key]}; valid is up to {most} = {values[most]}"
        for key, most in pairs
        if values[key] > values[most]
    ]


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """Return the known key that an unknown one is nearest to, as a question in brackets; empty without one."""
    near = get_close_matches(key, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


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
            problems.append(f"{key} is missing; valid is {setting.kind.valid}")
            continue
        try:
            values[key] = setting.kind.read(run_config[key])
        except (ValueError, TypeError, OverflowError) as error:
            because = f" ({error})" if str(error) else ""
            problems.append(f"{key} = {run_config[key]!r}; valid is {setting.kind.valid}{because}")
    problems += [
        f"{key} = {run_config[key]!r} is not a setting of this app{did_you_mean(key, settings)}; "
        f"there are: {', '.join(sorted(settings))}"
        for key in sorted(set(run_config) - set(settings))
        if not key.startswith("fault-")
    ]
    refuse(problems)
    return values


def reader(
    settings: Mapping[str, Setting], problems: Callable[[Mapping[str, Any]], Sequence[str]]
) -> Callable[[Mapping[str, UserConfigValue]], dict[str, Any]]:
    """Return what reads an app's settings from a run config: each by itself, then against each other.

    Parameters
    ----------
    settings : Mapping[str, Setting]
        The app's.
    problems : Callable[[Mapping[str, Any]], Sequence[str]]
        Returns what is wrong between values that are each valid.

    Returns
    -------
    Callable[[Mapping[str, bool | int | float | str]], dict[str, Any]]
        Returns the values; raises SettingsError that names every bad key, its value and what is valid.
    """

    def read(run_config: Mapping[str, UserConfigValue]) -> dict[str, Any]:
        values = read_settings(run_config, settings)
        refuse(problems(values))
        return values

    return read
