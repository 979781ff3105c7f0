"""A node's records survive a checkpoint, whatever they hold."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hedgerow.sim import FaultModel, InProcessGrid, load_checkpoint, save_checkpoint
from hedgerow.sim.engine.node_state import pack_records, unpack_records

PARTS = ("dtype", "shape", "stype", "data")


def test_every_kind_of_record_comes_back_from_disk(tmp_path: Path) -> None:
    records = RecordDict(
        {
            "arrays": ArrayRecord(
                {
                    "w": Array(np.arange(6.0).reshape(2, 3)),
                    "n": Array(np.array(3)),
                    "e": Array(np.zeros((0, 2))),
                }
            ),
            "payload": ArrayRecord({"p": Array("float32", (5,), "ours.topk.v1", b"\x00\x01\xff")}),
            "metrics": MetricRecord({"i": 1, "f": 0.5, "is": [1, 2], "fs": [0.5], "none": []}),
            "config": ConfigRecord(
                {"b": True, "s": "x", "raw": b"\x00\xff", "raws": [b"a", b""], "empty": b""}
            ),
        }
    )
    save_checkpoint(tmp_path / "c.npz", pack_records(records))
    back = unpack_records(load_checkpoint(tmp_path / "c.npz"))
    assert list(back) == list(records)
    for name, record in records.array_records.items():
        for key, array in record.items():
            twin = back.array_records[name][key]
            assert [getattr(twin, part) for part in PARTS] == [getattr(array, part) for part in PARTS]
    assert back.metric_records == records.metric_records
    assert back.config_records == records.config_records


def counting_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        before = context.state.get("memory", ArrayRecord({"n": Array(np.zeros(2))}))["n"].numpy()
        context.state["memory"] = ArrayRecord({"n": Array(before + 1)})
        return Message(RecordDict({"m": MetricRecord({"n": float(before[0])})}), reply_to=message)

    return app


def round_of(grid: InProcessGrid) -> list[float]:
    messages = [Message(RecordDict(), node_id, "train", ttl=10.0) for node_id in grid.get_node_ids()]
    replies = grid.send_and_receive(messages, timeout=20.0)
    return [reply.content["m"]["n"] if reply.has_content() else -1.0 for reply in replies]  # type: ignore[misc]


@pytest.mark.usefixtures("flower_identity")
def test_an_engine_goes_on_from_its_state_with_the_same_memories_and_the_same_faults(tmp_path: Path) -> None:
    faults = FaultModel(dropout=0.4)
    whole = InProcessGrid(counting_app(), 6, faults=faults, seed=3)
    expected = [round_of(whole) for _ in range(6)]
    first = InProcessGrid(counting_app(), 6, faults=faults, seed=3)
    before = [round_of(first) for _ in range(3)]
    save_checkpoint(tmp_path / "c.npz", first.state_dict())
    second = InProcessGrid(counting_app(), 6, faults=faults, seed=3)
    second.load_state_dict(load_checkpoint(tmp_path / "c.npz"))
    assert before + [round_of(second) for _ in range(3)] == expected


@pytest.mark.usefixtures("flower_identity")
def test_a_state_of_another_number_of_nodes_is_refused() -> None:
    state = InProcessGrid(counting_app(), 2).state_dict()
    with pytest.raises(ValueError, match="the state must be of 3 nodes, got 2"):
        InProcessGrid(counting_app(), 3).load_state_dict(state)
