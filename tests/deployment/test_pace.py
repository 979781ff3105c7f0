"""Nodes that ask often survive a SuperLink that is killed and started again."""

import time
from pathlib import Path

import pytest

from hedgerow.sim import Deployment
from hedgerow.sim.deploy.flower_cli import healthy

pytestmark = pytest.mark.slow


def test_nodes_go_on_after_their_superlink_was_killed_and_started_again(
    tiny_app: Path, tmp_path: Path
) -> None:
    database = ["--database", str(tmp_path / "state.db")]
    with Deployment(tiny_app, 2, superlink_options=database) as deployment:
        pids = [node.pid for node in deployment.nodes]
        assert deployment.run(deployment.plan("rounds=1"), echo=False, timeout=240).exit_code == 0
        deployment.superlink.kill()
        time.sleep(5)
        deployment.superlink.start()
        port = int(deployment.address.rpartition(":")[2])
        deployment.superlink.wait_until(lambda: healthy(port), 60)
        again = deployment.run(deployment.plan("rounds=1"), echo=False, timeout=300)
        assert again.exit_code == 0
        assert [node.pid for node in deployment.nodes] == pids
        assert all(node.running for node in deployment.nodes)
