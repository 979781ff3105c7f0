"""Shamir's shares: any threshold of them is the secret, fewer are anything."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.wire.secret_shares import MAX_SHARES, combined_shares, secret_shares


@settings(deadline=None, max_examples=40)
@given(st.binary(min_size=1, max_size=80), st.data())
def test_any_threshold_of_shares_gives_the_secret_back(secret: bytes, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 60))
    threshold = data.draw(st.integers(1, count))
    shares = secret_shares(secret, threshold, count)
    points = data.draw(st.permutations(range(1, count + 1)))[: data.draw(st.integers(threshold, count))]
    assert combined_shares(points, [shares[point - 1] for point in points]) == secret


def test_every_pair_of_three_shares_and_no_single_one() -> None:
    secret = bytes(range(32))
    shares = secret_shares(secret, 2, 3)
    for pair in combinations(range(3), 2):
        assert combined_shares([i + 1 for i in pair], [shares[i] for i in pair]) == secret
    assert all(combined_shares([i + 1], [share]) != secret for i, share in enumerate(shares))


def test_fewer_shares_than_the_threshold_are_uniform_whatever_the_secret() -> None:
    # 40,000 bytes of the value 0: each share alone must have all 256 values equally often.
    share = np.frombuffer(secret_shares(bytes(40_000), 2, 3)[1], np.uint8)
    counts = np.bincount(share, minlength=256)
    # 255 degrees of freedom: 380 is passed once in 10^6.
    assert np.sum((counts - 156.25) ** 2 / 156.25) < 380


def test_the_field_is_that_of_aes() -> None:
    # FIPS 197, section 4.2: {57} * {83} = {c1}; {57} * {13} = {fe}.
    from hedgerow.wire.secret_shares import _PRODUCTS

    assert _PRODUCTS[0x57, 0x83] == 0xC1
    assert _PRODUCTS[0x57, 0x13] == 0xFE


def test_what_makes_no_shares_and_no_secret_is_refused() -> None:
    for threshold, count in ((0, 3), (4, 3), (1, MAX_SHARES + 1)):
        with pytest.raises(ValueError, match="must have 1 <= threshold"):
            secret_shares(b"x", threshold, count)
    for points in ([1, 1], [0, 1], [1, 256], []):
        with pytest.raises(ValueError, match="must be of different points"):
            combined_shares(points, [b"ab"] * len(points))
    with pytest.raises(ValueError, match="one length"):
        combined_shares([1, 2], [b"a", b"ab"])


@pytest.mark.parametrize(("threshold", "count"), [(2, 3), (5, 8), (33, 50), (171, 255)])
def test_fewer_shares_than_the_threshold_fit_every_secret(
    threshold: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is drawn, each number by itself, as shares at threshold - 1 points: a map that has an inverse over
    # GF(2^8) takes uniform draws to uniform shares, whatever the secret adds to them.
    from hedgerow.wire.secret_shares import _LOGARITHMS, _POWERS, _PRODUCTS

    drawn = threshold - 1
    unit = np.eye(drawn, dtype=np.uint8)
    monkeypatch.setattr("os.urandom", lambda size: unit.tobytes())
    rows = np.stack(
        [np.frombuffer(share, np.uint8) for share in secret_shares(bytes(drawn), threshold, count)]
    )
    matrix = rows[np.random.default_rng(0).permutation(count)[:drawn]].copy()
    for column in range(drawn):
        pivot = column + int(np.argmax(matrix[column:, column] != 0))
        matrix[[column, pivot]] = matrix[[pivot, column]]
        assert matrix[column, column] != 0
        inverse = _POWERS[(255 - _LOGARITHMS[matrix[column, column]]) % 255]
        matrix[column] = _PRODUCTS[inverse, matrix[column]]
        for row in range(column + 1, drawn):
            matrix[row] ^= _PRODUCTS[matrix[row, column], matrix[column]]
