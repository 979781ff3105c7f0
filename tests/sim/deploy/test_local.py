"""A run on a deployment of its own."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from hedgerow.sim import AppSpec, plan_run
from hedgerow.sim.deploy import local
from hedgerow.sim.deploy.local import deploy_local


def test_the_log_of_an_app_that_writes_no_run_folder_is_kept_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = AppSpec("strange-app", tmp_path / "app", {}, {}, None)
    deployment = MagicMock()
    deployment.return_value.submit.return_value.lines = ["round 1\n", "done\n"]
    monkeypatch.setattr(local, "Deployment", deployment)
    monkeypatch.setattr(local, "follow", lambda _: 0)
    deploy_local(spec, plan_run(spec, [], num_nodes=2), log_to=tmp_path / "out")
    (file,) = (tmp_path / "out").iterdir()
    assert file.match("strange-app-*.log")
    assert file.read_text() == "round 1\ndone\n"
    assert f"leaves no run folder. Its log: {file}" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "keep", "told"), [(1, False, True), (1, True, False), (0, False, False)])
def test_a_failed_run_whose_logs_are_gone_says_what_keeps_them(
    code: int,
    keep: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = AppSpec("tiny-app", tmp_path / "app", {}, {}, None)
    monkeypatch.setattr(local, "Deployment", MagicMock())
    monkeypatch.setattr(local, "follow", lambda _: code)
    assert deploy_local(spec, plan_run(spec, [], num_nodes=2), keep_logs=keep) == code
    assert ("--keep-logs" in capsys.readouterr().err) == told
