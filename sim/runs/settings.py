"""A run's settings: each key once, with its default, what is valid and one sentence of help.

Everything else follows from an app's ``SETTINGS``: the check of a run config, whole and before any work
starts (one error that lists every bad key with its value and what it may be), and what ``settings_files``
writes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from flwr.app import UserConfigValue

from hedgerow.sim.runs.kinds import Kind
from hedgerow.wire.checks import did_you_mean, plain_name
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.printable import quoted, reason, shown

__all__ = [
    "Reader",
    "Role",
    "Setting",
    "SettingsError",
    "as_settings_errors",
    "at_most",
    "check_node_keys",
    "check_work",
    "meant_key",
    "override",
    "problems_of",
    "read_settings",
    "reader",
    "refuse",
    "unknown_key",
]


# What other libraries and papers call a key, by ``plain_name``, and what it is here, the likeliest first.
_LENGTHS = ("num-rounds", "iterations", "num-server-rounds")
_SYNONYMS: Sequence[tuple[Sequence[str], Sequence[str]]] = (
    (("lr", "stepsize", "eta"), ("learning-rate", "lr", "fixed-c", "inner-lr")),
    (("epochs", "numepochs", "localepochs"), ("local-epochs", "local-iters", "local-steps", *_LENGTHS)),
    (("localsteps", "steps"), ("local-steps", "local-iters", "tau1", "local-interval", *_LENGTHS)),
    (("rounds", "numrounds", "numserverrounds", "iterations", "iters"), _LENGTHS),
    (("clients", "nodes", "numnodes", "workers", "numsupernodes"), ("num-clients",)),
    (("servers", "edges", "numedges"), ("num-servers",)),
    (("bs", "batch"), ("batch-size",)),
    (("data",), ("dataset",)),
    (("randomseed", "randomstate"), ("seed",)),
)


class SettingsError(ValueError):
    """One or more settings are not valid; the message lists them all."""


class Role(StrEnum):
    """What a setting is to a run's results."""

    # What a round does is determined by it: it is the same where a run is resumed, or kept as finished.
    RESULTS = "decides results"
    # Rounds already run do not depend on it, those to come may.
    RESUME = "may change on resume"
    # Where a run is computed and kept.
    IRRELEVANT = "irrelevant to results"
    # Determines bits, and is not what runs are compared for.
    REPETITION = "not part of the experiment"

    @property
    def may_change(self) -> bool:
        """Whether a run may be resumed with another value."""
        return self in (Role.RESUME, Role.IRRELEVANT)

    @property
    def is_experiment(self) -> bool:
        """Whether runs with different values are different experiments."""
        return self in (Role.RESULTS, Role.RESUME)


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
    role : Role (default: ``Role.RESULTS``)
        What it is to a run's results.
    """

    default: UserConfigValue
    kind: Kind
    help: str
    role: Role = Role.RESULTS


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


def refuse(problems: Sequence[str], cause: Exception | None = None) -> None:
    """Raise one SettingsError with all problems; return where there are none."""
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise SettingsError(f"Bad settings:\n{lines}") from cause


def at_most(values: Mapping[str, Any], *pairs: tuple[str, str]) -> list[str]:
    """Return what is wrong where the first key of a pair exceeds the second."""
    return [
        f"{key} = {values[key]}; valid is up to {most} = {values[most]}"
        for key, most in pairs
        if values[key] > values[most]
    ]


def check_node_keys(configs: Sequence[Mapping[str, UserConfigValue]], known: Sequence[str]) -> None:
    """Raise SettingsError where a node's config has a key that no node of an app reads."""
    unknown = {key: value for config in configs for key, value in config.items() if key not in known}
    problems = []
    for key, value in unknown.items():
        meant = did_you_mean(key, known)
        problems.append(
            f"{shown(key)} = {quoted(value)} is not a key of a node config{f' ({meant})' if meant else ''}; "
            f"there are: {', '.join(known)}"
        )
    refuse(problems)


def check_work(said: str, steps: int, samples: int) -> None:
    """Raise SettingsError where nodes would refuse so many local steps, or epochs, of so many samples each.

    ``said`` names the settings and their values.
    """
    most = max(1, min(MAX_STEPS, MAX_SAMPLES // samples))
    if steps > most:
        refuse(
            [f"{said}: {steps} of {samples} samples; valid is up to {most}, whose batches are drawn at once"]
        )


def meant_key(key: str, known: Iterable[str]) -> str:
    """Return the run-config key that an unknown one stands for, as a question; empty without one."""
    keys = list(known)
    for names, meant in _SYNONYMS:
        if plain_name(key) in names and (there := [one for one in meant if one in keys]):
            return f"did you mean {there[0]!r}?"
    return did_you_mean(key, keys)


def unknown_key(key: str, value: object, settings: Mapping[str, object]) -> str:
    """Return what to say of a key that is none of the settings."""
    meant = meant_key(key, settings)
    return (
        f"{shown(key)} = {quoted(value)} is not a setting of this app{f' ({meant})' if meant else ''}; "
        f"there are: {', '.join(sorted(settings))}"
    )


@contextmanager
def as_settings_errors(what: str = "") -> Iterator[None]:
    """Raise what the library refuses while it builds what the settings describe as a SettingsError.

    Parameters
    ----------
    what : str (default: "")
        What is built, where the library's own words may not say which key is meant.
    """
    try:
        yield
    except SettingsError:
        raise
    except (ValueError, OSError, OverflowError, ZeroDivisionError, MemoryError) as error:
        words = reason(error) or type(error).__name__
        refuse([f"{what}: {words}" if what else words], error)


def problems_of(run_config: Mapping[str, UserConfigValue], settings: Mapping[str, Setting]) -> list[str]:
    """Return what is wrong with each key of a run config by itself: missing, not valid, or unknown."""
    return _read(run_config, settings)[1]


def read_settings(
    run_config: Mapping[str, UserConfigValue], settings: Mapping[str, Setting]
) -> dict[str, Any]:
    """Return every setting's value; the engine's own keys, ``fault-…``, may stand beside the app's.

    Raises
    ------
    SettingsError
        If a key is missing, not valid or unknown: one error for all of them.
    """
    values, problems = _read(run_config, settings)
    refuse(problems)
    return values


def _read(
    run_config: Mapping[str, UserConfigValue], settings: Mapping[str, Setting]
) -> tuple[dict[str, Any], list[str]]:
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, setting in settings.items():
        if key not in run_config:
            problems.append(f"{key} is missing; valid is {setting.kind.valid}")
            continue
        try:
            values[key] = setting.kind.read(run_config[key])
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            because = f" ({shown(error, 300)})" if str(error) else ""
            problems.append(f"{key} = {quoted(run_config[key])}; valid is {setting.kind.valid}{because}")
    problems += [
        unknown_key(key, run_config[key], settings)
        for key in sorted(set(run_config) - set(settings))
        if not key.startswith("fault-")
    ]
    return values, problems


@dataclass(frozen=True)
class Reader:
    """Reads an app's settings from a run config: each by itself, then against each other.

    Parameters
    ----------
    settings : Mapping[str, Setting]
        The app's.
    problems : Callable[[Mapping[str, Any]], Sequence[str]]
        Returns what is wrong between values that are each valid.
    """

    settings: Mapping[str, Setting]
    problems: Callable[[Mapping[str, Any]], Sequence[str]]

    @property
    def defaults(self) -> dict[str, UserConfigValue]:
        """Each setting's value where the user says nothing."""
        return {key: setting.default for key, setting in self.settings.items()}

    def __call__(self, run_config: Mapping[str, UserConfigValue]) -> dict[str, Any]:
        """Return the values.

        Raises
        ------
        SettingsError
            Which names every bad key, its value and what is valid.
        """
        values = read_settings(run_config, self.settings)
        refuse(self.problems(values))
        return values


def reader(settings: Mapping[str, Setting], problems: Callable[[Mapping[str, Any]], Sequence[str]]) -> Reader:
    """Return what reads an app's settings from a run config; see ``Reader``."""
    return Reader(settings, problems)
