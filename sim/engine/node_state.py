"""A node's records as a tree of JSON values and ndarrays, for a checkpoint."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from hedgerow.wire.records import lazy_array, view

__all__ = ["pack_records", "unpack_records"]

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
