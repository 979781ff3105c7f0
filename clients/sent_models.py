"""The models of messages: received ones as state dicts, with what a node has itself; trained ones as rows."""

from collections.abc import Mapping, Sequence
from functools import reduce
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn

from hedgerow.clients.frozen import at_home
from hedgerow.clients.instructions import only_config
from hedgerow.clients.local_layers import own_layers
from hedgerow.clients.local_task import LocalTask
from hedgerow.clients.training.work import StackRow
from hedgerow.wire.blocks import block_of, in_block
from hedgerow.wire.calls import Call
from hedgerow.wire.frozen import FROZEN_CHECKSUM
from hedgerow.wire.records import received_state, records_of

# Cached per model, because building a state dict takes as long as a step of a small model.
_ENTRIES: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Return the message's one ArrayRecord; ValueError if it has none, or more than one."""
    records = records_of(content, ArrayRecord)
    if len(records) != 1:
        raise ValueError(f"the message must have exactly one ArrayRecord, got {len(records)}")
    return next(iter(records.values()))


def sent_state(call: Call, task: LocalTask, blocks: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return a copy of the message's one ArrayRecord as a state dict, on the task's device, in its dtypes.

    Frozen arrays (``wire/frozen.py``) are added, shared: never change them. Arrays of other ``blocks``, by
    name, keep their keys in the message, see ``wire/blocks.py``. ValueError unless there is one ArrayRecord,
    if keys or shapes are not the model's, or for a value that is not finite.
    """
    own, record = _entries(task.model), only_arrays(call.content)
    lacking = [key for key in own if key not in record]
    home = home_arrays(call, task, lacking) if lacking else {}
    expected = {key: value for key, value in own.items() if key not in home}
    for name in blocks:
        expected |= in_block(name, {key: own[key] for key in block_of(name, record) if key in own})
    shapes = {key: tuple(value.shape) for key, value in expected.items()}
    sent = received_state(record, shapes, task.x.device)
    return {key: value.to(expected[key].dtype) for key, value in sent.items()} | home


def at_home_of(call: Call, task: LocalTask) -> dict[str, Tensor]:
    """Return the arrays of the model that a message with the model does not have."""
    record = only_arrays(call.content)
    return home_arrays(call, task, [key for key in _entries(task.model) if key not in record])


def home_arrays(call: Call, task: LocalTask, keys: Sequence[str]) -> dict[str, Tensor]:
    """Return the arrays of the model that a message does not have.

    The frozen ones are those that ``clients/frozen.py`` finds, shared: never change them. The node's own
    layers are as it has trained them last, or those of the run's initial model.
    """
    config = only_config(call)
    if not keys or FROZEN_CHECKSUM not in config:
        return {}
    home = at_home(config, call.context, task, keys)
    return {**home, **own_layers(call, home)}


def state_rows(
    states: Sequence[Mapping[str, Tensor]],
    keys: Sequence[str],
    starts: Sequence[Mapping[str, Tensor] | None] = (),
) -> Tensor:
    """Return state dicts as rows (K, M) on their device, in the order of the keys.

    The rows are float64 if one of the values is, else float32. Of an integer or boolean array they have the
    change since a node's start, of ``starts`` (K), or the array if there is none.
    """
    values = [states[0][key] for key in keys]
    floats = [value.dtype for value in values if value.is_floating_point()]
    dtype = reduce(torch.promote_types, floats, torch.float32)
    ends = np.cumsum([value.numel() for value in values]).tolist()
    rows = torch.empty(len(states), ends[-1], dtype=dtype, device=values[0].device)
    stacks: dict[int, list[int]] = {}
    for k, state in enumerate(states):
        stacks.setdefault(id(state.stack if isinstance(state, StackRow) else state), []).append(k)
    for members in stacks.values():
        first, at = states[members[0]], _as_slice(members)
        within = _as_slice([state.row for k in members if isinstance(state := states[k], StackRow)])
        for key, value, end in zip(keys, values, ends, strict=True):
            own = first.stack[key][within] if isinstance(first, StackRow) else first[key][None]
            if not value.is_floating_point():
                own = _changes(own, [starts[k] for k in members] if starts else [None], key)
            rows[at, end - value.numel() : end] = own.reshape(len(own), value.numel()).to(dtype)
    return rows


def _changes(own: Tensor, starts: Sequence[Mapping[str, Tensor] | None], key: str) -> Tensor:
    """Return integers (k, ...) minus those that the nodes started from, mostly one object; int64."""
    if len({id(start) for start in starts}) > 1:
        return torch.cat([_changes(one[None], [start], key) for one, start in zip(own, starts, strict=True)])
    return own.long() if starts[0] is None else own.long() - starts[0][key].to(own.device, torch.int64)


def _as_slice(numbers: list[int]) -> slice | list[int]:
    """Return numbers as an index; a slice, which copies nothing, if they are consecutive."""
    run = range(numbers[0], numbers[0] + len(numbers)) if numbers else range(0)
    return slice(run.start, run.stop) if numbers == list(run) else numbers


def _entries(model: nn.Module) -> dict[str, Tensor]:
    """Return the shapes and dtypes of the model's state dict, as meta tensors."""
    if model not in _ENTRIES:
        _ENTRIES[model] = {
            key: torch.empty_like(value, device="meta") for key, value in model.state_dict().items()
        }
    return _ENTRIES[model]
