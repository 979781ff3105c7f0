"""What a node keeps between rounds, told to the server for its checkpoint and taken back from it.

Flower's engines drop a node's state when a run ends, and give a resumed run a new id. The state of a device
is its owner's: with ``share-state = false`` in the node config it stays where it is.
"""

from flwr.app import ConfigRecord, RecordDict

from hedgerow.wire.calls import NODE_RECORD, RUN_KEY, Call

__all__ = ["restore_state", "tell_state"]


def tell_state(call: Call) -> RecordDict:
    """Answer ``query.state``: all records of ``context.state``, and in ``NODE_RECORD`` whose they are.

    Raises
    ------
    PermissionError
        If the node config says ``share-state = false``.
    """
    if not call.context.node_config.get("share-state", True):
        raise PermissionError(
            f"share-state is false in the node config of partition {call.partition_id}: its state stays here"
        )
    about = ConfigRecord({"partition-id": call.partition_id, RUN_KEY: str(call.context.run_id)})
    return RecordDict({**call.context.state, NODE_RECORD: about})


def restore_state(call: Call) -> RecordDict:
    """Obey ``query.restore``: what ``tell_state`` answered takes the place of ``context.state``."""
    earlier_run = call.content.config_records[NODE_RECORD][RUN_KEY]
    state = call.context.state
    state.clear()
    for name, record in call.content.items():
        if name == NODE_RECORD:
            continue
        if isinstance(record, ConfigRecord) and record.get(RUN_KEY) == earlier_run:
            # Methods disown another run's state; the resumed run is the same one under a new id.
            state[name] = ConfigRecord({**record, RUN_KEY: str(call.context.run_id)})
        else:
            state[name] = record
    return RecordDict()
