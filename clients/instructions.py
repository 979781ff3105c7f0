"""Readers of a message's config values and model; each raises ValueError with key, value and valid range."""

from collections.abc import Mapping, Sequence
from functools import reduce
from math import inf
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor, nn

from hedgerow.clients.frozen import at_home
from hedgerow.clients.local_task import LocalTask
from hedgerow.clients.mods.guard import KeyMistake
from hedgerow.clients.training.work import LARGEST_STEP, StackRow
from hedgerow.wire.blocks import block_of, in_block
from hedgerow.wire.calls import Call
from hedgerow.wire.frozen import FROZEN_CHECKSUM
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.records import received_state, records_of

Record = TypeVar("Record", ArrayRecord, ConfigRecord)
# Cached per model, because building a state dict takes as long as a step of a small model.
_ENTRIES: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


def only_config(call: Call) -> ConfigRecord:
    """Return the message's one ConfigRecord; ValueError if it has none, or more than one."""
    return _only(call.content, ConfigRecord)


def whole(config: ConfigRecord, key: str, least: int) -> int:
    """Return an integer of the config, at least ``least``."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _invalid(key, value, f"an integer >= {least}")
    return value


def local_steps(config: ConfigRecord, key: str, samples: int = 1) -> int:
    """Return the number of steps, or epochs, of ``samples`` each that a message requests.

    It must be at least 1 and within ``MAX_STEPS`` and ``MAX_SAMPLES``, because all batches are drawn at once.
    """
    most = max(1, min(MAX_STEPS, MAX_SAMPLES // max(1, samples)))
    if (value := whole(config, key, 1)) > most:
        raise _invalid(key, value, f"an integer from 1 to {most}")
    return value


def positive(config: ConfigRecord, key: str) -> float:
    """Return a finite number > 0 of the config."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
        raise _invalid(key, value, "a finite number > 0")
    return value


def step_size(config: ConfigRecord, key: str) -> float:
    """Return a number > 0 of the config that is finite also in float32."""
    if (value := positive(config, key)) > LARGEST_STEP:
        raise _invalid(key, value, "a finite number > 0, also in float32")
    return value


def nonnegative(config: ConfigRecord, key: str, below: float = inf) -> float:
    """Return a number of the config, 0 <= number < ``below``."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < below:
        valid = "a finite number >= 0" if below == inf else f"a number >= 0 and < {below:g}"
        raise _invalid(key, value, valid)
    return value


def flag(config: ConfigRecord, key: str, default: bool | None = None) -> bool:
    """Return a boolean of the config; a missing key has the default, if there is one."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise _invalid(key, value, "true or false")
    return value


def string(config: ConfigRecord, key: str) -> str:
    """Return a string of the config."""
    value = config.get(key)
    if not isinstance(value, str):
        raise _invalid(key, value, "a text")
    return value


def choice(config: ConfigRecord, key: str, valid: Sequence[str]) -> str:
    """Return a string of the config that is one of ``valid``."""
    value = config.get(key)
    if value not in valid:
        raise _invalid(key, value, " or ".join(map(repr, valid)))
    return str(value)


def sent_state(call: Call, task: LocalTask, blocks: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return a copy of the message's one ArrayRecord as a state dict, on the task's device, in its dtypes.

    Frozen arrays (``wire/frozen.py``) are added, shared: never change them. Arrays of other ``blocks``, by
    name, keep their keys in the message, see ``wire/blocks.py``. ValueError unless there is one ArrayRecord,
    if keys or shapes are not the model's, or for a value that is not finite.
    """
    own, record = _entries(task.model), _only(call.content, ArrayRecord)
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
    record = _only(call.content, ArrayRecord)
    return home_arrays(call, task, [key for key in _entries(task.model) if key not in record])


def home_arrays(call: Call, task: LocalTask, keys: Sequence[str]) -> dict[str, Tensor]:
    """Return the arrays of the model that a message does not have, as ``clients/frozen.py`` finds them."""
    if not keys:
        return {}
    config = only_config(call)
    return at_home(config, call.context, task, keys) if FROZEN_CHECKSUM in config else {}


def only_arrays(content: RecordDict) -> ArrayRecord:
    """Return the message's one ArrayRecord; ValueError if it has none, or more than one."""
    return _only(content, ArrayRecord)


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


def _only(content: RecordDict, kind: type[Record]) -> Record:
    records = records_of(content, kind)
    if len(records) != 1:
        raise ValueError(f"the message must have exactly one {kind.__name__}, got {len(records)}")
    return next(iter(records.values()))


def _invalid(key: str, value: object, valid: str) -> ValueError:
    return KeyMistake(key, f"{key} must be {valid}, got {value!r} in the message's config")
