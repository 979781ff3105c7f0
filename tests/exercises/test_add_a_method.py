"""CONTRIBUTING's "Add a method", done: files, a line of the registry and exports make a method of the suite.

SCAFFOLD is taken out of a copy of this checkout, and added again.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "strategies/scaffold.py",
    "clients/scaffold.py",
    "flower_apps/scaffold/",
    "tests/strategies/test_scaffold.py",
)
REGISTRY = "tests/registry.py"
# Each has some lines for the method.
NAMED = (REGISTRY, "strategies/__init__.py", "clients/__init__.py")
pytestmark = pytest.mark.xdist_group("add a method")


class Checkout:
    """A copy of the tracked files of this checkout, under git."""

    def __init__(self, home: Path) -> None:
        self.home = home
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        for name in listed.stdout.decode().split("\0"):
            # Pictures and recorded results are no part of it.
            recorded = name.startswith("results/") and not name.endswith(".py")
            if name and (ROOT / name).exists() and not recorded and ".svg" not in name:
                self.copy(name)
        for name in FILES:
            place = home / name
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        for name in NAMED:
            lines = (home / name).read_text().splitlines(keepends=True)
            (home / name).write_text("".join(line for line in lines if "caffold" not in line))
        self.git("init", "--quiet")
        self.git("add", "--all")
        self.git("-c", "user.name=me", "-c", "user.email=me@here", "commit", "--quiet", "--message", "Before")

    def copy(self, name: str) -> None:
        (self.home / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, self.home / name, follow_symlinks=False)

    def git(self, *arguments: str) -> str:
        return self.output("git", *arguments)

    def python(self, *arguments: str, given: str = "") -> str:
        return self.output(sys.executable, *arguments, given=given)

    def hedgerow(self, *arguments: str) -> str:
        return self.python("-m", "hedgerow.sim", *arguments)

    def pytest(self, *arguments: str) -> str:
        return self.python("-m", "pytest", "-p", "no:cacheprovider", *arguments)

    def output(self, *command: str, given: str = "") -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.home / ".typing"), "OMP_NUM_THREADS": "1"}
        environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
        done = subprocess.run(
            command,
            cwd=self.home,
            env=environment,
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout to which the method was added."""
    checkout = Checkout(tmp_path_factory.mktemp("checkout"))
    listed = subprocess.run(
        ["git", "ls-files", "-z", *FILES, *NAMED], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        checkout.copy(name)
    checkout.hedgerow("settings", "flower_apps/scaffold", "--write")
    return checkout


def test_it_is_new_files_and_one_line_of_the_registry(added: Checkout) -> None:
    changed = {line[3:]: line[:2] for line in added.git("status", "--porcelain", "-uall").splitlines()}
    assert {name for name, how in changed.items() if how != "??"} == {*NAMED}
    lines = {
        name: (int(more), int(less))
        for more, less, name in map(str.split, added.git("diff", "--numstat").splitlines())
    }
    assert lines == {REGISTRY: (1, 0), "strategies/__init__.py": (2, 0), "clients/__init__.py": (2, 0)}
    assert {name.split("/")[0] for name in changed} == {"strategies", "clients", "flower_apps", "tests"}
    new = [
        name for name, how in changed.items() if how == "??" and name.startswith(("strategies/", "clients/"))
    ]
    assert new == ["clients/scaffold.py", "strategies/scaffold.py"]


# Runs each command, and writes what it showed; in one process, since all import the same.
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from hedgerow.sim.cli import app

shown = [CliRunner().invoke(app, arguments) for arguments in json.load(sys.stdin)]
json.dump([(one.exit_code, one.stdout) for one in shown], open("shown.json", "w"))
"""


def test_every_command_knows_it(added: Checkout, tmp_path: Path) -> None:
    small = ["-c", "num-clients=4 num-rounds=3 model=logistic"]
    asked = [
        ["--help"],
        ["settings", "scaffold"],
        ["run", "scaffold", "--quiet", *small, "-c", f"output-dir='{tmp_path}/runs'"],
        ["check", "scaffold", *small],
        ["new", "scaffold", f"{tmp_path}/mine"],
    ]
    added.python("-c", COMMANDS, given=json.dumps(asked))
    codes, (help, settings, run, check, _) = zip(
        *json.loads((added.home / "shown.json").read_text()), strict=True
    )
    assert set(codes) == {0}
    assert ["scaffold", *["local", "SGD", "with", "control", "variates", "against", "drift"]] in [
        line.split() for line in help.splitlines()
    ]
    assert "\nglobal-rate = 1.0\n" in settings
    assert "scaffold on mnist-5k, eta_g = 1" in run
    assert ["Scaffold", "yes"] in [line.split() for line in check.splitlines()]
    assert (tmp_path / "mine" / "scaffold" / "task.py").is_file()


def test_the_default_tests_have_it_and_hold(added: Checkout) -> None:
    listed = added.python("tests/golden/compare.py", "--list", "--only", "scaffold*")
    assert listed.splitlines()[-1] == "2 rows"
    places = ("tests/contracts", "tests/flower_apps", "tests/strategies/test_scaffold.py")
    shown = added.pytest(*places, "-k", "scaffold")
    assert int(shown.split(" passed")[0].split()[-1]) >= 40


def test_it_reads_as_the_rest_does(added: Checkout) -> None:
    files = [
        name for name in added.git("ls-files", "-o", "--exclude-standard").split() if name.endswith(".py")
    ]
    assert len(files) >= 8
    for check in ("check", "format --check"):
        added.python("-m", "ruff", *check.split(), *files)


@pytest.mark.slow
def test_the_wheel_has_it(added: Checkout) -> None:
    added.pytest("tests/test_wheel.py")


def test_packaging_and_the_documentation_have_it(added: Checkout) -> None:
    packages = "import runpy, setuptools; setuptools.setup = lambda **o: print(o); runpy.run_path('setup.py')"
    assert "'hedgerow.strategies'" in added.python("-c", packages)
    pyproject = tomllib.loads((added.home / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"]
    apps = added.home / "flower_apps"
    packed = {file for pattern in patterns["hedgerow.apps"] for file in apps.glob(pattern)}
    files = {file for file in (apps / "scaffold").rglob("*.*") if "__pycache__" not in file.parts}
    assert {file for file in files if file.suffix != ".svg"} <= packed  # Figures stay in the repository.
    nav = "import json, pages; print(json.dumps(pages.with_methods(['Methods'])[0]['Methods']))"
    menus = json.loads(added.python("-c", f"import sys; sys.path.insert(0, 'docs'); {nav}"))
    (menu,) = [entry["SCAFFOLD"] for entry in menus if "SCAFFOLD" in entry]
    assert {"How to run it": "apps/scaffold.md"} in menu
    assert {"Settings": "settings/scaffold.md"} in menu
