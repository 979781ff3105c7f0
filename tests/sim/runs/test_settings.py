"""Settings are read whole: every value checked, every bad key in one error."""

from math import inf, nan
from typing import Any

import pytest

from hedgerow.sim import Setting, SettingsError, read_settings
from hedgerow.sim.runs.common_settings import RUN_SETTINGS
from hedgerow.sim.runs.kinds import NumberRange, choice, in_range, number, text, whole
from hedgerow.sim.runs.settings import override


def word_without_spaces(value: str) -> None:
    if " " in value:
        raise ValueError("it has spaces")


KINDS = {
    "clients": whole(1, 2**63 - 1),
    "share": in_range(0.0, 1.0),
    "beta": in_range(0.0, 1.0, open_below=True),
    "rate": number("a finite number > 0", NumberRange(0, 1e308, open_below=True)),
    "method": choice("a", "b"),
    "name": text("a word", word_without_spaces),
    "folder": text("a folder"),
}
SETTINGS = {key: Setting(0, kind, "") for key, kind in KINDS.items()}
GOOD: dict[str, Any] = {
    "clients": 3,
    "share": 0.0,
    "beta": 1,
    "rate": 1e-3,
    "method": "b",
    "name": "x",
    "folder": "",
}
BAD: list[tuple[str, Any, str]] = [
    ("clients", 0, "an integer from 1 to 2^63 - 1"),
    ("clients", 2**63, "an integer from 1 to 2^63 - 1"),
    ("clients", True, "an integer from 1 to 2^63 - 1"),
    ("share", 1.1, "a number in [0, 1]"),
    ("share", nan, "a number in [0, 1]"),
    ("beta", 0.0, "a number in (0, 1]"),
    ("rate", inf, "a finite number > 0"),
    ("method", "c", "one of 'a', 'b'"),
    ("method", "bb", "one of 'a', 'b' (did you mean 'b'?)"),
    ("name", "two words", "a word (it has spaces)"),
]


def test_valid_settings_are_read_with_their_types() -> None:
    values = read_settings(GOOD, SETTINGS)
    assert values == GOOD
    assert isinstance(values["beta"], float)
    assert isinstance(values["clients"], int)


@pytest.mark.parametrize(("key", "value", "valid"), BAD)
def test_a_bad_value_is_refused_with_key_value_and_what_is_valid(key: str, value: Any, valid: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_settings({**GOOD, key: value}, SETTINGS)
    assert str(error.value) == f"Bad settings:\n  - {key} = {value!r}; valid is {valid}"


@pytest.mark.parametrize(("key", "meant"), [("client", "clients"), ("methd", "method"), ("Rate", "rate")])
def test_a_near_miss_is_answered_with_the_key_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"is not a setting of this app \(did you mean '{meant}'\?\); there"
    ):
        read_settings({**GOOD, key: 3}, SETTINGS)


def test_an_app_may_have_other_defaults_and_other_help() -> None:
    changed = override(RUN_SETTINGS, defaults={"evaluate-every": 7}, helps={"quiet": "silence"})
    assert list(changed) == list(RUN_SETTINGS)
    assert (changed["evaluate-every"].default, changed["quiet"].help) == (7, "silence")
    assert changed["evaluate-every"].kind is RUN_SETTINGS["evaluate-every"].kind
    assert changed["resume"] is RUN_SETTINGS["resume"]
    with pytest.raises(KeyError):
        override(RUN_SETTINGS, defaults={"evaluate-evry": 7})


def test_all_that_is_wrong_is_in_one_error() -> None:
    bad = {
        "clients": 0,
        "share": 2,
        "rate": -1.0,
        "name": "x",
        "folder": "",
        "method": "c",
        "new": 1,
        "old": 2,
    }
    with pytest.raises(SettingsError) as error:
        read_settings(bad, SETTINGS)
    lines = str(error.value).splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["clients", "share", "beta", "rate", "method", "new", "old"]
