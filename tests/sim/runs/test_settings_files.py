"""What is written into an app's files is what its settings say, and nothing else changes."""

import tomllib
from pathlib import Path

import pytest

from hedgerow.sim import Setting
from hedgerow.sim.runs.kinds import in_range, text, whole
from hedgerow.sim.runs.settings_files import changed, pyproject_with, tables, write_settings

SETTINGS = {
    "clients": Setting(3, whole(1, 40), "nodes; see `hedgerow data`", first=True),
    "delta": Setting(1e-5, in_range(0.0, 1.0), "a share"),
    "topology": Setting("ring", text("'ring' or 'regular(<k>)'"), "the graph"),
    "folder": Setting("", text("a folder, or empty"), "where", group="run"),
}
WRITTEN = 'clients = 3\ndelta = 1e-5\ntopology = "ring"\nfolder = ""\n'
PYPROJECT = """[project]
name = "x"

# Before.
[tool.flwr.app.config]
old = 1
{comment}[tool.hedgerow]
num-supernodes = 3
"""


@pytest.mark.parametrize("comment", ["\n", "\n# A comment.\n"])
def test_the_run_config_holds_every_default_in_order(comment: str) -> None:
    before = PYPROJECT.format(comment=comment)
    after = pyproject_with(SETTINGS, before)
    assert after == before.replace("old = 1\n", WRITTEN)
    config = tomllib.loads(after)["tool"]["flwr"]["app"]["config"]
    assert config == {key: setting.default for key, setting in SETTINGS.items()}
    assert pyproject_with(SETTINGS, after) == after


def test_a_row_has_the_default_the_valid_values_and_the_meaning() -> None:
    text = tables(SETTINGS)
    assert "| `clients` | 3 | an integer from 1 to 40 | nodes; see `hedgerow data` |\n" in text
    assert "| `delta` | 1e-5 | a number in [0, 1] | a share |\n" in text
    assert "| `topology` | `ring` | 'ring' or 'regular(&lt;k>)' | the graph |\n" in text
    assert "| `folder` |  | a folder, or empty | where |\n" in text


def test_each_group_has_a_table() -> None:
    text = tables(SETTINGS)
    method, run = text.partition("## Method")[2].split("## Run")
    assert "| `clients` |" in method
    assert "| `folder` |" in run
    assert "| `folder` |" not in method
    assert text.count("| key | default | valid | what |") == 2


def test_what_a_run_changed_is_listed_with_the_defaults() -> None:
    told = changed(SETTINGS, {"clients": 3, "delta": 0.5, "fault-dropout": 0.1})
    assert told.splitlines() == [
        "delta = 0.5", "    a share", "    default: 1e-5",
        "fault-dropout = 0.1", "    not a setting of the app",
    ]  # fmt: skip
    assert changed(SETTINGS, {}) == ""


def test_a_file_that_says_the_same_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.format(comment="\n"))
    assert write_settings(SETTINGS, tmp_path) == [tmp_path / "pyproject.toml"]
    assert write_settings(SETTINGS, tmp_path) == []


def test_a_file_without_a_place_for_the_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match=r"must have a place for the settings, \[tool.flwr.app.config\]"):
        write_settings(SETTINGS, tmp_path)
    assert (tmp_path / "pyproject.toml").read_text() == "[project]\n"
