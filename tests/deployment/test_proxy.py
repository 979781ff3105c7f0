"""Who may submit runs: nodes reach their part of the SuperLink through a proxy, which has nothing else."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.deployment.test_apps import APPS

from hedgerow.sim.deploy.launcher import CONNECTION, Deployment
from hedgerow.sim.deploy.processes import Program, free_ports
from hedgerow.sim.deploy.supernode import SuperNode

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
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
            "num-clients=2 num-servers=2 topology=path tau1=2 tau2=1 iterations=4",
            f"output-dir='{tmp_path}'",
        )
        assert deployment.run(plan, timeout=300).exit_code == 0
