"""Settings are read whole: every value checked, every bad key in one error."""

import re
from math import inf, nan
from typing import Annotated, Any, ClassVar, Literal

import pytest

from hedgerow.sim import AppSettings, SettingsError
from hedgerow.sim.runs.common_settings import RunSettings, TaskSettings, role_of
from hedgerow.sim.runs.kinds import above, in_range, text, whole
from hedgerow.sim.runs.settings import GROUPS, Role, Rules, setting


def word_without_spaces(value: str) -> None:
    if " " in value:
        raise ValueError("it has spaces")


class Settings(AppSettings):
    clients: Annotated[int, whole(1, 2**63 - 1)] = setting(3, "nodes", first=True)
    share: Annotated[float, in_range(0.0, 1.0)] = setting(0.0, "a share")
    beta: Annotated[float, in_range(0.0, 1.0, open_below=True)] = setting(1.0, "another")
    rate: Annotated[float, above(0)] = setting(1e-3, "a rate", "training")
    method: Literal["a", "b"] = setting("b", "which")
    name: Annotated[str, text("a word", word_without_spaces)] = setting("x", "a name")
    folder: str = setting("", "where", "run", role=Role.IRRELEVANT)

    def rules(self) -> Rules:
        yield self.method == "b" or self.share < 1, "share", "below 1 with method = 'a'"
        yield from self.usual("with method = 'b'", "name", "folder") if self.method == "b" else ()


GOOD: dict[str, Any] = {
    "clients": 3,
    "share": 0.0,
    "beta": 1,
    "rate": 1e-3,
    "method": "b",
    "name": "x",
    "folder": "",
}
# What is valid, and what the error adds to it.
BAD: list[tuple[str, Any, str, str]] = [
    ("clients", 0, "an integer from 1 to 2^63 - 1", ""),
    ("clients", 2**63, "an integer from 1 to 2^63 - 1", ""),
    ("clients", True, "an integer from 1 to 2^63 - 1", ""),
    ("share", 1.1, "a number in [0, 1]", ""),
    ("share", nan, "a number in [0, 1]", ""),
    ("beta", 0.0, "a number in (0, 1]", ""),
    ("rate", inf, "a number > 0, up to 1e+30", ""),
    ("method", "c", "one of 'a', 'b'", ""),
    ("method", "bb", "one of 'a', 'b'", " (did you mean 'b'?)"),
    ("name", "two words", "a word", " (it has spaces)"),
]


def test_valid_settings_are_read_with_their_types() -> None:
    values = Settings.read(GOOD)
    assert values.run_config == GOOD
    assert isinstance(values.beta, float)
    assert isinstance(values.clients, int)


@pytest.mark.parametrize(("key", "value", "valid", "added"), BAD)
def test_a_bad_value_is_refused_with_key_value_and_what_is_valid(
    key: str, value: Any, valid: str, added: str
) -> None:
    with pytest.raises(SettingsError) as error:
        Settings.read({**GOOD, key: value})
    assert str(error.value) == f"Bad settings:\n  - {key} must be {valid}, got {value!r}{added}"


@pytest.mark.parametrize(("key", "meant"), [("client", "clients"), ("methd", "method"), ("Rate", "rate")])
def test_a_near_miss_is_answered_with_the_key_that_was_meant(key: str, meant: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"is not a setting of this app \(did you mean '{meant}'\?\); valid keys: "
    ):
        Settings.read({**GOOD, key: 3})


def test_an_app_may_have_other_defaults_and_other_help() -> None:
    class Changed(RunSettings):
        evaluate_every: int = setting(7)
        quiet: bool = setting(False, "silence", "method")

    usual, changed = RunSettings.table(), Changed.table()
    assert changed.keys() == usual.keys()
    assert (changed["evaluate-every"].default, changed["evaluate-every"].help) == (
        7,
        usual["evaluate-every"].help,
    )
    assert (changed["quiet"].help, changed["quiet"].group, changed["quiet"].role) == (
        "silence", "method", Role.IRRELEVANT,
    )  # fmt: skip
    assert changed["evaluate-every"].kind is usual["evaluate-every"].kind
    assert changed["resume"] == usual["resume"]
    with pytest.raises(SettingsError, match=r"evaluate-every must be an integer from 1 to 2\^20, got 0"):
        Changed.read({**Changed.defaults(), "evaluate-every": 0})


def test_a_field_that_says_nowhere_what_is_valid_is_refused() -> None:
    class Misspelt(RunSettings):
        evaluate_evry: int = setting(7)

    with pytest.raises(TypeError, match=r"Misspelt\.evaluate_evry must declare its valid values"):
        Misspelt.table()


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
        Settings.read(bad)
    lines = str(error.value).splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["clients", "share", "beta", "method", "rate", "new", "old"]
    assert lines[2] == "  - beta must be a number in (0, 1], got none"


def test_all_that_does_not_go_together_is_in_one_error() -> None:
    with pytest.raises(SettingsError) as error:
        Settings.read({**GOOD, "name": "y", "folder": "here"})
    assert str(error.value).splitlines()[1:] == [
        "  - name must be 'x' with method = 'b', got 'y'",
        "  - folder must be '' with method = 'b', got 'here'",
    ]
    with pytest.raises(SettingsError, match=r"share must be below 1 with method = 'a', got 1\.0"):
        Settings.read({**GOOD, "method": "a", "share": 1.0})


def test_settings_stand_in_the_order_of_their_groups_those_that_matter_first() -> None:
    groups = [one.group for one in Settings.table().values()]
    assert groups == sorted(groups, key=GROUPS.index)
    assert next(iter(Settings.table())) == "clients"


def test_the_engines_faults_may_stand_beside_an_apps_settings() -> None:
    assert Settings.read({**GOOD, "fault-dropout": 0.5}).run_config == GOOD


def test_a_setting_has_one_role_in_all_apps() -> None:
    roles = {"seed": Role.REPETITION, "device": Role.REPETITION}
    roles |= dict.fromkeys(("iterations", "num-rounds"), Role.RESUME)
    for key, role in roles.items():
        assert role_of(key) is role
    assert role_of("peers") is role_of("registry") is Role.IRRELEVANT
    assert role_of("anything") is Role.RESULTS


class OfData(TaskSettings, RunSettings):
    """Settings that one kind of data reads, with another default in an app."""

    TEXTS: ClassVar = {
        key: ("a text", str) for key in ("dataset", "partition", "classes", "standardise", "model")
    }
    train_loss_samples: int = setting(7)


@pytest.mark.parametrize("partition", ["own", "iid"])
def test_a_setting_that_the_runs_data_do_not_read_has_its_default(partition: str) -> None:
    defaults = {**OfData.defaults(), "partition": partition}
    OfData.read(defaults)
    where = "with" if partition == "own" else "unless"
    others: dict[str, Any] = {"holdout": 0.5, "train-loss-samples": 0, "data-dir": "."}
    for key, one in OfData.table().items():
        if one.own_data is None:
            continue
        value = others.get(key, "other")
        if one.own_data is (partition == "own"):
            OfData.read({**defaults, key: value})
        else:
            words = f"{key} must be {one.default!r} {where} partition = 'own', got {value!r}"
            with pytest.raises(SettingsError, match=re.escape(words)):
                OfData.read({**defaults, key: value})


def test_an_app_without_partitions_reads_all() -> None:
    RunSettings.read({**RunSettings.defaults(), "holdout": 0.5})
