"""Who may submit runs: nodes reach their part of the SuperLink by a proxy, operators by an SSH tunnel."""

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.deployment.test_apps import APPS

from hedgerow.sim import Deployment, SuperNode
from hedgerow.sim.deploy.launcher import CONNECTION
from hedgerow.sim.deploy.processes import Program, free_ports

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(NGINX is None, reason="no nginx here")]


class Proxied(Deployment):
    """A deployment whose nodes know the proxy's address alone."""

    proxy = ""

    def _supernode(self, *arguments: Any) -> SuperNode:
        if not self.proxy:
            self._start_proxy()
        node = super()._supernode(*arguments)
        node.command = [self.proxy if word == self.address else word for word in node.command]
        return node

    def _start_proxy(self) -> None:
        (port,) = free_ports(1)
        self.proxy = f"127.0.0.1:{port}"
        text = CONFIG.read_text(encoding="utf-8").replace("127.0.0.1:8000", self.address)
        text = text.replace("192.168.1.10:8443", self.proxy).replace("/etc/hedgerow", str(self.home))
        config, log = self.home / "nginx.conf", self.home / "logs" / "nginx.log"
        config.write_text(text, encoding="utf-8")
        settings = f"daemon off; pid {self.home}/nginx.pid; error_log stderr;"
        command = [str(NGINX), "-c", str(config), "-g", settings]
        proxy = Program("nginx", command, self._env("cli"), log)
        proxy.start()
        self._signals.callback(proxy.stop)


@contextmanager
def tunnelled(deployment: Deployment) -> Iterator[str]:
    """Forward a port to the SuperLink's through an SSH server; yield where. Its own without such a server."""
    if SSHD is None:
        yield deployment.address
        return
    folder, (door, port) = deployment.home / "ssh", free_ports(2)
    folder.mkdir(mode=0o700)
    for name in ("host", "operator"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    options = {
        "HostKey": folder / "host", "AuthorizedKeysFile": folder / "operator.pub", "PidFile": "none",
        "StrictModes": "no", "UsePAM": "no", "ListenAddress": "127.0.0.1",
    }  # fmt: skip
    settings = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    server = [SSHD, "-D", "-e", "-f", "/dev/null", "-p", str(door), *settings]
    client = [
        "ssh",
        "-N",
        "-L",
        f"{port}:{deployment.address}",
        "-p",
        str(door),
        "-i",
        str(folder / "operator"),
    ]
    client += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={folder / 'known'}"]
    client += ["-o", "ExitOnForwardFailure=yes", "-o", "IdentitiesOnly=yes", f"{getpass.getuser()}@127.0.0.1"]
    logs = deployment.home / "logs"
    programs = [
        Program(name, command, deployment._env("cli"), logs / f"{name}.log")
        for name, command in (("sshd", server), ("ssh", client))
    ]
    try:
        for program, where in zip(programs, (door, port), strict=True):
            program.start()
            program.wait_until(partial(_listened_on, where), 30.0)
        yield f"127.0.0.1:{port}"
    finally:
        for program in programs:
            program.stop()


def _listened_on(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def told(deployment: Deployment, address: str) -> Iterator[None]:
    """Let ``flwr`` know another address of the SuperLink."""
    file = deployment.home / "cli" / "config.toml"
    before = file.read_text(encoding="utf-8")
    file.write_text(before.replace(deployment.address, address), encoding="utf-8")
    yield
    file.write_text(before, encoding="utf-8")


def test_nodes_work_through_the_proxy_and_nobody_can_submit_a_run_there(tmp_path: Path) -> None:
    with Proxied(APPS / "sd-feel", 2, tls=True) as deployment:
        assert all(deployment.address not in node.command for node in deployment.nodes)

        def flwr(*arguments: str) -> subprocess.CompletedProcess[str]:
            return deployment.flwr(*arguments, timeout=60)

        assert flwr("supernode", "list", CONNECTION).returncode == 0
        with told(deployment, deployment.proxy):
            for refused in (
                ("supernode", "list", CONNECTION),
                ("list", CONNECTION),
                ("run", str(APPS / "sd-feel"), CONNECTION),
            ):
                assert flwr(*refused).returncode != 0
        plan = deployment.plan(
            "num-clients=2 num-servers=2 topology=path tau1=2 tau2=1 iterations=4", f"output-dir='{tmp_path}'"
        )
        with tunnelled(deployment) as address, told(deployment, address):
            assert deployment.run(plan, timeout=300).exit_code == 0
