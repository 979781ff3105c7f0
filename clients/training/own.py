"""A user's own training loop in place of local SGD.

The loop chooses the optimiser, the loss, the order of samples and the schedule. The method still chooses the
model that is sent, the number of steps, and the use of the trained model.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hedgerow.clients.training.draws import NodeDraws
from hedgerow.clients.training.work import Asked, LocalWork, State, Trained, is_small
from hedgerow.tasks.threads import map_on_threads


class TrainingData(TensorDataset):
    """A node's own samples on the training device, a data set of pairs, copied for the loop.

    Parameters
    ----------
    x, y : Tensor
        (samples, ...) and (samples,).
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y)
        self.x, self.y = x, y


class TrainingConfig(TypedDict):
    """The training that the method requests from a node in a round.

    Parameters
    ----------
    steps : int
        Mini-batch steps, >= 1.
    epochs : int or None
        The same in epochs, >= 1; None if the method counts steps.
    lr : float
        The step size of the method's SGD, > 0.
    batch_size : int
        Samples per mini-batch, >= 1.
    batches : list[NDArray[int64]]
        The samples of each of the ``steps`` in the built-in loop, as indices into the data.
    seed, partition_id : int
        The run's seed and the node, each >= 0.
    round : int
        The round, from 1; 0 if the server does not send it.
    """

    steps: int
    epochs: int | None
    lr: float
    batch_size: int
    batches: list[NDArray[np.int64]]
    seed: int
    round: int
    partition_id: int


# Trains the model in place. Only "train-loss" of the returned metrics is sent to the server.
TrainingLoop = Callable[[nn.Module, TrainingData, TrainingConfig], Mapping[str, Any] | None]


@dataclass(frozen=True)
class OwnTraining:
    """Training of the nodes of one call by the user's own loop, one node after another."""

    # ``train(model, data, config)`` trains ``model`` in place, a copy of the received model in training mode
    # on the training device, and may return metrics. The global generators of torch, NumPy and Python are
    # seeded by (seed, round, node) for the call and restored afterwards.
    train: TrainingLoop

    def sgd(self, model: nn.Module, works: Sequence[LocalWork]) -> list[Trained | ValueError]:
        """Return every node's result or error.

        As in ``local_sgd``, each node on a CPU computes on one thread, except for a single node with a large
        model.
        """

        def outcome(work: LocalWork) -> Trained | ValueError:
            try:
                return self._trained(model, work)
            except Exception as error:  # any error of a loop is that node's answer
                failed = ValueError(f"train failed with {type(error).__name__}: {error}")
                failed.__cause__ = error
                return failed

        on_cpu = all(work.x.device.type == "cpu" for work in works)
        if not on_cpu or (len(works) == 1 and not is_small(model)):
            return [outcome(work) for work in works]
        return map_on_threads(outcome, works, 1)

    def _trained(self, model: nn.Module, work: LocalWork) -> Trained:
        assert work.asked is not None
        if work.correction is not None:
            raise ValueError("correction must be None with a training loop of one's own, which applies none")
        data, config = _data(work, work.asked), _config(work, work.asked)
        # Copied, so that hooks, flags and dtypes set by the loop do not affect the next node.
        own = copy.deepcopy(model)
        own.load_state_dict(dict(work.start))
        own.train()
        with NodeDraws.of(own, work.stream):
            metrics = self.train(own, data, config)
        return _outcome(_state(own, work.start), metrics)


def _data(work: LocalWork, asked: Asked) -> TrainingData:
    if asked.augmentation != "none":
        raise ValueError(
            f"augmentation must be 'none' with your own training loop, got {asked.augmentation!r}: the loop "
            "transforms its samples"
        )
    index = torch.as_tensor(asked.part).to(work.x.device)
    return TrainingData(work.x[index], work.y[index])


def _config(work: LocalWork, asked: Asked) -> TrainingConfig:
    order = np.argsort(asked.part, kind="stable")
    ascending = asked.part[order]
    return {
        "steps": len(work.batches),
        "epochs": asked.epochs,
        "lr": work.lr,
        "batch_size": asked.batch_size,
        "batches": [order[np.searchsorted(ascending, batch)] for batch in work.batches],
        "seed": asked.seed,
        "round": asked.round,
        "partition_id": asked.partition_id,
    }


def _state(model: nn.Module, start: Mapping[str, Tensor]) -> State:
    """Return the trained state in the start's dtypes and on its device.

    ValueError if keys or shapes differ from the start's, or a value is not finite.
    """
    trained = model.state_dict()
    shapes, valid = ({k: tuple(v.shape) for k, v in state.items()} for state in (trained, start))
    if shapes != valid:
        wrong = sorted(key for key in shapes | valid if shapes.get(key) != valid.get(key))
        raise ValueError(f"the trained model differs from the one sent in keys or shapes: {wrong}")
    state = {
        key: value.detach().to(start[key]).clone(memory_format=torch.contiguous_format)
        for key, value in trained.items()
    }
    for key, value in state.items():
        if not torch.isfinite(value).all():
            raise ValueError(f"{key} of the trained model is not finite")
    return state


def _outcome(state: State, metrics: Mapping[str, Any] | None) -> Trained:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ValueError(f"train must return a dict of metrics, or None, got a {type(metrics).__name__}")
    if metrics is None or "train-loss" not in metrics:
        return Trained(state, {})
    loss = float(metrics["train-loss"])
    if not isfinite(loss):
        raise ValueError(f"train-loss must be a finite number, got {loss}")
    return Trained(state, {"train-loss": loss})
