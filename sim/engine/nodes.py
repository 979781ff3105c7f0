"""The nodes of a federation in one process: their ids, and their states between messages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from flwr.app import RecordDict, UserConfig
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.sim.engine.node_state import pack_records, unpack_records
from hedgerow.wire.seeds import Purpose, generator


@dataclass(slots=True)
class SimulatedNode:
    """One node and its state between messages."""

    node_id: int
    partition_id: int
    config: UserConfig
    state: RecordDict
    received: int = 0
    busy_until: float = 0.0
    offline_at: float = inf


class SimulatedNodes:
    """All nodes, each created on first use.

    Parameters
    ----------
    ids : ndarray of uint64, (N,)
        The node ids, by partition id.
    configs : sequence of dict or None (default: None)
        Each partition's node config, without ``partition-id`` and ``num-partitions``.
    """

    def __init__(self, ids: NDArray[np.uint64], configs: Sequence[UserConfig] | None = None) -> None:
        self.ids, self._by_id = ids, np.argsort(ids)
        self._ascending = ids[self._by_id]
        self.configs = configs
        self._made: dict[int, SimulatedNode] = {}
        self.all_made = False
        # Each node's checkpoint entry, by partition id, and the nodes whose entry is outdated.
        self._packed: dict[str, dict[str, Any]] = {}
        self._changed: dict[int, SimulatedNode] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def by_id(self) -> dict[int, SimulatedNode]:
        """Return all nodes by id, in the order of partitions; creates those that are missing."""
        if not self.all_made:
            made = [self._made.get(i) or self._new(at, i) for at, i in enumerate(self.ids.tolist())]
            self._made, self.all_made = {node.node_id: node for node in made}, True
        return self._made

    def find(self, node_id: int) -> SimulatedNode | None:
        """Return the node with an id; None if there is none."""
        if (node := self._made.get(node_id)) is not None or self.all_made:
            return node
        if not 0 <= node_id < 2**64:
            return None
        at = int(np.searchsorted(self._ascending, np.uint64(node_id)))
        if at == len(self) or int(self._ascending[at]) != node_id:
            return None
        self._made[node_id] = self._new(int(self._by_id[at]), node_id)
        return self._made[node_id]

    def at(self, partition_id: int) -> SimulatedNode:
        """Return the node of a partition."""
        node = self.find(int(self.ids[partition_id]))
        assert node is not None
        return node

    def online(self, now: float) -> list[int]:
        """Return the ids of the nodes that are online at a time, ascending."""
        if self.all_made:
            return sorted(node.node_id for node in self._made.values() if node.offline_at > now)
        away = {node.node_id for node in self._made.values() if node.offline_at <= now}
        online: list[int] = self._ascending.tolist()
        return [node_id for node_id in online if node_id not in away] if away else online

    def _new(self, partition_id: int, node_id: int) -> SimulatedNode:
        extra = {} if self.configs is None else self.configs[partition_id]
        config = {**extra, "partition-id": partition_id, "num-partitions": len(self)}
        return SimulatedNode(node_id, partition_id, config, RecordDict())

    # Checkpoints

    def note_change(self, node: SimulatedNode) -> None:
        """Pack a node anew for the next checkpoint."""
        self._changed[node.partition_id] = node

    def state_dict(self) -> dict[str, Any]:
        """Return the nodes' states and numbers of received messages, without nodes that received none."""
        for node in self._changed.values():
            self._packed[str(node.partition_id)] = {
                "received": node.received,
                "busy_until": node.busy_until,
                "offline_at": None if node.offline_at == inf else node.offline_at,
                "state": pack_records(node.state),
            }
        self._changed.clear()
        return {"num-nodes": len(self), "nodes": self._packed.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the nodes of a checkpoint; ValueError if it has another number of nodes."""
        written = int(state.get("num-nodes", len(state["nodes"])))
        if written != len(self):
            raise ValueError(f"the state must be of {len(self)} nodes, got {written}")
        if unknown := [at for at in state["nodes"] if not 0 <= int(at) < len(self)]:
            raise ValueError(f"partitions must be from 0 to {len(self) - 1}, got {unknown[0]}")
        made = [str(node.partition_id) for node in self._made.values()]
        as_made: dict[str, Any] = {"received": 0, "busy_until": 0.0, "offline_at": None, "state": {}}
        for at, stored in (dict.fromkeys(made, as_made) | state["nodes"]).items():
            node = self.at(int(at))
            node.received = int(stored["received"])
            node.busy_until = float(stored["busy_until"])
            node.offline_at = inf if stored["offline_at"] is None else float(stored["offline_at"])
            node.state = unpack_records(stored["state"])
            self.note_change(node)


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
