"""What a hostile or broken peer may send in place of a payload, and the claim that every decoder must meet.

All that is drawn can travel: what Flower's own serialisation would refuse never reaches a decoder.
"""

import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hedgerow.wire import PayloadError, payload_bytes, to_record, view

Rng = np.random.Generator

# Beside 64 times the honest payload: Python's parser takes 1.4 MB for the deepest .npy header.
SPARE_BYTES = 8_000_000
# Seconds of processor time after which an example counts as hanging.
PATIENCE = 5.0
# Payloads of one example: drawing an example takes as long as decoding a payload.
_BATCH = 8

_DTYPES: Sequence[str] = (
    *("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"),
    *(">f4", ">i8", "g", "c8", "c16", "S3", "U2", "M8[s]", "m8[s]", "V4", "i4,f4"),
)
_CLAIMS = (
    *("(1000000000000,)", "(-1,)", "(0, 4611686018427387904)", "(1000000, 1000000)", "()", "(2, -3)"),
    *(f"({'1,' * 70})", "(1.5,)", "('a',)", "(True,)", "[3]"),
)
NUMBERS: Sequence[Any] = (
    *(0, 1, -1, 2, 7, 50, 2**31, 2**53 + 2, 2**62, 2**63 - 1, -(2**63)),
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e38, 1e300, -1e308, float("nan"), float("inf"), float("-inf")),
)
TEXTS: Sequence[Any] = (
    *("", "x", "0.5", "topk(0.5)", "topk(99)", "9" * 30, "é" * 50, "nan", "identity", "sign"),
)


def pick(rng: Rng, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


# Bytes


def garbage_bytes(rng: Rng, size: int) -> bytes:
    return rng.bytes(int(rng.integers(0, 2 * size + 8)))


def mutated_bytes(data: bytes, rng: Rng) -> bytes:
    raw = bytearray(data)
    match int(rng.integers(5)):
        case 0:
            return bytes(raw[: int(rng.integers(0, len(raw) + 1))])
        case 1:
            return bytes(raw) + rng.bytes(int(rng.integers(1, 9)))
        case 2:
            return garbage_bytes(rng, len(raw))
        case 3 if raw:  # A float in place of eight bytes.
            start = int(rng.integers(len(raw)))
            return bytes(raw[:start]) + np.float64(pick(rng, NUMBERS)).tobytes() + bytes(raw[start + 8 :])
    for _ in range(int(rng.integers(1, 5)) if raw else 0):
        raw[int(rng.integers(len(raw)))] ^= 1 << int(rng.integers(8))
    return bytes(raw)


# Arrays


def _npy(values: NDArray[Any]) -> bytes:
    buffer = BytesIO()
    np.save(buffer, values, allow_pickle=True)
    return buffer.getvalue()


def _array(data: bytes, like: NDArray[Any], stype: str = "numpy.ndarray") -> Array:
    return Array(str(like.dtype), tuple(map(int, like.shape)), stype, data)


def _cast(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return values.astype(dtype)
        except (TypeError, ValueError):
            return np.zeros(values.shape, dtype)


def _with_numbers(values: NDArray[Any], rng: Rng) -> NDArray[Any]:
    numbers = values.copy()
    if numbers.size:
        with np.errstate(all="ignore"):
            number = np.float64(pick(rng, NUMBERS)).astype(values.dtype)
        numbers.flat[rng.integers(numbers.size, size=int(rng.integers(1, 4)))] = number
    return numbers


def _reshaped(values: NDArray[Any], rng: Rng) -> NDArray[Any]:
    flat = values.ravel()
    forms: list[NDArray[Any]] = [flat[None], values.T, flat[:-1], np.append(flat, flat[:1]), flat[:0]]
    return np.asarray(
        pick(rng, [*forms, np.zeros((), values.dtype), np.zeros((0, 7), values.dtype), values[None]])
    )


def _lying(values: NDArray[Any], rng: Rng) -> bytes:
    """Return honest data under a header that claims another shape."""
    honest, shape = _npy(values), pick(rng, _CLAIMS)
    claim = f"{{'descr': '{values.dtype.str}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    data = honest[honest.index(b"\n") + 1 :]
    return b"\x93NUMPY\x01\x00" + len(claim).to_bytes(2, "little") + claim + data


def mutated_array(array: Array, rng: Rng) -> Array:
    try:
        values = view(array)
    except PayloadError:  # It has a fault already.
        return array
    other = _cast(values, pick(rng, _DTYPES))
    mutations: Sequence[Callable[[], Array]] = (
        lambda: _array(mutated_bytes(_npy(values), rng), values),
        lambda: _array(_lying(values, rng), values),
        lambda: to_record({"": other})[""],  # as an engine without a wire has it
        lambda: _array(_npy(other), other),
        lambda: _array(_npy(_reshaped(values, rng)), values),
        lambda: _array(_npy(np.array([values.tolist(), print], object)), values),
        lambda: _array(_npy(values), values, stype=pick(rng, ("torch", "", "pickle"))),
        lambda: _array(_npy(_with_numbers(values, rng)), values),
    )
    return pick(rng, mutations)()


def garbage_array(rng: Rng) -> Array:
    shape = tuple(rng.integers(0, 5, size=int(rng.integers(0, 4))).tolist())
    values = _cast(rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 40), pick(rng, _DTYPES))
    data = _npy(values) if rng.random() < 0.7 else garbage_bytes(rng, 100)
    return _array(data, values)


# Records

Value = Any


def garbage_value(rng: Rng) -> Value:
    lists: list[Value] = [[1, 2, 3], [0.5, float("nan")], ["a", "a"], [b"x", b""], [True], [2**62], [-1]]
    return pick(rng, [*NUMBERS, *TEXTS, True, False, garbage_bytes(rng, 20), *lists])


def _mutated_list(items: list[Value], rng: Rng) -> list[Value]:
    place = int(rng.integers(len(items)))
    changed = mutated_value(items[place], rng)
    one_kind = changed if type(changed) is type(items[0]) else items[-1]
    return pick(
        rng,
        (
            items[:-1] or items * 2,
            [*items, items[0]],
            items[::-1],
            [*items[:place], one_kind, *items[place + 1 :]],
        ),
    )


def mutated_value(value: Value, rng: Rng) -> Value:
    if rng.random() < 0.3:
        return garbage_value(rng)
    if isinstance(value, bytes):
        return mutated_bytes(value, rng)
    if isinstance(value, list) and value:
        return _mutated_list(value, rng)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return garbage_value(rng)
    return pick(rng, NUMBERS) if rng.random() < 0.7 else type(value)(value + int(rng.integers(-2, 3)))


def _number(rng: Rng) -> Value:
    lists: list[Value] = [[1, 2, 3], [0.5, float("nan")], [2**62], []]
    return pick(rng, [*NUMBERS, *lists])


def _rekeyed(record: Any, rng: Rng, extra: Callable[[], Any]) -> Any:
    """Drop, rename or add a key."""
    changed = type(record)()
    chosen = pick(rng, list(record)) if len(record) else None
    way = int(rng.integers(3))
    for key, value in record.items():
        if key != chosen or way == 2:
            changed[key] = value
        elif way == 1:
            changed[pick(rng, ("", "x", f"{key}x", "0/" + key))] = value
    if way == 2 or chosen is None:
        changed["extra"] = extra()
    return changed


def mutated_arrays(record: ArrayRecord, rng: Rng) -> ArrayRecord:
    if not len(record) or rng.random() < 0.2:
        return _rekeyed(record, rng, lambda: garbage_array(rng))
    changed = record.copy()
    key = pick(rng, list(record))
    changed[key] = mutated_array(record[key], rng)
    return changed


def mutated_metrics(record: MetricRecord, rng: Rng) -> MetricRecord:
    if not len(record) or rng.random() < 0.3:
        return _rekeyed(record, rng, lambda: _number(rng))
    return MetricRecord({**record, pick(rng, list(record)): _number(rng)})


def mutated_config(record: ConfigRecord, rng: Rng) -> ConfigRecord:
    if not len(record) or rng.random() < 0.2:
        return _rekeyed(record, rng, lambda: garbage_value(rng))
    key = pick(rng, list(record))
    return ConfigRecord({**record, key: mutated_value(record[key], rng)})


def _keys(rng: Rng) -> list[str]:
    names = ("a", "w", "arrays", "num-examples", "values", "indices", "é")
    return [pick(rng, names) for _ in range(int(rng.integers(4)))]


def garbage_arrays(rng: Rng) -> ArrayRecord:
    return ArrayRecord({key: garbage_array(rng) for key in _keys(rng)})


def garbage_record(rng: Rng) -> ArrayRecord | MetricRecord | ConfigRecord:
    match int(rng.integers(3)):
        case 0:
            return garbage_arrays(rng)
        case 1:
            return MetricRecord({key: _number(rng) for key in _keys(rng)})
    return ConfigRecord({key: garbage_value(rng) for key in _keys(rng)})


def _mutated_record(record: Any, rng: Rng) -> Any:
    if isinstance(record, ArrayRecord):
        return mutated_arrays(record, rng)
    return mutated_metrics(record, rng) if isinstance(record, MetricRecord) else mutated_config(record, rng)


def garbage(rng: Rng) -> RecordDict:
    names = ("arrays", "metrics", "config", "update", "payload", "x")
    return RecordDict({pick(rng, names): garbage_record(rng) for _ in range(int(rng.integers(4)))})


def mutated(content: RecordDict, rng: Rng) -> RecordDict:
    """Return the content with one or two faults; the input is left as it was."""
    if rng.random() < 0.1:
        return garbage(rng)
    changed = content.copy()
    for _ in range(int(rng.integers(1, 3))):
        if not len(changed) or rng.random() < 0.15:
            changed = _rekeyed(changed, rng, lambda: garbage_record(rng))
            continue
        name = pick(rng, list(changed))
        wrong_kind = rng.random() < 0.1
        changed[name] = garbage_record(rng) if wrong_kind else _mutated_record(changed[name], rng)
    return changed


# The claim


@dataclass(frozen=True)
class Decoder:
    """One decoder of the suite.

    Parameters
    ----------
    name : str
        What a test calls it.
    payload : Any
        A valid payload: bytes, a list of bytes, an ArrayRecord or a RecordDict.
    decode : Callable[[Any], Any]
        Returns its value, or raises.
    right : Callable[[Any], bool]
        Whether a value is of the agreed shape and dtype, and finite.
    errors : tuple of exceptions (default: ValueError)
        What the decoder's callers catch.
    dear : int (default: 1)
        How many times fewer payloads it is shown, because it takes long to decode one.
    """

    name: str
    payload: Any
    decode: Callable[[Any], Any]
    right: Callable[[Any], bool]
    errors: tuple[type[Exception], ...] = (ValueError,)
    dear: int = 1

    def __str__(self) -> str:
        return self.name

    def spoilt(self, rng: Rng) -> Any:
        """Return anything in place of the payload."""
        payload, wholly_random = self.payload, rng.random() < 0.2
        if isinstance(payload, bytes):
            return garbage_bytes(rng, len(payload)) if wholly_random else mutated_bytes(payload, rng)
        if isinstance(payload, ArrayRecord):
            return garbage_arrays(rng) if wholly_random else mutated_arrays(payload, rng)
        if isinstance(payload, RecordDict):
            return garbage(rng) if wholly_random else mutated(payload, rng)
        return garbage_value(rng) if wholly_random else mutated_value(payload, rng)

    @property
    def size(self) -> int:
        if isinstance(self.payload, list):
            return sum(map(len, self.payload))
        return len(self.payload) if isinstance(self.payload, bytes) else payload_bytes(self.payload)


def hunt(decoder: Decoder, payloads: int, explore: bool = False) -> None:
    """Hold a decoder to the claim: a clear error or a right value, in bounded memory and time.

    The payloads are the same each time, or others if it is to ``explore``.
    """
    # An honest payload is a right value; and what is made once a process is not the payload's.
    assert decoder.right(decoder.decode(decoder.payload))

    examples = -(-payloads // (_BATCH * decoder.dear))

    @settings(deadline=None, max_examples=examples, database=None, derandomize=not explore)
    @given(st.integers(0, 2**63))
    def claim(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(_BATCH):
            _hold(decoder, decoder.spoilt(rng))

    claim()


def _hold(decoder: Decoder, payload: Any) -> None:
    started = time.process_time()
    tracemalloc.start()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            value = decoder.decode(payload)
        assert decoder.right(value), value
    except decoder.errors:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < SPARE_BYTES + 64 * decoder.size
    assert time.process_time() - started < PATIENCE
