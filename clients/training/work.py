"""What local training takes and gives: one node's model, batches and step size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.wire.checks import is_real, require

__all__ = ["Correction", "LocalWork", "Loss", "State", "Trained", "cross_entropy"]

State = dict[str, Tensor]
# (outputs, targets) -> one loss a sample.
Loss = Callable[[Tensor, Tensor], Tensor]
# (parameters, their start) -> terms that are added to the gradients, by name; all (nodes, *shape).
Correction = Callable[[State, State], Mapping[str, Tensor]]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class LocalWork:
    """One node's local training between two exchanges.

    Parameters
    ----------
    start : Mapping[str, Tensor]
        The model to start from, as a state dict. Not changed.
    x, y : Tensor
        The data that ``batches`` index, (samples, ...) and (samples,), on the training device. Nodes of
        one simulation share one resident copy.
    batches : Sequence[NDArray[int64]]
        The samples of each step, in order; lengths may differ, none may be empty.
    lr : float
        Step size, > 0 and finite in float32.

    Raises
    ------
    ValueError
        If the step size is not positive and finite in float32, or a batch is empty or indexes past the data.
    """

    start: Mapping[str, Tensor]
    x: Tensor
    y: Tensor
    batches: Sequence[NDArray[np.int64]]
    lr: float

    def __post_init__(self) -> None:
        valid = is_real(self.lr) and 0 < self.lr <= _LARGEST
        require("lr", self.lr, "a finite number > 0, also in float32", valid)
        for step, batch in enumerate(self.batches):
            if not len(batch) or batch.min() < 0 or batch.max() >= len(self.x):
                bounds = f"{batch.min()} to {batch.max()}" if len(batch) else "empty"
                raise ValueError(f"batches[{step}] is {bounds}; valid are indices 0 to {len(self.x) - 1}")


@dataclass(frozen=True)
class Trained:
    """The model after the last step, and the mean mini-batch loss over the steps (before each step)."""

    state: State
    mean_loss: float


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits, one value a sample."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
