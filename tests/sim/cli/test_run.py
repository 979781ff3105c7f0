"""``hedgerow run``: what runs, and what it exits with."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from tests.sim.cli.command_line import APPS, hedgerow
from tests.sim.tiny_app import MakeApp, result

from hedgerow.sim.runs import follow


def test_the_command_line_runs_an_app(make_app: MakeApp, tmp_path: Path) -> None:
    home = make_app()
    shown = hedgerow("run", home, "--nodes", "3", "--strict", "-c", "output-dir=out", "-c", "lr=1")
    assert shown.exit_code == 0, shown.output
    np.testing.assert_allclose(result(tmp_path / "out")["arrays"], [4.0] * 3)


def test_an_app_that_fails_exits_with_1(make_app: MakeApp) -> None:
    shown = hedgerow("run", make_app(), "-c", "fail=true")
    assert shown.exit_code == 1
    assert 'raise RuntimeError("asked to fail")' in shown.stderr
    assert "the app tiny-app raised this, not Hedgerow" in shown.stderr


def test_a_run_that_diverges_exits_with_1_and_one_error(tmp_path: Path) -> None:
    small = "num-clients=2 num-servers=1 iterations=2 tau1=1 tau2=1 topology=complete model=logistic"
    wild = "learning-rate=1e20 max-update-norm-ratio=0 max-loss-ratio=1000"
    shown = hedgerow("run", APPS / "sd_feel", "-c", f"{small} {wild} quiet=true output-dir='{tmp_path}'")
    assert shown.exit_code == 1, shown.output
    (line,) = [line for line in shown.stderr.splitlines() if "diverges" in line]
    assert line.startswith("Run failed: Round ")
    assert not list(tmp_path.glob("*/summary.json"))


TINY = "num-clients=2 num-servers=1 iterations=2 tau1=1 tau2=1 topology=complete model=logistic"


def test_the_commands_that_a_run_ends_with_run_a_second_time_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow.FollowServer, "serve", lambda _: None)
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    for _ in range(2):
        shown = hedgerow("run", "sd-feel", "-q", "-c", TINY)
        assert shown.exit_code == 0, shown.output
    *_, report, watch, plot = shown.stdout.rstrip().splitlines()
    for line in (report, watch, plot):
        command = line.strip().partition("  ")[0]
        done = hedgerow(*shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)
    for name in ("report", "plot", "table"):
        assert hedgerow(name, "runs").exit_code == 0
        assert hedgerow(name, *Path("runs").iterdir()).exit_code == 0
    # In this process, whatever the app's key said.
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"engine = \W*(&\w+;|&#\w+;)?inprocess", page)
    assert not re.search(r"engine = \W*(&\w+;|&#\w+;)?flower", page)


def test_a_finished_run_says_that_nothing_was_left_and_another_apps_is_refused(
    tmp_path: Path, make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = make_app()
    assert hedgerow("run", "sd-feel", "-q", "-c", TINY, "--output-dir", "out").exit_code == 0
    (folder,) = (tmp_path / "out").iterdir()
    again = hedgerow("run", "sd-feel", "--resume", folder)
    assert again.exit_code == 0, again.output
    assert "The run was already finished: nothing was left to do." in again.stdout
    further = hedgerow("run", "sd-feel", "--resume", folder, "-c", "iterations=3")
    assert further.exit_code == 0, further.output
    assert "already finished" not in further.stdout
    other = hedgerow("run", "ceps", "--resume", folder)
    assert other.exit_code == 2
    assert other.stderr == f"Error: --resume: {folder} is a run of app 'sd_feel', not of 'ceps'\n"
    assert hedgerow("run", own, "--nodes", "3", "-q", "--output-dir", "mine").exit_code == 0
    (mine,) = (file.parent for file in (tmp_path / "mine").glob("*/config.json"))
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps({**config, "app": "other-app"}))
    other = hedgerow("run", own, "--resume", mine)
    assert other.exit_code == 2
    assert "is a run of app 'other-app', not of 'tiny-app'" in other.stderr
