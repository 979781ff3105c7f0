"""Edge servers on SuperNodes of their own, with TLS and authentication: the bits of the in-process engine."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.deployment.leftovers import left_running

from hedgerow.sim import Deployment, read_rounds

pytestmark = pytest.mark.slow

APP = Path(__file__).parents[2] / "flower_apps" / "sd-feel"
ROLES = [{"role": "client"}] * 2 + [{"role": "edge"}] * 2
CONFIG = (
    "edge-servers=nodes num-servers=2 topology=path tau1=2 tau2=1 alpha=2 iterations=4 batch-size=5 "
    "model=logistic evaluate-every=1"
)


def test_two_clients_and_two_edge_servers_end_with_the_bits_of_the_engine(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(APP), "--nodes", "4"]
    subprocess.run([*command, "-c", f"{CONFIG} output-dir={here}"], check=True, timeout=240)
    with Deployment(APP, 4, tls=True, node_config=ROLES) as deployment:
        end = deployment.run(deployment.plan(CONFIG, f"output-dir={there}"), timeout=900)
        logs = "\n".join(node.log()[-2000:] for node in deployment.nodes)
    assert end.exit_code == 0, f"{end}\n{logs}"
    (ours,), (theirs,) = here.iterdir(), there.iterdir()
    with np.load(ours / "model.npz") as a, np.load(theirs / "model.npz") as b:
        assert [name for name in a.files if not np.array_equal(a[name], b[name])] == []
    records = read_rounds(ours), read_rounds(theirs)
    for record in (*records[0], *records[1]):
        del record["wall_seconds"]
    assert records[0] == records[1]
    # Two clients and two edge servers, and two gossip steps.
    assert [record["sent"] for record in records[0]] == [0, 8, 8]
    assert json.loads((theirs / "summary.json").read_text())["lost-replies"] == {}
    assert left_running(deployment.home) == []
