"""A node's records as a tree of JSON values and ndarrays, for a checkpoint.

Flower's own engines drop the nodes' states when a run ends, so they are fetched by messages during the run,
and restored before the first round of a resumed run.
"""

import time
from collections.abc import Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.sim.runs.checkpoint import CheckpointError
from hedgerow.wire.calls import NODE_RECORD
from hedgerow.wire.message_types import RESTORE, STATE
from hedgerow.wire.records import lazy_array, view

_NUMPY = "numpy.ndarray"


def pack_records(records: RecordDict) -> dict[str, Any]:
    """Return the records as ``{name: {"kind": …, "items": …}}``; the arrays are shared, not copied."""
    return {name: _packed(record) for name, record in records.items()}


def unpack_records(tree: Mapping[str, Any]) -> RecordDict:
    """Return the records from the result of ``pack_records``."""
    return RecordDict({name: _unpacked(packed) for name, packed in tree.items()})


def _packed(record: ArrayRecord | MetricRecord | ConfigRecord) -> dict[str, Any]:
    if isinstance(record, ArrayRecord):
        return {"kind": "arrays", "items": {key: _packed_array(array) for key, array in record.items()}}
    kind = "metrics" if isinstance(record, MetricRecord) else "config"
    return {"kind": kind, "items": {key: _packed_value(value) for key, value in record.items()}}


def _unpacked(packed: Mapping[str, Any]) -> ArrayRecord | MetricRecord | ConfigRecord:
    items = packed["items"]
    if packed["kind"] == "arrays":
        record = ArrayRecord()
        for key, stored in items.items():
            record[key] = _unpacked_array(stored)
        return record
    values = {key: _unpacked_value(value) for key, value in items.items()}
    return MetricRecord(values) if packed["kind"] == "metrics" else ConfigRecord(values)


def _packed_array(array: Array) -> Any:
    if array.stype == _NUMPY:
        return view(array)
    # A codec's payload, opaque bytes.
    return {
        "dtype": array.dtype,
        "shape": list(array.shape),
        "stype": array.stype,
        "data": np.frombuffer(array.data, np.uint8),
    }


def _unpacked_array(stored: Any) -> Array:
    if isinstance(stored, np.ndarray):
        return lazy_array(stored)
    return Array(stored["dtype"], tuple(stored["shape"]), stored["stype"], stored["data"].tobytes())


def _packed_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return np.frombuffer(value, np.uint8)
    return [_packed_value(item) for item in value] if isinstance(value, list) else value


def _unpacked_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return [_unpacked_value(item) for item in value] if isinstance(value, list) else value


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
