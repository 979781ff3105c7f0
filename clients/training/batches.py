"""The mini-batches of one client by iteration, each a function of (seed, client, iteration) alone."""

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.seeds import Purpose, generator

__all__ = ["batch_indices", "step_batches"]


def batch_indices(
    seed: int, partition_id: int, iteration: int, num_samples: int, batch_size: int
) -> NDArray[np.int64]:
    """Return the mini-batch of one client in one iteration (from 1), drawn without replacement.

    All ``num_samples`` are taken, in order, if there are no more than ``batch_size``.
    """
    if num_samples <= batch_size:
        return np.arange(num_samples)
    stream = generator(seed, round=iteration, partition_id=partition_id, purpose=Purpose.BATCH)
    return stream.choice(num_samples, batch_size, replace=False)


def step_batches(
    part: NDArray[np.int64], *, seed: int, partition_id: int, done: int, steps: int, batch_size: int
) -> list[NDArray[np.int64]]:
    """Return the mini-batches, of a client's samples ``part``, of the iterations done + 1 to done + steps."""
    return [
        part[batch_indices(seed, partition_id, iteration, len(part), batch_size)]
        for iteration in range(done + 1, done + steps + 1)
    ]
