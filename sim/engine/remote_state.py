"""What the nodes of Flower's own engines keep between rounds, for a checkpoint.

Flower drops it when a run ends, so a run that is to go on must fetch it while it lasts, and give it back
before the first round.
"""

import time
from collections.abc import Mapping
from logging import WARNING
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.sim.engine.node_state import pack_records, unpack_records
from hedgerow.sim.runs.checkpoint import CheckpointError
from hedgerow.wire.calls import NODE_RECORD
from hedgerow.wire.message_types import RESTORE, STATE

__all__ = ["RemoteState"]


class RemoteState:
    """The state of all nodes behind a grid, fetched and restored by two queries.

    Parameters
    ----------
    grid : Grid
        Flower's grid, in simulation or of real devices.
    timeout : float
        Seconds that one query may take, > 0, and that nodes may take to come back.
    """

    # Fetching is an exchange with every node: a checkpoint is made when it is due, not every round.
    on_demand = True

    def __init__(self, grid: Grid, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout

    def state_dict(self) -> dict[str, Any]:
        """Return every node's records by partition; a node that does not answer is missing, and logged."""
        return {partition: pack_records(content) for partition, (_, content) in self._told().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every node its records back; waits for as many nodes as there were.

        Raises
        ------
        CheckpointError
            If a node does not come back, or does not take its records.
        """
        end = time.monotonic() + self._timeout
        while len(list(self._grid.get_node_ids())) < len(state) and time.monotonic() < end:
            time.sleep(0.2)
        here = self._told()
        if missing := sorted(state.keys() - here.keys(), key=int):
            raise CheckpointError(
                f"partition {', '.join(missing)} kept state in the checkpoint and is not there after "
                f"{self._timeout:g} s"
            )
        contents = {here[partition][0]: unpack_records(records) for partition, records in state.items()}
        if refused := contents.keys() - self._ask(contents, RESTORE).keys():
            raise CheckpointError(f"{len(refused)} nodes did not take their state back")

    def _told(self) -> dict[str, tuple[int, RecordDict]]:
        """Return each partition's node id and what it told; replies that do not say are none."""
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
