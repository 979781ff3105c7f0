"""Contractive compressors of model updates, and their encoding as bytes.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", Assumption 3: ||Q(v) - v||^2 <= (1 - alpha) ||v||^2. Our choices where the paper is
silent: ties in Top-k go to the lower index, so that exactly k entries are sent; the ternary quantiser has the
least-squares scale, because the scale ||v||_2 is not contractive.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.wire.bits import bytes_of, from_bits, index_width, packed
from hedgerow.wire.checks import at_least, in_range, int_at_least, int_between
from hedgerow.wire.codec import Code, Seed
from hedgerow.wire.elias_fano import decode_indices, encode_indices, index_bits
from hedgerow.wire.records import Layout, PayloadError, lazy_array, to_record, view
from hedgerow.wire.seeds import Purpose, generator
from hedgerow.wire.sign_shares import signed
from hedgerow.wire.thresholding import largest

COMPRESSORS = ("identity", "randk", "sign", "ternary", "topk")
# Why nodes do not compress private updates.
UNSOUND = (
    "error feedback adds earlier residuals to updates that were already clipped, so that they exceed the "
    "norm and the privacy guarantee is void. Clip at the server, "
    "Compressed(DifferentialPrivacyServerSideFixedClipping(...)), or use error_feedback=False"
)
# The arrays that are sent, under their compressor's keys.
Payload = dict[str, NDArray[Any]]

_RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_SIGN_BIT_CLEARED = 0x7FFFFFFF
_INFINITY = 0x7F800000
_MAX_SIZE = 2**31 - 1
_MAX_ROUND = 10**10


class Compressor(Code[Payload], Protocol):
    """A compressor Q of vectors (d,), 1 <= d < 2^31, and the encoding of its results."""

    def __str__(self) -> str:
        """The name, which ``parse_compressor`` parses."""

    def decode(self, payload: Payload, size: int, seed: Seed = ()) -> NDArray[np.float32]:
        """Return Q(v) (size,); PayloadError if the payload is not that of a vector of this size."""

    def contraction(self, size: int) -> float:
        """Return the largest alpha of Assumption 3 that holds for every vector (size,)."""

    def encode_stack(self, v: Tensor, seeds: Sequence[Seed] = ()) -> list[Payload]:
        """Return ``encode`` of each row of (nodes, d), bit for bit, whatever the tensor's device."""
        rows = v.detach().cpu().numpy()
        return [self.encode(*each) for each in zip(rows, seeds or [()] * len(rows), strict=True)]


@dataclass(frozen=True)
class Identity(Compressor):
    """Q(v) = v: d float32, 32 d bits, alpha = 1."""

    def __str__(self) -> str:
        return "identity"

    def encode(self, v: NDArray[Any], seed: Seed = ()) -> Payload:
        """Return ``values``, float32 (d,)."""
        vector, _ = _checked(v)
        return {"values": vector.copy()}

    def decode(self, payload: Payload, size: int, seed: Seed = ()) -> NDArray[np.float32]:
        """Return the values."""
        values: NDArray[np.float32] = _agreed(payload, values=(np.float32, size))["values"]
        return values.copy()

    def bits(self, size: int, payload: Payload | None = None) -> int:
        """Return 32 d."""
        return 32 * size

    def contraction(self, size: int) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class _Keeping:
    """The number of entries to keep, as a fraction or a count."""

    fraction: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.count is None):
            raise ValueError(
                f"either fraction or count must be given, got {self.fraction!r} and {self.count!r}"
            )
        if self.fraction is not None:
            in_range("fraction", self.fraction, 0.0, 1.0, open_below=True)
        if self.count is not None:
            int_at_least(1, count=self.count)

    @property
    def _share(self) -> str:
        return repr(float(self.fraction)) if self.fraction is not None else str(self.count)

    def kept(self, size: int) -> int:
        """Return k for vectors (size,)."""
        if self.fraction is not None:
            # Exact decimal arithmetic: 0.29 * 100 is below 29 in binary.
            return max(1, int(Fraction(repr(float(self.fraction))) * size))
        return min(self.count or size, size)


@dataclass(frozen=True)
class TopK(_Keeping, Compressor):
    """Keep the k entries of largest magnitude, over all layers at once; alpha = k / d.

    Indices are encoded by ``encode_indices``: about 8.6 bits each for 1 % of the entries, where the paper
    counts 32, or ceil(log2 d) if packed.

    Parameters
    ----------
    fraction : float or None
        k = floor(fraction * d), but at least 1; in (0, 1].
    count : int or None
        k itself, >= 1; vectors with fewer entries are kept whole. Exactly one of fraction and count is given.

    Raises
    ------
    ValueError
        If neither or both are given, or one is out of range.
    """

    def __str__(self) -> str:
        return f"topk({self._share})"

    def encode(self, v: NDArray[Any], seed: Seed = ()) -> Payload:
        """Return ``indices``, the encoding of k ascending indices, and ``values``, float32 (k,)."""
        vector, magnitudes = _checked(v)
        indices = largest(magnitudes, self.kept(vector.size))
        return self._payload(indices, vector[indices], vector.size)

    def decode(self, payload: Payload, size: int, seed: Seed = ()) -> NDArray[np.float32]:
        """Return the vector with the values at the indices, zero elsewhere."""
        k = self.kept(size)
        arrays = _agreed(payload, indices=(np.uint8, None), values=(np.float32, k))
        vector = np.zeros(size, np.float32)
        vector[decode_indices(arrays["indices"], k, size)] = arrays["values"]
        return vector

    def bits(self, size: int, payload: Payload | None = None) -> int:
        """Return 32 k and the bits of k of d indices."""
        return 32 * self.kept(size) + index_bits(size, self.kept(size))

    def contraction(self, size: int) -> float:
        """Return k / d, which all-equal magnitudes attain."""
        return self.kept(size) / size

    def encode_stack(self, v: Tensor, seeds: Sequence[Seed] = ()) -> list[Payload]:
        """Return ``encode`` of each row; a GPU selects in all rows at once."""
        if v.device.type == "cpu":
            return super().encode_stack(v, seeds)
        indices, values = _largest_of_rows(v.detach(), self.kept(v.shape[1]))
        return [self._payload(i, x, v.shape[1]) for i, x in zip(indices, values, strict=True)]

    def _payload(self, indices: NDArray[Any], values: NDArray[np.float32], size: int) -> Payload:
        return {"indices": encode_indices(indices, size), "values": values}


@dataclass(frozen=True)
class RandK(_Keeping, Compressor):
    """Keep k entries, drawn anew each round and the same at all nodes; alpha = k / d in expectation.

    The values are not scaled by d / k: error feedback, which is required, adds the other entries later. All
    nodes send the same entries, so a median, a trimmed mean or Krum works on them, unlike on entries that
    each node chooses.

    Parameters
    ----------
    fraction, count : float or None, int or None
        As in ``TopK``.
    round : int or None (default: None)
        The round that keys the draw, 0 <= round < 10^10; required for encoding, see ``in_round``.

    Raises
    ------
    ValueError
        If a parameter is out of range.
    """

    round: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.round is not None:
            int_between(0, _MAX_ROUND - 1, round=self.round)

    def __str__(self) -> str:
        return f"randk({self._share}{'' if self.round is None else f',round={self.round}'})"

    def encode(self, v: NDArray[Any], seed: Seed = ()) -> Payload:
        """Return ``values``, float32 (k,); both sides know the indices."""
        vector, _ = _checked(v)
        return {"values": vector[self._support(vector.size)]}

    def decode(self, payload: Payload, size: int, seed: Seed = ()) -> NDArray[np.float32]:
        """Return the vector with the values at the round's indices, zero elsewhere."""
        support = self._support(size)
        vector = np.zeros(size, np.float32)
        vector[support] = _agreed(payload, values=(np.float32, support.size))["values"]
        return vector

    def bits(self, size: int, payload: Payload | None = None) -> int:
        """Return 32 k."""
        return 32 * self.kept(size)

    def contraction(self, size: int) -> float:
        """Return k / d: Assumption 3 holds in expectation over rounds, not in each round."""
        return self.kept(size) / size

    def _support(self, size: int) -> NDArray[np.int64]:
        if self.round is None:
            raise ValueError(f"compressor must name a round, as 'randk(0.1,round=3)', got {str(self)!r}")
        return _common_support(size, self.kept(size), self.round)


@dataclass(frozen=True)
class ScaledSign(Compressor):
    """Q(v) = (||v||_1 / d) sign(v), sign(0) = +1: d + 32 bits, alpha = 1 / d at worst.

    For a given vector alpha is exactly ||v||_1^2 / (d ||v||_2^2).
    """

    def __str__(self) -> str:
        return "sign"

    def encode(self, v: NDArray[Any], seed: Seed = ()) -> Payload:
        """Return ``bits``, uint8 (ceil(d / 8),), a set bit for +, and ``scale``, float32 (1,)."""
        vector, magnitudes = _checked(v)
        mean = magnitudes.view(np.float32).sum(dtype=np.float64) / vector.size
        return {"bits": np.packbits(vector >= 0), "scale": np.array([mean], np.float32)}

    def decode(self, payload: Payload, size: int, seed: Seed = ()) -> NDArray[np.float32]:
        """Return the scale times the signs."""
        arrays = _agreed(payload, bits=(np.uint8, bytes_of(size)), scale=(np.float32, 1))
        return _signed(arrays, "bits", size)

    def bits(self, size: int, payload: Payload | None = None) -> int:
        """Return d + 32."""
        return size + 32

    def contraction(self, size: int) -> float:
        """Return 1 / d, which a vector with one entry attains."""
        return 1 / size


@dataclass(frozen=True)
class Ternary(Compressor):
    """The m* entries of largest magnitude as +-S_m* / m*, zero elsewhere; alpha = 1 / d at worst.

    S_m is the sum of the m largest magnitudes and m* the smallest maximizer of S_m^2 / m, which makes
    ||Q(v) - v||^2 = ||v||^2 - S_m*^2 / m* the least that one scale can leave.
    """

    def __str__(self) -> str:
        return "ternary"

    def encode(self, v: NDArray[Any], seed: Seed = ()) -> Payload:
        """Return ``indices`` and ``signs``, packed bits, and ``scale``, float32 (1,)."""
        vector, magnitudes = _checked(v)
        sums = np.cumsum(np.sort(magnitudes)[::-1].view(np.float32), dtype=np.float64)  # S_1 … S_d
        m = int(np.argmax(sums**2 / np.arange(1, vector.size + 1))) + 1
        indices = largest(magnitudes, m)
        return {
            "indices": packed(indices, index_width(vector.size)),
            "signs": np.packbits(vector[indices] >= 0),
            "scale": np.array([sums[m - 1] / m], np.float32),
        }

    def decode(self, payload: Payload, size: int, seed: Seed = ()) -> NDArray[np.float32]:
        """Return the scale times the signs at the indices, zero elsewhere."""
        indices = self._indices(payload, size)
        values = _signed(payload, "signs", indices.size)
        if indices[-1] >= size or not (indices[1:] > indices[:-1]).all():
            raise PayloadError("bad index", f"indices are not ascending within 0 to {size - 1}")
        vector = np.zeros(size, np.float32)
        vector[indices] = values
        return vector

    def bits(self, size: int, payload: Payload | None = None) -> int:
        """Return 32 + m* (1 + ceil(log2 d)); ValueError without the payload, which determines m*."""
        if payload is None:
            raise ValueError("payload must be given, because ternary has no fixed size")
        return 32 + self._indices(payload, size).size * (1 + index_width(size))

    def contraction(self, size: int) -> float:
        """Return 1 / d."""
        return 1 / size

    def _indices(self, payload: Payload, size: int) -> NDArray[np.int64]:
        """Return the m* indices. They ascend, so a zero after the first is padding."""
        width = index_width(size)
        arrays = _agreed(payload, indices=(np.uint8, None), signs=(np.uint8, None), scale=(np.float32, 1))
        coded, signs = arrays["indices"], arrays["signs"]
        if coded.size <= bytes_of(size * width):
            room = min(size, 8 * coded.size // width) if width else 1
            indices = from_bits(np.unpackbits(coded, count=room * width), room, width)
            m = int(np.flatnonzero(indices)[-1]) + 1 if indices.any() else 1
            if (coded.size, signs.size) == (bytes_of(m * width), bytes_of(m)):
                return indices[:m]
        raise PayloadError("wrong shape", f"{coded.size} bytes of indices, {signs.size} bytes of signs")


# Each of a round's nodes is sent the same name.
@lru_cache(maxsize=64)
def parse_compressor(text: str) -> Compressor:
    """Return the compressor of a name, the inverse of ``str``.

    Parameters
    ----------
    text : str
        ``identity``, ``sign``, ``ternary``, ``topk(0.01)`` (a fraction in (0, 1], with a point),
        ``topk(100)`` (a count >= 1), ``randk(0.1)``, ``randk(0.1,round=3)``.

    Raises
    ------
    ValueError
        If it is none of them.
    """
    plain: tuple[Compressor, ...] = (Identity(), ScaledSign(), Ternary())
    for one in plain:
        if text.strip() == str(one):
            return one
    number = r"(?:(?P<count>\d{1,10})|(?P<fraction>\d*\.\d*(?:e-?\d+)?|\d+e-?\d+))"
    of_round = r"(?:,\s*round\s*=\s*(?P<k>\d{1,10})\s*)?"
    if match := re.fullmatch(rf"\s*(topk|randk)\(\s*{number}\s*{of_round}\)\s*", text, re.ASCII):
        count, fraction, k = match["count"], match["fraction"], match["k"]
        try:
            share, number_of = (None, int(count)) if count else (float(fraction), None)
            if match[1] == "randk":
                return RandK(share, number_of, int(k) if k else None)
            if k is None:
                return TopK(share, number_of)
        except ValueError:
            pass
    raise ValueError(
        "compressor must be 'identity', 'sign', 'ternary', 'topk(0.01)' (a fraction in (0, 1]), "
        "'topk(100)' (a count >= 1) or 'randk(0.1)' (the same "
        f"entries at all nodes), got {text!r}"
    )


def validate_compressor(text: str) -> None:
    """Raise ValueError unless ``text`` names a compressor, without a round."""
    compressor = parse_compressor(text)
    if isinstance(compressor, RandK) and compressor.round is not None:
        raise ValueError(f"compressor must be without a round, like 'randk(0.1)', got {text!r}")


def in_round(compressor: Compressor, round: int) -> Compressor:
    """Return the compressor for a round: ``RandK`` with its number, any other unchanged."""
    return replace(compressor, round=round) if isinstance(compressor, RandK) else compressor


@lru_cache(maxsize=4)
def _common_support(size: int, keep: int, round: int) -> NDArray[np.int64]:
    indices = rand_k(size, keep, seed=0, round=round, partition_id=0)
    indices.flags.writeable = False
    return indices


def rand_k(size: int, keep: int, *, seed: int, round: int, partition_id: int) -> NDArray[np.int64]:
    """Return the ascending indices that Rand-K keeps; both sides draw them, so only values are sent.

    Parameters
    ----------
    size, keep : int
        Number of entries, and K, 1 <= keep <= size.
    seed, round, partition_id : int
        Key of the random stream, each >= 0.

    Raises
    ------
    ValueError
        If ``keep`` is out of range.
    """
    at_least(1, keep=keep)
    if keep > size:
        raise ValueError(f"keep must be from 1 to {size}, the entries to choose from, got {keep!r}")
    stream = generator(seed, round=round, partition_id=partition_id, purpose=Purpose.COMPRESSION)
    return np.sort(stream.choice(size, keep, replace=False))


# Records.


def record_payload(record: ArrayRecord) -> Payload:
    """Return the record's arrays, read-only; PayloadError ``undecodable`` if one is not an array."""
    return {key: view(array) for key, array in record.items()}


def compressed_keys(layout: Layout) -> tuple[str, ...]:
    """Return the compressed keys of a state dict: floating point, except running statistics."""
    return tuple(
        key
        for key, dtype in zip(layout.keys, layout.dtypes, strict=True)
        if np.dtype(dtype).kind == "f" and not key.endswith(_RUNNING_STATISTICS)
    )


@lru_cache(maxsize=64)
def compressed_part(layout: Layout) -> Layout:
    """Return the layout of the compressed keys: the order of the flat vector, on both sides."""
    return layout.part(compressed_keys(layout))


def dense_part(layout: Layout) -> Layout:
    """Return the layout of the keys that are sent uncompressed, beside the payload."""
    return layout.part(set(layout.keys) - set(compressed_part(layout).keys))


def pack_update(layout: Layout, payload: Payload, dense: Mapping[str, Tensor | NDArray[Any]]) -> ArrayRecord:
    """Return the record of one update.

    Parameters
    ----------
    layout : Layout
        The layout of the whole state dict.
    payload : Mapping[str, NDArray]
        The encoded message (d,) over ``compressed_part(layout)``.
    dense : Mapping[str, Tensor or NDArray]
        The values of ``dense_part(layout)``, not differences.

    Raises
    ------
    ValueError
        If dense has other keys, or if a key of the state dict is also one of the payload.
    """
    keys = dense_part(layout).keys
    if set(dense) != set(keys):
        raise ValueError(f"dense must have the keys {sorted(keys)}, got {sorted(dense)}")
    if shared := set(keys) & set(payload):
        raise ValueError(f"the state dict must have no key of {set(payload)}, got {min(shared)!r}")
    return to_record(payload | {key: dense[key] for key in keys})


def unpack_update(
    compressor: Compressor, layout: Layout, record: ArrayRecord
) -> tuple[NDArray[np.float32], dict[str, NDArray[Any]]]:
    """Return the decoded vector (d,) over ``compressed_part(layout)`` and the dense entries.

    Raises
    ------
    PayloadError
        If the record is not one of ``pack_update`` for this layout. The check allocates no more than the
        model's size.
    """
    rest = dense_part(layout)
    dense = ArrayRecord()
    for key in rest.keys:
        if key in record:
            dense[key] = record[key]
    dense = promoted(rest, dense)
    if not all(np.isfinite(values).all() for values in rest.views(dense).values()):
        raise PayloadError("non-finite", "NaN or infinity in the arrays")
    payload = {key: array for key, array in record_payload(record).items() if key not in dense}
    values = {
        key: view(dense[key]).astype(dtype, copy=False)
        for key, dtype in zip(rest.keys, rest.dtypes, strict=True)
    }
    return compressor.decode(payload, compressed_part(layout).size), values


def summed_arrays(compressor: Compressor, sent: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the reference values of a node's reply whose changes are summed.

    - ``compressor``: ``Identity``, whose reply is a whole model, or ``RandK`` with a round, whose reply is an
      update.
    - ``sent``: The model that the node was sent.

    Raises
    ------
    ValueError
        For any other compressor, with which each node sends different entries.
    """
    if isinstance(compressor, Identity):
        return dict(sent)
    if not isinstance(compressor, RandK):
        raise ValueError(
            f"compressor must be 'identity' or 'randk(0.1)' within a sum, got {str(compressor)!r}"
        )
    layout = Layout.of(to_record(sent))
    values = np.zeros(compressor.kept(compressed_part(layout).size), np.float32)
    return {"values": values, **{key: sent[key] for key in dense_part(layout).keys}}


def promoted(layout: Layout, record: ArrayRecord) -> ArrayRecord:
    """Return the record with integers converted to floats where the layout has floats.

    A weighted mean turns a model's counters into floats, while nodes still send integers.
    """
    declared = dict(zip(layout.keys, layout.dtypes, strict=True))
    out = record.copy()
    for key, array in record_payload(record).items():
        dtype = np.dtype(declared.get(key, array.dtype))
        if dtype.kind == "f" and array.dtype.kind in "iu":
            out[key] = lazy_array(array.astype(dtype))
    return out


# Vectors.


def _checked(v: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return the vector in float32, and its magnitudes as integers of the same order, faster to select."""
    with np.errstate(over="ignore"):  # an overflow becomes infinite and is refused below
        vector = np.ascontiguousarray(v, np.float32)
    if v.ndim != 1 or not 1 <= vector.size <= _MAX_SIZE:
        raise ValueError(f"the vector must have the shape (d,) with 1 <= d < 2^31, got {v.shape}")
    magnitudes = vector.view(np.int32) & np.int32(_SIGN_BIT_CLEARED)
    if magnitudes.max() >= _INFINITY:
        raise ValueError("the vector must hold finite float32 values, got NaN or infinity")
    return vector, magnitudes


def _largest_of_rows(v: Tensor, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return indices and values (nodes, k) of ``largest`` of each row, computed on the tensor's device."""
    v = v.to(torch.float32)
    magnitudes = v.abs()  # (nodes, d)
    if v.numel() and not torch.isfinite(magnitudes.amax()):
        raise ValueError("the vector must hold finite float32 values, got NaN or infinity")
    threshold = torch.topk(magnitudes, k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, ties = magnitudes > threshold, magnitudes == threshold
    room = k - above.sum(1, keepdim=True)
    kept = above | (ties & (ties.cumsum(1, dtype=torch.int32) <= room))
    indices = kept.nonzero()[:, 1].reshape(len(v), k)
    return indices.cpu().numpy(), v.gather(1, indices).cpu().numpy()


def _agreed(payload: Payload, **forms: tuple[type[np.generic], int | None]) -> Payload:
    """Return the payload if its arrays are finite, with the agreed keys, dtypes and lengths (None: any)."""
    if missing := sorted(set(forms) - set(payload)):
        raise PayloadError("missing key", f"{missing[0]!r}")
    if unknown := sorted(set(payload) - set(forms)):
        raise PayloadError("unknown key", f"{unknown[0]!r}")
    for key, (dtype, length) in forms.items():
        array = payload[key]
        if array.dtype != dtype:
            raise PayloadError("wrong dtype", f"{key!r} is {array.dtype}, expected {np.dtype(dtype)}")
        if array.ndim != 1 or length not in (None, array.size):
            raise PayloadError("wrong shape", f"{key!r} has {array.shape}, expected ({length},)")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise PayloadError("non-finite", f"NaN or infinity in {key!r}")
    return payload


def _signed(payload: Payload, signs: str, count: int) -> NDArray[np.float32]:
    """Return the payload's scale times its signs under a key."""
    scale = payload["scale"][0]
    if scale < 0:
        raise PayloadError("bad scale", f"{scale} is negative")
    return signed(np.unpackbits(payload[signs], count=count).view(bool), scale)
