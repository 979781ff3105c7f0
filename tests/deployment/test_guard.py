"""A SuperNode whose server sends an honest app a hostile run config: it is guarded without a policy."""

import json
from pathlib import Path

import pytest
from tests.sim.tiny_app import write_package

from hedgerow.sim import Deployment

pytestmark = pytest.mark.slow

CONFIG = """
dataset = "mnist-5k"
partition = "iid"
num-clients = 1
model = "logistic"
seed = 0
data-dir = ""
output-dir = "runs"
simulated = true
engine = "inprocess"
"""

CLIENT_APP = """
from hedgerow.clients import sd_feel_client

app = sd_feel_client()
"""

SERVER_APP = """
import json
import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    (reply,) = grid.send_and_receive([Message(RecordDict(), nodes[0], "query.whoami")], timeout=120)
    told = {"reason": reply.error.reason} if reply.has_error() else dict(reply.content["whoami"])
    folder = Path(context.run_config["output-dir"])
    folder.mkdir(parents=True)
    (folder / "told.json").write_text(json.dumps(told))
"""


def test_a_supernode_without_a_policy_runs_nothing_that_a_run_config_names(tmp_path: Path) -> None:
    app, victim = tmp_path / "app", tmp_path / "victim"
    write_package(app, "guarded", CONFIG, CLIENT_APP, SERVER_APP, "guarded-app")
    victim.mkdir()
    (victim / "records.csv").write_text("1,2")
    told = {}
    # The folder is the node's own, which a run may read: what stops it is the import path.
    with Deployment(app, 1, node_config=[{"data-dir": str(victim)}]) as deployment:
        for name, dataset in (("honest", "mnist-5k"), ("hostile", "shutil:rmtree")):
            out = tmp_path / name
            end = deployment.run(deployment.plan(f"dataset={dataset} output-dir={out}"), timeout=300)
            assert end.exit_code == 0, deployment.nodes[0].log()[-2000:]
            told[name] = json.loads((out / "told.json").read_text())
        log = deployment.nodes[0].log()
    assert told["honest"]["num-examples"] == 4000
    assert (victim / "records.csv").exists()
    assert told["hostile"]["reason"].endswith("dataset: the import path is none that this node allows'>")
    assert str(tmp_path) not in told["hostile"]["reason"]
    assert "shutil:rmtree" in log
