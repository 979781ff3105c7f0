"""The page's app, as a stranger writes one: it builds, and one seed gives one model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sim.cli.command_line import hedgerow

from .pages import DOCS, blocks, environment

PAGE = DOCS / "tutorials" / "any-flower-app.md"


def test_each_promise_of_repetition_names_its_test() -> None:
    table = (DOCS / "bits.md").read_text().split("## Which apps repeat")[1].split("\n\n")[2]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:]]
    assert [len(row) for row in rows] == [5] * 6
    for cell in (cell for row in rows for cell in row[1:]):
        named = re.findall(r"\]\(\.\./(tests/[a-z_/]+\.py)\)", cell)
        assert named or cell in ("no promise", "one process a device"), cell
        assert all((DOCS.parent / file).is_file() for file in named)


@pytest.fixture
def moons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for block in blocks(PAGE):
        if block.title:
            file = tmp_path / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    (tmp_path / "moons" / "moons" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "moons"


def model(*options: object) -> tuple[bytes, Path]:
    """Run the app in a new folder; return its model's bytes and the run folder."""
    before = set(Path("runs").glob("*"))
    shown = hedgerow("run", "moons", *options, "--quiet")
    assert shown.exit_code == 0, shown.output
    (folder,) = set(Path("runs").glob("*")) - before
    return (folder / "model.npz").read_bytes(), folder


def test_flower_builds_the_app_of_the_page(moons: Path, tmp_path: Path) -> None:
    flwr = Path(sys.executable).with_name("flwr")
    built = subprocess.run(
        [flwr, "build", "--app", moons],
        cwd=tmp_path,
        check=False,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr


@pytest.mark.usefixtures("moons")
def test_one_seed_gives_one_model_again_with_two_workers_and_after_a_stop() -> None:
    nodes = ("--nodes", 10)
    drawn, folder = model(*nodes)
    config = json.loads((folder / "config.json").read_text())
    assert config["seed"] == config["run"]["seed"]
    seed = ("--seed", config["seed"])
    assert model(*nodes, *seed)[0] == drawn
    assert model(*nodes, *seed, "--workers", 2)[0] == drawn
    assert model(*nodes)[0] != drawn
    _, half = model(*nodes, *seed, "-c", "num-server-rounds=3")
    shown = hedgerow("run", "moons", "--resume", half, "-c", "num-server-rounds=5", "--quiet")
    assert shown.exit_code == 0, shown.output
    assert (half / "model.npz").read_bytes() == drawn
