"""Coded indices: back to the bit, in a size that both sides know, and nothing else is taken for them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.wire import PayloadError, decode_indices, encode_indices, index_bits
from hedgerow.wire.elias_fano import added, most_entries


def drawn(size: int, count: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(size, count, replace=False))


@settings(deadline=None, max_examples=80)
@given(data=st.data(), size=st.integers(1, 3000), seed=st.integers(0, 999))
def test_indices_come_back_in_as_many_bytes_as_were_announced(data, size: int, seed: int) -> None:
    count = data.draw(st.integers(0, size))
    indices = drawn(size, count, seed)
    coded = encode_indices(indices, size)
    assert coded.size == -(-index_bits(size, count) // 8)
    assert np.array_equal(decode_indices(coded, count, size), indices)


@pytest.mark.parametrize("indices", [[0, 1, 2], [2**31 - 4, 2**31 - 3, 2**31 - 2], [0, 5, 2**31 - 2]])
def test_the_ends_of_a_range_and_clusters_are_coded_too(indices: list[int]) -> None:
    size = 2**31 - 1
    # 3 indices of 31 bits: l = 29, so that the bitmap of high parts is a handful of bits.
    assert index_bits(size, 3) == 3 * 29 + 3 + ((size - 1) >> 29)
    assert decode_indices(encode_indices(np.array(indices), size), 3, size).tolist() == indices


def test_golden_code_and_all_or_none_need_no_bits() -> None:
    # d = 16, K = 4, l = 2: highs 0, 0, 1, 3 mark places 0, 1, 3, 6 of 7; lows 01, 11, 00, 10.
    coded = encode_indices(np.array([1, 3, 4, 14]), 16)
    assert np.unpackbits(coded).tolist() == [1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 0]
    assert index_bits(7, 7) == index_bits(7, 0) == 0
    assert decode_indices(np.zeros(0, np.uint8), 7, 7).tolist() == list(range(7))


@pytest.mark.parametrize(("size", "count"), [(387_072, 12_096), (4_709_376, 147_168), (1000, 10), (640, 320)])
def test_the_size_is_within_six_tenths_of_a_bit_of_the_entropy(size: int, count: int) -> None:
    least = (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2)
    assert least <= index_bits(size, count) <= least + 0.6 * count + 8


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 5000), share=st.floats(0, 1.2))
def test_a_budget_is_met_and_one_more_entry_would_break_it(size: int, share: float) -> None:
    bits = int(32 * size * share)
    count = most_entries(size, bits)
    assert 1 <= count <= size
    if count > 1:
        assert 32 * count + index_bits(size, count) <= bits
    if count < size:
        assert 32 * (count + 1) + index_bits(size, count + 1) > bits or count + 1 == size


def broken(kind: str) -> np.ndarray:
    coded = encode_indices(np.array([1, 3, 4, 14]), 16)
    bits = np.unpackbits(coded)
    if kind == "short":
        return coded[:1]
    if kind == "dtype":
        return coded.astype(np.int64)
    if kind == "padding":
        bits[15] = 1
    elif kind == "count":
        bits[0] = 0
    elif kind == "twice":  # lows 01, 01 under one high: the same index twice
        bits[9] = 0
    return np.packbits(bits)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("short", "wrong shape"),
        ("dtype", "wrong dtype"),
        ("padding", "bad padding"),
        ("count", "bad index"),
        ("twice", "bad index"),
    ],
)
def test_what_is_no_code_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(PayloadError, match=reason):
        decode_indices(broken(kind), 4, 16)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), size=st.integers(1, 400))
def test_any_bytes_are_indices_or_an_error(data, size: int) -> None:
    count = data.draw(st.integers(0, size))
    length = -(-index_bits(size, count) // 8)
    coded = np.frombuffer(data.draw(st.binary(min_size=length, max_size=length)), np.uint8)
    try:
        indices = decode_indices(coded, count, size)
    except PayloadError:
        return
    assert len(indices) == count
    assert np.array_equal(encode_indices(indices, size), coded)


@pytest.mark.parametrize("indices", [[3, 1], [1, 1], [-1], [16]])
def test_what_is_not_ascending_is_not_encoded(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="must ascend within 0 to 15"):
        encode_indices(np.array(indices), 16)


# Sparse updates


def coded(indices: list[int], size: int = 30) -> np.ndarray:
    return encode_indices(np.array(indices), size)


def test_a_sparse_update_is_added_to_a_copy() -> None:
    held = np.zeros(30, np.float32)
    moved = added(held, {"indices": coded([0, 29]), "values": np.array([1, 2], np.float32)})
    assert (moved[0], moved[29], np.count_nonzero(moved)) == (1, 2, 2)
    assert not held.any()


TWO = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("update", "match"),
    [
        ({"indices": coded([0, 60], size=100), "values": TWO}, "bad padding|bad index"),
        ({"indices": coded([0, 9])[:1], "values": TWO}, "wrong shape: indices have"),
        ({"indices": coded([0, 9]).astype(np.int64), "values": TWO}, "wrong dtype: indices are int64"),
        ({"indices": coded([0, 9])[::-1].copy(), "values": TWO}, "bad index|bad padding"),
        ({"indices": coded([0, 9]), "values": np.ones(2)}, "values are float64"),
        ({"indices": coded([0, 9]), "values": np.ones(31, np.float32)}, "K up to 30"),
        ({"values": TWO}, r"wrong keys: \['values'\], expected \['indices', 'values'\]"),
    ],
)
def test_an_update_of_another_vector_is_refused(update: Any, match: str) -> None:
    with pytest.raises(PayloadError, match=match):
        added(np.zeros(30, np.float32), update)
