"""The state of nodes behind a grid, fetched for a checkpoint and given back to a later run's nodes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from hedgerow.clients import BatchClientApp, each, send_state
from hedgerow.sim import (
    CheckpointError,
    InProcessGrid,
    RunRecorder,
    load_checkpoint,
    save_checkpoint,
)
from hedgerow.sim.engine.node_state import RemoteState
from hedgerow.wire import NODE_RECORD, STATE, Call

pytestmark = pytest.mark.usefixtures("flower_identity")


@dataclass
class Round:
    round: int


def count(call: Call) -> RecordDict:
    """Count this node's messages in its state."""
    state = call.context.state
    calls = int(state.metric_records["count"]["calls"]) + 1 if "count" in state else 1  # type: ignore[arg-type]
    state["count"] = MetricRecord({"calls": calls})
    return RecordDict({"metrics": MetricRecord({"partition-id": call.partition_id, "calls": calls})})


def federation(num_nodes: int = 3, **options: Any) -> InProcessGrid:
    return InProcessGrid(BatchClientApp({"train": each(count)}), num_nodes, **options)


def round_of(grid: Grid, skip: int = 0) -> dict[int, int]:
    """Send every node but the first ``skip`` a message; return each partition's count."""
    asked = sorted(grid.get_node_ids())[skip:]
    replies = grid.send_and_receive([Message(RecordDict(), node_id, "train") for node_id in asked])
    metrics = [reply.content.metric_records["metrics"] for reply in replies]
    return {int(m["partition-id"]): int(m["calls"]) for m in metrics}  # type: ignore[arg-type]


def test_nodes_go_on_where_they_were(tmp_path: Path) -> None:
    earlier = federation()
    round_of(earlier)
    round_of(earlier, skip=1)
    save_checkpoint(tmp_path / "state.npz", RemoteState(earlier, 10).state_dict())
    later = federation(seed=1)  # node ids and the run's id differ
    RemoteState(later, 10).load_state_dict(load_checkpoint(tmp_path / "state.npz"))
    before, after = round_of(earlier), round_of(later)
    assert before == after
    assert sorted(after.values()) == [2, 3, 3]


@pytest.mark.parametrize("garbage", [RecordDict(), RecordDict({NODE_RECORD: ConfigRecord({"run": "1"})})])
def test_a_node_that_does_not_say_who_it_is_costs_its_own_state_alone(garbage: RecordDict) -> None:
    def tell(call: Call) -> RecordDict:
        return garbage if call.partition_id == 1 else send_state(call)

    grid = InProcessGrid(BatchClientApp({STATE: each(tell)}), 3)
    assert set(RemoteState(grid, 10).state_dict()) == {"0", "2"}


def test_a_node_that_does_not_come_back_is_named() -> None:
    state = RemoteState(federation(3), 10).state_dict()
    with pytest.raises(CheckpointError, match=r"state of partition 1, 2, which is not online after 0.2 s"):
        RemoteState(federation(1), 0.2).load_state_dict(state)


def test_nodes_are_asked_only_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    class Counting(RemoteState):
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return super().state_dict()

    recorder = RunRecorder(tmp_path, {}, checkpoint_every=2)
    nodes = Counting(federation(), 10)
    recorder.keep_state(nodes=nodes)
    for number in range(1, 6):
        recorder.on_round_end(Round(number))
    assert nodes.asked == 2
