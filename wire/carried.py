"""Records and objects as trees of JSON values and ndarrays, for a checkpoint.

``Carried`` has the state of another project's strategy: those of its attributes that a run has changed.
Values are read and written by rules for their types, never by pickle, because reading a checkpoint must not
run code. What no rule can write is named.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from pathlib import PurePath
from re import Pattern
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid

from hedgerow.kept_values import generator_state, set_generator_state
from hedgerow.wire.records import lazy_array, view

# What a strategy refers to, but does not change.
_CODE = (
    FunctionType, BuiltinFunctionType, MethodType, type, ModuleType, partial, logging.Logger, Grid,
)  # fmt: skip
# What cannot change without being replaced.
_CONSTANT = (PurePath, Enum, Pattern, date, time, timedelta, range, complex)
# Python's flag of classes made by a class statement.
_HEAP_TYPE = 1 << 9
_NONE = (None, None)
_MAPPINGS: Mapping[str, Callable[[Any], Any]] = {
    kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)
}
_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)
}
_RECORDS = (ArrayRecord, MetricRecord, ConfigRecord)
_NUMPY = "numpy.ndarray"


class _CannotWriteError(TypeError):
    """There is no rule for a value's type."""


class Carried:
    """What a strategy's attributes were at the start of a run, to find those that have changed.

    An attribute is written by the first rule that holds: its type is one of ``pack``; it is an object written
    in Python, whose attributes are written in turn; it is a constant. Otherwise ``cannot`` names it.
    """

    def __init__(self, strategy: object) -> None:
        self._strategy = strategy
        self._before = {path: (value, packed) for path, value, packed in _walk(strategy)}

    def state_dict(self, copy: object | None = None) -> dict[str, Any]:
        """Return the attributes that have changed since, by their path; those of a copy, if one is given."""
        now = self._strategy if copy is None else copy
        packed = {path: value for path, _, value in _walk(now) if value is not None}
        before = {path: self._before.get(path, _NONE)[1] for path in packed}
        return {path: now for path, now in packed.items() if not _same(now, before[path])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore attributes; KeyError for one of an object that the strategy does not have."""
        for path, packed in state.items():
            owner, (*above, name) = self._strategy, path.split(".")
            for step in above:
                owner = vars(owner)[step]
            _put(owner, name, packed)

    def cannot(self) -> list[str]:
        """Return the attributes that no rule can write, as ``name (a Type)``."""
        return [
            f"{path} (a {type(value).__name__})"
            for path, value, packed in _walk(self._strategy)
            if packed is None
            and not _is_python(value)
            and not (isinstance(value, _CONSTANT) and value is self._before.get(path, _NONE)[0])
        ]


def _walk(thing: Any, above: str = "", seen: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, value and packed value (or None) of all attributes, and of those of objects among them."""
    seen |= {id(thing)}
    for name, value in list(vars(thing).items()):
        if isinstance(value, _CODE):
            continue
        try:
            packed = pack(value)
        except _CannotWriteError:
            packed = None
        yield above + name, value, packed
        if packed is None and _is_python(value) and id(value) not in seen:
            yield from _walk(value, f"{above}{name}.", seen)


def _is_python(value: object) -> bool:
    """Return whether all of an object's state is in its attributes."""
    kinds = type(value).__mro__[:-1]
    in_python = all(kind.__flags__ & _HEAP_TYPE and not vars(kind).get("__slots__") for kind in kinds)
    return in_python and hasattr(value, "__dict__")


def _put(owner: Any, name: str, packed: Any) -> None:
    """Set an attribute; objects with a state of their own keep their identity."""
    value, kind = vars(owner).get(name), packed.get("type") if isinstance(packed, dict) else None
    if kind == "state_dict":
        assert value is not None
        value.load_state_dict(unpack(packed["value"]))
    elif kind == "generator":
        set_generator_state(value, unpack(packed["value"]))
    else:
        setattr(owner, name, unpack(packed))


def pack(value: Any) -> Any:  # noqa: PLR0911  # One return for each type.
    """Return a value as JSON values and ndarrays, with its type; TypeError if there is no rule for it."""
    if value is None or type(value) in (bool, int, float, str):
        return {"type": "plain", "value": value}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        # As bytes, because safetensors has no complex numbers.
        raw = np.frombuffer(value.tobytes(), np.uint8)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {"type": kind, "value": raw, "dtype": value.dtype.str, "shape": list(value.shape)}
    if type(value) is bytes:
        return {"type": "bytes", "value": np.frombuffer(value, np.uint8)}
    if type(value) is torch.Tensor:
        return _packed_tensor(value)
    if type(value) is RecordDict:
        return {"type": "RecordDict", "value": pack_records(value)}
    if type(value) in _RECORDS:
        return {"type": "record", "value": pack_records(RecordDict({"record": value}))}
    if type(value).__name__ in _MAPPINGS and type(value) is _MAPPINGS[type(value).__name__]:
        if isinstance(value, defaultdict) and value.default_factory not in (None, list, dict, int, float):
            raise _CannotWriteError
        items = [[pack(key), pack(item)] for key, item in value.items()]
        factory = getattr(getattr(value, "default_factory", None), "__name__", "")
        return {"type": type(value).__name__, "value": items, "factory": factory}
    if type(value).__name__ in _SEQUENCES and type(value) is _SEQUENCES[type(value).__name__]:
        most = getattr(value, "maxlen", None)
        return {"type": type(value).__name__, "value": [pack(item) for item in value], "maxlen": most}
    if (state := generator_state(value)) is not None:
        return {"type": "generator", "value": pack(state)}
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return {"type": "state_dict", "value": pack(dict(value.state_dict()))}
    raise _CannotWriteError(type(value).__name__)


def unpack(packed: Mapping[str, Any]) -> Any:  # noqa: PLR0911  # One return for each type.
    """Return the value from the result of ``pack``."""
    kind, value = packed["type"], packed["value"]
    if kind in _MAPPINGS:
        items = {unpack(key): unpack(item) for key, item in value}
        if kind == "defaultdict":
            factories = {"list": list, "dict": dict, "int": int, "float": float}
            return defaultdict(factories.get(packed["factory"]), items)
        return _MAPPINGS[kind](items)
    if kind in _SEQUENCES:
        values = [unpack(item) for item in value]
        return deque(values, packed["maxlen"]) if kind == "deque" else _SEQUENCES[kind](values)
    match kind:
        case "plain":
            return value
        case "array":
            return np.frombuffer(value.tobytes(), packed["dtype"]).reshape(packed["shape"]).copy()
        case "scalar":
            return np.frombuffer(value.tobytes(), packed["dtype"])[0]
        case "bytes":
            return value.tobytes()
        case "tensor":
            dtype, empty = getattr(torch, packed["dtype"]), not len(value)
            flat = torch.empty(0, dtype=dtype) if empty else torch.from_numpy(value.copy()).view(dtype)
            return flat.reshape(packed["shape"])
        case "RecordDict":
            return unpack_records(value)
        case "record":
            return unpack_records(value)["record"]
    raise ValueError(f"the checkpoint must have known types, got {kind!r}")


def _packed_tensor(value: torch.Tensor) -> dict[str, Any]:
    # As bytes, because NumPy has no bfloat16.
    flat = value.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().copy() if len(flat) else np.zeros(0, np.uint8)
    dtype = str(value.dtype).removeprefix("torch.")
    return {"type": "tensor", "value": raw, "dtype": dtype, "shape": list(value.shape)}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (
            isinstance(one, np.ndarray)
            and isinstance(other, np.ndarray)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(item, other[key]) for key, item in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    # By repr: NaN is itself, and 1 is not True.
    return repr(one) == repr(other)


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
