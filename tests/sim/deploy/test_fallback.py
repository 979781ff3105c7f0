"""A node with other SuperLinks to fall back to: whom it dials, in which order, and how it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hedgerow.sim.deploy.fallback import superlinks

# In the place of Flower's SuperNode: loses the first SuperLink, is refused by the second, is the third's.
NODE = """#!/bin/sh
echo "$@" >> "$TOLD"
case "$*" in
    *first:1) sleep 60 & exit 75 ;;
    *second:2) exit 1 ;;
    *wrong:4) exit 2 ;;
esac
trap 'echo goodbye >> "$TOLD"; exit 0' TERM
while true; do sleep 0.05; done
"""
DIALS = """
import os, sys
from hedgerow.sim.deploy import fallback
sys.executable, fallback._PAUSE, fallback._GOODBYE = sys.argv[1], 0.1, 0.1
sys.exit(fallback.dial_in_turn(sys.argv[2].split(","), sys.argv[3:], os.environ))
"""


def dialling(tmp_path: Path, addresses: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    program, told = tmp_path / "node", tmp_path / "told"
    program.write_text(NODE)
    program.chmod(0o755)
    told.touch()
    command = [sys.executable, "-c", DIALS, str(program), addresses, *arguments]
    return subprocess.Popen(command, env={**os.environ, "TOLD": str(told)}), told


def wait_for(text: str, told: Path) -> None:
    end = time.monotonic() + 30.0
    while text not in told.read_text():
        assert time.monotonic() < end, told.read_text()
        time.sleep(0.02)


def test_the_next_superlink_is_dialled_until_the_process_is_told_to_end(tmp_path: Path) -> None:
    one, told = dialling(tmp_path, "first:1,second:2,third:3", "--port", "9")
    try:
        wait_for("third:3", told)
        time.sleep(0.2)
        one.send_signal(signal.SIGTERM)
        assert one.wait(10.0) == 0
    finally:
        one.kill()
    options = "-m hedgerow.sim.deploy.fallback --port 9 --max-wait-time 60 --superlink"
    dialled = [f"{options} {address}" for address in ("first:1", "second:2", "third:3")]
    assert told.read_text().splitlines() == [*dialled, "goodbye"]


def test_a_node_dials_its_own_superlink_first_and_each_once() -> None:
    arguments = ["--superlink", "10.0.0.1:8000", "--port", "1"]
    assert superlinks(arguments, "hub.local:1, [::1]:2,10.0.0.1:8000") == [
        "10.0.0.1:8000",
        "hub.local:1",
        "[::1]:2",
    ]
    assert superlinks(["--superlink=a:1"], "b:2") == ["a:1", "b:2"]
