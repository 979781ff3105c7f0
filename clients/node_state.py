"""A node's state between rounds, and its copy in the server's checkpoint.

Flower's engines drop a node's state when a run ends and give a resumed run a new id. A device's state belongs
to its owner: with ``share-state = false`` in the node config it never leaves the node. A device encrypts what
it sends with its own key and accepts nothing else, so that the server can neither read nor forge a state.
"""

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.clients.instructions import only_config, whole
from hedgerow.clients.links import own_key
from hedgerow.clients.mods.guard import check_restore, locked_number
from hedgerow.wire.calls import LINKS_RECORD, NODE_RECORD, RUN_KEY, SEALED_RECORD, SECRET_RECORD, Call
from hedgerow.wire.process import is_simulated
from hedgerow.wire.records import PayloadError, finite_views, lazy_array


def keep(context: Context, name: str, arrays: ArrayRecord, status: Mapping[str, str | int]) -> None:
    """Store arrays in ``context.state`` under a name, and their description as ``<name>-status``."""
    context.state[name] = arrays
    context.state[f"{name}-status"] = ConfigRecord({RUN_KEY: str(context.run_id), **status})


def kept(context: Context, name: str) -> tuple[dict[str, NDArray[Any]], ConfigRecord]:
    """Return the arrays and status stored in this run; both empty if they are missing or damaged."""
    state, about = context.state, f"{name}-status"
    status = state.config_records.get(about, ConfigRecord())
    if name in state.array_records and status.get(RUN_KEY) == str(context.run_id):
        with suppress(PayloadError):
            return finite_views(state.array_records[name]), status
    return {}, ConfigRecord()


@dataclass(frozen=True)
class NodeState:
    """Arrays that a node keeps between rounds; each of its replies changes them exactly once.

    A reply says with ``keep`` what to hold once the model has absorbed it, and what otherwise. The strategy
    needs ``parts=[Acknowledgements()]``, which names the last reply that was absorbed: a lost reply, a
    repeated round, and a run that resumes from an earlier checkpoint then all start from the same arrays.

    Parameters
    ----------
    call : Call
        The instruction.
    name : str
        Names the arrays in ``context.state``.
    after, otherwise : Mapping[str, NDArray]
        The arrays of the node's last reply, if it was absorbed, and if not; empty at first.
    absorbed : bool
        Whether it was absorbed. A message that is no training instruction does not say: then True.
    repeated : bool
        Whether it replied to this same round, which is repeated.
    about : Mapping[str, str or int]
        What ``keep`` was given in addition to the arrays.
    """

    call: Call
    name: str
    after: Mapping[str, NDArray[Any]]
    otherwise: Mapping[str, NDArray[Any]]
    absorbed: bool = True
    repeated: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, name: str) -> "NodeState":
        """Return what a node keeps under a name; ValueError for an invalid ``acknowledged`` in the config."""
        arrays, status = kept(call.context, name)
        after, otherwise = (
            {key.removeprefix(start): value for key, value in arrays.items() if key.startswith(start)}
            for start in (_AFTER, _OTHERWISE)
        )
        config = only_config(call)
        if _ACKNOWLEDGED not in config:
            return cls(call, name, after, otherwise, about=status)
        now, last = whole(config, _ROUND, 0), whole(config, _ACKNOWLEDGED, -1)
        replied = status.get(_ROUND)
        # State of another round than the server counts on belongs to another course of the run.
        if not isinstance(replied, int) or not now > 0 or not last <= replied <= now:
            return cls(call, name, {}, {})
        absorbed = last == replied
        again = replied == now and not absorbed
        return cls(call, name, after, otherwise, absorbed, repeated=again, about=status)

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The arrays to start from, by key; read-only."""
        return self.after if self.absorbed else self.otherwise

    def like(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of ``arrays`` as tensors like these; zeros where the node keeps none of the shape."""
        own = {key: torch.zeros_like(value) for key, value in tensors.items()}
        for key, value in self.arrays.items():
            if key in own and value.shape == own[key].shape:
                own[key] = torch.tensor(value).to(own[key])
        return own

    def keep(
        self,
        after: Mapping[str, NDArray[Any] | Tensor],
        otherwise: Mapping[str, NDArray[Any]] | None = None,
        **about: str | int,
    ) -> None:
        """Keep the arrays of this reply: ``after`` if it is absorbed, else ``otherwise``.

        ``otherwise`` is ``arrays`` by default. ValueError if the instruction has no ``acknowledged``.
        """
        config = only_config(self.call)
        if _ACKNOWLEDGED not in config:
            raise ValueError(
                f"the message's config must have {_ACKNOWLEDGED!r} for a node that keeps {self.name!r}: give "
                "the strategy parts=[Acknowledgements()]"
            )
        otherwise = self.arrays if otherwise is None else otherwise
        arrays = {key: v.numpy(force=True) if isinstance(v, Tensor) else v for key, v in after.items()}
        record = ArrayRecord()
        for start, slot in ((_AFTER, arrays), (_OTHERWISE, otherwise)):
            for key, value in slot.items():
                record[start + key] = lazy_array(value)
        keep(self.call.context, self.name, record, {**about, _ROUND: whole(config, _ROUND, 0)})


_ROUND, _ACKNOWLEDGED = "round-index", "acknowledged"
_AFTER, _OTHERWISE = "after.", "otherwise."


def send_state(call: Call) -> RecordDict:
    """Answer ``query.state``: the records of ``context.state``, and the node and run in ``NODE_RECORD``.

    ``SECRET_RECORD`` is omitted, because the root of a node's noise would allow its removal. A device sends
    one record, ``SEALED_RECORD``, that only it can read. PermissionError if the node config has
    ``share-state = false``.
    """
    _check_shared(call)
    node = ConfigRecord({"partition-id": call.partition_id, RUN_KEY: str(call.context.run_id)})
    records = {name: record for name, record in call.context.state.items() if name != SECRET_RECORD}
    if not is_simulated():
        number = locked_number()
        about = _of(call, str(call.context.run_id), number)
        locked = own_key(call.context).lock(_written(records), about)
        records = {SEALED_RECORD: ConfigRecord({"bytes": locked, "number": number})}
    return RecordDict({**records, NODE_RECORD: node})


def restore_state(call: Call) -> RecordDict:
    """Answer ``query.restore``: replace ``context.state`` by what ``send_state`` answered earlier.

    PermissionError as in ``send_state``; ValueError if this node did not send the records, or lost its key.
    """
    _check_shared(call)
    about = call.content.config_records.get(NODE_RECORD, ConfigRecord())
    earlier_run = about.get(RUN_KEY)
    if not isinstance(earlier_run, str) or about.get("partition-id") != call.partition_id:
        raise ValueError(
            f"{NODE_RECORD} must be of a run and the partition {call.partition_id}, got {dict(about)} in "
            "the message"
        )
    state = call.context.state
    records: Mapping[str, Any] = call.content
    if is_simulated():
        check_restore(earlier_run, 0)
        kept = {}
    else:
        sealed = call.content.config_records.get(SEALED_RECORD, ConfigRecord())
        locked, number = sealed.get("bytes"), sealed.get("number")
        if not isinstance(locked, bytes) or not isinstance(number, int):
            raise ValueError(f"{SEALED_RECORD} must hold what this node locked, got {dict(sealed)!r:.80}")
        records = _read(own_key(call.context).unlock(locked, _of(call, earlier_run, number)))
        check_restore(earlier_run, number)
        # Keep the links and secrets that this run has already established.
        kept = {name: state[name] for name in (LINKS_RECORD, SECRET_RECORD) if name in state}
    state.clear()
    for name, record in records.items():
        if name in (NODE_RECORD, SECRET_RECORD):
            continue
        if isinstance(record, ConfigRecord) and record.get(RUN_KEY) == earlier_run:
            # Methods ignore another run's state; the resumed run is the same one under a new id.
            state[name] = ConfigRecord({**record, RUN_KEY: str(call.context.run_id)})
        else:
            state[name] = record
    for name, record in kept.items():
        state[name] = record
    return RecordDict()


def _check_shared(call: Call) -> None:
    if not call.context.node_config.get("share-state", True):
        raise PermissionError(
            f"share-state is false in the node config of partition {call.partition_id}: its state stays here"
        )


def _of(call: Call, run: str, number: int) -> str:
    return f"state {number} of partition {call.partition_id} in run {run}"


# Records as JSON, because Flower's own serialisation is not public.
_KINDS = {"arrays": ArrayRecord, "metrics": MetricRecord, "config": ConfigRecord}


def _written(records: Mapping[str, Any]) -> bytes:
    tree = {
        name: [
            next(kind for kind, of in _KINDS.items() if isinstance(record, of)),
            {key: _value_written(value) for key, value in record.items()},
        ]
        for name, record in records.items()
    }
    return json.dumps(tree).encode()


def _value_written(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Array):
        return {"array": [value.dtype, list(value.shape), value.stype, _value_written(value.data)]}
    return [_value_written(one) for one in value] if isinstance(value, list) else value


def _read(text: bytes) -> dict[str, Any]:
    return {
        name: _KINDS[kind]({key: _value_read(value) for key, value in items.items()})
        for name, (kind, items) in json.loads(text).items()
    }


def _value_read(value: Any) -> Any:
    if isinstance(value, list):
        return [_value_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    dtype, shape, stype, data = value["array"]
    return Array(dtype, tuple(shape), stype, _value_read(data))
