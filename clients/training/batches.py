"""The mini-batches of one client by iteration, each a function of (seed, client, iteration) alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.seeds import Purpose, generator, generators

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
    parts: Sequence[NDArray[np.int64]],
    *,
    seed: int,
    partition_ids: Sequence[int],
    done: int,
    steps: Sequence[int],
    batch_size: int,
) -> list[list[NDArray[np.int64]]]:
    """Return each client's mini-batches, of its samples, of the iterations done + 1 to done + steps.

    They are those of ``batch_indices``, whose streams are seeded for all clients at once.
    """
    iterations = [
        range(done + 1, done + n + 1) if len(p) > batch_size else ()
        for p, n in zip(parts, steps, strict=True)
    ]
    rounds = [k for own in iterations for k in own]
    nodes = [i for i, own in zip(partition_ids, iterations, strict=True) for _ in own]
    streams = iter(generators(seed, rounds, nodes, Purpose.BATCH))
    return [
        [part[next(streams).choice(len(part), batch_size, replace=False)] for _ in own] if own else [part] * n
        for part, own, n in zip(parts, iterations, steps, strict=True)
    ]
