"""Each app as a Flower App Bundle: Flower builds, checks and installs it, and it runs where it lies."""

import os
import subprocess
import sys
import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from flwr.cli.app_cmd.publish import (
    _collect_file_paths,
    _validate_app_name,
    _validate_description,
    _validate_files,
)
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.cli.install import install_from_fab
from tests.flower_apps.cases import CASES, AppCase

from hedgerow.sim import read_rounds

LICENSE = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> AppCase:
    found: AppCase = request.param
    return found


def test_flower_builds_it_with_its_code_readme_and_licence(case: AppCase) -> None:
    config, warnings = load_and_validate(case.folder / "pyproject.toml")
    assert config["tool"]["flwr"]["app"]["fab-format-version"] == 1
    assert warnings == []
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(case.folder))) as fab:
        names = set(fab.namelist())
        assert fab.read("LICENSE") == LICENSE.read_bytes()
    code = {f"{case.name}/{file.name}" for file in (case.folder / case.name).glob("*.py")}
    assert {"pyproject.toml", "README.md", "paper.toml", *code} <= names


def test_it_passes_what_flower_checks_before_it_publishes(case: AppCase) -> None:
    config, _ = load_and_validate(case.folder / "pyproject.toml", check_module=False)
    description = config["project"]["description"]
    _validate_app_name(case.folder.name, "folder")
    _validate_description(description)
    assert len(description) <= 200
    _validate_files(_collect_file_paths(case.folder))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name == "sd_feel" else pytest.mark.slow)
        for case in CASES
    ],
)
def test_installed_elsewhere_it_runs(case: AppCase, tmp_path: Path) -> None:
    home = install_from_fab(build_fab_from_disk(case.folder), tmp_path / "home", skip_prompt=True)
    assert home.is_relative_to(tmp_path)
    installed = tomllib.loads((home / "pyproject.toml").read_text())
    assert installed["project"]["name"] == case.folder.name
    settings = " ".join(f"{key}={_toml(value)}" for key, value in case.small.items())
    code = "from hedgerow.sim.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", str(home), "--quiet", "-c", settings],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_rounds(folder)[-1]["round"] >= 1


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
