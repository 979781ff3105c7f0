"""A node's task is found by the run's settings, and by the node's own where it has some."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

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
    return Context(
        run_id=1,
        node_id=100 + partition_id,
        node_config={"partition-id": partition_id, "num-partitions": 4, **(node or {})},
        state=RecordDict(),
        run_config=RUN if run is None else run,
    )


def test_the_nodes_share_out_the_training_set() -> None:
    tasks = [local_task(context_of(i)) for i in range(4)]
    dealt = sorted(int(sample) for task in tasks for sample in task.part)
    assert dealt == list(range(len(tasks[0].x)))


def test_a_nodes_part_is_that_of_the_seed() -> None:
    parts = federated("mnist-5k", "dirichlet(0.5)", 4, 3).parts
    assert local_task(context_of(2)).part.tolist() == parts[2].tolist()
    other = local_task(context_of(2, run={**RUN, "seed": 4}))
    assert other.part.tolist() != parts[2].tolist()


def test_the_nodes_of_a_process_share_one_copy_of_data_and_model() -> None:
    first, second = local_task(context_of(0)), local_task(context_of(1))
    assert first.x is second.x
    assert first.y is second.y
    assert first.model is second.model


def test_the_model_is_the_one_the_run_names_with_the_runs_seed() -> None:
    weights = local_task(context_of(0, run={**RUN, "seed": 11})).model.state_dict()
    expected = build_model("logistic", (1, 28, 28), 10, seed=11).state_dict()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


@pytest.mark.parametrize("partition_id", [-1, 4])
def test_a_partition_outside_the_federation_is_refused(partition_id: int) -> None:
    with pytest.raises(ValueError, match=rf"partition-id is {partition_id}; valid is 0 to 3"):
        local_task(context_of(partition_id))


def test_the_nodes_device_goes_before_the_runs() -> None:
    assert local_task(context_of(0, {"device": "cpu"}, {**RUN, "device": "abacus"})).x.device.type == "cpu"


def test_the_nodes_data_folder_goes_before_the_runs(tmp_path: Path) -> None:
    run = {**RUN, "dataset": "cifar10", "data-dir": str(tmp_path / "of-the-run")}
    with pytest.raises(FileNotFoundError, match="of-the-node"):
        local_task(context_of(0, {"data-dir": str(tmp_path / "of-the-node")}, run))
    with pytest.raises(FileNotFoundError, match="of-the-run"):
        local_task(context_of(0, run=run))


def test_data_dir_and_device_may_be_left_out_of_the_run() -> None:
    run = {key: value for key, value in RUN.items() if key not in ("data-dir", "device")}
    assert local_task(context_of(0, run=run)).x.device.type == "cpu"


# Devices


def test_the_cpu_is_always_there() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("there", "device"), [(False, "cpu"), (True, "cuda")])
def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch, there: bool, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert resolve_device("auto") == torch.device(device)


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"device is '{name}', but torch finds no CUDA device"):
        resolve_device(name)


def test_a_cuda_index_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device is 'cuda:2', but torch finds 2 CUDA devices"):
        resolve_device("cuda:2")
