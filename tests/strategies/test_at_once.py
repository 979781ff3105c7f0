"""Exchanges in columns come to what the same exchanges in messages do."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict

from hedgerow.clients import BatchClientApp, LocalTask, sd_feel_client, whoami
from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import FedAvg, RoundEnd, SDFeel
from hedgerow.strategies.vectors import DeviceRows
from hedgerow.wire import Call, ColumnHandler, Delivery, InColumns, to_record

NODES = 6


class App(BatchClientApp):
    """Answers in messages and in columns, and says which it was asked for."""

    def __init__(self, nodes: "Nodes") -> None:
        super().__init__({"train": nodes.messages, "query.whoami": whoami(lambda context: 10)})
        self.nodes = nodes

    def column_handler(self, message_type: str) -> ColumnHandler | None:
        return self.nodes.columns if message_type == "train" else None


class Nodes:
    """Nodes whose replies are those of a table, in messages and in columns."""

    def __init__(self, spoilt: dict[int, dict[str, Any]], tensors: bool = False) -> None:
        self.spoilt = spoilt
        self.tensors = tensors  # Whether rows are what they are on a GPU.
        self.asked: list[str] = []
        self.app = App(self)

    def one(self, node: int, content: RecordDict) -> tuple[np.ndarray, dict[str, float]]:
        config, sent = content["config"], content["arrays"]["w"].numpy()
        w = sent + np.float32(0.1) * (node - config["server-round"])
        metrics = {
            "num-examples": 10 + node,
            "num-steps": config["local-steps"],
            "train-loss": 1.0 / (1 + node),
        }
        spoilt = dict(self.spoilt.get(node, {}))
        w = w * spoilt.pop("times", 1.0)
        if spoilt.pop("raises", False):
            raise ValueError("no data")
        return w.astype(np.float32), metrics | spoilt

    def messages(self, calls: Sequence[Call]) -> list[RecordDict | Exception]:
        self.asked.append("messages")
        answers: list[RecordDict | Exception] = []
        for call in calls:
            try:
                w, metrics = self.one(call.partition_id, call.content)
            except ValueError as error:
                answers.append(error)
                continue
            reported: Any = MetricRecord(metrics)
            answers.append(RecordDict({"arrays": to_record({"w": w}), "metrics": reported}))
        return answers

    def columns(self, deliveries: Sequence[Delivery]) -> InColumns:
        self.asked.append("columns")
        found = [
            self.one(int(context.node_config["partition-id"]), group.content)
            for group in deliveries
            for context in group.contexts
        ]
        metrics = {key: np.array([one[key] for _, one in found]) for key in found[0][1]}
        rows = np.stack([w for w, _ in found])
        return InColumns(torch.from_numpy(rows) if self.tensors else rows, metrics)


def played(
    spoilt: dict[int, dict[str, Any]], at_once: bool, workers: int = 1, tensors: bool = False, **options: Any
) -> tuple[Any, ...]:
    nodes, ends = Nodes(spoilt, tensors), list[RoundEnd]()
    strategy = SDFeel(
        num_servers=3, tau1=2, tau2=2, min_available_nodes=NODES, fraction_evaluate=0.0,
        on_round_end=[ends.append], **options,
    )  # fmt: skip
    never = patch.object(InProcessGrid, "columns", lambda *asked: None)
    with InProcessGrid(nodes.app, NODES, workers=workers) as grid, flower_identity(1):
        if not at_once:
            never.start()
        try:
            start = to_record({"w": np.linspace(-1, 1, 5, dtype=np.float32)})
            strategy.start(grid, start, num_rounds=6)
        finally:
            if not at_once:
                never.stop()
    # What is asked of a worker is noted there.
    assert set(nodes.asked) == (set() if workers > 1 else {"columns" if at_once else "messages"})
    rounds = [(end.train, end.rejected, end.accepted, end.sim_seconds, end.by_link) for end in ends]
    transfers = sorted(map(repr, strategy.ledger.transfers))
    return [w["w"].numpy().tobytes() for w in strategy.server_models()], rounds, transfers


rows_are_wrong = pytest.mark.parametrize(
    "spoilt",
    [
        {},
        {2: {"times": np.nan}},
        {4: {"times": 1e9}},
        {1: {"num-examples": -1}},
        {0: {"train-loss": np.inf}, 5: {"times": np.inf}},
        {3: {"num-examples": 2**60}},
        {1: {"num-examples": 40_000}},
    ],
)
options_differ = pytest.mark.parametrize(
    "options", [{}, {"aggregation": "median"}, {"participation": 0.7, "seed": 3}]
)


@rows_are_wrong
@options_differ
def test_rows_that_are_wrong_cost_themselves_alone_as_in_messages(
    spoilt: dict[int, dict[str, Any]], options: dict[str, Any]
) -> None:
    assert played(spoilt, True, **options) == played(spoilt, False, **options)


@rows_are_wrong
@options_differ
def test_rows_that_stay_on_a_device_come_to_the_bits_of_those_on_the_host(
    spoilt: dict[int, dict[str, Any]], options: dict[str, Any]
) -> None:
    assert played(spoilt, True, tensors=True, **options) == played(spoilt, True, **options)


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a run that reads a row on the host."""

    def copied(rows: DeviceRows, at: Any) -> None:
        raise AssertionError(f"row {at} was copied")

    monkeypatch.setattr(DeviceRows, "__getitem__", copied)


@pytest.mark.usefixtures("stays")
def test_the_mean_copies_no_row_to_the_host() -> None:
    played({}, True, tensors=True)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("stays")
def test_models_that_train_on_a_gpu_stay_there_until_their_mean() -> None:
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 8, generator=stream).cuda(), torch.randint(0, 3, (60,), generator=stream).cuda()
    net = torch.nn.Linear(8, 3).cuda()

    def task(context: Context) -> LocalTask:
        return LocalTask(net, x, y, np.arange(10) + 10 * int(context.node_config["partition-id"]))

    def trained(columns: bool) -> tuple[np.ndarray, list[str]]:
        strategy, where = FedAvg(min_available_nodes=NODES, fraction_evaluate=0.0, local_steps=2), list[str]()
        in_columns = InProcessGrid.columns

        def answer(grid: InProcessGrid, *asked: Any) -> InColumns | None:
            found = in_columns(grid, *asked) if columns else None
            where.extend([found.rows.device.type] if found and isinstance(found.rows, torch.Tensor) else [])
            return found

        config = ConfigRecord({"learning-rate": 0.1, "batch-size": 5, "seed": 0})
        start = ArrayRecord({key: value.cpu() for key, value in net.state_dict().items()})
        with (
            InProcessGrid(sd_feel_client(task), NODES) as grid,
            flower_identity(1),
            patch.object(InProcessGrid, "columns", answer),
        ):
            strategy.start(grid, start, num_rounds=2, train_config=config)
        arrays = strategy.current_arrays()
        assert arrays is not None
        return np.concatenate([array.numpy().ravel() for array in arrays.values()]), where

    (stayed, there), (sent, _) = trained(columns=True), trained(columns=False)
    assert there == ["cuda", "cuda"]
    np.testing.assert_allclose(stayed, sent, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spoilt", [{}, {4: {"times": 1e9}}])
@pytest.mark.parametrize("options", [{}, {"participation": 0.5, "seed": 3}])
def test_workers_answer_in_columns_what_one_process_does(
    spoilt: dict[int, dict[str, Any]], options: dict[str, Any]
) -> None:
    found = []
    in_columns = InProcessGrid.columns

    def columns(self: InProcessGrid, *asked: Any) -> InColumns | None:
        found.append(in_columns(self, *asked))
        return found[-1]

    with patch.object(InProcessGrid, "columns", columns):
        dealt = [played(spoilt, True, workers, **options) for workers in (2, 4)]
    assert len(found) == 2 * 6
    assert None not in found
    assert dealt == [played(spoilt, True, **options)] * 2


class Dying(Nodes):
    """Nodes of which the first to be asked in columns takes its process with it, once."""

    def __init__(self, marker: Path) -> None:
        super().__init__({})
        self.marker = marker

    def columns(self, deliveries: Sequence[Delivery]) -> InColumns:
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return super().columns(deliveries)
        os._exit(1)


def test_where_a_worker_dies_messages_go_and_no_reply_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Dying(tmp_path / "died")
    strategy = FedAvg(min_available_nodes=NODES, fraction_evaluate=0.0, local_steps=2)
    with InProcessGrid(nodes.app, NODES, workers=2) as grid, flower_identity(1):
        strategy.start(grid, to_record({"w": np.zeros(3, np.float32)}), num_rounds=2)
    assert nodes.marker.exists()
    assert "a worker process died" in caplog.text
    assert strategy.report.accepted == NODES


@pytest.mark.parametrize("spoilt", [{3: {"raises": True}}, {3: {"num-steps": 1}}])
def test_where_a_node_fails_or_took_other_steps_messages_go(spoilt: dict[int, dict[str, Any]]) -> None:
    nodes = Nodes(spoilt)
    strategy = FedAvg(min_available_nodes=NODES, fraction_evaluate=0.0, local_steps=2)
    with InProcessGrid(nodes.app, NODES) as grid, flower_identity(1):
        strategy.start(grid, to_record({"w": np.zeros(3, np.float32)}), num_rounds=2)
    assert nodes.asked[:2] == ["columns", "messages"]
    assert strategy.report.accepted == NODES - 1


@pytest.mark.parametrize(
    "engine", [{"strict": True}, {"faults": FaultModel(dropout=0.1)}, {"real_time": True}]
)
def test_what_is_serialised_lost_or_timed_goes_in_messages(engine: dict[str, Any]) -> None:
    nodes = Nodes({})
    strategy = FedAvg(min_available_nodes=NODES, fraction_evaluate=0.0, local_steps=2)
    with InProcessGrid(nodes.app, NODES, **engine) as grid, flower_identity(1):
        strategy.start(grid, to_record({"w": np.zeros(3, np.float32)}), num_rounds=2)
    assert set(nodes.asked) == {"messages"}
