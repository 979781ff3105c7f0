from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles.hsgd import top_k

from hedgerow.wire import PayloadError
from hedgerow.wire.sparse_rows import decode_rows, encode_rows, kept, row_bytes

ROWS = st.tuples(st.integers(1, 4), st.integers(1, 300), st.integers(0, 10))


@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (16, 3), (32, 7), (64, 14), (128, 28), (800, 175)])
def test_so_many_of_the_largest_entries_are_kept(n: int, k: int) -> None:
    # 7/32 of a row, as the paper's 128 levels say, and at least one.
    assert kept(n) == k
    row = np.array([[0.5, -3, 0.1, 2, -0.05, 1, -0.7, 0.2]])
    assert decode_rows(encode_rows(row), 1, 8).tolist() == [[0, -3, 0, 0, 0, 0, 0, 0]]


@settings(deadline=None, max_examples=60)
@given(ROWS)
def test_decoded_rows_are_the_top_k_of_each(case: tuple[int, int, int]) -> None:
    count, n, seed = case
    rows = np.random.default_rng(seed).integers(-3, 4, (count, n)).astype(np.float32)  # with ties
    payload = encode_rows(rows)
    assert {len(row) for row in payload} == {row_bytes(n)}
    assert np.array_equal(decode_rows(payload, count, n), [top_k(row) for row in rows])


@pytest.mark.parametrize("n", [1, 2, 256, 257, 65_536, 65_537])
def test_the_last_index_survives(n: int) -> None:
    row = np.zeros((1, n), np.float32)
    row[0, -1] = 1.0
    assert np.array_equal(decode_rows(encode_rows(row), 1, n), row)


GOOD = encode_rows(np.arange(64, dtype=np.float32)[None])[0]  # 14 values, 14 indices of 1 byte


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (None, "wrong shape"),
        (GOOD, "wrong shape"),
        ([GOOD, GOOD], "wrong shape"),
        ([GOOD[:-1]], "wrong shape"),
        ([GOOD[:-1] + b"\xff"], "bad index"),
        ([GOOD[:-1] + GOOD[-2:-1]], "bad index"),
        ([np.float32(np.nan).tobytes() + GOOD[4:]], "non-finite"),
    ],
)
def test_a_broken_payload_is_refused_by_reason(payload: Any, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        decode_rows(payload, 1, 64)
    assert caught.value.reason == reason


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_what_is_not_finite_in_32_bits_is_not_sent(value: float) -> None:
    with pytest.raises(ValueError, match="must hold finite float32 values"):
        encode_rows(np.array([[value, 0.0]]))
