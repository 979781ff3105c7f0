"""The mini-batches of whole local epochs, as experiments of FedMUD and its baselines train.

Paper: S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient Federated
Learning" (FedMUD), the set-up of Section 6: E epochs over a node's samples, shuffled anew in each. Ours: the
order is a function of (seed, round, client) alone.
"""

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.checks import at_least
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["epoch_batches"]


def epoch_batches(
    part: NDArray[np.int64], *, seed: int, round: int, partition_id: int, epochs: int, batch_size: int
) -> list[NDArray[np.int64]]:
    """Return the batches of a node's local epochs: each epoch holds every sample once.

    - ``part``: The node's samples, at least one.
    - ``seed``, ``round``, ``partition_id``: What the order is drawn from, each >= 0.
    - ``epochs``, ``batch_size``: E and B, each >= 1. An epoch's last batch holds what is left, and is kept.

    Raises
    ------
    ValueError
        If the node has no samples, or a number is out of range.
    """
    at_least(1, epochs=epochs, batch_size=batch_size)
    if not len(part):
        raise ValueError(f"part of node {partition_id} must have at least 1 sample to train on, got 0")
    stream = generator(seed, round=round, partition_id=partition_id, purpose=Purpose.BATCH)
    ends = range(batch_size, len(part), batch_size)
    return [batch for _ in range(epochs) for batch in np.split(stream.permutation(part), ends)]
