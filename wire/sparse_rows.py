"""Top-k rows as bytes: the format of encodings and heads in the compressed variants of HSGD.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", C-HSGD and C-TDCD: top-k with the ratio
log2(128) / 32 = 7/32. Our choices: at least one entry is kept, and ties go to the lower index. Unlike in the
suite's other top-k, a row is one bytes object, and indices take whole bytes, as in the cost formulas.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.bits import bytes_of, index_width
from hedgerow.wire.records import PayloadError

Rows = NDArray[Any]

_FORM = np.dtype("<f4")


def kept(n: int) -> int:
    """Return k = max(1, floor(7 n / 32)) of rows (n,), n >= 1."""
    return max(1, 7 * n // 32)


def row_bytes(n: int) -> int:
    """Return the bytes of one row (n,): k values and k indices."""
    return kept(n) * (_FORM.itemsize + bytes_of(index_width(n)))


def encode_rows(rows: Rows) -> list[bytes]:
    """Return each row's k largest entries: the values in float32, then their ascending indices.

    - ``rows``: (rows, n), n >= 1; all finite in float32.

    Raises
    ------
    ValueError
        If a value is not finite.
    """
    n = rows.shape[1]
    largest = np.argsort(-np.abs(rows), axis=1, kind="stable")[:, : kept(n)]
    indices = np.sort(largest, axis=1)
    with np.errstate(over="ignore"):  # an overflow becomes infinite and is refused below
        values = np.take_along_axis(rows, indices, axis=1).astype(_FORM)
    if not (np.isfinite(rows).all() and np.isfinite(values).all()):
        raise ValueError("a row must hold finite float32 values, got NaN or infinity")
    width = bytes_of(index_width(n))
    coded = indices.astype("<u4").view(np.uint8).reshape(*indices.shape, 4)[..., :width]
    return [value.tobytes() + index.tobytes() for value, index in zip(values, coded, strict=True)]


def decode_rows(payload: Any, count: int, n: int) -> Rows:
    """Return float32 rows (count, n) with the sent values, zero elsewhere.

    Nothing larger than the result is allocated, whatever the payload.

    Raises
    ------
    PayloadError
        If the payload is not one of ``encode_rows`` for ``count`` rows.
    """
    k, size, width = kept(n), row_bytes(n), bytes_of(index_width(n))
    if not isinstance(payload, list) or len(payload) != count:
        raise PayloadError("wrong shape", f"the payload is not a list of {count} rows")
    for row in payload:
        if not isinstance(row, bytes) or len(row) != size:
            raise PayloadError("wrong shape", f"a row is not of {size} bytes")
    coded = np.frombuffer(b"".join(payload), np.uint8).reshape(count, size)
    values = np.ascontiguousarray(coded[:, : k * _FORM.itemsize]).view(_FORM)
    indices = np.zeros((count, k, 4), np.uint8)
    indices[..., :width] = coded[:, k * _FORM.itemsize :].reshape(count, k, width)
    places = indices.reshape(count, -1).view("<u4").astype(np.int64)
    if not np.isfinite(values).all():
        raise PayloadError("non-finite", "NaN or infinity in a row")
    if (places >= n).any() or (np.diff(places, axis=1) <= 0).any():
        raise PayloadError("bad index", f"indices are not ascending within 0 to {n - 1}")
    rows = np.zeros((count, n), np.float32)
    np.put_along_axis(rows, places, values, axis=1)
    return rows
