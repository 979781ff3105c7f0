"""The steps of docs/deploy/tls-and-keys.md with real programs: add a node, renew, revoke a node."""

import json
import sqlite3
import ssl
from contextlib import closing
from pathlib import Path

import pytest

from hedgerow.sim import Deployment, StartError, SuperNode, make_credentials
from hedgerow.sim.deploy.certificates import KeptCA, add_nodes, renew_certificates, revoke_node
from hedgerow.sim.deploy.flower_cli import environment, healthy
from hedgerow.sim.deploy.health import answers
from hedgerow.sim.deploy.launcher import CONNECTION
from hedgerow.sim.deploy.processes import free_ports

pytestmark = pytest.mark.slow


def answered(deployment: Deployment, out: Path) -> list[int]:
    """Run the app once, and return the partitions that answered."""
    assert deployment.run(deployment.plan(f"output-dir={out}"), echo=False, timeout=120).exit_code == 0
    (replies,) = json.loads((out / "result.json").read_text())
    return [reply["partition"] for reply in replies]


def further(deployment: Deployment, keys: Path, partition: int) -> SuperNode:
    """Return a node of one more partition, not started."""
    (port,) = free_ports(1)
    arguments = ["--superlink", deployment.address, "--port", str(port)]
    arguments += ["--root-certificates", str(keys / "ca.crt")]
    arguments += ["--auth-supernode-private-key", str(keys / f"node{partition}")]
    env, log = environment(deployment.home / f"node{partition}"), deployment.logs / f"node{partition}.log"
    return SuperNode(partition, {"partition-id": partition, "num-partitions": 3}, arguments, env, log)


def test_nodes_are_added_and_revoked_and_certificates_renewed_while_a_superlink_keeps_its_state(
    tiny_app: Path, tmp_path: Path
) -> None:
    ca = KeptCA(tmp_path / "ca.key", "correct horse")
    keys = make_credentials(tmp_path / "keys", 2, days=20, keep_ca=ca)
    folder, (health,) = keys.ca.parent, free_ports(1)
    state = tmp_path / "state.db"
    options = ["--database", str(state), "--health-server-address", f"127.0.0.1:{health}"]
    with Deployment(tiny_app, 2, tls=keys, superlink_options=options) as deployment:
        assert answers(f"127.0.0.1:{health}")
        assert answered(deployment, tmp_path / "first") == [0, 1]

        (added,) = add_nodes(folder, 1)
        assert deployment.flwr("supernode", "register", str(added.public), CONNECTION).returncode == 0
        third = further(deployment, folder, 2)
        third.start()
        try:
            third.join(60)
            assert answered(deployment, tmp_path / "added") == [0, 1, 2]

            before = keys.server_certificate.read_bytes()
            renew_certificates(folder, ca, days=365)
            assert keys.server_certificate.read_bytes() != before
            # As docs/deploy/operate.md copies the state, and puts the copy back.
            with closing(sqlite3.connect(state)) as one, closing(sqlite3.connect(tmp_path / "copy")) as other:
                one.backup(other)
            deployment.superlink.stop()
            for file in tmp_path.glob("state.db*"):
                file.unlink()
            (tmp_path / "copy").rename(state)
            deployment.superlink.start()
            port = int(deployment.address.rpartition(":")[2])
            deployment.superlink.wait_until(lambda: healthy(port, keys.ca), 60)
            # The nodes that are online when the app starts: at least two.
            assert len(answered(deployment, tmp_path / "renewed")) >= 2

            served = ssl.get_server_certificate(("127.0.0.1", port), ca_certs=str(keys.ca))
            assert served.strip() == keys.server_certificate.read_text().strip()

            # As the device has it.
            own = added.private.read_bytes()
            revoke_node(folder, 2)
            listed = deployment.flwr("supernode", "list", CONNECTION, "--format", "json")
            there = {str(node["node-id"]) for node in json.loads(listed.stdout)["nodes"]}
            assert str(third.node_id) in there
            gone = deployment.flwr("supernode", "unregister", str(third.node_id), CONNECTION)
            assert gone.returncode == 0, gone.stdout
            assert answered(deployment, tmp_path / "revoked") == [0, 1]
        finally:
            third.stop()
        added.private.write_bytes(own)
        third.start()
        try:
            with pytest.raises(StartError, match="Failed to activate SuperNode"):
                third.join(60)
        finally:
            third.stop()
