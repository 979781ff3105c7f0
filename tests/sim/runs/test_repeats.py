"""One seed gives one run of any Flower app: again, with other workers, and after a stop."""

import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy

from hedgerow.clients import BatchClientApp
from hedgerow.sim import FaultModel, Simulation, record_round, simulate
from hedgerow.wire import Call

NODES = 4
DELAYED = FaultModel.from_run_config({"fault-dropout": 0.2, "fault-delay": "exponential:2"})


def drawing_app() -> ClientApp:
    """An app whose handlers draw from all global generators, and that names no round."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        drawn = random.random() + np.random.random() + torch.rand(()).item()  # noqa: NPY002
        arrays = [array + drawn for array in message.content.array_records["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 10, "train_loss": drawn})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, _: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "loss": random.random()})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


# All of Flower's strategies that run on such an app, each sampling half of the nodes.
_SOME: dict[str, Any] = {"fraction_train": 0.5, "min_train_nodes": 2}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    **{
        name: partial(getattr(flower, name), **_SOME)
        for name in ("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedMedian", "FedTrimmedAvg")
    },
    "FedAvgM(0.9)": lambda: flower.FedAvgM(server_momentum=0.9, server_learning_rate=0.5, **_SOME),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1, **_SOME),
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.1, q=0.1, **_SOME),
    "Krum": flower.Krum,
    "DP, fixed": lambda: flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(**_SOME), 0.5, 1.0, 2),
    "DP, adaptive": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        flower.FedAdam(**_SOME), 0.5, 2, clipped_count_stddev=0.5
    ),
}


def run(make: Callable[[], Strategy] = FedAvg, rounds: int = 4, **options: Any) -> Simulation:
    options = {
        "initial_arrays": ArrayRecord([np.zeros(3)]),
        "seed": 7,
        "timeout": 3.0,
        "quiet": True,
        **options,
    }
    return simulate(make, drawing_app(), NODES, num_rounds=rounds, **options)


def bits(done: Simulation) -> Any:
    assert done.result is not None
    arrays = [array.tobytes() for array in done.result.arrays.to_numpy_ndarrays()]
    keys = ("round", "train", "evaluate", "sent", "accepted", "rejected")
    return arrays, [{key: end[key] for key in keys} for end in done.rounds]


@pytest.mark.parametrize(
    ("name", "faults"),
    [(name, faults) for name in STRATEGIES for faults in (None, DELAYED) if not (faults and "adapt" in name)],
    ids=str,
)
def test_a_stopped_run_ends_as_one_that_was_not(name: str, faults: FaultModel | None, tmp_path: Path) -> None:
    make = STRATEGIES[name]
    whole = run(make, faults=faults)
    half = run(make, 2, faults=faults, output_dir=tmp_path, checkpoint_every=1)
    resumed = run(make, faults=faults, resume=half.folder)
    assert bits(resumed) == bits(whole)
    assert not any(end["resumed"] for end in resumed.rounds)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_does_not_matter(workers: int) -> None:
    assert bits(run(workers=workers)) == bits(run())
    assert bits(run(workers=workers, max_in_flight=1)) == bits(run())


@pytest.mark.parametrize("kind", [random.random, np.random.random, lambda: torch.rand(()).item()])
def test_draws_of_a_batched_handler_do_not_depend_on_its_calls(kind: Callable[[], float]) -> None:
    def train(calls: Sequence[Call]) -> list[RecordDict]:
        metrics = [MetricRecord({"num-examples": 10, "loss": kind()}) for _ in calls]
        arrays = [ArrayRecord([np.full(3, metric["loss"])]) for metric in metrics]
        return [RecordDict({"arrays": a, "metrics": m}) for a, m in zip(arrays, metrics, strict=True)]

    def batched(**options: Any) -> Any:
        start = {"initial_arrays": ArrayRecord([np.zeros(3)]), "seed": 7, "num_rounds": 2}
        only = FedAvg(fraction_evaluate=0.0)
        done = simulate(only, BatchClientApp({"train": train}), NODES, quiet=True, **start, **options)
        return bits(done)

    alone = batched(max_in_flight=1)
    assert alone == batched() == batched(workers=2)
    assert len({end["train"]["loss"] for end in alone[1]}) == 2


def test_another_seed_is_another_run() -> None:
    assert bits(run(seed=8)) != bits(run())


def test_the_callers_generators_are_put_back() -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]  # noqa: NPY002
    run()
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]  # noqa: NPY002


def test_a_loop_of_its_own_repeats_too() -> None:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, _: Context) -> None:
        arrays = RecordDict({"arrays": ArrayRecord([np.full(2, random.random())])})
        for number in (1, 2):
            with record_round(grid, number) as metrics:
                asked = [Message(arrays, node_id, "train") for node_id in grid.get_node_ids()]
                replies = list(grid.send_and_receive(asked))
                metrics.train["loss"] = sum(one.content["metrics"]["train_loss"] for one in replies)

    def losses(**options: Any) -> list[Any]:
        done = simulate(app, drawing_app(), NODES, quiet=True, **options)
        return [end["train"]["loss"] for end in done.rounds]

    assert losses() == losses() == losses(workers=2)
    assert losses()[0] != losses()[1]
    assert losses() != losses(seed=1)


class Counting(FedAvg):
    """A strategy of a user: it counts in an object, draws from a generator of its own, and holds a lock."""

    def __init__(self, held: object = None) -> None:
        super().__init__()
        self.counter = Counter()
        self.stream = np.random.default_rng(4)
        self.held = held

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.counter.rounds.append(server_round)
        assert self.counter.rounds == list(range(1, server_round + 1))
        assert arrays is not None
        shift = self.stream.random() * len(self.counter.rounds)
        return ArrayRecord([array + shift for array in arrays.to_numpy_ndarrays()]), metrics


class Counter:
    def __init__(self) -> None:
        self.rounds: list[int] = []


def test_the_state_of_a_users_strategy_is_carried(tmp_path: Path) -> None:
    half = run(Counting, 2, output_dir=tmp_path, checkpoint_every=1)
    assert bits(run(Counting, resume=half.folder)) == bits(run(Counting))


def test_what_cannot_be_carried_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def holding() -> Strategy:
        return Counting(iter([1, 2, 3]))

    half = run(holding, 2, output_dir=tmp_path, checkpoint_every=1)
    assert "attributes of the strategy: held (a list_iterator)" in caplog.text
    caplog.clear()
    resumed = run(holding, resume=half.folder)
    assert "Not restored: held (a list_iterator)." in caplog.text
    assert [end["resumed"] for end in resumed.rounds] == [False, False, True, False]


def test_a_run_says_what_does_not_repeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(**options: Any) -> str:
        caplog.clear()
        folder = run(rounds=1, output_dir=tmp_path, quiet=False, **options).folder
        assert folder is not None
        reasons = json.loads((folder / "summary.json").read_text())["not-repeatable"]
        assert all(reason in caplog.text for reason in reasons)
        return "; ".join(reasons)

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert "operating system" in told()
    assert "threads" in told()
    assert "sets" not in told()
    assert "late" not in told()
    assert "late" in told(real_time=True)
    monkeypatch.delenv("PYTHONHASHSEED")
    assert "sets" in told()
