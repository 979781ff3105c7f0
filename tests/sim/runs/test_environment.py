"""A run's config tells the machine, the engine and the code that it comes from."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hedgerow.sim.runs import environment as module
from hedgerow.sim.runs.environment import environment


def test_what_decides_on_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    found = environment()
    assert found["torch"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["torch"]["version"] == torch.__version__
    assert {type(found["torch"][name]) for name in ("mkl", "onednn")} == {bool}
    assert found["threads"] == {
        "torch": torch.get_num_threads(),
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": None,
    }


def test_the_processors_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Made-up CPU @ 3 GHz\nmodel name\t: Made-up CPU @ 3 GHz\n")
    monkeypatch.setattr(module, "_CPUINFO", info)
    assert environment()["cpu"] == "Made-up CPU @ 3 GHz"
    info.unlink()
    assert environment()["cpu"] != "Made-up CPU @ 3 GHz"


def test_without_git_the_environment_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    found = environment(app=tmp_path)
    assert (found["git"], found["app-git"]) == (None, None)


def test_the_repository_of_the_app_is_told_from_the_suites(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.strip()

    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    app = tmp_path / "apps" / "mine"
    app.mkdir(parents=True)
    git("init")
    (app / "app.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert environment(app=app)["app-git"] == {"commit": commit, "modified": False}
    (app / "app.py").write_text("2")
    found = environment(app=app)
    assert found["app-git"] == {"commit": commit, "modified": True}
    assert found["git"] != found["app-git"]
