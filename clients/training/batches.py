"""The mini-batch of one client in one iteration, a function of (seed, client, iteration) alone."""

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.seeds import Purpose, generator

__all__ = ["batch_indices"]


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
