"""Three ClientApps as a newcomer to Flower writes them, for NumPy, PyTorch and scikit-learn, on tiny data."""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

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


def torch_app() -> ClientApp:
    app = ClientApp()

    def load(message: Message, context: Context) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
        model = torch.nn.Linear(2, 2)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        x, y = data(context)
        return model, torch.tensor(x, dtype=torch.float32), torch.tensor(y)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, x, y = load(message, context)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(5):
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return reply(message, ArrayRecord(model.state_dict()), train_loss=loss.item())

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, x, y = load(message, context)
        with torch.no_grad():
            return reply(message, loss=torch.nn.functional.cross_entropy(model(x), y).item())

    return app


def torch_arrays() -> ArrayRecord:
    torch.manual_seed(0)
    return ArrayRecord(torch.nn.Linear(2, 2).state_dict())


def sklearn_app() -> ClientApp:
    app = ClientApp()

    def load(message: Message) -> LogisticRegression:
        model = LogisticRegression(max_iter=3, warm_start=True)
        model.classes_ = np.array([0, 1])
        model.coef_, model.intercept_ = message.content.array_records["arrays"].to_numpy_ndarrays()
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, (x, y) = load(message), data(context)
        with warnings.catch_warnings():
            # Three steps are no convergence, and are not meant to be.
            warnings.simplefilter("ignore")
            model.fit(x, y)
        trained = ArrayRecord([model.coef_, model.intercept_])
        return reply(message, trained, train_loss=float(log_loss(y, model.predict_proba(x))))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, (x, y) = load(message), data(context)
        return reply(message, loss=float(log_loss(y, model.predict_proba(x), labels=[0, 1])))

    return app


def sklearn_arrays() -> ArrayRecord:
    return ArrayRecord([np.zeros((1, 2)), np.zeros(1)])
