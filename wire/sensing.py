"""Sensing matrices defined by a seed: Gaussian ones, and a Hadamard transform that stores no matrix.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", the matrix Phi of
Algorithm 2. Differences: Phi is sent as a seed, not as 64 d n bits. It is drawn in blocks of columns, because
its vectors are sparse: encoding and the decoder's line search draw only a few blocks. Entries are float32
normals, for half the memory, which suffices because only signs are used. A decoder reads all of Phi several
times; the part that does not fit in memory is drawn once and read back from a file. A subsampled randomised
Hadamard transform is an alternative for dimensions with too large a matrix.
"""

import math
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hedgerow.wire.checks import at_least, in_range, require

MEMORY_LIMIT = 2**28
# Large enough to amortise the set-up of a generator, small enough that a column is cheap.
_BLOCK_ENTRIES = 2**16
_PRODUCT_ENTRIES = 2**20
_LARGEST_TRANSFORM = 2**26
_LARGEST_FILE = 2**32
_MAPPED_BYTES = 2**24


class Sensing(ABC):
    """A matrix Phi (d, n), defined by its products with vectors.

    Attributes
    ----------
    d, n : int
        Measurements and coordinates.
    """

    d: int
    n: int

    @property
    def shape(self) -> tuple[int, int]:
        """(d, n)."""
        return self.d, self.n

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes that are kept from the first ``rmatvec`` on."""

    @abstractmethod
    def columns(self, indices: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Return Phi[:, indices], (d, len(indices)) in column-major order."""

    @abstractmethod
    def rmatvec(self, h: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return Phi^T h (n,) of a vector (d,), accumulated in float32 unless Phi was given."""

    def matvec(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return Phi x (d,) of a vector (n,), from the columns of its support."""
        support = np.flatnonzero(x)
        at_once = max(1, _PRODUCT_ENTRIES // self.d)
        measured = np.zeros(self.d)
        for start in range(0, support.size, at_once):
            part = support[start : start + at_once]
            measured += np.einsum("jp,j->p", self.columns(part).T, x[part])
        return measured


class GaussianSensing(Sensing):
    """A matrix Phi (d, n) of independent standard normals, zeroed with probability 1 - density.

    All results have the same bits, whatever is kept in memory and however many threads there are.

    - ``seed``: The matrix's seed, integers >= 0. Seeds of different matrices must have the same length.
    - ``d``, ``n``: Measurements and coordinates, >= 1.
    - ``density``: The fraction of nonzeros, in (0, 1]. 1 is the Gaussian matrix. With s-sparse vectors a row
      of a matrix measures nothing with probability (1 - density)^s: recovery already fails far above 0.05.
    - ``memory_limit``: The most bytes of the matrix kept in memory once ``rmatvec`` has drawn them, >= 0. The
      rest is drawn one block of at most 256 KiB (or one column) at a time, and kept in an unnamed temporary
      file for the life of this object: up to 4 GiB, if the temporary folder has twice the room. A larger
      rest is drawn at each use.

    Raises
    ------
    ValueError
        If an argument is not valid.
    """

    def __init__(
        self, seed: tuple[int, ...], d: int, n: int, density: float = 1.0, memory_limit: int = MEMORY_LIMIT
    ) -> None:
        _check_seed(seed)
        at_least(1, d=d, n=n)
        in_range("density", density, 0.0, 1.0, open_below=True)
        at_least(0, memory_limit=memory_limit)
        self.seed, self.d, self.n, self.density = seed, d, n, density
        self._width = max(1, _BLOCK_ENTRIES // d)
        fitting = memory_limit // (4 * d)
        self._fitting = n if fitting >= n else fitting - fitting % self._width
        # The first columns of Phi as rows: (kept, d).
        self._kept: NDArray[np.floating] = np.empty((0, d), np.float32)
        # The others, once it has all of them.
        self._file: BinaryIO | None = None

    @classmethod
    def of(cls, matrix: ArrayLike) -> Self:
        """Return a given matrix (d, n), in its own precision, as a sensing matrix."""
        given = np.asarray(matrix)
        sensing = cls((0,), *given.shape)
        sensing._kept = np.ascontiguousarray(given.T)
        sensing._fitting = sensing.n
        return sensing

    @property
    def nbytes(self) -> int:
        """The bytes that are kept from the first ``rmatvec`` on."""
        return self._fitting * self.d * self._kept.itemsize

    @property
    def fits(self) -> bool:
        """Whether all of it fits in memory."""
        return self._fitting == self.n

    def columns(self, indices: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Return Phi[:, indices], (d, len(indices)) in column-major order; draws those that are not kept."""
        block_of = np.where(indices < len(self._kept), -1, indices // self._width)
        blocks = np.unique(block_of)
        if self.fits and 2 * blocks.size * self._width > self.n > len(self._kept):
            self._keep()  # most of it is needed, and will be for the next message
        if len(self._kept) == self.n:
            return np.asarray(self._kept[indices], np.float64).T
        chosen = np.empty((indices.size, self.d))
        for block in blocks:
            inside = block_of == block
            if block < 0:
                chosen[inside] = self._kept[indices[inside]]
            elif self._file is not None:
                chosen[inside] = self._read(self._file, indices[inside])
            else:
                chosen[inside] = self._draw(int(block))[indices[inside] - block * self._width]
        return chosen.T

    def rmatvec(self, h: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return Phi^T h (n,) of a vector (d,), accumulated in the matrix's precision."""
        weights = h.astype(self._kept.dtype)
        correlated = np.empty(self.n, self._kept.dtype)
        for start, rows in self._transposed():
            # einsum and not a matrix library, because its sums do not depend on threads or blocks.
            np.einsum("jp,p->j", rows, weights, out=correlated[start : start + len(rows)])
        return correlated.astype(np.float64)

    def _transposed(self) -> Iterator[tuple[int, NDArray[np.floating]]]:
        if len(self._kept) < self._fitting:
            self._keep()
        if len(self._kept):
            yield 0, self._kept
        if self._file is not None:
            yield from self._mapped(self._file)
        elif len(self._kept) < self.n:
            yield from self._drawn()

    def _drawn(self) -> Iterator[tuple[int, NDArray[np.floating]]]:
        """Yield the columns that are not kept, and write them to a file if there is room."""
        file = _temporary_file(4 * self.d * (self.n - len(self._kept)))
        for start in range(len(self._kept), self.n, self._width):
            rows = self._draw(start // self._width)
            yield start, rows
            if file is not None and not _written(file, rows):
                file = None  # the disk is full
        self._file = file

    def _mapped(self, file: BinaryIO) -> Iterator[tuple[int, NDArray[np.floating]]]:
        """Yield the columns in the file, mapped a piece at a time, outside this process's own memory."""
        first = len(self._kept)
        at_once = max(1, _MAPPED_BYTES // (4 * self.d))
        for start in range(first, self.n, at_once):
            shape = min(at_once, self.n - start), self.d
            yield start, np.memmap(file, np.float32, "r", 4 * self.d * (start - first), shape)

    def _read(self, file: BinaryIO, indices: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        size, first = 4 * self.d, len(self._kept)
        rows = (os.pread(file.fileno(), size, size * (int(index) - first)) for index in indices)
        return np.frombuffer(b"".join(rows), np.float32).reshape(-1, self.d)

    def _keep(self) -> None:
        kept = np.empty((self._fitting, self.d), np.float32)
        for start in range(0, self._fitting, self._width):
            kept[start : start + self._width] = self._draw(start // self._width)
        self._kept = kept

    def _draw(self, block: int) -> NDArray[np.float32]:
        rng = np.random.default_rng([*self.seed, block])
        shape = min(self._width, self.n - block * self._width), self.d
        rows = rng.standard_normal(shape, np.float32)
        if self.density < 1:
            rows *= rng.random(shape, np.float32) < self.density
        return rows


def _temporary_file(size: int) -> BinaryIO | None:
    """Return an empty unnamed file for ``size`` bytes; None if its folder lacks room."""
    try:
        if size > _LARGEST_FILE or shutil.disk_usage(tempfile.gettempdir()).free < 2 * size:
            return None
        # Unbuffered, so that the write itself fails if the disk is full; rows are large.
        return tempfile.TemporaryFile(buffering=0)
    except OSError:
        return None


def _written(file: BinaryIO, rows: NDArray[np.float32]) -> bool:
    try:
        return file.write(rows.data) == rows.nbytes
    except OSError:
        return False


class HadamardSensing(Sensing):
    """Phi = S H D' H D / sqrt(N): a subsampled randomised Hadamard transform, (d, n), with no matrix.

    H is the Walsh-Hadamard matrix of the first power of two N >= max(d, n), D and D' are random signs, S
    selects d of N rows, and vectors are padded with zeros to N. An entry is a sum of N signs over sqrt(N),
    close to a standard normal. (With D alone entries are signs, whose sums carry little information: half the
    measurements of two equal entries are 0.) An entry of H D' H depends only on i xor j, so a column is a
    look-up, and Phi^T h is two transforms of N log2 N additions. It needs 6 bytes per coordinate of N, and 8
    per measurement.

    N. Ailon, B. Chazelle, "The fast Johnson-Lindenstrauss transform and approximate nearest neighbors", 2009;
    S. Dirksen, H. C. Jung, H. Rauhut, "One-bit compressed sensing with partial Gaussian circulant matrices",
    2020, for one-bit measurements with similarly few random numbers.

    - ``seed``: The matrix's seed, integers >= 0. Seeds of different matrices must have the same length.
    - ``d``, ``n``: Measurements and coordinates, 1 to 2^26.

    Raises
    ------
    ValueError
        If an argument is not valid.
    """

    def __init__(self, seed: tuple[int, ...], d: int, n: int) -> None:
        _check_seed(seed)
        at_least(1, d=d, n=n)
        self.seed, self.d, self.n = seed, d, n
        self.size = 1 << (max(d, n) - 1).bit_length()
        require("max(d, n)", max(d, n), f"at most {_LARGEST_TRANSFORM}", self.size <= _LARGEST_TRANSFORM)
        rng = np.random.default_rng(seed)
        self._first, self._second = (_signs(rng, self.size) for _ in range(2))
        self._rows = np.sort(rng.choice(self.size, d, replace=False))
        # Phi[i, j] = D[j] diagonal[rows[i] ^ j].
        self._diagonal = _transformed(self._second.astype(np.float32)) / np.float32(math.sqrt(self.size))

    @property
    def nbytes(self) -> int:
        """The bytes that are kept."""
        kept = (self._first, self._second, self._rows, self._diagonal)
        return sum(array.nbytes for array in kept)

    def columns(self, indices: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
        """Return Phi[:, indices], (d, len(indices)) in column-major order."""
        chosen: NDArray[np.float64] = self._diagonal[self._rows ^ indices[:, None]].astype(np.float64)
        chosen *= self._first[indices, None]
        return chosen.T

    def rmatvec(self, h: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return Phi^T h (n,) of a vector (d,), accumulated in float32."""
        spread = np.zeros(self.size, np.float32)
        spread[self._rows] = h
        correlated = _transformed(_transformed(spread) * self._second) * self._first
        found: NDArray[np.float64] = correlated[: self.n].astype(np.float64) / math.sqrt(self.size)
        return found


def _signs(rng: np.random.Generator, count: int) -> NDArray[np.int8]:
    return (2 * rng.integers(0, 2, count, np.int8) - 1).astype(np.int8)


def _transformed(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return H v, in place, with additions in the same order on every machine."""
    half = 1
    while half < vector.size:
        pairs = vector.reshape(-1, 2, half)
        total = pairs[:, 0] + pairs[:, 1]
        np.subtract(pairs[:, 0], pairs[:, 1], out=pairs[:, 1])
        pairs[:, 0] = total
        half *= 2
    return vector


def _check_seed(seed: tuple[int, ...]) -> None:
    if not seed or min(seed) < 0:
        raise ValueError(f"seed must be a tuple of integers >= 0, got {seed!r}")


# The values of a codec's ``phi``.
MATRICES = ("gaussian", "srht")


def _too_many(matrices: Sequence[Sensing], memory_limit: int) -> bool:
    too_large = sum(isinstance(each, GaussianSensing) and not each.fits for each in matrices)
    return too_large > 1 or sum(each.nbytes for each in matrices) > memory_limit


_shared: OrderedDict[tuple[Any, ...], Sensing] = OrderedDict()
_lock = Lock()


def shared_sensing(
    seed: tuple[int, ...],
    d: int,
    n: int,
    density: float = 1.0,
    memory_limit: int = MEMORY_LIMIT,
    *,
    kind: str = "gaussian",
) -> Sensing:
    """Return this process's matrix of a seed; all shared matrices together keep ``memory_limit`` bytes.

    One of them may be too large for memory and use a file. The least recently used ones are dropped and drawn
    again on use, which affects only speed. The arguments are those of ``GaussianSensing``; ``kind`` is one of
    ``MATRICES``.
    """
    key = (seed, d, n, density, memory_limit, kind)
    with _lock:
        if key not in _shared:
            sensing = HadamardSensing(seed, d, n) if kind == "srht" else GaussianSensing(*key[:5])
            while _shared and _too_many([sensing, *_shared.values()], memory_limit):
                _shared.popitem(last=False)
            _shared[key] = sensing
        _shared.move_to_end(key)
        return _shared[key]
