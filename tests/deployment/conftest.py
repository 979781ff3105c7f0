"""One torch thread on both sides of every comparison; a small app without torch, which starts in a second."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.sim.tiny_app import write_package

from hedgerow.sim.deploy.launcher import THREADS

CONFIG = """
rounds = 1
pause = 0.0
fail = false
output-dir = "runs"
"""

CLIENT_APP = """
import time

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def count(message: Message, context: Context) -> Message:
    calls = context.state.metric_records.setdefault("calls", MetricRecord({"n": 0}))
    calls["n"] += 1
    time.sleep(context.run_config["pause"])
    config = context.node_config
    answer = {"n": calls["n"], "partition": config["partition-id"], "rank": config.get("rank", -1)}
    return Message(RecordDict({"answer": MetricRecord(answer)}), reply_to=message)
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
    config = context.run_config
    if config["fail"]:
        raise RuntimeError("asked to fail")
    rounds = []
    for _ in range(config["rounds"]):
        while len(nodes := sorted(grid.get_node_ids())) < 2:
            time.sleep(0.2)
        print("ROUND", len(rounds), flush=True)
        replies = grid.send_and_receive([Message(RecordDict(), node, "query") for node in nodes], timeout=120)
        answers = [dict(reply.content["answer"]) for reply in replies if reply.has_content()]
        rounds.append(sorted(answers, key=lambda answer: answer["partition"]))
    folder = Path(config["output-dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(rounds))
"""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The last bits of a loop over one node depend on how many threads torch has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(THREADS, "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_app(tmp_path: Path) -> Path:
    """The app's folder: each round it asks every node how often it was asked before."""
    return write_package(tmp_path / "app", "tinyapp", CONFIG, CLIENT_APP, SERVER_APP, "tiny-app")
