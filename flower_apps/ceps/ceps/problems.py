"""The nodes' problems: linear regression, logistic regression, or a neural network on images.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Examples 1 and 2. The
network is not in the paper.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from hedgerow.clients import LinearRegression, LogisticRegression, Problem, TorchProblem, local_task
from hedgerow.clients.evaluation import metrics_of
from hedgerow.clients.own_share import OwnShare, has_own, other_data, own_share
from hedgerow.tasks import FederatedData, build_model, evaluate, federated
from hedgerow.tasks.regression import LinearData, binary_images, binary_libsvm, linear_part
from hedgerow.wire.calls import Call

# The settings that determine a node's problem, beside its partition id.
PROBLEM_KEYS = (
    "problem",
    "num-clients",
    "seed",
    "features",
    "sparsity",
    "noise",
    "samples-low",
    "samples-high",
    "dataset",
    "data-dir",
    "class-0",
    "class-1",
    "libsvm",
    "l2",
    "model",
    "partition",
)
Key = tuple[tuple[str, Any], ...]


def key_of(values: Mapping[str, Any]) -> Key:
    """Return the settings of ``PROBLEM_KEYS``, hashable."""
    return tuple((name, values[name]) for name in PROBLEM_KEYS)


def node_problem(context: Context) -> Problem:
    """Return a node's objective; the node config's ``data-dir`` takes precedence over the run's.

    With ``partition = "own"`` it is that of the node's own data.
    """
    if has_own(context):
        return own_problem(context)
    if "data" in context.node_config:
        raise other_data(context)
    values = dict(context.run_config)
    values["data-dir"] = context.node_config.get("data-dir") or values["data-dir"]
    return problem(key_of(values), int(context.node_config["partition-id"]))


@dataclass(frozen=True)
class FromInitial:
    """A problem in the change of its parameters from a common start.

    The methods start from zero, where a network does not learn; the change is sparse.
    """

    inner: Problem
    start: NDArray[np.float64]

    @property
    def n(self) -> int:
        """The dimension."""
        return self.inner.n

    @property
    def num_examples(self) -> int:
        """The number of local records."""
        return self.inner.num_examples

    @property
    def largest_eigenvalue(self) -> float:
        """As the inner problem's, at the start."""
        return self.inner.largest_eigenvalue

    @property
    def curvature(self) -> float:
        """As the inner problem's, at the start."""
        return self.inner.curvature

    def value(self, w: NDArray[np.float64]) -> float:
        """Return the objective at start + w."""
        return self.inner.value(self.start + w)

    def gradient(self, w: NDArray[np.float64], clip: float = inf) -> NDArray[np.float64]:
        """Return the gradient at start + w."""
        return self.inner.gradient(self.start + w, clip)


@lru_cache(maxsize=4096)
def problem(key: Key, node: int) -> Problem:
    """Return the objective of one node, cached."""
    values = dict(key)
    match values["problem"]:
        case "linear":
            data = LinearData(
                values["features"],
                values["sparsity"],
                values["noise"],
                (values["samples-low"], values["samples-high"]),
            )
            return LinearRegression(*linear_part(data, node, values["seed"]))
        case "logistic":
            x, y = _binary(key)[node]
            return LogisticRegression(x, y, values["l2"])
        case _:
            images = _images(values)
            part = torch.from_numpy(images.parts[node])
            network = _network(key)
            return FromInitial(TorchProblem(network, images.x[part], images.y[part]), _flat(network))


# By the data, which are a new object whenever they change.
_OWN: WeakKeyDictionary[OwnShare, dict[tuple[Any, ...], Problem]] = WeakKeyDictionary()


def own_problem(context: Context) -> Problem:
    """Return the objective of a node's own data, cached while the data do not change."""
    share, values = own_share(context), context.run_config
    key = (values["problem"], values["l2"], values["model"], values["seed"])
    made = _OWN.setdefault(share, {})
    if key not in made:
        made[key] = _own_logistic(share, float(key[1])) if key[0] == "logistic" else _own_network(context)
    return made[key]


def _own_logistic(share: OwnShare, l2: float) -> Problem:
    if share.x.dtype.kind in "iu":
        raise ValueError("data for problem = 'logistic' must be floating-point, got integers, which are ids")
    if share.num_classes != 2:
        raise ValueError(f"data for problem = 'logistic' must have 2 classes, got {share.num_classes}")
    return LogisticRegression(*_records(share, share.part), l2)


def _records(share: OwnShare, part: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return share.x[part].reshape(len(part), -1).astype(np.float64), share.y[part].astype(np.float64)


def _own_network(context: Context) -> Problem:
    task = local_task(context)
    part = torch.from_numpy(task.part)
    return FromInitial(TorchProblem(task.model, task.x[part], task.y[part]), _flat(task.model))


def evaluate_own(call: Call) -> RecordDict:
    """Answer ``evaluate``: the metrics of the received model ``w`` (n,) on the node's held-out samples.

    Raises
    ------
    PermissionError
        If the run's privacy is ``sound``: the privacy accounting does not include these metrics.
    """
    run = call.context.run_config
    if run.get("privacy") == "sound":
        raise PermissionError("nodes do not evaluate on their data when privacy = 'sound' in the run config")
    share, n = own_share(call.context), own_problem(call.context).n
    (record,) = call.content.array_records.values()
    (w,) = (np.asarray(array.numpy(), np.float64) for array in record.values())
    if w.shape != (n,) or not np.isfinite(w).all():
        raise ValueError(f"the model in the message must be {n} finite numbers, got shape {w.shape}")
    part = share.held_out if len(share.held_out) else share.part
    y = torch.from_numpy(share.y[part])
    if run["problem"] == "network":
        model = deepcopy(local_task(call.context).model)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(_flat(model) + w).float(), model.parameters())
        found = evaluate(model, torch.from_numpy(share.x[part]), y)
    else:
        logits = np.stack([np.zeros(len(part)), _records(share, part)[0] @ w], axis=1)
        found = evaluate(torch.nn.Identity(), torch.from_numpy(logits), y)
    return RecordDict({"metrics": metrics_of(found, bool(len(share.held_out)))})


def own_dimension(values: Mapping[str, Any], input_shape: tuple[int, ...], num_classes: int) -> int:
    """Return the dimension n of the models for samples of a shape.

    Raises
    ------
    ValueError
        If there are more than two classes and the problem is ``logistic``.
    """
    if values["problem"] == "logistic":
        if num_classes != 2:
            raise ValueError(f"data for problem = 'logistic' must have 2 classes, got {num_classes}")
        return int(np.prod(input_shape))
    return _flat(build_model(values["model"], input_shape, num_classes, values["seed"])).size


def dimension(values: Mapping[str, Any]) -> int:
    """Return the dimension n of the models."""
    if values["problem"] == "linear":
        return int(values["features"])
    return problem(key_of(values), 0).n


@lru_cache(maxsize=2)
def _binary(key: Key) -> list[Any]:
    values = dict(key)
    if values["libsvm"]:
        path = Path(values["data-dir"] or ".") / values["libsvm"]
        return list(binary_libsvm(path, values["num-clients"], values["seed"]))
    classes = (values["class-0"], values["class-1"])
    return list(
        binary_images(
            values["dataset"], classes, values["num-clients"], values["seed"], values["data-dir"] or None
        )
    )


def _images(values: Mapping[str, Any]) -> FederatedData:
    return federated(
        values["dataset"],
        values["partition"],
        values["num-clients"],
        values["seed"],
        values["data-dir"] or None,
    )


@lru_cache(maxsize=2)
def _network(key: Key) -> torch.nn.Module:
    values = dict(key)
    data = _images(values).dataset
    return build_model(values["model"], data.input_shape, data.num_classes, values["seed"])


def _flat(model: torch.nn.Module) -> NDArray[np.float64]:
    trained = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    return torch.cat(trained).double().numpy()


def named_model(network: torch.nn.Module | None, w: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """Return a node's model by name: ``w``, or the arrays of the network that ``w`` changes."""
    if network is None:
        return {"w": w}
    return {name: tensor.cpu().numpy() for name, tensor in _changed(network, w).state_dict().items()}


def change_of(network: torch.nn.Module | None, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return ``w`` of a model by name, the inverse of ``named_model`` up to rounding."""
    if network is None:
        return np.asarray(arrays["w"], np.float64)
    model = deepcopy(network)
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    return _flat(model) - _flat(network)


def network_accuracy(values: Mapping[str, Any], w: NDArray[np.float64]) -> float | None:
    """Return the test accuracy of the network changed by ``w``; None for other problems."""
    if values["problem"] != "network":
        return None
    data = _images(values)
    return evaluate(_changed(_network(key_of(values)), w), data.x_test, data.y_test).accuracy


def network_of(values: Mapping[str, Any]) -> torch.nn.Module | None:
    """Return the network of dealt data, a copy; None for other problems."""
    return deepcopy(_network(key_of(values))) if values["problem"] == "network" else None


def model_metrics(values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Return a model's objective, the mean over all nodes' problems; of a network its test accuracy."""
    if values["problem"] != "network":
        key, nodes = key_of(values), int(values["num-clients"])
        return {"loss": float(np.mean([problem(key, i).value(arrays["w"]) for i in range(nodes)]))}
    data, model = _images(values), deepcopy(_network(key_of(values)))
    model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    return {"accuracy": evaluate(model, data.x_test, data.y_test).accuracy}


def _changed(network: torch.nn.Module, w: NDArray[np.float64]) -> torch.nn.Module:
    model = deepcopy(network)
    parameters = torch.from_numpy(_flat(network) + w).float()
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    return model
