"""Records carry arrays without loss, without needless copies, and never trust what comes in."""

import pickle
import tracemalloc
import warnings
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from hedgerow.sim import through_the_wire
from hedgerow.wire import Layout, PayloadError, lazy_array, payload_bytes, to_record, to_state_dict, view
from hedgerow.wire.records import LazyArray

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
# Whole numbers up to 2^24 are exact in float32, the default dtype of the flat vector.
EXACT = {
    "float32": {"elements": st.floats(-(2.0**100), 2.0**100, width=32)},
    "float16": {"elements": st.floats(-1e4, 1e4, width=16)},
    "int64": {"elements": st.integers(-(2**24), 2**24)},
    "uint8": {"elements": st.integers(0, 255)},
    "bool": {},
}


@st.composite
def arrays(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(EXACT)) -> NDArray[Any]:
    dtype = draw(st.sampled_from(dtypes))
    array = draw(hnp.arrays(dtype, SHAPES, **EXACT[dtype]))
    return np.asfortranarray(array) if draw(st.booleans()) else array


STATES = st.dictionaries(st.text("abc.é", min_size=1, max_size=5), arrays(), max_size=4)


def record_of(**arrays: NDArray[Any]) -> ArrayRecord:
    return to_record(arrays)


def npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> Array:
    """Return an Array whose bytes claim what the header says."""
    length = len(header).to_bytes(2 if version == (1, 0) else 4, "little")
    raw = b"\x93NUMPY" + bytes(version) + length + header.encode("latin1") + data
    return Array("float32", (1,), "numpy.ndarray", raw)


def claiming(shape: str, descr: str = "'<f4'", data: bytes = b"", version: tuple[int, int] = (1, 0)) -> Array:
    return npy(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n", data, version)


# Layouts


@settings(deadline=None)
@given(STATES)
def test_a_flat_vector_gives_back_the_record_it_was_made_of(state: dict[str, NDArray[Any]]) -> None:
    record = to_record(state)
    layout = Layout.of(record)
    again = layout.unflatten(layout.flatten(record))
    assert list(again) == list(state)
    for key, array in state.items():
        values = view(again[key])
        assert (values.shape, values.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(values, array)


@settings(deadline=None)
@given(hnp.arrays("float64", SHAPES, elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_a_float64_vector_keeps_every_bit_of_float64(array: NDArray[np.float64]) -> None:
    record = record_of(w=array)
    layout = Layout.of(record)
    vector = layout.flatten(record, np.float64)
    assert vector.dtype == np.float64
    np.testing.assert_array_equal(view(layout.unflatten(vector)["w"]), array)


def test_each_key_stands_where_the_slices_say_in_any_memory_order() -> None:
    record = record_of(a=np.ones((2, 2), np.float32), b=np.array(7, np.float32), c=np.zeros(0, np.float32))
    layout = Layout.of(record)
    assert layout.size == 5
    assert layout.slices == {"a": slice(0, 4), "b": slice(4, 5), "c": slice(5, 5)}
    np.testing.assert_array_equal(layout.flatten(record), [1, 1, 1, 1, 7])
    assert Layout.of(ArrayRecord()).flatten(ArrayRecord()).shape == (0,)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    layout = Layout.of(record_of(w=array))
    for same in (np.asfortranarray(array), np.repeat(array, 2, axis=1)[:, ::2], array.astype(">f4")):
        np.testing.assert_array_equal(layout.flatten(record_of(w=same)), array.ravel())


def test_means_of_integers_are_rounded_and_what_has_the_vectors_dtype_is_not_copied() -> None:
    layout = Layout.of(record_of(batches=np.zeros(2, np.int64)))
    np.testing.assert_array_equal(view(layout.unflatten(np.float32([2.9, -2.9]))["batches"]), [3, -3])
    layout = Layout.of(record_of(num_batches_tracked=np.array(0)))
    values = view(layout.unflatten(np.float32([12]))["num_batches_tracked"])
    assert (values.shape, values.dtype, int(values)) == ((), np.int64, 12)
    layout = Layout.of(record_of(w=np.zeros((2, 3), np.float32)))
    vector = np.arange(6, dtype=np.float32)
    assert np.shares_memory(view(layout.unflatten(vector)["w"]), vector)


# What a layout refuses

LAYOUT = Layout.of(record_of(w=np.zeros((2, 3), np.float32), n=np.zeros((), np.int64)))
GOOD = {"w": np.ones((2, 3), np.float32), "n": np.array(3)}


@pytest.mark.parametrize(
    ("reason", "bad"),
    [
        ("missing key", {"w": GOOD["w"]}),
        ("missing key", {}),
        ("unknown key", {**GOOD, "extra": GOOD["n"]}),
        ("wrong shape", {**GOOD, "w": np.ones((3, 2), np.float32)}),
        ("wrong shape", {**GOOD, "w": np.ones(6, np.float32)}),
        ("wrong shape", {**GOOD, "n": np.array([3])}),
        ("wrong dtype", {**GOOD, "w": np.ones((2, 3), np.int32)}),
        ("wrong dtype", {**GOOD, "w": np.full((2, 3), "1")}),
        ("wrong dtype", {**GOOD, "n": np.array(3.0)}),
        ("non-finite", {**GOOD, "w": np.full((2, 3), np.nan, np.float32)}),
        ("non-finite", {**GOOD, "w": np.full((2, 3), -np.inf, np.float32)}),
    ],
)
def test_a_record_that_was_not_agreed_on_is_refused_with_its_reason(
    reason: str, bad: dict[str, NDArray[Any]]
) -> None:
    with pytest.raises(PayloadError) as error:
        LAYOUT.flatten(to_record(bad))
    assert error.value.reason == reason
    assert str(error.value).startswith(f"{reason}: ")


def test_what_overflows_the_vector_is_non_finite_without_a_warning() -> None:
    overflowing = to_record({**GOOD, "w": np.full((2, 3), 1e300)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PayloadError, match="non-finite"):
            LAYOUT.flatten(overflowing)


def test_another_precision_of_the_same_kind_is_taken() -> None:
    vector = LAYOUT.flatten(to_record({"w": np.ones((2, 3), np.float64), "n": np.array(3, np.int32)}))
    np.testing.assert_array_equal(vector, [1, 1, 1, 1, 1, 1, 3])


# Hostile bytes

FOUR = b"\0" * 4
UNDECODABLE = {
    "no bytes": Array("float32", (1,), "numpy.ndarray", b""),
    "bad magic": Array("float32", (1,), "numpy.ndarray", b"\x93NUMPX\x01\0" + b"\0" * 20),
    "cut in the magic": Array("float32", (1,), "numpy.ndarray", b"\x93NUM"),
    "cut in the header": Array("float32", (1,), "numpy.ndarray", b"\x93NUMPY\x01\0v\0{'descr'"),
    "cut in the data": claiming("(2,)", data=FOUR),
    "more data than shape": claiming("(1,)", data=2 * FOUR),
    "header longer than a file": Array("float32", (1,), "numpy.ndarray", b"\x93NUMPY\x02\0\xff\xff\xff\xff{"),
    "overlong header": npy(" " * 20_000 + "{}"),
    "unknown version": claiming("(1,)", data=FOUR, version=(3, 0)),
    "unknown serialisation": Array("float32", (1,), "torch.pickle", FOUR),
    "not a dictionary": npy("[]\n"),
    "open bracket": npy("{'descr': '<f4', (\n"),
    "open text": npy("'''{"),
    "deep nesting": npy("(" * 5_000),
    "deep signs": npy("-" * 9_000 + "1"),
    "code for a header": npy("__import__('os').getcwd()\n"),
    "unknown dtype": claiming("(1,)", "'zzz'", FOUR),
    "objects": claiming("(1,)", "'|O'", 2 * FOUR),
    "objects in a structure": claiming("(1,)", "[('a', '<f4'), ('b', '|O')]", 3 * FOUR),
    "dtype with a shape": claiming("(2,)", "('<f4', (2,))", 4 * FOUR),
    "dtype of no size": claiming("(3,)", "'<U0'"),
    "huge shape": claiming("(1000000000000,)", data=FOUR),
    "huge dtype": claiming("(1,)", "('<f4', (100000000,))", FOUR),
    "huge shape of nothing": claiming("(0, 4611686018427387904)"),
    "unspeakable shape of nothing": claiming(f"(0, {10**30})"),
    "huge shape of no size": claiming("(1000000000000,)", "'|V0'"),
    "negative lengths": claiming("(-1, -1)", data=FOUR),
    "negative length of nothing": claiming("(0, -5)"),
    "length that is a truth value": claiming("(True,)", data=FOUR),
    "too many dimensions": claiming(f"({'1,' * 70})", data=FOUR),
}


@pytest.mark.parametrize("name", UNDECODABLE)
def test_hostile_bytes_are_undecodable_and_allocate_next_to_nothing(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError) as error:
            view(UNDECODABLE[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.value.reason == "undecodable"
    assert peak < 8e6  # Python's parser takes 1.4 MB for the deepest header that NumPy lets pass


class Bomb:
    went_off = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "went_off", True)


def test_pickled_objects_are_never_unpickled() -> None:
    buffer = BytesIO()
    np.save(buffer, np.array([Bomb()], object), allow_pickle=True)
    with pytest.raises(PayloadError, match="undecodable"):
        view(Array("object", (1,), "numpy.ndarray", buffer.getvalue()))
    assert not Bomb.went_off


def test_the_bytes_count_not_what_is_declared_beside_them_and_version_two_headers_are_read() -> None:
    honest = Array(np.ones(3, np.float32))
    lying = Array("int8", (10**12,), "numpy.ndarray", honest.data)
    assert (view(lying).shape, view(lying).dtype) == ((3,), np.float32)
    buffer = BytesIO()
    np.lib.format.write_array(buffer, np.arange(3), version=(2, 0))
    values = view(Array("int64", (3,), "numpy.ndarray", buffer.getvalue()))
    np.testing.assert_array_equal(values, [0, 1, 2])


# Lazy arrays


@settings(deadline=None)
@given(STATES)
def test_lazy_arrays_have_the_bytes_of_flowers_own_and_pass_its_serialisation(
    state: dict[str, NDArray[Any]],
) -> None:
    got = through_the_wire(RecordDict({"arrays": to_record(state)}), "test")["arrays"]
    assert list(got) == list(state)
    for key, array in state.items():
        lazy, eager = lazy_array(array), Array(array)
        for part in ("data", "dtype", "shape", "stype", "object_id"):
            assert getattr(lazy, part) == getattr(eager, part)
        assert type(got[key]) is Array
        assert got[key].data == eager.data
        assert (view(lazy).shape, view(lazy).dtype) == (view(eager).shape, view(eager).dtype)
        np.testing.assert_array_equal(view(lazy), view(eager))


@pytest.mark.parametrize("was_read", [False, True])
def test_a_lazy_array_survives_pickle(was_read: bool) -> None:
    lazy = lazy_array(np.arange(6.0).reshape(2, 3))
    if was_read:
        assert lazy.data
    again = pickle.loads(pickle.dumps(lazy))
    assert isinstance(again, LazyArray)
    assert again.data == lazy.data
    np.testing.assert_array_equal(again.numpy(), lazy.numpy())


def test_numpy_is_a_copy_and_a_view_is_the_arrays_memory_read_only() -> None:
    array = np.zeros(3)
    lazy, eager = lazy_array(array), Array(np.arange(3.0))
    lazy.numpy()[:] = 1
    assert not array.any()
    for one in (lazy, eager):
        with pytest.raises(ValueError, match="read-only"):
            view(one)[0] = 1
    assert np.shares_memory(view(lazy), array)
    assert np.shares_memory(view(eager), np.frombuffer(eager.data, np.uint8))
    array[0] = 1  # allowed by NumPy, forbidden by LazyArray's docstring


# State dicts


def test_a_state_dict_comes_back_with_its_dtypes_and_bits_as_the_readers_own() -> None:
    state = {"w": torch.randn(2, 3, generator=torch.Generator().manual_seed(1)), "n": torch.tensor(7)}
    again = to_state_dict(to_record(state))
    assert list(again) == ["w", "n"]
    assert all(torch.equal(again[key], state[key]) for key in state)
    assert all(again[key].dtype == state[key].dtype for key in state)
    # A record of parameters shares their memory; what is read from it does not.
    parameter = torch.nn.Parameter(torch.zeros(3))
    record = to_record({"w": parameter})
    assert np.shares_memory(view(record["w"]), parameter.detach().numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        to_state_dict(record)["w"] += 1
    assert not view(record["w"]).any()


# Counting

CONFIGS = st.dictionaries(
    st.text("abc", min_size=1, max_size=4),
    st.one_of(
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False),
        st.text("xyzé", min_size=1, max_size=5),
        st.binary(min_size=1, max_size=5),
        st.lists(st.integers(0, 9), min_size=1, max_size=3),
        st.lists(st.booleans(), min_size=1, max_size=3),
        st.lists(st.text("xy", max_size=3), min_size=1, max_size=3),
    ),
    max_size=5,
)
METRICS = st.dictionaries(
    st.text("abc", min_size=1, max_size=4),
    st.one_of(st.integers(0, 9), st.floats(0, 1), st.lists(st.floats(0, 1), max_size=3)),
    max_size=5,
)


@settings(deadline=None)
@given(STATES, METRICS, CONFIGS)
def test_payload_bytes_are_flowers_count(
    state: dict[str, NDArray[Any]], metrics: dict[str, Any], config: dict[str, Any]
) -> None:
    records = [to_record(state), ArrayRecord(), MetricRecord(metrics), ConfigRecord(config)]
    for key, array in state.items():
        records[1][key] = Array(array)  # type: ignore[index]
    counted = [payload_bytes(record) for record in records]
    assert counted == [record.count_bytes() for record in records]
    content = RecordDict({f"r{i}": record for i, record in enumerate(records)})
    assert payload_bytes(content) == sum(counted) + 8


@pytest.mark.parametrize("shape", [(1,) * 12 + (100, 2), (10_000, 2), (2, 10_000), (), (0, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_payload_bytes_count_the_header_of_either_memory_order(shape: tuple[int, ...], order: Any) -> None:
    record = record_of(w=np.zeros(shape, np.float32, order))
    assert payload_bytes(record) == record.count_bytes()


def test_counting_does_not_serialise_and_an_empty_text_counts_nothing_where_flower_cannot_count() -> None:
    record = record_of(w=np.zeros((100, 100)))
    payload_bytes(RecordDict({"arrays": record}))
    assert "_bytes" not in record["w"].__dict__
    assert payload_bytes(ConfigRecord({"role": ""})) == len("role")


WHOLE = ("?", "b", "h", "i", "q", "B", "H", "I", "Q")


@settings(deadline=None)
@given(data=st.data(), letter=st.sampled_from(WHOLE), vector=st.sampled_from([np.float32, np.float64]))
def test_integers_that_do_not_change_keep_every_bit_and_small_changes_are_exact(data, letter, vector) -> None:
    dtype = np.dtype(letter)
    low, high = (0, 1) if letter == "?" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    first = np.array(data.draw(st.lists(st.integers(low, high), min_size=1, max_size=5)), dtype)
    layout = Layout.of(to_record({"n": first, "w": np.ones(2, np.float16)}))
    most = 2 ** (24 if vector is np.float32 else 53)
    now = np.array(
        [data.draw(st.integers(max(low, int(v) - most), min(high, int(v) + most))) for v in first], dtype
    )
    for values in (first, now):
        row = layout.flatten(to_record({"n": values, "w": np.ones(2, np.float16)}), vector)
        back = layout.unflatten(row)
        np.testing.assert_array_equal(view(back["n"]), values)
        assert view(back["n"]).dtype == dtype
    # A mean of replies moves by the rounded mean of the changes.
    third = layout.flatten(to_record({"n": first, "w": np.ones(2, np.float16)}), vector)
    mean = view(layout.unflatten((2.0 * third.astype(float) + row) / 3)["n"])
    wanted = [int(a) + round((int(b) - int(a)) / 3) for a, b in zip(first, now, strict=True)]
    assert all(abs(int(got) - want) <= 1 for got, want in zip(mean, wanted, strict=True))


def test_an_integer_that_changes_beyond_the_vector_is_refused_by_name() -> None:
    layout = Layout.of(to_record({"n": np.array([5], np.int64)}))
    far = to_record({"n": np.array([5 + 2**24 + 1], np.int64)})
    with pytest.raises(PayloadError, match=r"integer too large: 'n' .*persistent=False"):
        layout.flatten(far)
    assert layout.flatten(far, np.float64) == 2**24 + 1
