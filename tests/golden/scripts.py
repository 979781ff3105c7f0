"""Rows that no setting can ask for: strategies in ``Compressed``, by ``simulate``."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from table import Row

_NODES, _FEATURES = 5, 40


def play(row: Row, out: Path) -> dict[str, Any]:
    """Run the row's script; its run folder is made under ``out``."""
    {"compressed-fedavg": _fedavg, "compressed-sd-feel": _sd_feel}[row.script](row, out)
    return {}


def _fedavg(row: Row, out: Path) -> None:
    from hedgerow.clients import compress_reply
    from hedgerow.sim import simulate
    from hedgerow.strategies import Compressed

    client = ClientApp(mods=[compress_reply])
    client.train()(_train)
    # Flower draws the order of its nodes from Python's own generator.
    random.seed(0)
    start = ArrayRecord({"weight": Array(np.zeros(_FEATURES, np.float32))})
    strategy = Compressed(FedAvg(fraction_evaluate=0.0), str(row.settings["codec"]))
    simulate(
        strategy, client, _NODES, output_dir=out, quiet=True, initial_arrays=start, num_rounds=4, timeout=60.0
    )


def _train(message: Message, context: Any) -> Message:
    """Take steps of least squares on a node's own rows, as an app of Flower's does."""
    node = int(context.node_config["partition-id"])
    rng = np.random.default_rng(node)
    rows = rng.standard_normal((30, _FEATURES))
    told = rows @ np.linspace(-1, 1, _FEATURES) + 0.1 * node
    weight = np.asarray(message.content["arrays"]["weight"].numpy(), np.float64)
    for _ in range(3):
        weight = weight - 0.05 * rows.T @ (rows @ weight - told) / len(rows)
    arrays = ArrayRecord({"weight": Array(weight.astype(np.float32))})
    metrics = MetricRecord({"num-examples": 30 + node})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def _sd_feel(row: Row, out: Path) -> None:
    from hedgerow import clients
    from hedgerow.sim import find_app, plan_run, simulate
    from hedgerow.strategies import Compressed
    from sd_feel import client_app, server_app

    settings = {key: value for key, value in row.settings.items() if key != "codec"}
    # Of commits whose clients compress only where they are wrapped.
    compressed = getattr(clients, "compressed", lambda app: app)
    spec = find_app(Path(server_app.__file__).parents[1])
    plan = plan_run(spec, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    made = server_app.experiment(server_app.settings.read(plan.run_config))
    simulate(
        Compressed(made.strategy(on_round_end=[]), str(row.settings["codec"])),
        compressed(client_app.app), plan.num_nodes, run_config=plan.run_config, output_dir=out, quiet=True,
        initial_arrays=made.initial_arrays, num_rounds=made.num_rounds, timeout=60.0,
        train_config=ConfigRecord(dict(made.train_config)),
    )  # fmt: skip
