"""A grid is all that a script needs to start a strategy; an identity that Flower set stays."""

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.supercore.task_identity import TaskIdentity

from hedgerow.sim import InProcessGrid
from hedgerow.sim.engine import _compat
from hedgerow.strategies import SDFeel

NOTHING = (None, None, None)


def identity() -> tuple[int | None, int | None, int | None]:
    return TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id


@pytest.fixture(autouse=True)
def no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is none of Flower's, whatever tests before it left."""
    monkeypatch.setattr(_compat, "_borrowers", {})
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)


def client_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trained = ArrayRecord([a + 1.0 for a in message.content.array_records["arrays"].to_numpy_ndarrays()])
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 1, "loss": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def initial() -> ArrayRecord:
    return ArrayRecord([np.zeros(3)])


def a_message(grid: InProcessGrid) -> Message:
    return Message(RecordDict({"config": ConfigRecord({})}), grid.get_node_ids()[0], "evaluate")


@pytest.mark.parametrize("make", [FedAvg, SDFeel])
def test_a_strategy_starts_on_a_grid_with_no_extra_step(make: Callable[[], Strategy]) -> None:
    result = make().start(grid=InProcessGrid(client_app(), 5), initial_arrays=initial(), num_rounds=2)
    assert (result.arrays["0"].numpy() > 0).all()
    assert result.evaluate_metrics_clientapp[2]["loss"] == 0.5


def test_the_identity_ends_with_the_block_and_comes_back_with_use() -> None:
    with InProcessGrid(client_app(), 2, seed=4) as grid:
        assert identity() == (5, 1, 1)
    assert identity() == NOTHING
    a_message(grid)
    assert identity() == (5, 1, 1)
    grid.close()
    grid.close()
    assert identity() == NOTHING


def test_flowers_own_identity_stays() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 77, 12, 9
    with InProcessGrid(client_app(), 2) as grid:
        assert len(grid.send_and_receive([a_message(grid)])) == 1
        assert identity() == (77, 12, 9)
    assert identity() == (77, 12, 9)


def test_messages_are_of_the_run_that_they_are_pushed_to() -> None:
    with InProcessGrid(client_app(), 2, seed=1) as outer:
        message = a_message(outer)
        with InProcessGrid(client_app(), 2, seed=8) as inner:
            (answer,) = inner.send_and_receive([a_message(inner)])
            assert answer.metadata.run_id == inner.run.run_id == 9
        assert TaskIdentity.run_id == 2
        (answer,) = outer.send_and_receive([message])
        assert answer.metadata.run_id == outer.run.run_id == 2
    assert identity() == NOTHING
