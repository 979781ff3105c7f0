"""What the nodes learn: linear regression, logistic regression, or a neural network on images.

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

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray

from hedgerow.clients.ceps.problems import LinearRegression, LogisticRegression, Problem, TorchProblem
from hedgerow.tasks import FederatedData, build_model, federated
from hedgerow.tasks.regression import LinearData, binary_images, binary_libsvm, linear_part

__all__ = ["PROBLEM_KEYS", "Key", "dimension", "key_of", "network_accuracy", "node_problem", "problem"]

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
    """Return a node's objective; its node config's ``data-dir`` goes before the run's."""
    values = dict(context.run_config)
    values["data-dir"] = context.node_config.get("data-dir") or values["data-dir"]
    return problem(key_of(values), int(context.node_config["partition-id"]))


@dataclass(frozen=True)
class FromInitial:
    """A problem in the change of its parameters from a start that all nodes share.

    The methods start from zero, where a network does not learn; what is sparse is the change.
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
    """Return the objective of one node, made once in a process."""
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
            return FromInitial(TorchProblem(_network(key), images.x[part], images.y[part]), _initial(key))


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


def _initial(key: Key) -> NDArray[np.float64]:
    trained = [p.detach().flatten() for p in _network(key).parameters() if p.requires_grad]
    return torch.cat(trained).double().numpy()


def network_accuracy(values: Mapping[str, Any], w: NDArray[np.float64]) -> float | None:
    """Return the share of test images that the network changed by ``w`` gets right; None elsewhere."""
    if values["problem"] != "network":
        return None
    data = _images(values)
    key = key_of(values)
    model = deepcopy(_network(key))
    parameters = torch.from_numpy(_initial(key) + w).float()
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    with torch.no_grad():
        right = (model(data.x_test).argmax(1) == data.y_test).float().mean()
    return float(right)
