"""The nodes of a federation in one process: their ids, and their states between messages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from math import inf
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict, UserConfig
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.sim.runs.checkpoint import CheckpointError
from hedgerow.wire.calls import NODE_RECORD
from hedgerow.wire.carried import pack_records, unpack_records
from hedgerow.wire.message_types import RESTORE, STATE
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

    def addressed(self, node_ids: Sequence[int]) -> list[SimulatedNode | None]:
        """Return the nodes with these ids, which a message will change; None for an unknown one."""
        nodes = [self.find(node_id) for node_id in node_ids]
        self.note_changes([node for node in nodes if node is not None])
        return nodes

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

    def note_changes(self, nodes: Iterable[SimulatedNode]) -> None:
        """Pack nodes anew for the next checkpoint."""
        self._changed |= {node.partition_id: node for node in nodes}

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
            self.note_changes([node])


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


class RemoteState:
    """The state of all nodes of a grid, fetched and restored by two queries.

    Parameters
    ----------
    grid : Grid
        Flower's grid, of a simulation or of devices.
    timeout : float
        Seconds for one query, > 0, and for nodes to reconnect.
    """

    # Fetching is an exchange with every node, done only when a checkpoint is due.
    on_demand = True

    def __init__(self, grid: Grid, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout

    def state_dict(self) -> dict[str, Any]:
        """Return every node's records by partition; nodes that do not answer are missing, and logged."""
        return {partition: pack_records(content) for partition, (_, content) in self._states().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Wait for as many nodes as there were, and restore each node's records.

        CheckpointError if a node does not reconnect or refuses its records.
        """
        end = time.monotonic() + self._timeout
        while len(list(self._grid.get_node_ids())) < len(state) and time.monotonic() < end:
            time.sleep(0.2)
        here = self._states()
        if missing := sorted(state.keys() - here.keys(), key=int):
            raise CheckpointError(
                f"the checkpoint has state of partition {', '.join(missing)}, which is not online after "
                f"{self._timeout:g} s"
            )
        contents = {here[partition][0]: unpack_records(records) for partition, records in state.items()}
        if refused := contents.keys() - self._ask(contents, RESTORE).keys():
            raise CheckpointError(f"{len(refused)} nodes did not restore their state")

    def _states(self) -> dict[str, tuple[int, RecordDict]]:
        """Return each partition's node id and state; replies without a partition id are ignored."""
        question = RecordDict({"config": ConfigRecord()})
        asked = {node_id: question for node_id in self._grid.get_node_ids()}
        answers = {}
        for node_id, content in self._ask(asked, STATE).items():
            about = content.config_records.get(NODE_RECORD, ConfigRecord())
            if "partition-id" in about:
                answers[str(about["partition-id"])] = node_id, content
        if len(answers) < len(asked):
            log(WARNING, "%d of %d nodes did not send their state.", len(asked) - len(answers), len(asked))
        return answers

    def _ask(self, contents: Mapping[int, RecordDict], query: str) -> dict[int, RecordDict]:
        messages = [
            Message(content, node_id, query, ttl=self._timeout) for node_id, content in contents.items()
        ]
        replies = self._grid.send_and_receive(messages, timeout=self._timeout)
        return {reply.metadata.src_node_id: reply.content for reply in replies if not reply.has_error()}
