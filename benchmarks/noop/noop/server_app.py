"""Sends rounds of messages over whatever grid it is given, and times them."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    run = context.run_config
    while len(list(grid.get_node_ids())) < int(run["num-clients"]):
        time.sleep(0.1)
    node_ids = sorted(grid.get_node_ids())
    share = int(run["num-params"]) // 8
    content = RecordDict(
        {"arrays": ArrayRecord({f"w{i}": Array(np.zeros(share, np.float32)) for i in range(8)})}
    )
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(int(run["num-rounds"])):
        chosen = rng.choice(len(node_ids), int(run["per-round"]), replace=False)
        started = time.perf_counter()
        replies = list(grid.send_and_receive([Message(content, node_ids[i], "train") for i in chosen]))
        seconds.append(time.perf_counter() - started)
        assert len(replies) == len(chosen)
        assert not any(reply.has_error() for reply in replies)
    Path(str(run["result"])).write_text(json.dumps(seconds), encoding="utf-8")
