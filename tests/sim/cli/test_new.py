"""``hedgerow new``: an app of one's own, from a checkout and from an installed wheel."""

import ast
import filecmp
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.sim.cli.command_line import APPS, hedgerow

from hedgerow.clients.device import shared_model
from hedgerow.clients.local_task import _local_task
from hedgerow.sim import SettingsError, find_app, load, read_config, read_rounds

ROOT = APPS.parent
METHODS = ("ceps", "fedmud", "hsgd", "sd-feel", "similarity-free")
# A round or two of each.
SHORT = {
    "sd-feel": "num-servers=2 tau1=1 tau2=1 iterations=1 topology=complete num-clients=4",
    "similarity-free": "num-rounds=1 num-clients=4 partition=iid",
    "fedmud": "num-rounds=1 num-clients=4 ratio=0.5",
    "ceps": "iterations=6 num-clients=4",
    "hsgd": "iterations=4",
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the apps' modules and models before and after: copies of an app bear the same names."""
    packages = [method.replace("-", "_") for method in METHODS]

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in packages]

    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    shared_model.cache_clear()
    _local_task.cache_clear()
    yield
    for name in loaded():
        del sys.modules[name]
    shared_model.cache_clear()
    _local_task.cache_clear()


def _in_a_process(*arguments: object, cwd: Path, **environment: str) -> str:
    code = "from hedgerow.sim.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("method", METHODS)
def test_a_new_app_is_the_methods_own_code_with_a_task_of_ones_own(method: str, tmp_path: Path) -> None:
    home = tmp_path / "my-own"
    shown = hedgerow("new", method, home)
    assert shown.exit_code == 0, shown.output
    package = method.replace("-", "_")
    spec = find_app(home)
    assert spec.name == "my-own"
    assert spec.config["dataset"] == f"{package}.task:load"
    assert spec.config["model"] == f"{package}.task:build"
    assert {"runs/", ".venv/", "__pycache__/"} <= set((home / ".gitignore").read_text().split())
    assert spec.config.keys() == find_app(APPS / method).config.keys()
    theirs, mine = APPS / method / package, home / package
    shipped = [file.name for file in theirs.glob("*.py")]
    assert filecmp.cmpfiles(theirs, mine, shipped, shallow=False)[1:] == (["settings.py"], [])
    assert {file.name for file in mine.iterdir()} - {*shipped, "__pycache__"} == {"task.py"}
    task = ast.parse((mine / "task.py").read_text())
    assert {node.name for node in task.body if isinstance(node, ast.FunctionDef)} == {"load", "build"}


@pytest.mark.parametrize("method", METHODS)
def test_a_new_apps_settings_have_the_defaults_of_its_config(
    method: str, tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its settings' rules take its own task for the default, also in runs that do not read it."""
    assert hedgerow("new", method, tmp_path / "mine").exit_code == 0
    config = find_app(tmp_path / "mine").config
    monkeypatch.syspath_prepend(tmp_path / "mine")
    settings = importlib.import_module(f"{method.replace('-', '_')}.settings")
    assert settings.Settings.defaults() == config
    shipped = find_app(APPS / method).config
    changed = [key for key in config if config[key] != shipped[key]]
    assert {"dataset", "model"} <= set(changed)
    own = {**config, "partition": "own"}
    settings.read(own)
    with pytest.raises(SettingsError, match=f"dataset must be {config['dataset']!r} with partition = 'own'"):
        settings.read({**own, "dataset": "mnist-5k"})


@pytest.mark.parametrize(
    "method",
    [one if one == "sd-feel" else pytest.param(one, marks=pytest.mark.slow) for one in METHODS],
)
def test_a_new_app_learns_as_it_is_generated(
    method: str, tmp_path: Path, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hedgerow("new", method, "x").exit_code == 0
    shown = hedgerow("run", "x")
    assert shown.exit_code == 0, shown.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("x-")
    assert read_config(folder)["app"] == "x"
    assert load([folder]).runs[0].label == "x"
    # Ten digits; benign or malignant, of whom 63 in 100 are benign.
    assert read_rounds(folder)[-1]["central"]["accuracy"] > (0.85 if method == "hsgd" else 0.6)


@pytest.mark.parametrize(
    "method",
    [one if one in ("fedmud", "hsgd") else pytest.param(one, marks=pytest.mark.slow) for one in METHODS],
)
def test_a_new_app_trains_the_model_that_is_its_own(method: str, tmp_path: Path, fresh: None) -> None:
    package = method.replace("-", "_")
    assert hedgerow("new", method, tmp_path / "mine").exit_code == 0
    task = tmp_path / "mine" / package / "task.py"
    if method != "hsgd":
        text = task.read_text().replace("features, 32", "features, 7").replace("(32, 32)", "(7, 32)")
        task.write_text(text)
    shown = hedgerow(
        "run", tmp_path / "mine", "--quiet", "-c", SHORT[method], "-c", f"output-dir='{tmp_path}/runs'"
    )
    assert shown.exit_code == 0, shown.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_rounds(folder)[-1]["central"]["loss"] > 0
    if method == "ceps":  # whose models stay on the nodes
        assert not (folder / "model.npz").exists()
        return
    with np.load(folder / "model.npz") as model:
        if method == "hsgd":
            assert model["hospital.1.weight"].shape[1] == 7
        else:
            assert model["0.weight"].shape == (7, 64)


@pytest.mark.slow
def test_a_wheel_makes_and_runs_apps_without_a_checkout(tmp_path: Path) -> None:
    source, target, work = tmp_path / "source", tmp_path / "target", tmp_path / "work"
    for room in ("strategies", "clients", "wire", "tasks", "sim", "flower_apps"):
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip"]
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "wheel", *options, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--quiet", "--target", str(target), str(wheel)],
        check=True,
    )
    shutil.rmtree(source)
    work.mkdir()
    where = {"PYTHONPATH": str(target)}

    _in_a_process("new", "sd-feel", "x", cwd=work, **where)
    _in_a_process("run", "x", "--quiet", "-c", SHORT["sd-feel"] + " iterations=2", cwd=work, **where)
    _in_a_process("run", "similarity-free", "--quiet", "-c", SHORT["similarity-free"], cwd=work, **where)

    runs = {folder.name.split("-")[0]: read_rounds(folder) for folder in (work / "runs").iterdir()}
    assert [end["round"] for end in runs["sd_feel"]] == [0, 1, 2]
    assert [end["round"] for end in runs["similarity_free"]] == [0, 1]
    code = "import hedgerow.sim as sim; print(sim.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **where}, capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith(str(target))
