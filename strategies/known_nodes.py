"""The fixed nodes of a simulation engine, for a ``Roster`` that need not query them.

The cost depends on the number of participants, not on the number of nodes.
"""

from collections.abc import Callable, ItemsView, Iterator, MutableMapping, MutableSet, Sequence, ValuesView
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["AllBut", "KnownSizes", "LazyNodes"]

T = TypeVar("T")


class KnownSizes(MutableMapping[int, float]):
    """The sizes (N,) of all clients, by partition id."""

    def __init__(self, sizes: Sequence[int] | NDArray[Any]) -> None:
        self.array = np.array(sizes, np.float64)

    def __getitem__(self, client: int) -> float:
        if not 0 <= client < len(self.array):
            raise KeyError(client)
        return float(self.array[client])

    def __setitem__(self, client: int, size: float) -> None:
        self.array[client] = size

    def __delitem__(self, client: int) -> None:
        raise TypeError(f"the size of client {client} is known, and stays")

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.array)))

    def __len__(self) -> int:
        return len(self.array)

    def items(self) -> ItemsView[int, float]:
        """Return clients and sizes."""
        return _Items(self)

    def values(self) -> ValuesView[float]:
        """Return the sizes."""
        return _Sizes(self)


class _Items(ItemsView[int, float]):
    def __init__(self, sizes: KnownSizes) -> None:
        super().__init__(sizes)
        self._array = sizes.array

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return iter(enumerate(self._array.tolist()))


class _Sizes(ValuesView[float]):
    def __init__(self, sizes: KnownSizes) -> None:
        super().__init__(sizes)
        self._array = sizes.array

    def __iter__(self) -> Iterator[float]:
        return iter(self._array.tolist())


class LazyNodes(Sequence[T]):
    """One node per place, created at the first access."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self._count, self._make = count, make
        self._made: dict[int, T] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> list[T]: ...
    def __getitem__(self, at: int | slice) -> T | list[T]:
        if isinstance(at, int) and (node := self._made.get(at)) is not None:
            return node
        partitions = range(self._count)[at]
        if isinstance(partitions, range):
            return [self[i] for i in partitions]
        return self._made.setdefault(partitions, self._make(partitions))


class AllBut(MutableSet[int]):
    """The node ids of all nodes (N,) except ``away``; membership is only tested for ids of these nodes."""

    def __init__(self, node_ids: NDArray[np.uint64], away: set[int]) -> None:
        self._node_ids = node_ids
        self.away = away

    def __contains__(self, node_id: object) -> bool:
        return node_id not in self.away

    def __iter__(self) -> Iterator[int]:
        return (i for i in self._node_ids.tolist() if i not in self.away)

    def __len__(self) -> int:
        return len(self._node_ids) - len(self.away)

    def add(self, node_id: int) -> None:
        """Include a node."""
        self.away.discard(node_id)

    def discard(self, node_id: int) -> None:
        """Exclude a node."""
        self.away.add(node_id)
