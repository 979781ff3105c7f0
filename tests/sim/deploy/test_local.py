"""A run on a deployment of its own."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from hedgerow.sim import AppSpec, plan_run
from hedgerow.sim.deploy import local
from hedgerow.sim.deploy.local import deploy_local


def test_nodes_read_and_import_what_the_run_config_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config: dict[str, bool | int | float | str] = {"data-dir": "", "dataset": "mnist", "model": "mlp"}
    spec = AppSpec("tiny-app", tmp_path / "app", config, {}, None)
    monkeypatch.chdir(tmp_path)
    asked: list[object] = []

    class AskedError(Exception):
        pass

    def note(*_: object, node_config: object, **__: object) -> None:
        asked.append(node_config)
        raise AskedError

    monkeypatch.setattr(local, "Deployment", note)
    plan = plan_run(spec, ["data-dir=mine dataset=my.data:load model=my.model:build"], num_nodes=2)
    for own in ([{}, {"data-dir": "/own"}], None):
        with pytest.raises(AskedError):
            deploy_local(spec, plan, node_config=own)
    mine = {"data-dir": str(tmp_path / "mine"), "allow-imports": "my.data:load,my.model:build"}
    assert asked == [[mine, {**mine, "data-dir": "/own"}], [mine, mine]]
    with pytest.raises(AskedError):
        deploy_local(spec, plan_run(spec, ["model=my.model:build"], num_nodes=2), own_data=True)
    assert asked[-1] == [{}, {}]


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
