"""The workflows run what a developer runs: targets of the Makefile, and nothing else of ours."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps(file: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(file.read_text())["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=[file.stem for file in WORKFLOWS])
def test_a_workflow_runs_make_targets_that_are_there(file: Path) -> None:
    targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [step["run"] for step in steps(file) if "run" in step]
    assert commands
    for command in commands:
        made = re.fullmatch(r"make ([\w-]+)", command)
        assert made, command
        assert made[1] in targets


def test_every_python_that_the_package_names_is_tested() -> None:
    (matrix,) = (
        job["strategy"]["matrix"]
        for job in yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
        if "strategy" in job
    )
    said = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(said) <= set(matrix["python"])
