"""Input and result of local training: one node's model, batches and step size."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

State = dict[str, Tensor]
# With more parameters vmap loses to the loop, and a single node gains from threads within an operation.
SMALL = 100_000
# A step size must be finite in float32.
LARGEST_STEP = float(np.finfo(np.float32).max)
# (outputs, targets) -> the loss of each sample.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Asked:
    """The request that a node's batches were built from."""

    part: NDArray[np.int64]  # the node's samples, as indices into the data
    batch_size: int
    seed: int
    round: int
    partition_id: int
    epochs: int | None = None  # local epochs; None if the method counts steps
    augmentation: str = "none"  # of the samples of each batch


@dataclass(frozen=True)
class LocalWork:
    """One node's local training between two exchanges.

    Parameters
    ----------
    start : Mapping[str, Tensor]
        The model to start from, as a state dict. Not changed.
    x, y : Tensor
        The data that ``batches`` index, (samples, ...) and (samples,), on the training device. Simulated
        nodes share one copy.
    batches : Sequence[NDArray[int64]]
        The samples of each step, in order; lengths may differ. ``local_sgd`` checks that none is empty or
        indexes past the data.
    lr : float
        Step size, > 0 and finite in float32; ``local_sgd`` checks that too.
    asked : Asked or None (default: None)
        The request behind the batches. With it, draws of the forward pass depend on (seed, round, node);
        without it, on the work.
    correction : Mapping[str, Tensor] or None (default: None)
        Added to the gradient of each trained parameter in every step, by name, each of its shape: c - c_i of
        SCAFFOLD's y <- y - lr (g_i(y) - c_i + c). Nodes that train together all have one, or none has.
    """

    start: Mapping[str, Tensor]
    x: Tensor
    y: Tensor
    batches: Sequence[NDArray[np.int64]]
    lr: float
    asked: Asked | None = None
    correction: Mapping[str, Tensor] | None = None

    @property
    def stream(self) -> tuple[int, int, int]:
        """What the draws of forward passes follow from: the request, or without one the work itself."""
        if self.asked is not None:
            return self.asked.seed, self.asked.round, self.asked.partition_id
        sums = [float(value.double().sum()) for value in self.start.values()]
        digest = blake2b(repr([self.lr, *sums]).encode(), digest_size=4)
        for batch in self.batches:
            digest.update(batch.tobytes())
        return int.from_bytes(digest.digest()), 0, 0


class StackRow(Mapping[str, Tensor]):
    """One node's state as a row of a stack; its tensors are created on access.

    - ``stack``: All nodes' values (nodes, *shape).
    - ``shared``: Keys whose values the stack stores once; they are copied on access.
    """

    __slots__ = ("row", "shared", "stack")

    def __init__(self, stack: Mapping[str, Tensor], row: int, shared: Collection[str] = ()) -> None:
        self.stack, self.row, self.shared = stack, row, shared

    def __getitem__(self, key: str) -> Tensor:
        """Return the node's value."""
        own = self.stack[key][self.row]
        return own.clone() if key in self.shared else own

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys."""
        return iter(self.stack)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.stack)


@dataclass(frozen=True)
class Trained:
    """The model after the last step, and the metrics that the node reports.

    ``train-loss`` is the mean over steps of the mini-batch loss before each step; a user's own training loop
    need not report it.
    """

    state: Mapping[str, Tensor]
    metrics: Mapping[str, float]

    @property
    def mean_loss(self) -> float:
        """``train-loss``."""
        return self.metrics["train-loss"]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits, one value per sample."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def is_small(model: nn.Module) -> bool:
    """Return whether a model is too small to gain from threads within an operation."""
    return sum(p.numel() for p in model.parameters()) < SMALL
