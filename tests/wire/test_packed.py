"""A packed content is the same content in fewer objects."""

import json

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hedgerow.sim import through_the_wire
from hedgerow.wire import PayloadError, payload_bytes, to_record
from hedgerow.wire import packed as module
from hedgerow.wire.packed import is_packed, packed, unpacked

keys = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
arrays = npst.arrays(
    npst.boolean_dtypes() | npst.integer_dtypes() | npst.floating_dtypes(),
    npst.array_shapes(min_dims=0, max_dims=3, max_side=4),
)
records = (
    st.dictionaries(keys, arrays, max_size=4).map(to_record)
    | st.dictionaries(keys, st.binary(max_size=9) | st.integers(-9, 9), max_size=3).map(ConfigRecord)
    | st.dictionaries(keys, st.lists(st.floats(), min_size=1, max_size=3), max_size=3).map(MetricRecord)
)
contents = st.dictionaries(keys, records, max_size=4).map(RecordDict)


def exactly(content: RecordDict) -> list[object]:
    """Return all of a content, in order, bit by bit."""
    return [
        (key, type(record).__name__, [(name, *vars_of(value)) for name, value in record.items()])
        for key, record in content.items()
    ]


def vars_of(value: object) -> tuple[object, ...]:
    if isinstance(value, Array):
        return value.dtype, tuple(value.shape), value.stype, value.data
    return (repr(value),)


def objects(content: RecordDict) -> int:
    return 1 + sum(
        1 + sum(2 for _ in record) if isinstance(record, ArrayRecord) else 1 for record in content.values()
    )


@settings(deadline=None, max_examples=60)
@given(contents, st.integers(1, 300))
def test_a_content_comes_out_as_it_went_in(content: RecordDict, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE_BYTES", size)
        sent = packed(content)
    assert not any(isinstance(record, ArrayRecord) for record in sent.values())
    came = unpacked(through_the_wire(sent, "a test"))
    assert exactly(came) == exactly(content)
    assert payload_bytes(came) == payload_bytes(content)


@settings(deadline=None, max_examples=30)
@given(contents)
def test_a_packed_content_is_known_as_such(content: RecordDict) -> None:
    assert is_packed(packed(content)) == bool(content)


def test_the_arrays_of_a_model_are_one_object() -> None:
    model = to_record({f"layer{i}": np.ones(3) for i in range(50)})
    content = RecordDict({"arrays": model, "config": ConfigRecord({"lr": 0.1})})
    assert objects(content) == 103
    assert objects(packed(content)) == 3


def test_a_large_model_travels_in_slices_of_four_mebibytes() -> None:
    content = RecordDict({"arrays": to_record({"a": np.zeros(9 << 17), "b": np.zeros(3)})})
    sizes = [len(record["data"]) for record in packed(content).values()]  # type: ignore[index,arg-type]
    assert sizes[:2] == [1 << 22, 1 << 22]
    assert len(sizes) == 3


def test_nodes_that_share_a_record_share_its_object() -> None:
    model, memo = to_record({"a": np.ones(3)}), {}  # type: ignore[var-annotated]
    one, other = (
        packed(RecordDict({"arrays": model, "config": ConfigRecord({"node": i})}), memo) for i in (1, 2)
    )
    assert one["packed.0/arrays"] is other["packed.0/arrays"]
    assert one["packed/config"] != other["packed/config"]


def layout(*rows: object) -> RecordDict:
    return RecordDict({"packed.0/x": ConfigRecord({"layout": json.dumps(rows), "data": b"12345678"})})


@pytest.mark.parametrize(
    "content",
    [
        layout(["a", "float32", [1], "numpy.ndarray", 4]),
        layout(["a", "float32", [1], "numpy.ndarray", 9]),
        layout(["a", "float32", [1], "numpy.ndarray", -4], ["b", "float32", [1], "numpy.ndarray", 12]),
        layout(["a", "float32", "1", "numpy.ndarray", 8]),
        layout([1, "float32", [1], "numpy.ndarray", 8]),
        layout(*[["a", "float32", [1], "numpy.ndarray", 4]] * 2),
        layout(["a"]),
        layout(7),
        RecordDict({"packed.0/x": ConfigRecord({"data": b""})}),
        RecordDict({"packed.0/x": ConfigRecord({"layout": "[" * 100_000, "data": b""})}),
        RecordDict({"packed.0/x": MetricRecord({"layout": 1})}),
        RecordDict({"packed.0/x": to_record({"layout": np.ones(1)})}),
        RecordDict({"packed.1/x": ConfigRecord({"layout": "[]", "data": b""})}),
        RecordDict({"packed/x": ConfigRecord(), "y": ConfigRecord()}),
    ],
)  # fmt: skip
def test_what_nobody_packed_is_refused(content: RecordDict) -> None:
    with pytest.raises(PayloadError, match=r"^undecodable: "):
        unpacked(content)
