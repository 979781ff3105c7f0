"""Values of a strategy's attributes return from a checkpoint as they were."""

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from hedgerow.sim import load_checkpoint, save_checkpoint
from hedgerow.wire.carried import pack, pack_records, unpack, unpack_records

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


keys = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.tuples(st.integers()))
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=9)
)
arrays = st.sampled_from(
    [np.arange(6.0).reshape(2, 3), np.array(2), np.zeros(0, np.int8), np.array([1 + 2j]), np.float32(1.5)]
)
tensors = st.sampled_from(
    [torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor(True), torch.zeros(0)]
)


def containers(values: Any) -> Any:
    lists = st.lists(values, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(lambda items: deque(items, 5)),
        st.frozensets(st.integers(), max_size=3),
        st.dictionaries(keys, values, max_size=3),
        st.dictionaries(keys, values, max_size=3).map(OrderedDict),
        st.dictionaries(keys, values, max_size=3).map(lambda items: defaultdict(list, items)),
        st.lists(st.text(max_size=2), max_size=4).map(Counter),
    )


def told(value: Any) -> Any:
    """Return a value's type and contents, comparable to the bit."""
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return type(value), factory, [(told(key), told(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [told(item) for item in value]
    return type(value), repr(sorted(value)) if isinstance(value, frozenset | set) else repr(value)


@given(st.recursive(st.one_of(plain, arrays, tensors), containers, max_leaves=8))
def test_a_value_returns_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "carried.safetensors"
    save_checkpoint(file, {"value": pack(value)})
    assert told(unpack(load_checkpoint(file)["value"])) == told(value)


def test_records_return_too(tmp_path: Path) -> None:
    for record in (ArrayRecord([np.arange(3.0)]), MetricRecord({"a": [1, 2]})):
        save_checkpoint(tmp_path / "c", {"value": pack(record)})
        found = unpack(load_checkpoint(tmp_path / "c")["value"])
        assert type(found) is type(record)
        assert {key: told(_value(item)) for key, item in found.items()} == {
            key: told(_value(item)) for key, item in record.items()
        }


def _value(item: Any) -> Any:
    return item.numpy() if hasattr(item, "numpy") else item


@pytest.mark.parametrize("value", [object(), iter([]), {1: object()}, np.array([object()]), [open], 1 + 2j])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        pack(value)
