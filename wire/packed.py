"""Fewer objects a message: all arrays of a record in one, on the way between a server and its devices.

Flower sends every array of a message as two objects or more, each with requests of its own at every hop. Here
an ``ArrayRecord`` travels as ``ConfigRecord`` objects of at most 4 MiB: the ``.npy`` bytes of its arrays, one
after the other, and their layout. Unpacked, a content is what it was: keys, dtypes, bytes and order. What is
counted (``payload_bytes``) is the content itself; the layout is envelope, as Flower's headers are.

A packed content is known by its keys. Other records, and nodes that share a record, share its objects still.
"""

import json
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from hedgerow.wire.records import PayloadError

# The key in a server's query that asks a node whether it reads packed contents, and in the node's answer.
PACKED = "packed"
# Before a record's key: as it is; the slice of an ArrayRecord with this number.
_PLAIN, _SLICE = "packed/", "packed."
_SLICE_BYTES = 1 << 22


def is_packed(content: RecordDict) -> bool:
    """Return whether a content is packed."""
    return bool(content) and all(key.startswith((_PLAIN, _SLICE)) for key in content)


def packed(content: RecordDict, memo: dict[int, dict[str, ConfigRecord]] | None = None) -> RecordDict:
    """Return a content with its arrays in few objects; records in ``memo`` (by id) are taken from there."""
    known = {} if memo is None else memo
    out = RecordDict()
    for key, record in content.items():
        if not isinstance(record, ArrayRecord):
            out[_PLAIN + key] = record
            continue
        if id(record) not in known:
            known[id(record)] = _slices(record)
        for number, part in known[id(record)].items():
            out[f"{_SLICE}{number}/{key}"] = part
    return out


def _slices(record: ArrayRecord) -> dict[str, ConfigRecord]:
    """Return the record in slices, by number."""
    data = b"".join(array.data for array in record.values())
    layout = [[key, a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in record.items()]
    starts = range(0, max(1, len(data)), _SLICE_BYTES)
    slices = [ConfigRecord({"data": data[start : start + _SLICE_BYTES]}) for start in starts]
    slices[0]["layout"] = json.dumps(layout)
    return {str(i): one for i, one in enumerate(slices)}


def unpacked(content: RecordDict) -> RecordDict:
    """Return the content that was packed.

    Raises
    ------
    PayloadError
        ``undecodable`` if it is not what ``packed`` makes. Nothing much larger than the received bytes is
        allocated.
    """
    out, parts = RecordDict(), dict[str, list[Any]]()
    for key, record in content.items():
        form, _, own = key.partition("/")
        if form + "/" == _PLAIN:
            out[own] = record
        elif form == f"{_SLICE}{len(parts.setdefault(own, []))}":
            parts[own].append(record)
            out[own] = ArrayRecord()  # In its place among the others.
        else:
            raise PayloadError("undecodable", "a packed content has other records or another order")
    for own, slices in parts.items():
        try:
            out[own] = _joined(slices)
        except Exception as error:  # Whatever another program has packed.
            raise PayloadError("undecodable", f"a packed record: {type(error).__name__}: {error}") from error
    return out


def _joined(slices: list[Any]) -> ArrayRecord:
    data = b"".join(one["data"] for one in slices)
    record, end = ArrayRecord(), 0
    layout = json.loads(slices[0]["layout"])
    for key, dtype, shape, stype, size in layout:
        start, end = end, end + max(0, size)
        record[key] = Array(dtype, tuple(shape), stype, data[start:end])
    if (end, len(layout)) != (len(data), len(record)):
        raise ValueError(f"{len(data)} bytes, of which the layout has {end}, or a key twice")
    return record
