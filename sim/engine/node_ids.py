"""The ids of a federation's nodes: drawn like Flower's, or read from Flower's own grid."""

from __future__ import annotations

import time

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.wire.seeds import Purpose, generator

__all__ = ["draw_node_ids", "wait_for_nodes"]


def draw_node_ids(num_nodes: int, seed: int) -> NDArray[np.uint64]:
    """Draw ids (N,) of 64 random bits, like Flower's, but never in partition order, to expose order bugs."""
    rng = generator(seed, purpose=Purpose.FAULT)
    ids = np.zeros(0, np.uint64)
    while len(ids) < num_nodes:
        ids = np.append(ids, rng.integers(2, 2**64, size=num_nodes - len(ids), dtype=np.uint64))
        ids = ids[np.sort(np.unique(ids, return_index=True)[1])]
    return ids[::-1] if (ids[:-1] < ids[1:]).all() else ids


def wait_for_nodes(grid: Grid, num_nodes: int | None, timeout: float) -> list[int]:
    """Wait until all nodes of a grid have registered, and return their ids, ascending."""
    end = time.monotonic() + timeout
    settled, seen = time.monotonic(), -1
    while True:
        node_ids = sorted(grid.get_node_ids())
        if len(node_ids) != seen:
            settled, seen = time.monotonic(), len(node_ids)
        if num_nodes is not None and len(node_ids) >= num_nodes:
            return node_ids[:num_nodes]
        if num_nodes is None and node_ids and time.monotonic() - settled >= 1.0:
            return node_ids
        if time.monotonic() >= end:
            raise ValueError(
                f"{num_nodes if num_nodes is not None else 'at least 1'} nodes must be online after "
                f"{timeout:g} s, got {len(node_ids)}; flwr run sets their number: "
                '--federation-config "num-supernodes=N"'
            )
        time.sleep(0.1)
