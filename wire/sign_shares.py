"""Which weights' signs travel where not all can: drawn by both sides, of every layer the same share.

For FedBAT within a budget below one bit a weight: S. Li et al., 2024, send every weight's sign, and S. Li
et al. (FedMUD) compare that with methods that send less. Ours: weights that are not drawn stay as they are
that round.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.checks import at_least
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["drawn_weights", "signs_by_layer"]


def signs_by_layer(sizes: Mapping[str, int], signs: int) -> dict[str, int]:
    """Return how many signs each layer sends: its share of them, rounded down, but one at least.

    Parameters
    ----------
    sizes : Mapping[str, int]
        Weights of each layer, >= 1.
    signs : int
        Signs of all layers, >= 0; all weights' where there are no more.
    """
    at_least(0, signs=signs)
    total = sum(sizes.values())
    return {key: min(size, max(1, signs * size // total)) for key, size in sizes.items()}


def drawn_weights(
    sizes: Mapping[str, int], signs: int, *, seed: int, version: int
) -> dict[str, NDArray[np.int64] | None]:
    """Return the ascending indices of each layer's weights that are drawn; None where all are.

    They are drawn once a version, for all nodes of a process and all replies: do not change them.

    Parameters
    ----------
    sizes, signs
        As in ``signs_by_layer``.
    seed, version : int
        The run's seed, and the version of the weights that the signs move, >= 0 each.
    """
    counts = signs_by_layer(sizes, signs)
    return {
        key: _drawn(sizes[key], count, seed, version, place) if count < sizes[key] else None
        for place, (key, count) in enumerate(counts.items())
    }


# The layers of a model, of the version at hand and of one that a late node catches up with.
@lru_cache(maxsize=64)
def _drawn(size: int, count: int, seed: int, version: int, place: int) -> NDArray[np.int64]:
    stream = generator(seed, round=version, partition_id=place, purpose=Purpose.SUBSET)
    return np.sort(stream.choice(size, count, replace=False))
