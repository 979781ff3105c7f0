"""Updates of weights by one bit each, +alpha or -alpha per layer, for all weights or a random subset.

For FedBAT, S. Li et al., 2024, which sends every weight's sign. S. Li et al. (FedMUD) compare it with methods
that send less than one bit per weight. For such a budget, both sides here draw the weights whose signs are
sent, the same share of every layer; the others do not change in that round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.bits import bytes_of
from hedgerow.wire.checks import at_least
from hedgerow.wire.records import PayloadError
from hedgerow.wire.seeds import Purpose, generator


@dataclass(frozen=True)
class SignUpdates:
    """The encoding of a run's updates, shared by server and nodes.

    An update has for each layer ``"<key>:bits"``, uint8, a set bit for +alpha, and ``"<key>:alpha"``,
    float32, of one entry.
    """

    sizes: Mapping[str, int]  # weights of each layer, >= 1
    signs: int  # signs sent for all layers, >= 0; see ``signs_by_layer``
    seed: int  # the run's

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of signs sent for each layer."""
        return signs_by_layer(self.sizes, self.signs)

    @property
    def bits(self) -> int:
        """Nominal bits of an update: its signs, and 32 per layer."""
        return sum(self.counts.values()) + 32 * len(self.counts)

    @property
    def packed_bits(self) -> int:
        """Bits of an update's arrays."""
        return sum(8 * bytes_of(count) for count in self.counts.values()) + 32 * len(self.counts)

    def drawn(self, version: int) -> dict[str, NDArray[np.int64] | None]:
        """Return the indices of the weights whose signs are sent for a version; see ``drawn_weights``."""
        return drawn_weights(self.sizes, self.signs, seed=self.seed, version=version)

    def placed(self, key: str, values: NDArray[np.float32], version: int) -> NDArray[np.float32]:
        """Return a layer's update: the values (count,) at the drawn weights, zero elsewhere."""
        if (kept := self.drawn(version)[key]) is None:
            return values
        whole = np.zeros(self.sizes[key], np.float32)
        whole[kept] = values
        return whole

    def read(self, update: Mapping[str, NDArray[Any]], version: int) -> dict[str, NDArray[np.float32]]:
        """Return the decoded update of each layer's weights.

        Raises
        ------
        PayloadError
            If the update is malformed: ``missing key``, ``wrong dtype``, ``wrong shape``, ``bad scale`` or
            ``unknown key``.
        """
        steps = {
            key: self.placed(key, _signs_of(key, update, count), version)
            for key, count in self.counts.items()
        }
        if len(update) != 2 * len(steps):
            raise PayloadError("unknown key", f"one of {sorted(update)}")
        return steps


def signed(up: NDArray[np.bool_], alpha: np.float32) -> NDArray[np.float32]:
    """Return +alpha where ``up``, else -alpha."""
    return np.where(up, alpha, -alpha)


def _signs_of(name: str, update: Mapping[str, NDArray[Any]], count: int) -> NDArray[np.float32]:
    """Return one layer's signs times step size (count,)."""
    found = []
    for part, dtype, size in (("bits", np.uint8, bytes_of(count)), ("alpha", np.float32, 1)):
        key = f"{name}:{part}"
        if key not in update:
            raise PayloadError("missing key", repr(key))
        array = update[key]
        if array.dtype != dtype:
            raise PayloadError("wrong dtype", f"{key!r} is {array.dtype}, expected {np.dtype(dtype)}")
        if array.size != size:
            raise PayloadError("wrong shape", f"{key!r} has {array.shape}, expected ({size},)")
        found.append(array.ravel())
    bits, (alpha,) = found
    if not np.isfinite(alpha) or alpha < 0:
        raise PayloadError("bad scale", f"{name}:alpha is {alpha}, expected a finite number >= 0")
    return signed(np.unpackbits(bits, count=count).view(bool), alpha)


def signs_by_layer(sizes: Mapping[str, int], signs: int) -> dict[str, int]:
    """Return the number of signs of each layer: its share of them, rounded down, but at least one.

    - ``sizes``: Weights of each layer, >= 1.
    - ``signs``: Signs of all layers, >= 0; at most one per weight is used.
    """
    at_least(0, signs=signs)
    total = sum(sizes.values())
    return {key: min(size, max(1, signs * size // total)) for key, size in sizes.items()}


def drawn_weights(
    sizes: Mapping[str, int], signs: int, *, seed: int, version: int
) -> dict[str, NDArray[np.int64] | None]:
    """Return the ascending indices of each layer's drawn weights; None if all are drawn.

    They are cached and shared by all nodes of a process: do not modify them.

    - ``seed``, ``version``: The run's seed, and the version of the weights that are updated, >= 0 each.
    """
    counts = signs_by_layer(sizes, signs)
    return {
        key: _drawn(sizes[key], count, seed, version, place) if count < sizes[key] else None
        for place, (key, count) in enumerate(counts.items())
    }


# For the layers of the current version, and of an earlier one for a late node.
@lru_cache(maxsize=64)
def _drawn(size: int, count: int, seed: int, version: int, place: int) -> NDArray[np.int64]:
    stream = generator(seed, round=version, partition_id=place, purpose=Purpose.SUBSET)
    return np.sort(stream.choice(size, count, replace=False))
