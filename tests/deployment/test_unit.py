"""What the systemd unit takes from a node: enough, and nothing that it needs."""

import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from tests.deployment import confined
from tests.deployment.test_apps import APPS

from hedgerow.sim import Deployment
from hedgerow.sim.deploy import supernode
from hedgerow.sim.deploy.processes import program

UNIT = Path(__file__).parents[2] / "deploy" / "supernode@.service"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")


@needs_systemd
def test_systemds_own_judgement_of_the_unit_is_at_most_2(tmp_path: Path) -> None:
    instance = shutil.copy(UNIT, tmp_path / "supernode@node0.service")
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20", str(instance)]
    judged = subprocess.run(command, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout


@pytest.mark.slow
@needs_systemd
@pytest.mark.skipif(find_library("seccomp") is None, reason="no libseccomp here")
def test_a_run_completes_within_the_units_system_calls_and_address_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = program("flower-supernode")
    wrapped = tmp_path / "flower-supernode"
    wrapped.write_text(f'#!/bin/sh\nexec {sys.executable} {confined.__file__} {UNIT} {real} "$@"\n')
    wrapped.chmod(0o755)
    monkeypatch.setattr(supernode, "program", lambda name: str(wrapped))
    with Deployment(APPS / "sd-feel", 2, tls=True) as deployment:
        for node in deployment.nodes:
            for pid in (node.pid, *node.descendants()):
                assert "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
        plan = deployment.plan(
            "num-clients=2 num-servers=2 topology=path tau1=2 tau2=1 iterations=4", f"output-dir='{tmp_path}'"
        )
        assert deployment.run(plan, timeout=300).exit_code == 0


@needs_systemd
@pytest.mark.skipif(find_library("seccomp") is None, reason="no libseccomp here")
def test_what_the_unit_forbids_fails_and_training_does_not() -> None:
    code = """
import os, socket, torch
for forbidden in (
    lambda: os.chroot("/tmp"),
    lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    lambda: os.sched_setaffinity(0, {0}),
):
    try:
        forbidden()
    except OSError:
        continue
    raise SystemExit("allowed")
model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.Flatten(), torch.nn.Linear(108, 2))
model(torch.randn(4, 1, 8, 8)).sum().backward()
"""
    command = [sys.executable, confined.__file__, str(UNIT), sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert ended.returncode == 0, ended.stderr
