"""What one node learns on: its model, its samples, its device, found by the run's settings."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.tasks import build_model, federated

__all__ = ["LocalTask", "LocalTaskFn", "local_task", "resolve_device"]


@dataclass(frozen=True)
class LocalTask:
    """One node's learning task.

    Parameters
    ----------
    model : nn.Module
        The architecture on the training device; nodes of one process may share it as scratch space.
    x, y : Tensor
        The data on the training device, (samples, ...) and (samples,); nodes of one process may share
        one resident copy.
    part : NDArray[int64]
        The node's own samples, as indices into ``x`` and ``y``.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    part: NDArray[np.int64]


LocalTaskFn = Callable[[Context], LocalTask]


def resolve_device(name: str) -> torch.device:
    """Return the device of a setting: ``cpu``, ``cuda``, ``cuda:1``, …; ``auto`` is CUDA where there is one.

    Raises
    ------
    ValueError
        If the name is no device, or CUDA is asked for and not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Not whatever torch.device takes: "meta" and others are devices that nothing is trained on.
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"device is {name!r}; valid is 'auto', 'cpu', 'cuda' or 'cuda:<index>'")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but torch finds no CUDA device; valid here is 'auto' or 'cpu'")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device is {name!r}, but torch finds {count} CUDA devices")
    return device


def local_task(context: Context) -> LocalTask:
    """Return the task that the run config names.

    Read from the run config: ``dataset``, ``partition``, ``num-clients``, ``model``, ``seed``,
    ``data-dir``, ``device``. The node config's ``data-dir`` and ``device`` go first: a device keeps its
    data where it likes.
    """
    run, node = context.run_config, context.node_config
    return _local_task(
        str(run["dataset"]),
        str(run["partition"]),
        int(run["num-clients"]),
        str(run["model"]),
        int(run["seed"]),
        str(node.get("data-dir") or run.get("data-dir", "")),
        str(node.get("device") or run.get("device", "cpu")),
        int(node["partition-id"]),
    )


@lru_cache(maxsize=4096)
def _local_task(
    dataset: str,
    scheme: str,
    num_clients: int,
    model: str,
    seed: int,
    data_dir: str,
    device_name: str,
    partition_id: int,
) -> LocalTask:
    device = resolve_device(device_name)
    data = federated(dataset, scheme, num_clients, seed, data_dir or None).to(device)
    if not 0 <= partition_id < num_clients:
        raise ValueError(f"partition-id is {partition_id}; valid is 0 to {num_clients - 1}")
    shape, classes = data.dataset.input_shape, data.dataset.num_classes
    return LocalTask(_model(model, shape, classes, seed, device), data.x, data.y, data.parts[partition_id])


@lru_cache(maxsize=4)
def _model(
    name: str, input_shape: tuple[int, ...], num_classes: int, seed: int, device: torch.device
) -> nn.Module:
    return build_model(name, input_shape, num_classes, seed).to(device)
