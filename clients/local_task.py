"""A node's learning task: its model, samples and device, as the run's settings name them.

With ``partition = "own"`` the samples are the node's own, named by its node config alone (``own_share.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from flwr.app import Context, UserConfig
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.clients.device import resolve_device, shared_model
from hedgerow.clients.own_share import other_data, own_share
from hedgerow.clients.training.draws import warn_of_foreign_draws
from hedgerow.tasks import (
    DATASETS,
    MODELS,
    OWN,
    SCALINGS,
    SCHEMES,
    FederatedData,
    build_model,
    check_augmentation,
    check_takes,
    federated,
    is_import_path,
    parse_classes,
    parse_standardise,
    validate_scheme,
)
from hedgerow.wire.checks import did_you_mean
from hedgerow.wire.frozen import frozen_keys
from hedgerow.wire.records import check_travels


@dataclass(frozen=True)
class LocalTask:
    """One node's learning task.

    Parameters
    ----------
    model : nn.Module
        The architecture on the training device, scratch space that nodes of a process may share.
    x, y : Tensor
        The data on the training device, (samples, ...) and (samples,); nodes of a process may share one copy.
    part : NDArray[int64]
        The node's training samples, as indices into ``x`` and ``y``.
    held_out : NDArray[int64] or None (default: None)
        Its evaluation samples among them; None or empty for none.
    test : tuple of Tensor or None (default: None)
        Inputs and labels for evaluation that are not among them: a node's share of a data set's test samples.
    initial : Callable[[], nn.Module] or None (default: None)
        Draws the run's initial model, on the CPU, from the run's seed; None if that is not possible.
    augmentation : str (default: "none")
        Augmentation of each training batch, one of ``tasks.AUGMENTATIONS``.
    personal_test : Callable[[], tuple of Tensor] or None (default: None)
        Returns what takes the place of ``test`` if layers of the model are the node's own (``local-layers``):
        a share with the classes of its training samples.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    part: NDArray[np.int64]
    held_out: NDArray[np.int64] | None = None
    test: tuple[Tensor, Tensor] | None = None
    initial: Callable[[], nn.Module] | None = None
    augmentation: str = "none"
    personal_test: Callable[[], tuple[Tensor, Tensor]] | None = None

    def measured(self, *, personal: bool = False) -> tuple[Tensor, Tensor, bool]:
        """Return the evaluation samples, and whether they are none that the node trains on.

        They are ``held_out`` or ``test``, and ``part`` only where there are neither. ``personal`` is whether
        layers of the model are the node's own.
        """
        if self.held_out is None or not len(self.held_out):
            if personal and self.personal_test is not None:
                return *self.personal_test(), True
            if self.test is not None:
                return *self.test, True
            index, apart = self.part, False
        else:
            index, apart = self.held_out, True
        at = torch.as_tensor(index, device=self.x.device)
        return self.x[at], self.y[at], apart


LocalTaskFn = Callable[[Context], LocalTask]


def known_or_import_path(names: Sequence[str]) -> Callable[[str], None]:
    """Return a check that raises ValueError unless a text is one of the names or ``module:function``."""

    def check(value: str) -> None:
        if value not in names and not is_import_path(value):
            raise ValueError(did_you_mean(value, names))

    return check


def _scaling(value: str) -> None:
    if value not in SCALINGS:
        raise ValueError(f"unknown name {value!r}")


def _partition(value: str) -> None:
    if value != OWN:
        validate_scheme(value)


# The run config's text settings of the task: the valid values in words, and a check.
TASK_TEXTS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "dataset": (
        f"one of {', '.join(DATASETS)}, or an import path 'module:function'",
        known_or_import_path(DATASETS),
    ),
    "scaling": (f"one of {', '.join(SCALINGS)}", _scaling),
    "partition": (
        f"one of {', '.join(SCHEMES)} with its argument, 'dirichlet(0.5)'; '"
        f"flwr_datasets:NAME(key=value)'; or '{OWN}'",
        _partition,
    ),
    "classes": ("a number >= 2, names as 'benign,malignant', or empty", parse_classes),
    "standardise": ("'federated', 'none', or a mean and a deviation, '0.13,0.31'", parse_standardise),
    "model": (
        f"one of {', '.join(MODELS)}, or an import path 'module:function'",
        known_or_import_path(MODELS),
    ),
    "device": ("'auto', 'cpu', 'cuda' or 'cuda:<index>'", resolve_device),
}


def initial_model(values: Mapping[str, Any], input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return the run's initial model for samples of a shape, on the run's device."""
    device = resolve_device(values["device"])
    return build_model(values["model"], input_shape, num_classes, values["seed"]).to(device)


def frozen_part(model: nn.Module, x: Tensor | None = None) -> tuple[str, ...]:
    """Return ``frozen_keys(model, x)``; log a warning if the model draws from what no seed determines.

    ValueError if the model has nothing to train, or an array that cannot travel.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model must have a parameter with requires_grad=True, got none: nothing is trained")
    frozen = frozen_keys(model, x)
    check_travels(model.state_dict(), frozen)
    if x is not None:
        warn_of_foreign_draws(model, x)
    return frozen


def global_task(values: Mapping[str, Any]) -> tuple[nn.Module, FederatedData]:
    """Return the run's initial model and all its data, on the run's device."""
    device = resolve_device(values["device"])
    data = _dealt(values).to(device)
    shape, classes = data.dataset.input_shape, data.dataset.num_classes
    check_takes(str(values["model"]), str(data.dataset.x_train.dtype))
    check_augmentation(str(values.get("augmentation", "none")), shape)
    return initial_model(values, shape, classes), data


def dealt_sizes(run_config: UserConfig) -> list[int] | None:
    """Return each client's number of samples of the run's data set; None if clients use their own data."""
    return None if run_config["partition"] == OWN else _dealt(run_config).sizes


def _dealt(values: Mapping[str, Any]) -> FederatedData:
    return federated(
        str(values["dataset"]),
        str(values["partition"]),
        int(values["num-clients"]),
        int(values["seed"]),
        str(values.get("data-dir", "")) or None,
        str(values.get("scaling", "standard")),
    )


def local_task(context: Context) -> LocalTask:
    """Return the task that the run config describes.

    It reads ``dataset``, ``partition``, ``num-clients``, ``model``, ``seed``, ``data-dir``, ``scaling``,
    ``device`` and ``augmentation``. ``data-dir`` and ``device`` of the node config take precedence. With
    ``partition = "own"`` the node config names the data, see ``own_share``.

    Raises
    ------
    ValueError
        If the node config names the node's own data but the run uses another data set: such a node joins no
        run whose config names files or modules.
    """
    run, node = context.run_config, context.node_config
    if run["partition"] == OWN:
        return _own_task(context)
    if "data" in node:
        raise other_data(context)
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
        str(run.get("augmentation", "none")),
    )


def _own_task(context: Context) -> LocalTask:
    run, node = context.run_config, context.node_config
    device = resolve_device(str(node.get("device") or run.get("device", "cpu")))
    share, name = own_share(context), str(run["model"])
    # A node with its own data imports only what its owner allows.
    if is_import_path(name) and name not in share.source.allowed:
        raise ValueError(
            "model must not be an import path unless allow-imports of this node's config has it, got "
            f"{name!r} in the run config"
        )
    x, y = share.on(device)
    named = name, tuple(x.shape[1:]), share.num_classes, int(run["seed"])
    model = shared_model(*named, device)
    check_augmentation(augmentation := str(run.get("augmentation", "none")), tuple(x.shape[1:]))
    initial = partial(build_model, *named)
    return LocalTask(model, x, y, share.part, share.held_out, initial=initial, augmentation=augmentation)


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
    augmentation: str,
) -> LocalTask:
    device = resolve_device(device_name)
    data = federated(dataset, scheme, num_clients, seed, data_dir or None, scaling).to(device)
    if not 0 <= partition_id < num_clients:
        raise ValueError(f"partition-id must be from 0 to {num_clients - 1}, got {partition_id}")
    check_augmentation(augmentation, data.dataset.input_shape)
    named = model, data.dataset.input_shape, data.dataset.num_classes, seed
    return LocalTask(
        shared_model(*named, device),
        data.x,
        data.y,
        data.parts[partition_id],
        test=data.test_share(partition_id),
        personal_test=partial(data.personal_test_share, partition_id),
        initial=partial(build_model, *named),
        augmentation=augmentation,
    )
