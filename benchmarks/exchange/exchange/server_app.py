"""Sends rounds of a 21,840-parameter model and writes down when everything happened."""

import json
import time
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from hedgerow.sim.runs.packing_grid import PackingGrid
from hedgerow.strategies.inbox import collect
from hedgerow.tasks import build_model
from hedgerow.wire import WHOAMI

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    entered = time.time()
    run = context.run_config
    while len(list(grid.get_node_ids())) < int(run["num-clients"]):
        time.sleep(0.1)
    if run["own-loop"]:
        grid = cast(Grid, PackingGrid(grid))
        list(collect(grid, [Message(RecordDict(), node, WHOAMI) for node in grid.get_node_ids()], 600))
    content = RecordDict({"arrays": ArrayRecord(build_model("lenet", (1, 28, 28), 10, 0).state_dict())})
    rounds = []
    for _ in range(int(run["num-rounds"])):
        messages = [Message(content, node, "train") for node in grid.get_node_ids()]
        pushed = time.time()
        replies = collect(grid, messages, 600) if run["own-loop"] else grid.send_and_receive(messages)
        nodes = [{**reply.content["times"], "arrived": time.time()} for reply in replies]
        rounds.append({"pushed": pushed, "over": time.time(), "nodes": nodes})
    Path(str(run["result"])).write_text(json.dumps({"entered": entered, "rounds": rounds}), encoding="utf-8")
