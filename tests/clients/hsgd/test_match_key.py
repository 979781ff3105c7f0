"""The key of a group: who is hashed alike, what is sealed from whom, and sums under masks."""

import hmac
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hedgerow.clients.hsgd.match_key import MatchKey
from hedgerow.wire.fixed_point import fixed_point, from_fixed_point, joined, split

SECRET = bytes(range(32))
KEY = MatchKey(SECRET, 0)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_an_id_is_hashed_by_hmac_under_a_key_of_its_group_however_its_accents_are_written() -> None:
    derived = hmac.new(SECRET, b"hedgerow/hsgd/ids/0", sha256).digest()
    assert KEY.person("p-1") == hmac.new(derived, b"p-1", sha256).hexdigest()[:32]
    others = (MatchKey(SECRET, 1), MatchKey(SECRET[::-1], 0))
    assert len({key.person("p-1") for key in (KEY, *others)}) == 3
    assert KEY.person("Zo\u00eb") == KEY.person("Zoe\u0308")


def test_a_label_is_for_one_person_and_one_key() -> None:
    classes = list("abcd")
    sealed = KEY.seal(3, "a" * 32, classes)
    assert KEY.unseal(sealed, "a" * 32, classes) == 3
    assert sealed != KEY.seal(3, "a" * 32, classes)
    for key, person, told, among in (
        (KEY, "b" * 32, sealed, classes),
        (MatchKey(SECRET, 1), "a" * 32, sealed, classes),
        (KEY, "a" * 32, sealed[:-1], classes),
        (KEY, "a" * 32, b"", classes),
        (KEY, "a" * 32, sealed, classes[:3]),
    ):
        with pytest.raises(ValueError, match="match-key-file"):
            key.unseal(told, person, among)


@given(st.lists(st.lists(FLOATS, min_size=2, max_size=2), min_size=1, max_size=6))
def test_masked_sums_are_exact(rows: list[list[float]]) -> None:
    people = [f"{n:032x}" for n in range(len(rows))]
    told = [KEY.mask([fixed_point(v) for v in row], person) for row, person in zip(rows, people, strict=True)]
    masks = split(KEY.masks([seed for _, seed in told], people, 2), 2)
    totals = [sum(column) for column in zip(*(split(masked, 2) for masked, _ in told), strict=True)]
    exact = [sum(map(fixed_point, column)) for column in zip(*rows, strict=True)]
    assert [from_fixed_point(t - m) for t, m in zip(totals, masks, strict=True)] == [
        from_fixed_point(number) for number in exact
    ]


@given(FLOATS)
def test_fixed_point_holds_squares_to_its_step(value: float) -> None:
    square = value * value
    assert from_fixed_point(split(joined([fixed_point(square)]), 1)[0]) == pytest.approx(square, abs=2**-96)


def test_a_masked_number_tells_nothing_of_itself() -> None:
    draws = [KEY.mask([fixed_point(1.0)], "a" * 32)[0] for _ in range(500)]
    bits = np.unpackbits(np.frombuffer(b"".join(draws), np.uint8)).reshape(500, -1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.15  # 384 bits, each within 6.7 deviations


@pytest.mark.parametrize("secret", [b"", b"x" * 15, b"x" * 5000])
def test_a_key_of_another_length_or_that_is_not_there_is_refused(secret: bytes, tmp_path: Path) -> None:
    (tmp_path / "match.key").write_bytes(secret)
    with pytest.raises(ValueError, match=f"must hold 16 to 4096 bytes, got {len(secret)}"):
        MatchKey.read(str(tmp_path / "match.key"), 0)
    with pytest.raises(ValueError, match=r"match-key-file must be a readable file, got 'no\.key'"):
        MatchKey.read(str(tmp_path / "no.key"), 0)
