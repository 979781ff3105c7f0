"""Named blocks: several vectors in one message, such as a model and a control variate.

All blocks are in the message's one ArrayRecord: the model's arrays under their own keys, those of another
block under ``<block>/<key>``. Compression, secure sums, means and columns therefore work as for a model
alone; bounds and server steps see each block by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.printable import quoted
from hedgerow.wire.records import Layout

MODEL = "model"
T = TypeVar("T")


@dataclass(frozen=True)
class Blocks:
    """The blocks of an exchange.

    Parameters
    ----------
    layouts : Mapping[str, Layout]
        The layout of each block by name, in the order of the vector. The first is ``model``.
    """

    layouts: Mapping[str, Layout]

    def __post_init__(self) -> None:
        """Raise ValueError if the model is not the first block, or two arrays have one key."""
        names = list(self.layouts)
        if names[:1] != [MODEL] or len(names) < 2 or any(not name or "/" in name for name in names):
            raise ValueError(
                f"layouts must have {MODEL!r} first, and other blocks with names without '/', got "
                f"{quoted(names)}"
            )
        if len({*self.layout.keys}) < len(self.layout.keys):
            raise ValueError(f"layouts must give every array a key of its own, got {self.layout.keys}")

    @cached_property
    def layout(self) -> Layout:
        """The layout of the whole vector (M,)."""
        keys = [key for name, one in self.layouts.items() for key in in_block(name, one.keys)]
        parts = self.layouts.values()
        return Layout(
            tuple(keys),
            tuple(shape for one in parts for shape in one.shapes),
            tuple(dtype for one in parts for dtype in one.dtypes),
            {key: v for name, one in self.layouts.items() for key, v in in_block(name, one.origin).items()},
        )

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Each block's slice of the vector."""
        ends = [0, *accumulate(one.size for one in self.layouts.values())]
        return {name: slice(*ends[at : at + 2]) for at, name in enumerate(self.layouts)}

    def joined(self, **blocks: NDArray[Any]) -> NDArray[Any]:
        """Return the vector (M,) of all blocks, by name."""
        return np.concatenate([blocks[name] for name in self.layouts])

    def split(self, vector: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return views of each block of a vector (M,), by name."""
        return {name: vector[where] for name, where in self.slices.items()}


def in_block(name: str, entries: Any) -> dict[str, Any]:
    """Return entries (a mapping, or keys alone) by their keys in a message, as arrays of a block."""
    values = entries if isinstance(entries, Mapping) else dict.fromkeys(entries)
    return {key if name == MODEL else f"{name}/{key}": value for key, value in values.items()}


def block_of(name: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of a message that are a block's other than the model's, by their own keys."""
    start = f"{name}/"
    return {key.removeprefix(start): value for key, value in entries.items() if key.startswith(start)}
