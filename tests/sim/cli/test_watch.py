"""``hedgerow watch``: it says where, serves until Ctrl-C, and leaves the run as it is."""

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim.runs import follow

WriteRun = Callable[..., Path]


def test_it_serves_until_it_is_interrupted(write_run: WriteRun) -> None:
    folder = write_run("run", [2.0, 1.0])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    process = subprocess.Popen(
        [sys.executable, "-m", "hedgerow.sim", "watch", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A shell has its background jobs, and all that they start, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith(f"Watching {folder} at http://127.0.0.1:")
        port = int(said.partition("127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/")
        assert b"loss over rounds" in connection.getresponse().read()
        # With a page that follows.
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "Stopped watching; the run is not affected\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_before_the_first_run_it_waits_for_it(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow.FollowServer, "serve", lambda _: None)
    waits = iter([(tmp_path / "runs").mkdir, lambda: write_run("runs/first", [2.0])])
    monkeypatch.setattr(time, "sleep", lambda _: next(waits)())
    said = hedgerow("watch")
    assert said.exit_code == 0, said.output
    assert said.stderr == f"Waiting for the first run in {tmp_path / 'runs'} (Ctrl-C ends it)\n"
    assert said.stdout.startswith(f"Watching {tmp_path / 'runs/first'} at ")


def test_waiting_ends_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", interrupted)
    said = hedgerow("watch")
    assert said.exit_code == 130
    assert said.stderr.endswith("Stopped waiting: there is no run yet\n")


def test_the_newest_run_is_followed(
    write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(follow.FollowServer, "serve", lambda _: None)
    assert "does not exist" in hedgerow("watch", "runs").stderr
    old, new = write_run("runs/old", [2.0]), write_run("runs/sweep/a/seed-0", [2.0])
    os.utime(old / "config.json", (1e9, 1e9))
    os.utime(old / "rounds.jsonl", (1e9, 1e9))
    for arguments, followed in (((), new), (("runs",), new), ((old, new), new), ((old,), old)):
        said = hedgerow("watch", *arguments)
        assert said.exit_code == 0, said.output
        assert said.stdout.startswith(f"Watching {followed} at "), arguments
