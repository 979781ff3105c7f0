"""A node's task is found by the run's settings, and by the node's own where it has some."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context
from tests.clients.contexts import context

from hedgerow.clients import local_task, resolve_device
from hedgerow.tasks import build_model, federated

RUN: dict[str, Any] = {
    "dataset": "mnist-5k",
    "partition": "dirichlet(0.5)",
    "num-clients": 4,
    "model": "logistic",
    "seed": 3,
    "data-dir": "",
    "device": "cpu",
}


def context_of(
    partition_id: int, node: dict[str, Any] | None = None, run: dict[str, Any] | None = None
) -> Context:
    return context(partition_id, run_config=RUN if run is None else run, num_partitions=4, **(node or {}))


def test_nodes_share_out_one_copy_of_the_training_set_by_the_seed_and_one_model() -> None:
    tasks = [local_task(context_of(i)) for i in range(4)]
    for task, part in zip(tasks, federated("mnist-5k", "dirichlet(0.5)", 4, 3).parts, strict=True):
        assert task.part.tolist() == part.tolist()
    assert sorted(int(sample) for task in tasks for sample in task.part) == list(range(len(tasks[0].x)))
    assert len({(id(task.x), id(task.y), id(task.model)) for task in tasks}) == 1
    other = local_task(context_of(2, run={**RUN, "seed": 11}))
    assert other.part.tolist() != tasks[2].part.tolist()
    expected = build_model("logistic", (1, 28, 28), 10, seed=11).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in other.model.state_dict().items())


@pytest.mark.parametrize("partition_id", [-1, 4])
def test_a_partition_outside_the_federation_is_refused(partition_id: int) -> None:
    with pytest.raises(ValueError, match=rf"partition-id must be from 0 to 3, got {partition_id}"):
        local_task(context_of(partition_id))


def test_the_nodes_device_and_data_folder_go_before_the_runs_which_may_leave_them_out(tmp_path: Path) -> None:
    assert local_task(context_of(0, {"device": "cpu"}, {**RUN, "device": "abacus"})).x.device.type == "cpu"
    run = {**RUN, "dataset": "cifar10", "data-dir": str(tmp_path / "of-the-run")}
    with pytest.raises(FileNotFoundError, match="of-the-node"):
        local_task(context_of(0, {"data-dir": str(tmp_path / "of-the-node")}, run))
    with pytest.raises(FileNotFoundError, match="of-the-run"):
        local_task(context_of(0, run=run))
    short = {key: value for key, value in RUN.items() if key not in ("data-dir", "device")}
    assert local_task(context_of(0, run=short)).x.device.type == "cpu"


# Devices


@pytest.mark.parametrize(
    ("name", "count", "found"),
    [
        ("cpu", 0, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 1, "cuda"),
        ("cuda", 0, "device must be 'auto' or 'cpu' here, got 'cuda': torch finds no CUDA device"),
        ("cuda:1", 0, "device must be 'auto' or 'cpu' here, got 'cuda:1': torch finds no CUDA device"),
        ("cuda:1", 2, "cuda:1"),
        ("cuda:2", 2, "device must be below 'cuda:2', got 'cuda:2': torch finds 2 CUDA devices"),
    ],
)
def test_a_device_is_one_that_is_there(
    name: str, count: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if found.startswith("device must"):
        with pytest.raises(ValueError, match=found):
            resolve_device(name)
    else:
        assert resolve_device(name) == torch.device(found)
