"""Compressors contract, travel as the bytes that the paper counts, and never trust what comes in.

The golden values are of the specification of Beikmohammadi et al., section 8.1.
"""

import tracemalloc
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from hedgerow.sim import through_the_wire
from hedgerow.wire import (
    COMPRESSORS,
    Compressor,
    Layout,
    PayloadError,
    RandK,
    ScaledSign,
    Ternary,
    TopK,
    compress,
    encode_indices,
    pack_update,
    parse_compressor,
    payload_bytes,
    rand_k,
    record_payload,
    to_record,
    unpack_update,
    validate_compressor,
)
from hedgerow.wire.compress import Identity, Payload, compressed_keys, compressed_part, in_round
from hedgerow.wire.records import decoded_record, nominal_bits

GOLDEN = np.array([3, -1, 2, 0.5], np.float32)
CASES: tuple[Compressor, ...] = (
    Identity(),
    TopK(0.01),
    TopK(0.3),
    TopK(count=3),
    ScaledSign(),
    Ternary(),
)
# In one round it may keep nothing of a vector: its alpha holds in expectation.
RANDOM = RandK(0.3, round=5)
EACH = pytest.mark.parametrize("compressor", [*CASES, RANDOM], ids=str)
# Small enough for sums of squares, and with many ties and zeros.
NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5]),
    st.floats(-(2.0**60), 2.0**60, width=32).filter(lambda x: x == 0 or abs(x) > 1e-12),
)
VECTORS = hnp.arrays(np.float32, st.integers(1, 60), elements=NUMBERS)
HEAVY_TAILED = st.builds(
    lambda d, seed: np.random.default_rng(seed).standard_t(1, d).astype(np.float32),
    st.integers(1, 400),
    st.integers(0, 2**32),
)
ANY_VECTOR = st.one_of(VECTORS, HEAVY_TAILED)


def sent(compressor: Compressor, v: NDArray[Any]) -> NDArray[np.float64]:
    """Return Q(v) as the other side gets it."""
    return compressor.decode(compressor.encode(v), v.size).astype(np.float64)


def squared(v: NDArray[Any]) -> float:
    return float(np.sum(np.asarray(v, np.float64) ** 2))


def error(compressor: Compressor, v: NDArray[Any]) -> float:
    return squared(sent(compressor, v) - v)


# Golden values


@pytest.mark.parametrize(
    ("compressor", "vector", "expected"),
    [
        (Identity(), GOLDEN, [3, -1, 2, 0.5]),
        (TopK(count=2), GOLDEN, [3, 0, 2, 0]),
        (TopK(count=1), GOLDEN, [3, 0, 0, 0]),
        (ScaledSign(), GOLDEN, [1.625, -1.625, 1.625, 1.625]),
        (Ternary(), GOLDEN, [2.5, 0, 2.5, 0]),
        # Ties go to the lower index, the sign of zero is plus.
        (TopK(count=2), np.float32([1, -1, 1, 1]), [1, -1, 0, 0]),
        (ScaledSign(), np.float32([0, -0.0, -4, 4]), [2, 2, -2, 2]),
        # The smallest support that is best: S_1^2 / 1 = S_4^2 / 4 = 9.
        (Ternary(), np.float32([1, -1, 3, 1]), [0, 0, 3, 0]),
    ],
    ids=str,
)
def test_golden_vectors(compressor: Compressor, vector: NDArray[Any], expected: list[float]) -> None:
    np.testing.assert_array_equal(sent(compressor, vector), expected)


def test_golden_sizes_of_the_papers_network() -> None:
    d = 431_080
    v = np.random.default_rng(0).standard_normal(d).astype(np.float32)
    counted = {str(c): (c.bits(d), record_bytes(c, v)) for c in (Identity(), TopK(0.01), ScaledSign())}
    assert counted == {
        "identity": (32 * d, 1_724_320 + 128 + len("values")),
        # An index is 6 low bits and its share of a bitmap of 4310 + floor(431079 / 64).
        "topk(0.01)": (32 * 4310 + 36_905, 17_240 + 4614 + 2 * 128 + len("indicesvalues")),
        "sign": (d + 32, 54_154),
    }
    assert TopK(0.01).contraction(d) == pytest.approx(0.00999814, abs=5e-9)


def record_bytes(compressor: Compressor, v: NDArray[Any]) -> int:
    record = to_record(compressor.encode(v))
    assert payload_bytes(record) == record.count_bytes()
    return payload_bytes(record)


# What every compressor does


@pytest.mark.parametrize("compressor", CASES, ids=str)
@settings(deadline=None, max_examples=40)
@given(v=ANY_VECTOR)
def test_a_compressor_contracts_by_its_alpha(compressor: Compressor, v: NDArray[np.float32]) -> None:
    alpha = compressor.contraction(v.size)
    assert 0 < alpha <= 1
    # The slack is float32's: a scale is rounded to it.
    assert error(compressor, v) <= (1 - alpha + 1e-6) * squared(v)


@EACH
@settings(deadline=None, max_examples=40)
@given(v=ANY_VECTOR, power=st.integers(-20, 20))
def test_what_is_counted_travels_bit_for_bit_and_a_scaled_vector_arrives_scaled(
    compressor: Compressor, v: NDArray[np.float32], power: int
) -> None:
    before = v.copy()
    payload = compressor.encode(v)
    np.testing.assert_array_equal(v, before)
    # Float64 is encoded as the float32 that travels.
    assert_same_payload(compressor.encode(v.astype(np.float64)), payload)
    arrived = through_the_wire(RecordDict({"update": to_record(payload)}), "reply")["update"]
    assert isinstance(arrived, ArrayRecord)
    assert_same_payload(record_payload(arrived), payload)
    bits = compressor.bits(v.size, payload)
    # Each array has a header of 128 bytes, its key, and up to 7 bits that fill the last byte.
    overhead = sum(128 + len(key) for key in payload)
    travelling = to_record(payload).count_bytes() - overhead
    assert ceil(bits / 8) <= travelling <= ceil(bits / 8) + len(payload) - 1
    if np.abs(v).max() < 2.0**80:
        scale = np.float32(2.0**power)  # Exact in float32, so that equality is.
        np.testing.assert_array_equal(sent(compressor, v * scale), sent(compressor, v) * scale)


@EACH
@settings(deadline=None, max_examples=40)
@given(
    v=hnp.arrays(
        np.float32, st.tuples(st.integers(0, 5), st.integers(1, 40)), elements=NUMBERS, fill=st.just(1.0)
    )
)
def test_a_stack_is_encoded_as_its_rows_are(compressor: Compressor, v: NDArray[np.float32]) -> None:
    stacked = compressor.encode_stack(torch.from_numpy(v))
    assert len(stacked) == len(v)
    for payload, row in zip(stacked, v, strict=True):
        assert_same_payload(payload, compressor.encode(row))


def test_a_stochastic_code_has_a_seed_for_each_row() -> None:
    class Dithered(Identity):
        """Rounds up or down at random, so that the mean is right."""

        def encode(self, v: NDArray[Any], seed: tuple[int, ...] = ()) -> Payload:
            up = np.random.default_rng(seed).random(v.size) < v - np.floor(v)
            return super().encode(np.floor(v) + up)

    v, code = torch.full((2, 500), 0.25), Dithered()
    seeds = [(3, 0), (3, 1)]
    first, second = code.encode_stack(v, seeds)
    assert not np.array_equal(first["values"], second["values"])
    assert_same_payload(first, code.encode(v[0].numpy(), (3, 0)))
    assert abs(code.decode(first, 500).mean() - 0.25) < 0.1


@EACH
def test_a_vector_has_one_axis_and_entries_that_are_finite_in_float32(compressor: Compressor) -> None:
    for bad in (np.nan, np.inf, -np.inf, 1e39):
        v = np.array([1.0, bad, 2.0])
        with pytest.raises(ValueError, match="NaN or infinity"):
            compressor.encode(v)
        with pytest.raises(ValueError, match="NaN or infinity"):
            compressor.encode_stack(torch.from_numpy(v)[None])
    for shape in ((0,), (), (2, 3)):
        with pytest.raises(ValueError, match="must have the shape"):
            compressor.encode(np.zeros(shape, np.float32))


def assert_same_payload(a: Payload, b: Payload) -> None:
    assert list(a) == list(b)
    for key, array in a.items():
        assert (array.dtype, array.shape) == (b[key].dtype, b[key].shape)
        assert array.tobytes() == b[key].tobytes()


# Top-k

KEPT = st.one_of(
    st.builds(TopK, st.floats(0.001, 1), st.none()), st.builds(TopK, st.none(), st.integers(1, 80))
)


@settings(deadline=None, max_examples=60)
@given(top_k=KEPT, v=ANY_VECTOR)
@example(top_k=TopK(1.0), v=GOLDEN)
@example(top_k=TopK(count=9), v=GOLDEN)
def test_top_k_is_the_first_k_of_a_stable_sort(top_k: TopK, v: NDArray[np.float32]) -> None:
    k = top_k.kept(v.size)
    expected = np.zeros(v.size)
    first = np.argsort(-np.abs(v), kind="stable")[:k]
    expected[first] = v[first]
    assert top_k.encode(v)["values"].size == k
    np.testing.assert_array_equal(sent(top_k, v), expected)


@settings(deadline=None, max_examples=40)
@given(
    v=hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=NUMBERS),
    top_k=KEPT,
)
def test_the_selection_of_a_gpu_is_that_of_a_cpu(v: NDArray[np.float32], top_k: TopK) -> None:
    # What runs on a GPU is plain torch: it gives the same on any device.
    k = top_k.kept(v.shape[1])
    indices, values = compress._largest_of_rows(torch.from_numpy(v), k)
    for row, i, x in zip(v, indices, values, strict=True):
        assert_same_payload(top_k._payload(i, x, row.size), top_k.encode(row))


@pytest.mark.parametrize(
    ("top_k", "d", "k"),
    [
        (TopK(0.01), 431_080, 4310),
        (TopK(0.01), 20, 1),
        (TopK(0.29), 100, 29),
        (TopK(1e-05), 10**6, 10),
        (TopK(count=7), 100, 7),
        (TopK(count=7), 3, 3),
    ],
    ids=str,
)
def test_k_is_the_floor_of_the_decimal_fraction_but_at_least_one(top_k: TopK, d: int, k: int) -> None:
    assert top_k.kept(d) == k


def test_equal_magnitudes_attain_the_contraction_of_top_k() -> None:
    v = np.float32([1, -1, 1, -1, 1, 1, 1, 1])
    top_k = TopK(count=3)
    assert error(top_k, v) == (1 - top_k.contraction(8)) * squared(v)


def test_indices_travel_coded() -> None:
    v = np.float32([0, 5, 0, -4, 6])
    # Three of five: a bitmap.
    np.testing.assert_array_equal(TopK(count=3).encode(v)["indices"], np.uint8([0b01011000]))
    # Two of twenty: the high parts 0 and 2 as a bitmap, then the low parts 1 and 3 of three bits.
    sparse = np.zeros(20, np.float32)
    sparse[[1, 19]] = 1
    np.testing.assert_array_equal(
        TopK(count=2).encode(sparse)["indices"], encode_indices(np.array([1, 19]), 20)
    )


# Sign and ternary


@settings(deadline=None, max_examples=40)
@given(v=ANY_VECTOR)
def test_the_error_of_a_scaled_sign_is_what_the_one_norm_says_and_that_of_ternary_the_least(
    v: NDArray[np.float32],
) -> None:
    exact = np.abs(v.astype(np.float64))
    assert error(ScaledSign(), v) == pytest.approx(
        squared(v) - exact.sum() ** 2 / v.size, abs=1e-6 * squared(v)
    )
    sums = np.cumsum(np.sort(exact)[::-1])
    least = squared(v) - float(np.max(sums**2 / np.arange(1, v.size + 1)))
    assert error(Ternary(), v) == pytest.approx(least, abs=1e-6 * squared(v))


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 63, 64])
@pytest.mark.parametrize("d", [1, 2, 3, 5, 9, 64, 65, 129, 300])
def test_the_ternary_support_need_not_tell_its_size_but_its_bits_need_the_payload(d: int, m: int) -> None:
    v = np.zeros(d, np.float32)
    v[: min(m, d)] = -1.5
    payload = Ternary().encode(v)
    np.testing.assert_array_equal(Ternary().decode(payload, d), v)
    assert Ternary().bits(d, payload) == 32 + min(m, d) * (1 + ceil(log2(d)))
    with pytest.raises(ValueError, match="payload must be given"):
        Ternary().bits(d)


# Names


@settings(deadline=None, max_examples=40)
@given(
    st.one_of(
        st.sampled_from([Identity(), ScaledSign(), Ternary(), RandK(count=3), RandK(0.1, round=10**10 - 1)]),
        KEPT,
    )
)
def test_a_compressor_is_what_its_name_says(compressor: Compressor) -> None:
    assert parse_compressor(str(compressor)) == compressor
    assert str(compressor).partition("(")[0] in COMPRESSORS


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("topk(0.01)", TopK(0.01)),
        (" topk( 0.01 ) ", TopK(0.01)),
        ("topk(1)", TopK(count=1)),
        ("topk(1.0)", TopK(1.0)),
        ("topk(1e-05)", TopK(1e-05)),
        ("randk(0.1)", RandK(0.1)),
        (" randk( 20 , round = 7 ) ", RandK(count=20, round=7)),
    ],
)
def test_names_that_people_write(text: str, compressor: Compressor) -> None:
    assert parse_compressor(text) == compressor


# One draw for all nodes


def test_rand_k_sends_values_of_the_same_entries_at_all_nodes_and_others_in_each_round() -> None:
    first, second = (RandK(0.3, round=r) for r in (0, 1))
    kept = [
        np.flatnonzero(sent(c, v)) for c in (first, second) for v in (np.ones(40), 2 - np.arange(40) / 40)
    ]
    np.testing.assert_array_equal(kept[0], kept[1])
    np.testing.assert_array_equal(kept[2], kept[3])
    assert len(kept[0]) == 12
    assert set(kept[0]) != set(kept[2])
    assert list(RANDOM.encode(np.ones(40))) == ["values"]
    assert RANDOM.bits(40) == 32 * 12


def test_rand_k_contracts_in_expectation() -> None:
    v = np.random.default_rng(0).standard_normal(50)
    left = [error(RandK(0.2, round=r), v) for r in range(600)]
    assert np.mean(left) == pytest.approx((1 - RandK(0.2).contraction(50)) * squared(v), rel=0.02)


def test_rand_k_without_a_round_is_refused() -> None:
    with pytest.raises(ValueError, match="must name a round"):
        RandK(0.1).encode(np.ones(10))
    validate_compressor("randk(0.1)")
    with pytest.raises(ValueError, match="must be without a round"):
        validate_compressor("randk(0.1,round=3)")
    assert in_round(RandK(0.1), 4) == RandK(0.1, round=4)
    assert in_round(TopK(0.1), 4) == TopK(0.1)


# Payloads that are none

V = np.random.default_rng(3).standard_normal(20).astype(np.float32)


def spoilt(compressor: Compressor, **changes: Any) -> Payload:
    return {k: a for k, a in {**compressor.encode(V), **changes}.items() if a is not None}


@pytest.mark.parametrize(
    ("compressor", "changes", "reason"),
    [
        (Identity(), {"values": None}, "missing key"),
        (Identity(), {"extra": V}, "unknown key"),
        (Identity(), {"values": V[:19]}, "wrong shape"),
        (Identity(), {"values": V.reshape(4, 5)}, "wrong shape"),
        (Identity(), {"values": V.astype(np.float64)}, "wrong dtype"),
        (Identity(), {"values": V.astype(">f4")}, "wrong dtype"),
        (Identity(), {"values": np.full(20, np.nan, np.float32)}, "non-finite"),
        (TopK(count=2), {"indices": np.int32([3, 4])}, "wrong dtype"),
        (TopK(count=2), {"values": np.float32([1, np.inf])}, "non-finite"),
        (TopK(count=2), {"indices": np.uint8([255, 255])}, "bad padding"),
        (TopK(count=2), {"indices": np.uint8([255, 192])}, "bad index"),
        (TopK(count=2), {"indices": np.uint8([0, 0])}, "bad index"),
        (TopK(count=2), {"indices": np.uint8([1])}, "wrong shape"),
        (TopK(count=2), {"values": V[:1]}, "wrong shape"),
        (ScaledSign(), {"scale": np.float32([np.nan])}, "non-finite"),
        (ScaledSign(), {"scale": np.float32([-1])}, "bad scale"),
        (ScaledSign(), {"scale": np.float32(1)}, "wrong shape"),
        (ScaledSign(), {"bits": np.zeros(4, np.uint8)}, "wrong shape"),
        (Ternary(), {"scale": np.float32([-1])}, "bad scale"),
        (Ternary(), {"signs": np.zeros(0, np.uint8)}, "wrong shape"),
        (Ternary(), {"signs": np.zeros((2, 2), np.uint8)}, "wrong shape"),
        (Ternary(), {"indices": np.zeros(1000, np.uint8)}, "wrong shape"),
        (Ternary(), {"indices": np.uint8([255, 255]), "signs": np.uint8([0])}, "bad index"),
    ],
)
def test_a_payload_that_is_none_is_refused_with_its_reason(
    compressor: Compressor, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(PayloadError) as refusal:
        compressor.decode(spoilt(compressor, **changes), V.size)
    assert refusal.value.reason == reason


@pytest.mark.parametrize("compressor", [TopK(count=2), ScaledSign(), Ternary()], ids=str)
def test_a_huge_payload_is_refused_without_unpacking_it(compressor: Compressor) -> None:
    huge = np.zeros(4_000_000, np.uint8)
    payload = {key: huge if a.dtype == np.uint8 else a for key, a in compressor.encode(V).items()}
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError):
            compressor.decode(payload, V.size)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


# Updates of a state dict

STATE: dict[str, NDArray[Any]] = {
    "conv.weight": np.ones((2, 3), np.float32),
    "bn.running_mean": np.full(2, 0.5, np.float32),
    "bn.num_batches_tracked": np.array(3),
    "conv.bias": np.zeros(2, np.float64),
}
LAYOUT = Layout.of(to_record(STATE))
DENSE = {"bn.running_mean": STATE["bn.running_mean"], "bn.num_batches_tracked": np.array(2**53 + 1)}
UPDATE = np.float32([1, -2, 3, 0, 0.5, -4, 9, 8])


@pytest.mark.parametrize("name", ["identity", "topk(2)", "topk(0.5)", "sign", "ternary"])
def test_an_update_comes_back_with_running_statistics_and_integers_as_they_are(name: str) -> None:
    assert compressed_keys(LAYOUT) == ("conv.weight", "conv.bias")
    assert compressed_part(LAYOUT).size == 8
    compressor = parse_compressor(name)
    vector, dense = unpack_update(compressor, LAYOUT, pack_update(LAYOUT, compressor.encode(UPDATE), DENSE))
    np.testing.assert_array_equal(vector, sent(compressor, UPDATE))
    assert dense.keys() == DENSE.keys()
    for key, array in dense.items():
        assert (array.dtype, array.shape) == (DENSE[key].dtype, DENSE[key].shape)
        np.testing.assert_array_equal(array, DENSE[key])


def test_a_counter_may_come_as_an_integer_where_a_mean_has_made_it_a_float() -> None:
    layout = Layout.of(to_record({**STATE, "bn.num_batches_tracked": np.array(3.5)}))
    _, dense = unpack_update(Identity(), layout, pack_update(layout, Identity().encode(UPDATE), DENSE))
    assert dense["bn.num_batches_tracked"].dtype == np.float64


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("bn.running_mean", None, "missing key"),
        ("bn.running_mean", np.zeros(3, np.float32), "wrong shape"),
        ("bn.running_mean", np.array([np.nan, 0], np.float32), "non-finite"),
        ("bn.num_batches_tracked", np.array(3.5), "wrong dtype"),
        ("conv.weight", STATE["conv.weight"], "unknown key"),
        ("values", UPDATE, "wrong shape"),
    ],
)
def test_an_update_with_other_entries_is_refused(key: str, value: Any, reason: str) -> None:
    compressor = TopK(count=2)
    record = pack_update(LAYOUT, compressor.encode(UPDATE), DENSE)
    record.pop(key, None)
    if value is not None:
        record.update(to_record({key: value}))
    with pytest.raises(PayloadError) as refusal:
        unpack_update(compressor, LAYOUT, record)
    assert refusal.value.reason == reason


def test_an_update_with_other_keys_is_not_packed() -> None:
    with pytest.raises(ValueError, match="dense must have the keys"):
        pack_update(LAYOUT, Identity().encode(UPDATE), {})
    state = {"w": UPDATE, "indices": np.arange(3)}
    with pytest.raises(ValueError, match="'indices'"):
        pack_update(Layout.of(to_record(state)), TopK(count=1).encode(UPDATE), {"indices": np.arange(3)})


# What a decoded record counts as


def test_a_decoded_record_counts_as_what_travelled_and_travels_as_a_plain_one() -> None:
    plain, record = to_record({"w": UPDATE}), decoded_record({"w": UPDATE}, wire_bytes=11, wire_bits=70)
    for same in (record, record.copy()):
        assert payload_bytes(same) == 11
        assert nominal_bits(same, default=256) == 70
        np.testing.assert_array_equal(same["w"].numpy(), UPDATE)
    arrived = through_the_wire(RecordDict({"arrays": record}), "reply")["arrays"]
    assert type(arrived) is ArrayRecord
    assert payload_bytes(arrived) == payload_bytes(plain) == 128 + len("w") + UPDATE.nbytes
    assert nominal_bits(plain, default=256) == 256


# Rand-K


@settings(deadline=None, max_examples=50)
@given(size=st.integers(1, 300), share=st.floats(0.01, 1.0), client=st.integers(0, 50))
def test_rand_k_keeps_so_many_different_entries_in_order(size: int, share: float, client: int) -> None:
    keep = ceil(share * size)
    indices = rand_k(size, keep, seed=3, round=7, partition_id=client)
    assert len(indices) == keep
    assert (np.diff(indices) > 0).all()
    assert 0 <= indices[0] <= indices[-1] < size
    keys = [(seed, t, i) for seed in (0, 1) for t in (1, 2) for i in (0, 1)]
    assert len({tuple(rand_k(100, 10, seed=seed, round=t, partition_id=i)) for seed, t, i in keys}) == 8
