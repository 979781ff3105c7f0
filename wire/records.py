"""State dict <-> ArrayRecord <-> flat vector, without needless copies.

Flower's ``Array`` serialises on construction. ``LazyArray`` keeps the ndarray and serialises only when its
bytes are read, so a message that stays in the process is never serialised. On the wire it is byte for byte
the same ``Array``.

A model travels key by key, in its own dtypes; NumPy has no bfloat16 or float8, which travel as float32. The
vector of a model holds what is averaged: the floating-point arrays, and of an integer or boolean array its
change since the start of the run, which is zero and costs no bit of precision where nothing changes it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from io import BytesIO
from math import prod
from typing import Any, Self, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import DTypeLike, NDArray

from hedgerow.wire.printable import quoted, shown

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

_NUMPY = "numpy.ndarray"
# The dtypes of a record: numbers that PyTorch has too.
_DTYPES = frozenset(map(np.dtype, ("?", *"bhilq", *"BHILQ", *"efd")))
_TENSORS = frozenset({
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.float32, torch.float64,
})  # fmt: skip
# Floating point that only PyTorch has: float32 holds all its values.
_AS_FLOAT32 = frozenset({
    torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
})  # fmt: skip


_DENSE = "a dense array of floats, integers or booleans of at most 64 bits"
_REMEDY = "convert it, or keep it out of the state dict (a buffer with persistent=False)"


class PayloadError(ValueError):
    """A record is invalid. ``reason`` is one of a few fixed words, for counting.

    ``detail`` may contain text from a node: the message has it escaped by ``shown``, at most 300 characters.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {shown(detail, 300)}")
        self.reason = reason


@lru_cache(maxsize=64)
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return str(dtype)


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return a message's records of one kind, by key.

    Flower's own views write every record back into the message, which costs a tenth of a small model's round.
    """
    return {key: record for key, record in content.items() if isinstance(record, kind)}


def config_in(content: RecordDict, key: str) -> ConfigRecord:
    """Return the ConfigRecord under a key; an empty one if there is none."""
    record = content.get(key)
    return record if isinstance(record, ConfigRecord) else ConfigRecord()


def only_record(content: RecordDict, kind: type[Record], reason: str) -> Record:
    """Return a message's one record of a kind.

    Raises
    ------
    PayloadError
        With this ``reason``, if it has none or more than one.
    """
    records = records_of(content, kind)
    if len(records) != 1:
        raise PayloadError(reason, f"{len(records)} {kind.__name__}s, expected one")
    return next(iter(records.values()))


class LazyArray(Array):
    """Flower's ``Array`` over an ndarray that is serialised on first use of ``data``.

    The ndarray is kept by reference and must not be modified afterwards.
    """

    def __init__(self, ndarray: NDArray[Any]) -> None:
        frozen = ndarray.view()
        frozen.flags.writeable = False
        # Bypasses Array.__setattr__, which checks each value, because a round makes thousands of these.
        self.__dict__.update(
            _ndarray=frozen, dtype=_dtype_name(ndarray.dtype), shape=ndarray.shape, stype=_NUMPY
        )

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The ``.npy`` bytes, made on first use."""
        cached: bytes | None = self.__dict__.get("_bytes")
        if cached is None:
            buffer = BytesIO()
            np.save(buffer, self._frozen, allow_pickle=False)
            cached = self.__dict__["_bytes"] = buffer.getvalue()
        return cached

    @property
    def _frozen(self) -> NDArray[Any]:
        frozen: NDArray[Any] = self.__dict__["_ndarray"]
        return frozen

    def numpy(self) -> NDArray[Any]:
        """Return a copy that the caller owns, as Flower's own ``Array`` does."""
        return self._frozen.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return lazy_array, (self._frozen,)


# Flower writes the class name into the object's header and looks it up on reading.
LazyArray.__qualname__ = Array.__qualname__


def lazy_array(ndarray: NDArray[Any]) -> Array:
    """Wrap an ndarray for a record, without a copy and without serializing it."""
    return LazyArray(ndarray)


class DecodedRecord(ArrayRecord):
    """A dense record that was decoded from a smaller one, with that one's size.

    - ``wire_bytes``: Its ``payload_bytes``: the bytes of the record that was sent.
    - ``wire_bits``: Its ``nominal_bits``: the paper's bits of the message.
    """

    def __init__(self, wire_bytes: int, wire_bits: int) -> None:
        super().__init__()
        self.wire_bytes, self.wire_bits = wire_bytes, wire_bits

    def copy(self) -> Self:
        """Return a shallow copy with the same wire size."""
        twin = super().copy()
        twin.wire_bytes, twin.wire_bits = self.wire_bytes, self.wire_bits
        return twin


# As for LazyArray: it is serialised as a plain record.
DecodedRecord.__qualname__ = ArrayRecord.__qualname__


def decoded_record(state: Mapping[str, NDArray[Any]], wire_bytes: int, wire_bits: int) -> ArrayRecord:
    """Return the arrays as a record with the size of the message that it was decoded from."""
    record = DecodedRecord(wire_bytes, wire_bits)
    for key, array in state.items():
        record[key] = lazy_array(array)
    return record


def nominal_bits(record: ArrayRecord, default: int) -> int:
    """Return the bits that a paper counts for a record: its own if it was decoded, else ``default``."""
    return record.wire_bits if isinstance(record, DecodedRecord) else default


@lru_cache(maxsize=4096)
def _npy_header_bytes(dtype: np.dtype[Any], shape: tuple[int, ...], fortran_order: bool) -> int:
    buffer = BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": fortran_order, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return len(buffer.getvalue())


def _array_bytes(array: Array) -> int:
    if isinstance(array, LazyArray):
        values = array._frozen
        return _npy_header_bytes(values.dtype, values.shape, values.flags.fnc) + values.nbytes
    return len(array.data)


def payload_bytes(content: RecordDict | ArrayRecord | MetricRecord | ConfigRecord) -> int:
    """Return the bytes of a record's values and keys, like Flower's ``count_bytes``.

    Lazy arrays are counted without serializing them. A message's envelope (metadata, object headers, HTTP) is
    not included. A ``DecodedRecord`` counts as the record that was sent.
    """
    if isinstance(content, DecodedRecord):
        return content.wire_bytes
    if isinstance(content, ArrayRecord):
        return sum(len(key) + _array_bytes(array) for key, array in content.items())
    if isinstance(content, RecordDict):
        return sum(len(key) + payload_bytes(record) for key, record in content.items())
    if isinstance(content, ConfigRecord):
        return sum(len(key) + _config_bytes(value) for key, value in content.items())
    return content.count_bytes()


def _config_bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(_config_bytes(item) for item in value)
    if isinstance(value, bool):
        return 1
    return len(value) if isinstance(value, str | bytes) else 8


def data_bytes(record: ArrayRecord) -> int:
    """Return the bytes of a record's values alone, without headers and keys."""
    return sum(view(array).nbytes for array in record.values())


def view(array: Array) -> NDArray[Any]:
    """Return the array read-only, without a copy unless it has a foreign byte order.

    Raises
    ------
    PayloadError
        ``undecodable`` if the bytes are not exactly one ``.npy`` array of the dtype and shape in its header,
        ``wrong dtype`` if its values are not booleans, integers or floats of at most 64 bits. Nothing is
        unpickled, and nothing larger than the received bytes is allocated.
    """
    values = array._frozen if isinstance(array, LazyArray) else _read(array)
    if values.dtype in _DTYPES:
        return values
    native = values.dtype.newbyteorder("=")
    if native not in _DTYPES:
        raise PayloadError("wrong dtype", f"{values.dtype}, expected booleans, integers or floats")
    copied = values.astype(native)
    copied.flags.writeable = False
    return copied


def _named_view(key: str, array: Array) -> NDArray[Any]:
    try:
        return view(array)
    except PayloadError as error:
        detail = f"{quoted(key)} of the model must be {_DENSE}, got {shown(array.dtype, 60)}: {_REMEDY}"
        raise PayloadError(error.reason, detail) from error


def _read(array: Array) -> NDArray[Any]:
    if array.stype != _NUMPY:
        raise PayloadError("undecodable", f"serialisation type {quoted(array.stype)}, expected {_NUMPY!r}")
    try:
        return _decoded(array.data)
    except Exception as error:  # the header is a Python literal: hostile ones fail in countless ways
        raise PayloadError("undecodable", f"not a .npy array ({error})") from error


def _decoded(data: bytes) -> NDArray[Any]:
    stream = BytesIO(data)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, fortran_order, dtype = read_header[np.lib.format.read_magic(stream)](stream)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    if len(data) - stream.tell() != prod(shape) * dtype.itemsize:
        raise ValueError(f"the bytes do not make up shape {shape} of {dtype}")
    flat = np.frombuffer(data, dtype=dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if fortran_order else "C")


def to_record(state: Mapping[str, torch.Tensor | NDArray[Any]]) -> ArrayRecord:
    """Wrap a state dict (tensors on any device, or ndarrays) as an ArrayRecord of lazy arrays.

    CPU tensors and ndarrays are not copied and must not be modified afterwards; bfloat16 and float8 become
    float32. A ValueError for what ``as_array`` refuses.
    """
    record = ArrayRecord()
    for key, value in list(state.items()):
        record[key] = lazy_array(as_array(key, value))
    return record


def as_array(key: str, value: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    """Return an entry of a state dict as an array: the tensor's own memory where NumPy has its dtype.

    Raises
    ------
    ValueError
        Unless it is an array, or a dense tensor of booleans, integers or floats of at most 64 bits.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        if value.dtype in _TENSORS:
            return value.detach().cpu().numpy()
        if value.dtype in _AS_FLOAT32:
            return value.detach().float().cpu().numpy()
    elif isinstance(value, np.ndarray):  # ``view`` checks its dtype, as for arrays from others.
        return value
    found = type(value).__name__
    if isinstance(value, torch.Tensor):
        found = f"{value.dtype}, {value.layout}".replace("torch.", "") + ", meta" * value.is_meta
    raise ValueError(f"{key!r} of the model must be {_DENSE}, got {found}: {_REMEDY}")


def check_travels(state: Mapping[str, torch.Tensor], home: Collection[str] = ()) -> None:
    """Raise ValueError, with key and remedy, if an entry of a state dict cannot travel or is not finite.

    ``home`` are keys of frozen arrays, which need not be finite.
    """
    for key, array in to_record(state).items():
        values = _named_view(key, array)
        if any(step == 0 and length > 1 for step, length in zip(values.strides, values.shape, strict=True)):
            raise ValueError(
                f"{key!r} of the model must have memory for each entry, got entries that share it, as after "
                "expand(): clone it"
            )
        if key not in home and not np.isfinite(values).all():
            raise ValueError(f"{key!r} of the model must be finite, got NaN or infinity: {_REMEDY}")


@lru_cache(maxsize=64)
def dtype_of(dtype: torch.dtype) -> str:
    """Return the name of the dtype in which tensors of a dtype travel; ValueError if they cannot."""
    return _dtype_name(as_array("a tensor", torch.empty(0, dtype=dtype)).dtype)


def change_of(values: NDArray[Any], since: NDArray[Any] | None) -> NDArray[Any]:
    """Return values minus earlier ones of the same dtype, int64 for integers and booleans (modulo 2^64).

    ``since`` None stands for zeros.
    """
    if values.dtype.kind == "f":
        return values if since is None else np.subtract(values, since, dtype=np.float64)
    whole = values.astype(np.int64)
    return whole if since is None else whole - since.astype(np.int64)


def to_state_dict(record: ArrayRecord, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return copies of the record's arrays as tensors on ``device``."""
    return {key: torch.tensor(view(array), device=device) for key, array in record.items()}


def finite_views(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the record's arrays, read-only, without a copy.

    Raises
    ------
    PayloadError
        If ``view`` refuses one, or it has NaN or infinity.
    """
    arrays = {key: view(array) for key, array in record.items()}
    for key, values in arrays.items():
        if not np.isfinite(values).all():
            raise PayloadError("non-finite", f"NaN or infinity in {quoted(key)}")
    return arrays


def checksum(record: ArrayRecord) -> str:
    """Return the SHA-256 of keys and values, in the record's order, to compare the records of two sides."""
    digest = sha256()
    for key, array in record.items():
        digest.update(key.encode() + b"\0")
        digest.update(view(array).tobytes())
    return digest.hexdigest()


def received_state(
    record: ArrayRecord,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device | str = "cpu",
    *,
    subject: str = "the message's arrays",
) -> dict[str, torch.Tensor]:
    """Return copies of a message's arrays as tensors, checked before anything is copied.

    - ``shapes``: The expected keys and shapes, in any order.
    - ``device``: The tensors' device; their dtypes are the message's.
    - ``subject``: The subject of an error about keys or shapes.

    Raises
    ------
    PayloadError
        If keys or shapes differ, or ``finite_views`` refuses an array.
    """
    arrays = finite_views(record)
    if (found := {key: values.shape for key, values in arrays.items()}) != dict(shapes):
        raise PayloadError("wrong shape", f"{subject} must have the shapes {dict(shapes)}, got {found}")
    return {key: torch.tensor(values, device=device) for key, values in arrays.items()}


@dataclass(frozen=True)
class Layout:
    """The keys, shapes and dtypes of a model, and the position of each array in a flat vector.

    The entries of an integer or boolean array are its change since ``origin``. A mean of replies is thus the
    mean of their changes, rounded to whole numbers: an array that no node changes keeps every bit, and
    counters count on.

    Parameters
    ----------
    keys : tuple[str, ...]
        Names in the record's order.
    shapes : tuple[tuple[int, ...], ...]
        One shape per key.
    dtypes : tuple[str, ...]
        One NumPy dtype name per key.
    origin : Mapping[str, NDArray[int64]] (default: zeros)
        The integers at the start of the run, by key; omitted where all are zero. Not compared.
    """

    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    origin: Mapping[str, NDArray[np.int64]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, record: ArrayRecord) -> Self:
        """Return the layout of a record, its own ``origin``; PayloadError if ``view`` refuses one."""
        arrays = {key: _named_view(key, array) for key, array in record.items()}
        return cls(
            keys=tuple(arrays),
            shapes=tuple(a.shape for a in arrays.values()),
            dtypes=tuple(str(a.dtype) for a in arrays.values()),
            origin={k: change_of(a, None) for k, a in arrays.items() if a.dtype.kind != "f" and a.any()},
        )

    @cached_property
    def size(self) -> int:
        """The number of elements of the flat vector."""
        return sum(prod(shape) for shape in self.shapes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Each key's slice of the flat vector."""
        ends = np.cumsum([0, *(prod(shape) for shape in self.shapes)])
        return {k: slice(int(a), int(b)) for k, a, b in zip(self.keys, ends, ends[1:], strict=False)}

    @cached_property
    def float_type(self) -> np.dtype[Any]:
        """The dtype of the vector: float64 if an array is, else float32."""
        return np.result_type(np.float32, *(d for d in self.dtypes if np.dtype(d).kind == "f"))

    @cached_property
    def integers(self) -> dict[str, slice]:
        """The slices of the integer and boolean arrays."""
        kinds = dict(zip(self.keys, self.dtypes, strict=True))
        return {key: where for key, where in self.slices.items() if np.dtype(kinds[key]).kind != "f"}

    @cached_property
    def floats(self) -> NDArray[np.intp]:
        """The positions of all other entries, ascending."""
        counted = np.zeros(self.size, bool)
        for where in self.integers.values():
            counted[where] = True
        return np.flatnonzero(~counted)

    def part(self, keys: Collection[str]) -> "Layout":
        """Return the layout of some of the keys, in this order."""
        rows = [row for row in zip(self.keys, self.shapes, self.dtypes, strict=True) if row[0] in keys]
        origin = {key: values for key, values in self.origin.items() if key in keys}
        return Layout(tuple(r[0] for r in rows), tuple(r[1] for r in rows), tuple(r[2] for r in rows), origin)

    def entries(self, key: str, values: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
        """Return an array's entries of the vector, flat.

        Raises
        ------
        PayloadError
            ``integer too large`` for an integer whose change the dtype does not hold exactly.
        """
        if values.dtype.kind == "f":
            return values.ravel()
        change = change_of(values.ravel(), self.origin[key].ravel() if key in self.origin else None)
        most = 2 ** (np.finfo(np.dtype(dtype)).nmant + 1)
        if change.size and max(-int(change.min()), int(change.max())) > most:
            raise PayloadError(
                "integer too large",
                f"{quoted(key)} differs from the start of the run by more than {most}: an integer array that "
                "changes must be a counter; keep another one out of the state dict (persistent=False)",
            )
        return change

    def flatten(self, record: ArrayRecord, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return the record as one vector, checked against this layout.

        Raises
        ------
        PayloadError
            With reason ``missing key``, ``unknown key``, ``wrong shape``, ``wrong dtype``,
            ``non-finite``, ``integer too large`` or ``undecodable``.
        """
        vector = np.empty(self.size, dtype)
        for key, values in self.views(record).items():
            with np.errstate(over="ignore"):  # an overflow becomes infinite and is found below
                vector[self.slices[key]] = self.entries(key, values, dtype)
        if not np.isfinite(vector).all():
            raise PayloadError("non-finite", "NaN or infinity in the arrays")
        return vector

    def views(self, record: ArrayRecord) -> dict[str, NDArray[Any]]:
        """Return the arrays in this order, read-only, checked as in ``flatten`` but for their values."""
        if missing := [key for key in self.keys if key not in record]:
            raise PayloadError("missing key", quoted(missing[0]))
        if len(record) != len(self.keys):
            raise PayloadError("unknown key", quoted(next(k for k in record if k not in self.keys)))
        found = {}
        for key, shape, declared in zip(self.keys, self.shapes, self.dtypes, strict=True):
            values = found[key] = view(record[key])
            if values.shape != shape:
                raise PayloadError("wrong shape", f"{quoted(key)} has {values.shape}, expected {shape}")
            if values.dtype.kind != np.dtype(declared).kind:
                raise PayloadError("wrong dtype", f"{quoted(key)} is {values.dtype}, expected {declared}")
        return found

    def unflatten(self, vector: NDArray[Any]) -> ArrayRecord:
        """Return the vector as a record: views if the dtype is the vector's, else copies."""
        record = ArrayRecord()
        for (key, where), shape, declared in zip(self.slices.items(), self.shapes, self.dtypes, strict=True):
            part = vector[where].reshape(shape)
            dtype = np.dtype(declared)
            if dtype.kind in "iub":
                whole = np.rint(part).astype(np.int64) + self.origin.get(key, 0)
                part = np.asarray(whole > 0 if dtype.kind == "b" else whole)
            record[key] = lazy_array(part.astype(dtype, copy=False))
        return record
