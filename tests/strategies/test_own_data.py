"""The server's side of own data: moments of parts make those of the whole, and no node can spoil them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from logging import getLogger
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict

from hedgerow.clients import similarity_free_client
from hedgerow.sim import InProcessGrid
from hedgerow.strategies import Node, OwnNodes, RosterError
from hedgerow.strategies.node_metrics import measured
from hedgerow.strategies.own_data import _moments, pooled
from hedgerow.tasks import moments, num_features
from hedgerow.wire import Ledger, PayloadError


def told(x: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    return len(x), x.mean(axis=0), x.var(axis=0) * len(x)


@pytest.mark.parametrize("shift", [0.0, 1e9])
def test_pooled_moments_are_those_of_all_samples(shift: float) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(shift + i, 1 + i, (n, 3)) for i, n in enumerate((1, 40, 700))]
    mean, std = pooled([told(part) for part in parts])
    everything = np.concatenate(parts)
    assert mean == pytest.approx(everything.mean(axis=0), rel=1e-12)
    # A large mean hides no deviation: nodes standardise in float64.
    assert std == pytest.approx(everything.std(axis=0), rel=1e-6)


def test_a_constant_feature_is_divided_by_one() -> None:
    x = np.column_stack([np.full(5, 0.1, np.float32).astype(np.float64), np.arange(5.0)])
    _, std = pooled([told(x), told(x)])
    assert std[0] == 1.0
    assert std[1] == pytest.approx(np.sqrt(2))


@pytest.mark.parametrize("value", [0.1, 1.7e9 + 0.1, -3e30])
def test_a_constant_has_no_deviation(value: float) -> None:
    found = [moments(np.full((rows, 1), value)) for rows in (1, 999, 100_003)]
    _, std = pooled([(one.count, one.mean, one.squares) for one in found])
    assert std.tolist() == [1.0]


GOOD: dict[str, Any] = {"count": 3, "mean": [0.0, 1.0], "squares": [1.0, 0.0]}


@pytest.mark.parametrize(
    "change",
    [
        {"count": 0},
        {"count": 2.5},
        {"count": 2**60},
        {"mean": [0.0]},
        {"mean": [float("nan"), 0.0]},
        {"mean": [1e31, 0.0]},
        {"squares": [-1.0, 0.0]},
        {"squares": [float("inf"), 0.0]},
        {"squares": [1e62, 0.0]},
        {"squares": 1.0},
    ],
)
def test_statistics_that_cannot_be_are_lost(change: dict[str, Any]) -> None:
    assert _moments(RecordDict({"s": MetricRecord(GOOD)}), 2)[0] == 3
    with pytest.raises(PayloadError):
        _moments(RecordDict({"s": MetricRecord({**GOOD, **change})}), 2)


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": 1.5},
        {"accuracy": -0.1},
        {"auc": 2.0},
        {"loss": 1e31},
        {"num-examples": 0},
        {"loss": [1.0]},
    ],
)
def test_measures_that_cannot_be_are_lost(change: dict[str, Any]) -> None:
    good = {"num-examples": 2, "loss": 0.5, "accuracy": 1.0}
    assert measured(Node(0, 1), RecordDict({"m": MetricRecord(good)})) == good
    with pytest.raises(PayloadError):
        measured(Node(0, 1), RecordDict({"m": MetricRecord({**good, **change})}))


RUN = {"partition": "own", "standardise": "federated", "holdout": 0.5, "seed": 0, "model": "logistic"}


def grid_of(folder: Path, shapes: list[int], silent: Sequence[int] = ()) -> InProcessGrid:
    rng = np.random.default_rng(0)
    for i, features in enumerate(shapes):
        np.savez(folder / f"{i}.npz", x=rng.normal(i, 1, (8, features)), y=np.arange(8) % 2)
    configs = [
        {"data": str(folder / f"{i}.npz"), "share-statistics": i not in silent} for i in range(len(shapes))
    ]
    return InProcessGrid(similarity_free_client(), len(shapes), run_config=RUN, node_configs=configs)


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[InProcessGrid]:
    with grid_of(tmp_path, [3, 3, 3]) as made:
        yield made


def test_the_server_learns_what_samples_look_like(grid: InProcessGrid) -> None:
    nodes = OwnNodes.gather(grid, 3, 10.0, features=num_features)
    assert (nodes.input_shape, nodes.num_classes, nodes.sizes) == ((3,), 2, [4, 4, 4])
    about = nodes.about()
    assert about["nodes"] == {"0": "partition-0", "1": "partition-1", "2": "partition-2"}
    assert about["mean"] == pytest.approx([1.0] * 3, abs=0.7)


def test_a_node_whose_samples_look_otherwise_is_left_out(tmp_path: Path) -> None:
    with grid_of(tmp_path, [3, 5, 3]) as grid:
        nodes = OwnNodes.gather(grid, 3, 10.0, quorum=2, features=num_features)
        assert list(nodes.about()["nodes"]) == ["0", "2"]


@pytest.mark.parametrize("silent", [[0], [1], [0, 1], [0, 1, 2]])
def test_no_node_trains_with_the_statistics_of_others(tmp_path: Path, silent: list[int]) -> None:
    with grid_of(tmp_path, [3, 3, 3], silent=silent) as grid:
        nodes = OwnNodes.gather(grid, 3, 10.0)
        with pytest.raises(RosterError, match=f"{len(silent)} reported none") as refused:
            nodes.standardise(3)
    named = {
        i for i in range(3) if f"node 'partition-{i}': PermissionError: share-stat" in str(refused.value)
    }
    assert named == {*silent}


def test_a_node_that_comes_after_the_statistics_were_pooled_is_named(
    grid: InProcessGrid, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = OwnNodes.gather(grid, 3, 10.0)
    present = nodes._present
    monkeypatch.setattr(nodes, "_present", lambda: present()[:2])
    nodes.standardise(3)
    monkeypatch.setattr(nodes, "_present", present)
    getLogger("flwr").addHandler(caplog.handler)
    try:
        nodes._send_standardisation([node.node_id for node in present()])
        assert "statistics that do not include their data: partition-2\n" in caplog.text
        caplog.clear()
        nodes._send_standardisation([node.node_id for node in present()])
        assert "do not include" not in caplog.text
    finally:
        getLogger("flwr").removeHandler(caplog.handler)


def test_integers_have_no_statistics(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(2):
        np.savez(tmp_path / f"{i}.npz", x=rng.integers(0, 9, (8, 5)), y=np.arange(8) % 2)
    configs = [{"data": str(tmp_path / f"{i}.npz")} for i in range(2)]
    run = {**RUN, "model": "own:ids"}
    with InProcessGrid(similarity_free_client(), 2, run_config=run, node_configs=configs) as grid:
        nodes = OwnNodes.gather(grid, 2, 10.0, features=num_features)
        assert (nodes.dtype, nodes.about().get("mean")) == ("int64", None)


def test_who_lost_what_it_was_told_is_told_again(grid: InProcessGrid) -> None:
    nodes = OwnNodes.gather(grid, 3, 10.0, features=num_features)
    ledger = Ledger()
    nodes._strategy = SimpleNamespace(  # type: ignore[assignment]
        ledger=ledger, federation=SimpleNamespace(gather=lambda _: nodes.roster)
    )
    states = [node.state for node in grid._nodes.values()]
    first = dict(states[0]["told/standardise"])
    states[0].clear()
    for rejected, there in (({}, False), ({"error 2": 1}, True)):
        end = SimpleNamespace(round=1, rejected=Counter(rejected))
        nodes._on_round_end(end)  # type: ignore[arg-type]
        kept = next(iter(grid._nodes.values())).state
        assert ("told/standardise" in kept) is there
    assert dict(kept["told/standardise"]) == first
    # Two messages each at the start; what was told again is booked at the end of the next round.
    assert ledger.by_link()["hub->node"].messages == 6
