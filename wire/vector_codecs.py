"""Codecs of a node's model vector: one-bit messages and their alternatives.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", which compares its
one-bit messages only with dense vectors. Added here: the sparse vector itself, indices and values, which for
small s is both shorter and exact; and the stochastic quantiser of the baselines. All numbers are
little-endian; fields of less than a byte are packed, first field in the most significant bits, and padded
with zeros.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hedgerow.wire.bits import bits_in, bytes_of, from_bits, index_width, packed
from hedgerow.wire.checks import at_least, int_between
from hedgerow.wire.codec import Codec, Seed
from hedgerow.wire.onebit import OneBit
from hedgerow.wire.records import PayloadError
from hedgerow.wire.thresholding import finite_vector

CODECS = (
    "1bcs",
    "sparse16",
    "sparse32",
    "sparse64",
    "dense32",
    "dense64",
    "quantised<b>",
    "quantised<b>x<v>",
)

Vector = NDArray[np.float64]


def parse_codec(name: str, **settings: Any) -> Codec:
    """Return the codec of a name.

    Parameters
    ----------
    name : str
        ``1bcs``, ``sparse16``, ``sparse32``, ``sparse64``, ``dense32``, ``dense64``, or ``quantised<b>`` with
        b bits per entry, 2 to 16, or ``quantised<b>x<v>`` for a message of v vectors, 2 to 9.
    **settings
        The fields of ``OneBit`` for ``1bcs``; ``s`` for the sparse codecs. All other settings are ignored, so
        that codecs can be exchanged in a configuration.

    Raises
    ------
    ValueError
        If the name is unknown, or a setting that the codec needs is missing, unknown or not valid.
    """
    if name == "1bcs":
        _check_settings(name, settings, "s", "d")
        if unknown := sorted(settings.keys() - OneBit.__dataclass_fields__.keys()):
            raise ValueError(
                f"codec settings must be among {', '.join(OneBit.__dataclass_fields__)}, got {unknown}"
            )
        return OneBit(**settings)
    if match := re.fullmatch("sparse(16|32|64)", name):
        _check_settings(name, settings, "s")
        return Sparse(settings["s"], int(match[1]))
    if match := re.fullmatch("dense(32|64)", name):
        return Dense(int(match[1]))
    if match := re.fullmatch("quantised([1-9][0-9]?)(?:x([2-9]))?", name):
        return Quantised(int(match[1]), int(match[2] or 1))
    raise ValueError(f"codec must be one of {', '.join(CODECS)}, with b from 2 to 16, got {name!r}")


def _check_settings(name: str, settings: dict[str, Any], *needed: str) -> None:
    if missing := [key for key in needed if key not in settings]:
        raise ValueError(f"codec {name!r} must have an integer >= 1 as {' and '.join(missing)}")


@dataclass(frozen=True)
class Dense(Codec):
    """All n entries as floating-point numbers.

    Parameters
    ----------
    width : {32, 64}
        Bits per value.
    """

    width: int = 64

    def __post_init__(self) -> None:
        if self.width not in (32, 64):
            raise ValueError(f"width must be 32 or 64, got {self.width!r}")

    def encode(self, v: ArrayLike, seed: Seed = ()) -> bytes:
        """Return n values; ValueError if one is not finite at this width."""
        return _narrowed(v, self.width).tobytes()

    def decode(self, payload: bytes, size: int, seed: Seed = ()) -> Vector:
        """Return the values (size,); PayloadError ``wrong size`` or ``non-finite``."""
        _check_size(payload, bytes_of(self.bits(size)))
        return _values(payload, self.width, size)

    def bits(self, size: int, payload: bytes | None = None) -> int:
        """Return width n."""
        return self.width * size


@dataclass(frozen=True)
class Sparse(Codec):
    """The nonzeros: their values, then their ascending indices, of ceil(log2 n) bits each.

    Parameters
    ----------
    s : int
        The most nonzeros of a message, >= 1. A message with fewer is shorter.
    width : {16, 32, 64}
        Bits per value.
    """

    s: int
    width: int = 32

    def __post_init__(self) -> None:
        at_least(1, s=self.s)
        if self.width not in (16, 32, 64):
            raise ValueError(f"width must be 16, 32 or 64, got {self.width!r}")

    def encode(self, v: ArrayLike, seed: Seed = ()) -> bytes:
        """Return the entries that are not zero at this width.

        Raises
        ------
        ValueError
            If one is not finite at this width, or more than s are nonzero.
        """
        values = _narrowed(v, self.width)
        indices = np.flatnonzero(values)
        if indices.size > self.s:
            raise ValueError(f"w must have at most s = {self.s} nonzeros, got {indices.size}")
        return values[indices].tobytes() + packed(indices, index_width(values.size)).tobytes()

    def decode(self, payload: bytes, size: int, seed: Seed = ()) -> Vector:
        """Return the vector (size,).

        Raises
        ------
        PayloadError
            If the bytes do not encode a vector of n entries with at most s nonzeros: ``wrong size``,
            ``non-finite``, ``bad index`` or ``bad padding``.
        """
        bits = self.bits(size, payload)
        count = bits // self._entry_bits(size)
        _check_size(payload, bytes_of(bits))
        indices = _unpacked(payload[count * self.width // 8 :], count, index_width(size))
        if count and not (np.all(np.diff(indices) > 0) and indices[-1] < size):
            raise PayloadError("bad index", f"indices are not ascending within 0 to {size - 1}")
        w = np.zeros(size)
        w[indices] = _values(payload, self.width, count)
        return w

    def bits(self, size: int, payload: bytes | None = None) -> int:
        """Return width + ceil(log2 n) for each of at most s nonzeros."""
        each, most = self._entry_bits(size), min(self.s, size)
        return each * (most if payload is None else min(8 * len(payload) // each, most))

    def _entry_bits(self, size: int) -> int:
        return self.width + index_width(size)


@dataclass(frozen=True)
class Quantised(Codec):
    """A float32 step, and each entry as a stochastically rounded multiple of it.

    The step q is the largest magnitude over 2^(b-1) - 1: nothing is clipped, the codec is unbiased, and an
    entry's error is less than q. ``seed`` is that of the rounding, different for each message.

    Parameters
    ----------
    width : int
        Bits b per entry, 2 to 16, including its sign.
    vectors : int (default: 1)
        Vectors of a message, concatenated and of equal length, each with its own step; >= 1.
    """

    width: int = 8
    vectors: int = 1

    def __post_init__(self) -> None:
        int_between(2, 16, width=self.width)
        at_least(1, vectors=self.vectors)

    @property
    def _levels(self) -> int:
        return (1 << self.width - 1) - 1

    def encode(self, v: ArrayLike, seed: Seed) -> bytes:
        """Return the step and n codes of each vector; ValueError if a step is not finite."""
        vector, rng = finite_vector("w", v), np.random.default_rng(seed)
        self._length(vector.size)
        return b"".join(self._encoded(part, rng) for part in np.split(vector, self.vectors))

    def _encoded(self, vector: Vector, rng: np.random.Generator) -> bytes:
        step = self._step(vector)
        multiples = vector / step if step > 0 else np.zeros_like(vector)
        floor = np.floor(multiples)
        rounded = floor + (rng.random(vector.size) < multiples - floor)
        return step.tobytes() + packed(rounded.astype(np.int64), self.width).tobytes()

    def decode(self, payload: bytes, size: int, seed: Seed = ()) -> Vector:
        """Return the rounded vectors (size,), whatever the seed.

        Raises
        ------
        PayloadError
            If the bytes do not encode vectors of n entries in total: ``wrong size``, ``non-finite``,
            ``bad scale``, ``bad code`` or ``bad padding``.
        """
        length = self._length(size)
        each = bytes_of(32 + self.width * length)
        _check_size(payload, self.vectors * each)
        parts = [self._decoded(payload[each * i : each * (i + 1)], length) for i in range(self.vectors)]
        return np.concatenate(parts)

    def _decoded(self, payload: bytes, n: int) -> Vector:
        step = float(_values(payload, 32, 1)[0])
        if step < 0:
            raise PayloadError("bad scale", f"{step} is negative")
        unsigned = _unpacked(payload[4:], n, self.width)
        codes = unsigned - (unsigned > self._levels) * 2**self.width
        if np.any(codes < -self._levels):
            raise PayloadError("bad code", f"a code is below -{self._levels}")
        # A float32 times at most 16 bits is exact, so the sender's own decoding equals the receiver's.
        return np.asarray(codes * step, np.float64)

    def bits(self, size: int, payload: bytes | None = None) -> int:
        """Return 32 and b n / v for each of the v vectors."""
        return 32 * self.vectors + self.width * size

    def _length(self, n: int) -> int:
        """Return the length of each vector."""
        if n % self.vectors:
            raise ValueError(
                f"w must have a multiple of {self.vectors} entries, for that many vectors, got {n}"
            )
        return n // self.vectors

    def _step(self, vector: Vector) -> np.float32:
        exact = np.abs(vector).max(initial=0) / self._levels
        with np.errstate(over="ignore"):  # What overflows is infinite, and refused.
            step = np.float32(exact)
        if step < exact:
            step = np.nextafter(step, np.float32(np.inf))
        if not np.isfinite(step):
            raise ValueError(
                f"w must have a step that is a float32, got entries up to {np.abs(vector).max()}"
            )
        return step


def _narrowed(w: ArrayLike, width: int) -> NDArray[np.floating]:
    vector = finite_vector("w", w)
    with np.errstate(over="ignore"):  # What overflows is infinite, and refused.
        values = vector.astype(f"<f{width // 8}")
    if not np.isfinite(values).all():
        raise ValueError(f"w must have entries that {width} bits hold, got up to {np.abs(vector).max()}")
    return values


def _values(payload: bytes, width: int, count: int) -> Vector:
    values = np.frombuffer(payload, f"<f{width // 8}", count).astype(np.float64)
    if not np.isfinite(values).all():
        raise PayloadError("non-finite", "NaN or infinity in the values")
    return values


def _check_size(payload: bytes, expected: int) -> None:
    if len(payload) != expected:
        raise PayloadError("wrong size", f"{len(payload)} bytes, expected {expected}")


def _unpacked(coded: bytes, count: int, width: int) -> NDArray[np.int64]:
    return from_bits(bits_in(np.frombuffer(coded, np.uint8), count * width), count, width)
