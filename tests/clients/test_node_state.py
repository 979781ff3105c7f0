"""What a node tells of its state and takes back, between runs with different ids."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from hedgerow.clients import NodeState, restore_state, send_state
from hedgerow.wire import RESTORE, SECRET_RECORD, STATE, Call


def node(run_id: int, partition_id: int = 3, state: RecordDict | None = None, **node_config: bool) -> Context:
    config = {"partition-id": partition_id, **node_config}
    return Context(run_id, 7, config, state or RecordDict(), {})  # type: ignore[arg-type]


def kept(run_id: int) -> RecordDict:
    status = ConfigRecord({"run": str(run_id), "round-index": 4})
    return RecordDict({"memory": ArrayRecord({"e": Array(np.arange(3.0))}), "status": status})


@pytest.mark.parametrize(("kept_in", "resumed_as", "then_in"), [(1, 1, "1"), (1, 2, "2"), (9, 2, "9")])
def test_all_that_a_node_keeps_comes_back_as_that_of_the_resumed_run_and_nothing_else(
    kept_in: int, resumed_as: int, then_in: str
) -> None:
    earlier = node(1, state=kept(kept_in))
    later = node(resumed_as, state=RecordDict({"other": ConfigRecord({"a": 1})}))
    restore_state(Call(send_state(Call(RecordDict(), earlier, STATE)), later, RESTORE))
    assert set(earlier.state) == set(later.state) == {"memory", "status"}
    assert np.array_equal(later.state.array_records["memory"]["e"].numpy(), np.arange(3.0))
    assert later.state.config_records["status"] == {"run": then_in, "round-index": 4}


def test_an_owner_can_keep_the_state_on_the_device() -> None:
    context = node(1, state=kept(1), **{"share-state": False})
    with pytest.raises(PermissionError, match="share-state is false in the node config of partition 3"):
        send_state(Call(RecordDict(), context, STATE))


def test_what_a_nodes_noise_is_drawn_from_is_neither_told_nor_taken() -> None:
    secret = ConfigRecord({"noise-root": b"known to nobody"})
    context = node(1, state=RecordDict({**kept(1), SECRET_RECORD: secret}))
    told = send_state(Call(RecordDict(), context, STATE))
    assert SECRET_RECORD not in told
    forged = RecordDict({**told, SECRET_RECORD: ConfigRecord({"noise-root": b"known to the server"})})
    later = node(2)
    restore_state(Call(forged, later, RESTORE))
    assert SECRET_RECORD not in later.state


# What becomes of a round at one node; "repeated": its reply is lost, and the round is made again.
FATES = ("absorbed", "lost", "repeated", "absent", "saved", "resumed")


@given(st.lists(st.sampled_from(FATES), max_size=24))
def test_what_a_node_keeps_counts_each_absorbed_reply_once(fates: list[str]) -> None:
    context, now, acknowledged, counted = node(1), 0, -1, 0
    saved = send_state(Call(RecordDict(), context, STATE)), now, acknowledged, counted
    for fate in fates:
        if fate == "saved":
            saved = send_state(Call(RecordDict(), context, STATE)), now, acknowledged, counted
            continue
        if fate == "resumed":
            state, now, acknowledged, counted = saved
            context = node(context.run_id + 1)
            restore_state(Call(state, context, RESTORE))
            continue
        if fate != "absent":
            config = ConfigRecord({"round-index": now, "acknowledged": acknowledged})
            own = NodeState.of(Call(RecordDict({"config": config}), context, "train"), "count")
            before = own.arrays.get("n", np.zeros(1))
            assert before == counted
            own.keep({"n": before + 1})
        if fate == "absorbed":
            acknowledged, counted = now, counted + 1
        now += fate != "repeated"


def test_state_without_acknowledgements_is_refused_with_the_remedy() -> None:
    call = Call(RecordDict({"config": ConfigRecord({})}), node(1), "train")
    with pytest.raises(ValueError, match=r"give the strategy parts=\[Acknowledgements\(\)\]"):
        NodeState.of(call, "count").keep({"n": np.zeros(1)})
