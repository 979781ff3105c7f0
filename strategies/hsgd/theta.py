"""The three blocks of HSGD's model, and their positions in its arrays."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.records import Layout

__all__ = ["Blocks", "Theta"]

Vector = NDArray[Any]


class Theta(NamedTuple):
    """Head (n0,), hospital's encoder (n1,) and devices' encoder (n2,), as vectors."""

    head: Vector
    hospital: Vector
    device: Vector

    @property
    def whole(self) -> Vector:
        """The concatenated blocks, (n0 + n1 + n2,)."""
        joined: Vector = np.concatenate(self)
        return joined

    def split(self, whole: Vector) -> "Theta":
        """Split a vector (n0 + n1 + n2,) into blocks of this model's lengths."""
        return Theta(*np.split(whole, np.cumsum([len(block) for block in self])[:-1]))

    def like(self, whole: Vector) -> "Theta":
        """Split a vector into blocks of this model's lengths and types."""
        parts = zip(self.split(whole), self, strict=True)
        return Theta(*(part.astype(block.dtype) for part, block in parts))


class Blocks:
    """The positions of the blocks in a model's flat vector: keys ``head.*``, ``hospital.*``, ``device.*``."""

    def __init__(self, layout: Layout) -> None:
        where: dict[str, list[NDArray[np.intp]]] = {name: [] for name in Theta._fields}
        for (key, part), dtype in zip(layout.slices.items(), layout.dtypes, strict=True):
            block = key.partition(".")[0]
            if block not in where:
                raise ValueError(
                    f"initial_arrays must have the keys head.*, hospital.* and device.*, got {key!r}"
                )
            if np.dtype(dtype).kind != "f":
                raise ValueError(f"initial_arrays[{key!r}] must be of a floating-point type, got {dtype}")
            where[block].append(np.arange(part.start, part.stop))
        for block, parts in where.items():
            if not parts or not sum(map(len, parts)):
                raise ValueError(f"initial_arrays must have at least one key {block}.* with entries")
        self._where = Theta(*(np.concatenate(parts) for parts in where.values()))
        self.sizes = tuple(map(len, self._where))

    def split(self, vector: Vector) -> Theta:
        """Return a flat vector's blocks, each in key order."""
        return Theta(*(vector[where] for where in self._where))

    def join(self, theta: Theta) -> Vector:
        """Return the flat vector of the blocks."""
        vector = np.empty(sum(self.sizes), np.result_type(*theta))
        for where, block in zip(self._where, theta, strict=True):
            vector[where] = block
        return vector
