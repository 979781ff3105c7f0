"""``hedgerow deploy``: what it exits with, and what it asks of the deployment."""

from pathlib import Path

import pytest
from tests.sim.cli.command_line import SD_FEEL, hedgerow

from hedgerow.sim.deploy import local
from hedgerow.sim.deploy.processes import StartError
from hedgerow.sim.runs.app import AppSpec


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-c", "nope=1"], "has no such key"),
        (["-c", "fault-dropout=0.1"], "a deployment plays no faults"),
        (["--node-config", "data_dir=/a"], "did you mean 'data-dir'?"),
        (
            ["--nodes", "2", "-c", "num-servers=2", "--node-config", "2: role=hub"],
            "valid partitions are 0 to 1",
        ),
    ],
)
def test_bad_options_exit_with_2(arguments: list[str], text: str) -> None:
    shown = hedgerow("deploy", "local", SD_FEEL, *arguments)
    assert shown.exit_code == 2
    assert text in shown.output


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (lambda: 0, 0),
        (lambda: 1, 1),
        (StartError("no port"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(143), 143),
    ],
)
def test_exit_codes_tell_how_it_ended(ends: object, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def end(spec: AppSpec, plan: object, **options: object) -> int:
        asked.update(options, plan=plan)
        if isinstance(ends, BaseException):
            raise ends
        return ends()  # type: ignore[operator, no-any-return]

    monkeypatch.setattr(local, "deploy_local", end)
    options = [
        "--nodes",
        "3",
        "-c",
        "num-servers=2",
        "--tls",
        "--out",
        "/a/b",
        "--keep-logs",
        "--node-config",
        "role=north",
    ]
    shown = hedgerow("deploy", "local", SD_FEEL, *options)
    assert shown.exit_code == code, shown.output
    assert asked["plan"].run_config["output-dir"] == "/a/b"  # type: ignore[attr-defined]
    assert asked["plan"].run_config["num-clients"] == 3  # type: ignore[attr-defined]
    del asked["plan"]
    assert asked == {"tls": True, "keep_logs": True, "node_config": [{"role": "north"}] * 3}


def test_keys_for_a_lan_are_made_by_a_command(tmp_path: Path) -> None:
    arguments = ["deploy", "keys", str(tmp_path / "keys"), "--nodes", "2", "--host", "192.168.1.10"]
    shown = hedgerow(*arguments)
    assert shown.exit_code == 0
    assert f"register {tmp_path / 'keys' / 'node1.pub'}" in shown.output
    again = hedgerow(*arguments)
    assert again.exit_code == 2
    assert "File exists" in again.output
