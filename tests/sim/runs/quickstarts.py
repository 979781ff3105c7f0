"""A ClientApp as a newcomer to Flower writes it, for NumPy; tests/sim/torch_app has one of PyTorch."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

Data = tuple[NDArray[Any], NDArray[Any]]


def data(context: Context) -> Data:
    """Two Gaussian classes, twenty examples a node."""
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    labels = np.arange(20) % 2
    return rng.normal(labels[:, None] * 2.0 - 1.0, 1.0, (20, 2)), labels


def reply(message: Message, arrays: ArrayRecord | None = None, **metrics: float) -> Message:
    records: dict[str, Any] = {"metrics": MetricRecord({"num-examples": 20, **metrics})}
    if arrays is not None:
        records["arrays"] = arrays
    return Message(RecordDict(records), reply_to=message)


def numpy_app(mods: Sequence[Any] = ()) -> ClientApp:
    app = ClientApp(mods=list(mods))

    def loss(weights: NDArray[Any], x: NDArray[Any], y: NDArray[Any]) -> float:
        return float(np.mean((x @ weights - (2 * y - 1)) ** 2))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        x, y = data(context)
        (weights,) = message.content.array_records["arrays"].to_numpy_ndarrays()
        for _ in range(5):
            weights = weights - 0.1 * x.T @ (x @ weights - (2 * y - 1)) / len(y)
        # Counts its rounds, as an app with a state of its own does.
        visits = context.state.metric_records.setdefault("visits", MetricRecord({"n": 0}))
        visits["n"] = n = cast(int, visits["n"]) + 1
        return reply(message, ArrayRecord([weights]), train_loss=loss(weights, x, y), visits=n)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        (weights,) = message.content.array_records["arrays"].to_numpy_ndarrays()
        return reply(message, loss=loss(weights, *data(context)))

    return app


def numpy_arrays() -> ArrayRecord:
    return ArrayRecord([np.zeros(2)])
