"""Readers of a message's records and config values; an error names key, value and valid range."""

from collections.abc import Sequence
from math import inf
from typing import TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord

from hedgerow.clients.mods.guard import KeyMistake
from hedgerow.clients.training.work import LARGEST_STEP
from hedgerow.wire.calls import Call
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.records import records_of

Record = TypeVar("Record", ArrayRecord, ConfigRecord)


def only_config(call: Call) -> ConfigRecord:
    """Return the message's one ConfigRecord; ValueError if it has none, or more than one."""
    records = records_of(call.content, ConfigRecord)
    if len(records) != 1:
        raise ValueError(f"the message must have exactly one ConfigRecord, got {len(records)}")
    return next(iter(records.values()))


def whole(config: ConfigRecord, key: str, least: int) -> int:
    """Return an integer of the config, at least ``least``."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _invalid(key, value, f"an integer >= {least}")
    return value


def local_steps(config: ConfigRecord, key: str, samples: int = 1) -> int:
    """Return the number of steps, or epochs, of ``samples`` each that a message requests.

    It must be at least 1 and within ``MAX_STEPS`` and ``MAX_SAMPLES``, because all batches are drawn at once.
    """
    most = max(1, min(MAX_STEPS, MAX_SAMPLES // max(1, samples)))
    if (value := whole(config, key, 1)) > most:
        raise _invalid(key, value, f"an integer from 1 to {most}")
    return value


def positive(config: ConfigRecord, key: str) -> float:
    """Return a finite number > 0 of the config."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise _invalid(key, value, "a finite number > 0")
    return value


def step_size(config: ConfigRecord, key: str) -> float:
    """Return a number > 0 of the config that is finite also in float32."""
    if (value := positive(config, key)) > LARGEST_STEP:
        raise _invalid(key, value, "a finite number > 0, also in float32")
    return value


def nonnegative(config: ConfigRecord, key: str, below: float = inf) -> float:
    """Return a number of the config, 0 <= number < ``below``."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < below:
        valid = "a finite number >= 0" if below == inf else f"a number >= 0 and < {below:g}"
        raise _invalid(key, value, valid)
    return value


def flag(config: ConfigRecord, key: str, default: bool | None = None) -> bool:
    """Return a boolean of the config; a missing key has the default, if there is one."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise _invalid(key, value, "true or false")
    return value


def string(config: ConfigRecord, key: str) -> str:
    """Return a string of the config."""
    value = config.get(key)
    if not isinstance(value, str):
        raise _invalid(key, value, "a text")
    return value


def strings(config: ConfigRecord, key: str) -> list[str]:
    """Return a list of strings of the config."""
    value = config.get(key)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _invalid(key, value, "a list of texts")
    return cast(list[str], value)


def choice(config: ConfigRecord, key: str, valid: Sequence[str]) -> str:
    """Return a string of the config that is one of ``valid``."""
    value = config.get(key)
    if value not in valid:
        raise _invalid(key, value, " or ".join(map(repr, valid)))
    return str(value)


def _invalid(key: str, value: object, valid: str) -> ValueError:
    return KeyMistake(key, f"{key} must be {valid}, got {value!r} in the message's config")
