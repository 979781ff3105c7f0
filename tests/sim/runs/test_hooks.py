"""What an app tells Hedgerow's commands: found by its own pyproject.toml, wherever it lies."""

import sys
from pathlib import Path

import pytest
from tests.sim.cli.command_line import APPS, hedgerow
from tests.sim.tiny_app import MakeApp

from hedgerow.sim import Hooks
from hedgerow.sim.runs.hooks import hooks_of, shipped_apps

HOOKS = '''
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from hedgerow.sim import CheckedNodes, Hooks, Verdict


def plan(target: Annotated[float, typer.Option(help="Loss to reach.")] = 0.1) -> Iterator[Table | str]:
    """Say how many rounds a target takes."""
    if target <= 0:
        raise ValueError(f"--target must be a number > 0, got {target}")
    table = Table("rounds")
    table.add_row(str(round(1 / target)))
    yield table
    yield "hedgerow run . -c 'label=[1]'"


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    lacks = f"{nodes.plan.num_nodes} nodes, {len(nodes.arrays)} array"
    yield Verdict("Tiny", "partly", lacks, "app = tiny()")


HOOKS = Hooks(plan=plan, check=check, node_keys=lambda: ["colour"])
'''


def with_hooks(home: Path, reference: str = "tinyapp.hooks:HOOKS", source: str = HOOKS) -> Path:
    (home / "tinyapp" / "hooks.py").write_text(source)
    pyproject = home / "pyproject.toml"
    pyproject.write_text(f'{pyproject.read_text()}\n[tool.hedgerow]\nhooks = "{reference}"\n')
    return home


def test_an_app_of_ones_own_has_a_planner_and_a_row_of_a_check(make_app: MakeApp) -> None:
    home = with_hooks(make_app())
    assert "Say how many rounds a target takes." in hedgerow("plan", home, "--help").output
    shown = hedgerow("plan", home, "--target", "0.25").output
    assert "│ 4" in shown
    assert "hedgerow run . -c 'label=[1]'\n" in shown
    for bad in ("0", "nan"):
        refused = hedgerow("plan", home, "--target", bad)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.startswith("Error: --target must be ")
        assert refused.stderr.endswith(f", got {float(bad)}\n")
    checked = hedgerow("check", home, "--nodes", "3").stdout
    assert "Tiny" in checked
    assert "3 nodes, 1 array" in checked
    assert "-> app = tiny()" in checked


@pytest.mark.parametrize(
    ("reference", "source"),
    [("tinyapp.hooks:HOOKS", "HOOKS = 3"), ("tinyapp.hooks:OTHERS", HOOKS), ("tinyapp.nothing:HOOKS", HOOKS)],
)
def test_hooks_that_are_none_are_one_clear_error(make_app: MakeApp, reference: str, source: str) -> None:
    home = with_hooks(make_app(), reference, source)
    refused = hedgerow("plan", home)
    assert refused.exit_code == 2
    assert f"got '{reference}'" in refused.stderr
    assert "must be module:attribute of a hedgerow.sim.Hooks" in refused.stderr


def test_an_app_without_hooks_adds_nothing(make_app: MakeApp) -> None:
    assert hooks_of(make_app()) == Hooks()


def test_copies_of_an_app_keep_their_hooks_apart_and_leave_no_modules(make_app: MakeApp) -> None:
    home = with_hooks(make_app())
    before = dict(sys.modules), list(sys.path)
    assert hooks_of(home).node_keys() == ["colour"]
    assert {name for name in sys.modules if name.startswith("tinyapp")} <= set(before[0])
    assert sys.path == before[1]


@pytest.mark.parametrize("app", shipped_apps())
def test_every_app_of_the_suite_has_a_row_of_a_check(app: str) -> None:
    assert hooks_of(APPS / app).check is not None


@pytest.mark.parametrize("app", shipped_apps())
def test_hooks_take_what_they_need_of_their_package_at_their_top(app: str) -> None:
    package = app.replace("-", "_")
    for file in (APPS / app / package).glob("*.py"):
        if file.name in ("hooks.py", "plan.py"):
            lines = file.read_text().splitlines()
            assert not [
                line for line in lines if line.strip().startswith(f"from {package}") and line[0] == " "
            ]
