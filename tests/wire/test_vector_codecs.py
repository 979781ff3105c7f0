"""Vector codecs are exact to their width, as long as is counted, unbiased, and trust no bytes."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hedgerow.wire import Dense, OneBit, PayloadError, Quantised, Sparse, parse_codec

NAMES = (
    "1bcs",
    "sparse16",
    "sparse32",
    "sparse64",
    "dense32",
    "dense64",
    "quantised2",
    "quantised8",
    "quantised13",
)
VECTORS = hnp.arrays(
    np.float64, st.integers(1, 40), elements=st.just(0.0) | st.floats(-1e4, 1e4) | st.floats(-1e-3, 1e-3)
)
SEED = (1, 2)


def codec_of(name, s=40, d=30):
    return parse_codec(name, s=s, d=d)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dense64", "f8"), ("sparse64", "f8"), ("dense32", "f4"), ("sparse32", "f4"), ("sparse16", "f2")],
)
@settings(deadline=None)
@given(w=VECTORS)
def test_codecs_round_to_the_nearest_of_their_width(name, dtype, w):
    codec = codec_of(name)
    assert np.array_equal(codec.decode(codec.encode(w, SEED), w.size, SEED), w.astype(dtype))


# The table of section 3.4 of the specification of Sha et al.; its 8-bit and 4-bit rows are per message too.
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("1bcs", (564, 10_064, 10_543)), ("dense64", (64_000, 640_000, 1_341_312)),
        ("dense32", (32_000, 320_000, 670_656)), ("sparse64", (740, 7_800, 7_900)),
        ("sparse32", (420, 4_600, 4_700)), ("sparse16", (260, 3_000, 3_100)),
        ("quantised8", (8_032, 80_032, 167_696)), ("quantised4", (4_032, 40_032, 83_864)),
    ],
)  # fmt: skip
def test_the_information_bits_are_those_of_the_table(name, bits):
    sizes = ((1000, 10, 500), (10_000, 100, 10_000), (20_958, 100, 10_479))
    assert tuple(codec_of(name, s=s, d=d).bits(n) for n, s, d in sizes) == bits


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=30)
@given(w=VECTORS)
def test_a_payload_is_as_long_as_is_counted(name, w):
    codec = codec_of(name)
    payload = codec.encode(w, SEED)
    assert len(payload) == -(-codec.bits(w.size, payload) // 8)
    if name.startswith("sparse"):
        kept = np.count_nonzero(w.astype(f"f{codec.width // 8}"))
        assert codec.bits(w.size, payload) == kept * codec.bits(w.size) // w.size


@pytest.mark.parametrize("name", NAMES)
def test_decoding_many_is_decoding_each_and_one_seed_gives_the_same_bytes(name):
    vectors, codec = np.random.default_rng(0).standard_normal((3, 40)), codec_of(name)
    seeds = [(1,), (2,), (1,)]
    payloads = [codec.encode(w, seed) for w, seed in zip(vectors, seeds, strict=True)]
    assert payloads == [codec.encode(w.copy(), seed) for w, seed in zip(vectors, seeds, strict=True)]
    many = codec.decode_many(payloads, 40, seeds)
    for z, payload, seed in zip(many, payloads, seeds, strict=True):
        assert np.array_equal(z, codec.decode(payload, 40, seed))


def test_a_sparse_payload_is_values_then_packed_indices():
    w = np.zeros(1000)
    w[[1, 1023 - 512]] = [1.5, -2]
    payload = Sparse(2, 32).encode(w)
    assert payload == struct.pack("<ff", 1.5, -2) + bytes([0b00000000, 0b01011111, 0b11110000])


@pytest.mark.parametrize("width", [2, 3, 8, 16])
def test_the_quantiser_is_unbiased(width):
    w = np.array([1, -0.73, 0.31, 0.002, 0, -1])
    codec = Quantised(width)
    decoded = np.array([codec.decode(codec.encode(w, (draw,)), 6) for draw in range(3000)])
    step = 1 / (2 ** (width - 1) - 1)
    assert decoded.mean(0) == pytest.approx(w, abs=5 * 0.5 * step / 3000**0.5 + 1e-6)


@settings(deadline=None)
@given(VECTORS, st.integers(2, 16), st.integers(0, 99))
def test_the_quantiser_is_off_by_less_than_a_step_anew_in_each_message(w, width, seed):
    codec = Quantised(width)
    payload = codec.encode(w, (seed,))
    step = struct.unpack("<f", payload[:4])[0]
    z = codec.decode(payload, w.size)
    # A step below the smallest float32 is sent as 0.
    assert np.all(np.abs(z - w) <= step * (1 + 1e-9) + 1e-44)
    assert step <= np.abs(w).max() / (2 ** (width - 1) - 1) * (1 + 1e-6) + 1e-44
    assert np.all(z[w == 0] == 0)
    v = np.linspace(-1, 1, 100)
    assert Quantised(4).encode(v, (seed, 1)) != Quantised(4).encode(v, (seed, 2))


@pytest.mark.parametrize(
    ("codec", "payload", "reason"),
    [
        (Dense(64), bytes(7), "wrong size"),
        (Dense(32), struct.pack("<4f", 1, 2, 3, float("nan")), "non-finite"),
        (Sparse(2, 32), bytes(3), "wrong size"),
        (Sparse(2, 32), struct.pack("<3fB", 1, 2, 3, 0b00011011), "wrong size"),
        (Sparse(2, 32), struct.pack("<fB", float("inf"), 0), "non-finite"),
        (Sparse(2, 32), struct.pack("<2fB", 1, 2, 0b01010000), "bad index"),
        (Sparse(2, 32), struct.pack("<2fB", 1, 2, 0b10010000), "bad index"),
        (Sparse(2, 32), struct.pack("<fB", 1, 0b00000001), "bad padding"),
        (Quantised(8), bytes(4), "wrong size"),
        (Quantised(8, vectors=2), bytes(9), "wrong size"),
        (Quantised(8, vectors=2), bytes(6) + struct.pack("<f2b", -1, 0, 0), "bad scale"),
        (Quantised(8), struct.pack("<f4b", -1, 0, 0, 0, 0), "bad scale"),
        (Quantised(8), struct.pack("<f4b", float("nan"), 0, 0, 0, 0), "non-finite"),
        (Quantised(8), struct.pack("<f4b", 1, 0, 0, 0, -128), "bad code"),
        (Quantised(3), struct.pack("<fBB", 1, 0, 1), "bad padding"),
    ],
)
def test_malformed_bytes_are_named(codec, payload, reason):
    with pytest.raises(PayloadError) as caught:
        codec.decode(payload, 4)
    assert caught.value.reason == reason
    # Beyond a vector of three.
    with pytest.raises(PayloadError, match="bad index"):
        Sparse(2, 32).decode(struct.pack("<fB", 1, 0b11000000), 3)


def test_vectors_that_are_quantised_together_each_have_a_step_of_their_own() -> None:
    rng = np.random.default_rng(3)
    large, small = 1e3 * rng.standard_normal(51), 1e-3 * rng.standard_normal(51)
    codec = Quantised(7, vectors=2)
    payload = codec.encode(np.concatenate([large, small]), (1,))
    assert len(payload) == 2 * len(Quantised(7).encode(large, (1,)))
    assert codec.bits(102) == 2 * Quantised(7).bits(51)
    for vector, z in zip((large, small), np.split(codec.decode(payload, 102), 2), strict=True):
        assert np.abs(z - vector).max() < 1.001 * np.abs(vector).max() / 63
    with pytest.raises(ValueError, match=r"w must have a multiple of 2 entries, .*got 5"):
        codec.encode(np.ones(5), (1,))


@pytest.mark.parametrize("name", ["sparse32", "quantised8", "dense32", "1bcs"])
def test_a_long_payload_costs_no_memory(name):
    payload = bytes(20_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError):
            codec_of(name).decode(payload, 100, SEED)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize(
    ("codec", "w"),
    [
        (Dense(32), [1e39]),
        (Sparse(2, 16), [1e5, 0]),
        (Sparse(2, 64), [1, 2, 3]),
        (Sparse(2, 64), [np.nan, 0]),
        (Dense(64), [np.inf]),
        (Quantised(8), [1e300]),
        (Quantised(8), [np.nan]),
    ],
)
def test_what_cannot_be_sent_is_refused(codec, w):
    with pytest.raises(ValueError, match=r"^w must have (entries|at most|a step)|^w must be finite"):
        codec.encode(w, SEED)


def test_a_name_gives_its_codec_or_names_the_setting_that_is_missing():
    assert parse_codec("1bcs", s=3, d=9, expand="literal") == OneBit(3, 9, expand="literal")
    assert parse_codec("sparse64", s=3, d="9", gamma=5.0) == Sparse(3, 64)
    assert parse_codec("dense32") == Dense(32)
    assert parse_codec("quantised4", s=3) == Quantised(4)
    assert parse_codec("quantised4x2") == Quantised(4, vectors=2)
    with pytest.raises(ValueError, match="'1bcs' must have an integer >= 1 as d"):
        parse_codec("1bcs", s=3)
    with pytest.raises(ValueError, match="must have an integer >= 1 as s"):
        parse_codec("sparse32")
