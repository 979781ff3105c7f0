"""Real processes on loopback: they start, answer, keep state, end as told, and leave nothing."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.deployment.leftovers import left_running

pytestmark = pytest.mark.slow


def command(app: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "hedgerow.sim", "deploy", "local", str(app), "--nodes", "2", *options]


def deploy(app: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(app, *options), capture_output=True, text=True, check=False, timeout=600)


def result(folder: Path) -> list[list[dict[str, Any]]]:
    out: list[list[dict[str, Any]]] = json.loads((folder / "result.json").read_text())
    return out


def home_of(output: str) -> Path:
    """Return the deployment's private folder, from the command that was shown."""
    found = re.search(r"--run-config (\S+)/run-config-0.toml", output)
    assert found, output
    return Path(found[1])


def test_an_app_runs_with_tls_and_keeps_its_state(tiny_app: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = deploy(
        tiny_app, "--tls", "--out", str(out), "--keep-logs", "-c", "rounds=2", "--node-config", "1: rank=7"
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "2 SuperNodes (TLS, authenticated)" in shown.stdout
    ranks = (-1, 7)
    assert result(out) == [[{"n": n, "partition": i, "rank": ranks[i]} for i in range(2)] for n in (1, 2)]
    (logs,) = out.glob("logs-*")
    assert {path.name for path in logs.iterdir()} == {"superlink.log", "node0.log", "node1.log"}
    assert left_running(home_of(shown.stdout)) == []
    assert not home_of(shown.stdout).exists()


def test_a_run_that_fails_exits_with_1(tiny_app: Path) -> None:
    shown = deploy(tiny_app, "-c", "fail=true")
    assert shown.returncode == 1
    assert "finished:failed" in shown.stderr
    assert left_running(home_of(shown.stdout)) == []


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_deployment_leaves_nothing(tiny_app: Path, sign: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        command(tiny_app, "-c", "pause=600"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background jobs, and so their children, are started deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if "ROUND 0" in line:
            break
    time.sleep(5)  # until nodes are at work
    process.send_signal(sign)
    shown += process.communicate(timeout=120)[0]
    assert process.returncode == code, shown
    assert left_running(home_of(shown)) == []
    assert not home_of(shown).exists()
