"""A small foreign Flower App, written into a folder: FedAvg's mean of steps that grow with the partition."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

PYPROJECT = """
[project]
name = "{name}"
version = "1.0.0"
description = "An app for tests"
license = "Apache-2.0"
dependencies = ["flwr>=1.41"]
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"
[tool.flwr.app.config]
"""
CONFIG = """
num-server-rounds = 2
lr = 0.5
fail = false
label = "plain"
output-dir = ""
device = "cpu"
model.width = 3
"""

CLIENT_APP = """
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    step = context.run_config["lr"] * (context.node_config["partition-id"] + 1)
    arrays = [array + step for array in message.content["arrays"].to_numpy_ndarrays()]
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
"""

SERVER_APP = """
import json
import pathlib
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    if config["fail"]:
        raise RuntimeError("asked to fail")
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3)
    initial = ArrayRecord([np.zeros(config["model.width"])])
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=config["num-server-rounds"])
    out = {
        "arrays": result.arrays.to_numpy_ndarrays()[0].tolist(),
        "label": config["label"],
        "device": config["device"],
        "nodes": len(list(grid.get_node_ids())),
    }
    folder = pathlib.Path(config["output-dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(out))
"""


MakeApp = Callable[..., Path]


def write_package(home: Path, package: str, config: str, client: str, server: str, name: str) -> Path:
    """Write a Flower App of two modules."""
    (home / package).mkdir(parents=True)
    (home / "pyproject.toml").write_text(PYPROJECT.format(name=name, package=package) + config)
    for module, text in (("__init__", ""), ("client_app", client), ("server_app", server)):
        (home / package / f"{module}.py").write_text(text)
    return home


def write_app(home: Path, package: str = "tinyapp", extra: str = "") -> Path:
    config = CONFIG.strip() + "\n" + textwrap.dedent(extra)
    return write_package(home, package, config, CLIENT_APP, SERVER_APP, "tiny-app")


def result(folder: Path) -> dict[str, object]:
    out: dict[str, object] = json.loads((folder / "result.json").read_text())
    return out
