"""What one node learns on: its model, its samples, its device, found by the run's settings."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.tasks import (
    DATASETS,
    MODELS,
    SCALINGS,
    SCHEMES,
    FederatedData,
    build_model,
    federated,
    is_import_path,
    validate_scheme,
)
from hedgerow.wire.checks import did_you_mean

__all__ = [
    "TASK_TEXTS",
    "LocalTask",
    "LocalTaskFn",
    "global_task",
    "known_or_import_path",
    "local_task",
    "resolve_device",
]


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


def known_or_import_path(names: Sequence[str]) -> Callable[[str], None]:
    """Return the check that raises ValueError unless a text is one of the names, or ``module:function``."""

    def check(value: str) -> None:
        if value not in names and not is_import_path(value):
            raise ValueError(did_you_mean(value, names))

    return check


def _scaling(value: str) -> None:
    if value not in SCALINGS:
        raise ValueError(f"unknown name {value!r}")


# The texts of a run config that say what is learnt: what is valid, in words and as a check.
TASK_TEXTS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "dataset": (
        f"one of {', '.join(DATASETS)}, or an import path 'module:function'",
        known_or_import_path(DATASETS),
    ),
    "data-dir": ("a folder, or empty", lambda _: None),
    "scaling": (f"one of {', '.join(SCALINGS)}", _scaling),
    "partition": (f"one of {', '.join(SCHEMES)} with its argument, 'dirichlet(0.5)'", validate_scheme),
    "model": (
        f"one of {', '.join(MODELS)}, or an import path 'module:function'",
        known_or_import_path(MODELS),
    ),
    "device": ("'auto', 'cpu', 'cuda' or 'cuda:<index>'", resolve_device),
}


def global_task(values: Mapping[str, Any]) -> tuple[nn.Module, FederatedData]:
    """Return the initial model and all data that a run's settings name, on their device."""
    device = resolve_device(values["device"])
    data = federated(
        values["dataset"],
        values["partition"],
        values["num-clients"],
        values["seed"],
        values["data-dir"] or None,
        values["scaling"],
    ).to(device)
    shape, classes = data.dataset.input_shape, data.dataset.num_classes
    return build_model(values["model"], shape, classes, values["seed"]).to(device), data


def local_task(context: Context) -> LocalTask:
    """Return the task that the run config names.

    Read from the run config: ``dataset``, ``partition``, ``num-clients``, ``model``, ``seed``,
    ``data-dir``, ``scaling``, ``device``. The node config's ``data-dir`` and ``device`` go first: a
    device keeps its data where it likes.
    """
    run, node = context.run_config, context.node_config
    return _local_task(
        str(run["dataset"]),
        str(run["partition"]),
        int(run["num-clients"]),
        str(run["model"]),
        int(run["seed"]),
        str(node.get("data-dir") or run.get("data-dir", "")),
        str(run.get("scaling", "standard")),
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
    scaling: str,
    device_name: str,
    partition_id: int,
) -> LocalTask:
    device = resolve_device(device_name)
    data = federated(dataset, scheme, num_clients, seed, data_dir or None, scaling).to(device)
    if not 0 <= partition_id < num_clients:
        raise ValueError(f"partition-id is {partition_id}; valid is 0 to {num_clients - 1}")
    shape, classes = data.dataset.input_shape, data.dataset.num_classes
    return LocalTask(_model(model, shape, classes, seed, device), data.x, data.y, data.parts[partition_id])


@lru_cache(maxsize=4)
def _model(
    name: str, input_shape: tuple[int, ...], num_classes: int, seed: int, device: torch.device
) -> nn.Module:
    return build_model(name, input_shape, num_classes, seed).to(device)
