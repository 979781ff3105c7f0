"""The comparer of two commits: what it reports of runs that differ, and what its table has to name."""

import itertools
import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.flower_apps.cases import APPS, CASES, AppCase
from tests.golden.compare import ROOT, differences, main, played, verdict
from tests.golden.table import DESIGNS, ROWS, SCRIPTS, Design, Row, pairwise

from hedgerow.sim import find_app, plan_run
from hedgerow.wire import AGGREGATIONS, CODECS, COMPRESSORS

# Words that no row has: what is valid on other machines, beside what this engine does, or nowhere recorded.
NOT_RUN = {
    *((case.spec.name, "engine", "inprocess") for case in CASES),  # Rows are in this engine.
    *((case.spec.name, "checkpoint-nodes", word) for case in CASES for word in ("always", "never")),
}
SMALL = next(row for row in ROWS if row.name == "similarity-free method ef-fedavg")


@pytest.fixture(scope="module")
def came_to() -> dict[str, dict[str, Any]]:
    """What the small row comes to, again and with other settings."""
    rows = {
        "itself": SMALL,
        "again": SMALL,
        "seed": replace(SMALL, settings={**SMALL.settings, "seed": 1}),
        "rate": replace(SMALL, settings={**SMALL.settings, "fixed-c": 0.31}),
        "evaluations": replace(SMALL, settings={**SMALL.settings, "evaluate-every": 4}),
        "unknown": replace(SMALL, settings={**SMALL.settings, "heat": 1}),
    }
    return dict(zip(rows, played(ROOT, list(rows.values())), strict=True))


def against(came_to: Mapping[str, Any], name: str) -> Any:
    return verdict(SMALL, came_to["itself"], came_to[name])


def test_a_row_is_equal_to_itself(came_to: dict[str, Any]) -> None:
    assert came_to["itself"]["parts"][0]["exit"] == [0, ""]
    assert str(against(came_to, "again")) == "similarity-free method ef-fedavg: equal"


def test_another_seed_moves_model_rounds_and_messages(came_to: dict[str, Any]) -> None:
    found = against(came_to, "seed")
    assert found.state == "differs"
    assert {"model", "rounds", "summary", "transcript"} <= set(found.aspects)
    assert not {"exit", "ledger", "privacy"} & set(found.aspects)


def test_another_step_size_is_first_seen_in_the_model_and_named_in_the_messages(
    came_to: dict[str, Any],
) -> None:
    found = against(came_to, "rate")
    assert found.first.startswith("model.")
    messages = [came_to[name]["parts"][0]["transcript"] for name in ("itself", "rate")]
    first = next(differences(*messages))
    assert first == ("[0][4].config[1].local-step[3]: 0.15, 0.155 against")


def test_what_is_told_and_not_learnt_leaves_the_model_equal(came_to: dict[str, Any]) -> None:
    assert against(came_to, "evaluations").aspects == ("rounds",)


def test_a_setting_that_a_checkout_lacks_is_told_apart(came_to: dict[str, Any]) -> None:
    found = against(came_to, "unknown")
    assert (found.state, found.first) == ("not there", "no setting heat in the commit")


@pytest.fixture(scope="module")
def renamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout whose nodes have another name for the record of their update."""
    copy = tmp_path_factory.mktemp("checkout")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for name in (*project["tool"]["setuptools"]["package-dir"].values(), "pyproject.toml"):
        place = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(place, copy / name, ignore=ignored) if place.is_dir() else shutil.copy(place, copy)
    replies = copy / "clients" / "mods" / "compress.py"
    source = replies.read_text()
    name = '{"update": record, "metrics"'
    assert source.count(name) == 1
    replies.write_text(source.replace(name, name.replace("update", "change")))
    return copy


def test_a_renamed_record_is_seen_in_the_messages_alone(renamed: Path, came_to: dict[str, Any]) -> None:
    (found,) = played(renamed, [SMALL])
    one = verdict(SMALL, came_to["itself"], found)
    assert one.aspects == ("transcript",)
    assert re.search(r"\[4\]\.update: .* nothing against", one.first)


def test_a_run_that_fails_on_one_side_is_told_by_its_error(came_to: dict[str, Any]) -> None:
    failed = {"parts": [{"there": True, "exit": [1, "TooFewRepliesError: round 2"]}]}
    found = verdict(SMALL, came_to["itself"], failed)
    assert found.aspects[0] == "exit"
    assert "TooFewRepliesError" in "\n".join(differences([0, ""], failed["parts"][0]["exit"]))


@pytest.mark.parametrize("end", [{"exit": ["timeout", "long"]}, {"killed": 9}, {"exit": ["broken", "?"]}])
def test_a_run_that_neither_side_ended_is_not_equal(end: dict[str, Any]) -> None:
    assert verdict(SMALL, {"parts": [end]}, {"parts": [end]}).state == "differs"


def test_an_error_that_both_sides_have_is_told() -> None:
    failed = {"parts": [{"there": True, "exit": [1, "TooFewRepliesError: round 2"]}]}
    assert str(verdict(SMALL, failed, failed)).endswith("equal (TooFewRepliesError: round 2)")


def test_a_nan_is_equal_to_a_nan_and_to_no_number() -> None:
    assert not list(differences({"a": [float("nan")]}, {"a": [float("nan")]}))
    assert list(differences({"a": [float("nan")]}, {"a": [1.0]})) == ["a[0]: NaN, 1.0 against"]
    assert list(differences([1], [1.0])) == ["[0]: 1, 1.0 against"]
    assert list(differences([1], [1, 2])) == ["all: 1 entries, 2 against"]


def test_the_command_lists_rows_by_name_and_by_tag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["compare.py", "--list", "--only", "quarantine"])
    assert main() == 0
    *names, count = capsys.readouterr().out.splitlines()
    assert [name.partition(" [")[0] for name in names] == ["similarity-free quarantine", "sd-feel quarantine"]
    assert count == "2 rows"


# The table


def of_app(name: str) -> list[Row]:
    return [row for row in ROWS if row.app == name and not row.script]


def test_every_app_is_in_the_table_and_every_name_once() -> None:
    assert {row.app for row in ROWS} == {path.parent.name for path in APPS.glob("*/pyproject.toml")}
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.script for row in ROWS} == {"", *SCRIPTS}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.registered.suite], ids=lambda case: case.name
)
def test_every_word_that_a_setting_may_be_is_in_the_table(case: AppCase) -> None:
    rows, missing = of_app(case.spec.name), []
    for key, setting in case.settings.SETTINGS.items():
        if setting.kind.valid.startswith("one of '"):
            had = {row.settings.get(key, setting.default) for row in rows}
            words = re.findall(r"'([^']*)'", setting.kind.valid)
            missing += [(case.spec.name, key, word) for word in words if word not in had]
    assert set(missing) <= NOT_RUN


def test_every_method_has_a_row_of_its_own() -> None:
    for case in CASES:
        settings = [row.settings for row in of_app(case.spec.name) if "method" in row.tags]
        assert settings
        for method in case.methods:
            assert any(case.named(method).items() <= one.items() for one in settings), method


def test_every_codec_and_rule_is_in_the_table() -> None:
    compressors = {str(row.settings.get("compressor", "")).partition("(")[0] for row in ROWS}
    assert {name.partition(",")[0] for name in compressors} >= set(COMPRESSORS)
    wrapped = {str(row.settings["codec"]).partition("(")[0] for row in ROWS if row.script}
    assert wrapped >= set(COMPRESSORS) - {"identity"}
    names = " ".join(row.name for row in ROWS if "codec" in row.tags)
    assert [codec for codec in CODECS if codec.partition("<")[0] not in names] == []
    named = re.sub(r"\(.*?\)", "", AGGREGATIONS.partition(", with")[0])
    rules = set(named.replace(" or ", ", ").split(", "))
    assert {"mean", "clipped"} < rules
    had = {str(row.settings.get("aggregation", "mean")).partition("(")[0] for row in ROWS}
    assert had >= rules


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.app)
def test_every_two_concerns_that_go_together_meet_in_a_row(design: Design) -> None:
    rows = pairwise(design)
    met = {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}
    assert met == design.pairs()


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.app)
def test_what_the_design_calls_refused_is_and_what_it_draws_is_not(design: Design) -> None:
    spec = find_app(APPS / design.app)
    first = {concern: next(iter(levels)) for concern, levels in design.factors.items()}
    levels = [(concern, level) for concern, names in design.factors.items() for level in names]
    for one, other in itertools.combinations(levels, 2):
        if one[0] != other[0] and design.is_refused(one, other):
            with pytest.raises(ValueError, match=r"must be .*, got "):
                plan_run(spec, overrides(design.row({**first, **dict((one, other))})))
    for drawn in pairwise(design):
        plan_run(spec, overrides(design.row(drawn)))


def overrides(row: Row) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in {**row.settings, **row.faults}.items()]
