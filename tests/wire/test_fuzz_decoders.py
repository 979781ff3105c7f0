"""Whatever bytes or arrays come, a decoder gives a clear error or a right value, and stays small."""

from typing import Any, cast

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from tests.wire.fuzzing import Decoder, Rng, hunt

from hedgerow.wire import (
    Codec,
    Compressor,
    Dense,
    Layout,
    OneBit,
    Quantised,
    RandK,
    ScaledSign,
    Sparse,
    Ternary,
    TopK,
    decode_indices,
    encode_indices,
    finite_views,
    pack_update,
    record_payload,
    to_record,
    to_state_dict,
    unpack_update,
)
from hedgerow.wire.compress import Identity, promoted
from hedgerow.wire.packed import packed, unpacked
from hedgerow.wire.records import received_state
from hedgerow.wire.sparse_rows import decode_rows, encode_rows

RNG: Rng = np.random.default_rng(1)
STATE: dict[str, Any] = {
    "w": RNG.standard_normal((5, 4)).astype(np.float32),
    "norm.num_batches_tracked": np.array(3, np.int64),
    "b": RNG.standard_normal(3),
    "mask": np.array([True, False]),
}
MODEL = to_record(STATE)
PACKED: Any = packed(RecordDict({"arrays": MODEL}))["packed.0/arrays"]
LAYOUT = Layout.of(MODEL)
SHAPES = {key: value.shape for key, value in STATE.items()}
DENSE = {key: STATE[key] for key in ("norm.num_batches_tracked", "mask")}
CHANGE = RNG.standard_normal(23)
SPARSE = np.where(np.arange(40) % 7 == 0, RNG.standard_normal(40), 0.0)
ROWS = RNG.standard_normal((3, 70)).astype(np.float32)

COMPRESSORS: list[Compressor] = [
    Identity(),
    TopK(count=5),
    RandK(fraction=0.3, round=4),
    ScaledSign(),
    Ternary(),
]
CODECS: list[Codec] = [
    *(Dense(width) for width in (32, 64)),
    *(Sparse(8, width) for width in (16, 32, 64)),
    *(Quantised(width) for width in (2, 5, 16)),
    Quantised(3, vectors=2),
    OneBit(2, 24),
    OneBit(2, 25, decoder="biht", expand="literal"),
    OneBit(2, 24, compand="none"),
]


def is_vector(value: Any, size: int, dtype: Any) -> bool:
    return bool(value.shape == (size,) and value.dtype == dtype and np.isfinite(value).all())


def is_state(state: Any) -> bool:
    return {key: tuple(value.shape) for key, value in state.items()} == SHAPES


def is_update(value: Any) -> bool:
    update, dense = value
    return is_vector(update, 23, np.float32) and {k: (v.shape, v.dtype) for k, v in dense.items()} == {
        k: (v.shape, v.dtype) for k, v in DENSE.items()
    }


def of_compressor(compressor: Compressor) -> Decoder:
    payload = to_record(compressor.encode(CHANGE))

    def decode(record: ArrayRecord) -> Any:
        return compressor.decode(record_payload(record), 23)

    return Decoder(str(compressor), payload, decode, lambda value: is_vector(value, 23, np.float32))


def of_update(compressor: Compressor) -> Decoder:
    record = pack_update(LAYOUT, compressor.encode(CHANGE), DENSE)
    return Decoder(f"update-{compressor}", record, lambda r: unpack_update(compressor, LAYOUT, r), is_update)


def of_codec(codec: Codec) -> Decoder:
    seed = (1, 2, 3)
    return Decoder(
        repr(codec),
        codec.encode(SPARSE, seed),
        lambda payload: codec.decode(payload, 40, seed),
        lambda value: value is None or is_vector(value, 40, np.float64),
        dear=20 if "gpsp" in repr(codec) else 1,
    )


def unpacked_as(layout: bytes) -> ArrayRecord:
    slices = ConfigRecord({"layout": layout.decode(errors="replace"), "data": PACKED["data"]})
    return cast(ArrayRecord, unpacked(RecordDict({"packed.0/arrays": slices}))["arrays"])


RECORDS = [
    Decoder(
        "packed",
        str(PACKED["layout"]).encode(),
        unpacked_as,
        lambda record: sum(len(array.data) for array in record.values()) == len(PACKED["data"]),
    ),
    Decoder(
        "layout",
        MODEL,
        LAYOUT.flatten,
        lambda v: is_vector(v, LAYOUT.size, np.float32),
    ),
    Decoder(
        "promoted",
        MODEL,
        lambda record: LAYOUT.flatten(promoted(LAYOUT, record)),
        lambda v: is_vector(v, LAYOUT.size, np.float32),
    ),
    Decoder("received", MODEL, lambda record: received_state(record, SHAPES), is_state),
    Decoder("state-dict", MODEL, to_state_dict, lambda state: isinstance(state, dict)),
    Decoder(
        "views", MODEL, finite_views, lambda state: all(np.isfinite(value).all() for value in state.values())
    ),
    Decoder("layout-of", MODEL, Layout.of, lambda layout: len(layout.keys) == len(layout.dtypes)),
    Decoder(
        "indices",
        encode_indices(np.arange(3, 700, 17), 700).tobytes(),
        lambda payload: decode_indices(np.frombuffer(payload, np.uint8), 41, 700),
        lambda v: v.shape == (41,) and bool((np.diff(v) > 0).all()) and v[0] >= 0 and v[-1] < 700,
    ),
    Decoder(
        "rows",
        encode_rows(ROWS),
        lambda payload: decode_rows(payload, 3, 70),
        lambda v: v.shape == (3, 70) and v.dtype == np.float32 and np.isfinite(v).all(),
    ),
]
DECODERS = [
    *RECORDS,
    *map(of_compressor, COMPRESSORS),
    *map(of_update, COMPRESSORS),
    *map(of_codec, CODECS),
]
every_decoder = pytest.mark.parametrize("decoder", DECODERS, ids=str)


@every_decoder
def test_anything_is_a_clear_error_or_a_right_value(decoder: Decoder) -> None:
    hunt(decoder, 120)


@pytest.mark.slow
@every_decoder
def test_thousands_of_payloads_are_clear_errors_or_right_values(decoder: Decoder) -> None:
    hunt(decoder, 5000, explore=True)


def test_garbage_that_a_decoder_must_see_is_in_what_it_is_shown() -> None:
    decoder, refused = RECORDS[0], 0
    for seed in range(300):
        try:
            decoder.decode(decoder.spoilt(np.random.default_rng(seed)))
        except ValueError:
            refused += 1
    assert 200 < refused < 300
