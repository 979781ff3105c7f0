"""One-bit compressed sensing of sparse vectors: a norm and d signs.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 2 (1BCS) and
problem (9), which it solves by gradient projection subspace pursuit: S. Zhou, Z. Luo, N. Xiu, G. Y. Li,
"Computing One-Bit Compressive Sensing via Double-Sparsity Constrained Optimization". Differences: the pursuit
runs until full agreement. Stopping when the support has not changed for three iterations gives up to a fifth
more error, and the published program, which uses larger supports on the way, about twice as much or more
(n = 1000 to 5000). The number of signs assumed to be flipped is not a parameter but half of those that
disagree at convergence. The expansion recovers the scale of the companded vector, which Algorithm 2 divides
out and then needs, so gamma has no effect (``expand="literal"`` is the paper's).
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hedgerow.wire.bits import bits_in, bytes_of
from hedgerow.wire.checks import at_least, in_range, one_of
from hedgerow.wire.codec import Codec, Seed
from hedgerow.wire.records import PayloadError
from hedgerow.wire.sensing import MATRICES, MEMORY_LIMIT, Sensing, shared_sensing
from hedgerow.wire.thresholding import finite_vector, largest, project

Vector = NDArray[np.float64]

_NORM_BYTES = 8
# In this range a norm's square is a normal float64.
_SMALLEST_NORM, _LARGEST_NORM = 1e-150, 1e150


def compand(w: ArrayLike, gamma: float = math.e) -> Vector:
    """Return sign(w) log_gamma(1 + |w|), element by element (Algorithm 2, step 2)."""
    values = np.asarray(w, np.float64)
    companded: Vector = np.copysign(np.log1p(np.abs(values)), values) / math.log(gamma)
    return companded


def expand_literal(direction: ArrayLike, norm: ArrayLike, gamma: float) -> Vector:
    """Return the vector of a unit direction, as in Algorithm 2, steps 6 and 7.

    Exact only if ln gamma = ||ln(1 + |w|)||; parameters and result are those of ``expand``.
    """
    v = np.asarray(direction, np.float64)
    return _of_norm(np.copysign(np.expm1(np.abs(v) * math.log(gamma)), v), np.asarray(norm, np.float64))


def expand(direction: ArrayLike, norm: ArrayLike) -> Vector:
    """Return sign(v) (exp(b |v|) - 1) with the b > 0 that yields the given norm: the inverse of companding.

    - ``direction``: (..., n), directions v, of norm 1, of companded vectors.
    - ``norm``: (...), the norms of the vectors before companding, in [1e-150, 1e150].

    Returns
    -------
    NDArray of float64 (..., n)
        Vectors with these norms.
    """
    v, norms = np.asarray(direction, np.float64), np.asarray(norm, np.float64)
    magnitude, target = np.abs(v), norms[..., None]
    # exp(b |v|) - 1 is at least b |v|, and its largest entry is at most its norm: both are upper bounds of b.
    b = np.minimum(target, np.log1p(target) / magnitude.max(-1, keepdims=True))
    for _ in range(100):
        grown = np.expm1(b * magnitude)
        relative = grown / target
        length = np.linalg.norm(relative, axis=-1, keepdims=True)
        slope = (relative * (grown + 1) * magnitude).sum(-1, keepdims=True) / length
        # The norm is convex in b: Newton's steps from above descend to the root and never pass it.
        lower = np.minimum(b, b - target * (length - 1) / slope)
        if np.all(lower >= b * (1 - 1e-15)):
            break
        b = lower
    return _of_norm(np.copysign(grown, v), norms)


def _of_norm(vectors: Vector, norms: Vector) -> Vector:
    scaled: Vector = vectors * (norms[..., None] / np.linalg.norm(vectors, axis=-1, keepdims=True))
    return scaled


class Direction(NamedTuple):
    """A decoder's result: the best s-sparse solution of problem (9)."""

    vector: Vector  # (n,): of norm 1, or 0 if nothing was found
    agreement: float  # the fraction of the d signs that it reproduces, in [0, 1]
    iterations: int


class _Trial(NamedTuple):
    """A point of the pursuit on the candidate coordinates, with its measurements."""

    values: Vector  # (candidates,)
    margins: Vector  # (d,), A x
    hinge: Vector  # (d,), max(0, epsilon 1 - A x), 0 for signs assumed to be flipped
    objective: float  # ||hinge||^2

    def improves(self, objective: float, values: Vector) -> bool:
        """Whether the objective falls by more than 1e-6 of the squared distance moved."""
        moved = self.values - values
        return self.objective < objective - 1e-6 * float(moved @ moved)


def gpsp(phi: Sensing, signs: Vector, s: int) -> Direction:
    """Decode by gradient projection and subspace steps, until full agreement.

    Minimises ||max(0, epsilon 1 - A x)||^2 with A = diag(signs) Phi over ||x||_0 <= s. If it converges before
    full agreement, signs were flipped or do not come from a sparse vector: it continues with the paper's k_f,
    the number of measurements that may disagree at no cost, as half of those that do. It takes at most 80
    iterations, and four to eight for correct signs.

    - ``phi``: The matrix (d, n) of the measurements.
    - ``signs``: (d,), the signs received, -1 or 1.
    - ``s``: The sparsity level, >= 1.
    """
    best = _pursuit(phi, signs, s, np.zeros(phi.n), 0, limit=40)
    iterations = best.iterations
    for _ in range(5):
        disagreeing = round((1 - best.agreement) * phi.d)
        if disagreeing == 0:
            break
        found = _pursuit(phi, signs, s, best.vector, (disagreeing + 1) // 2, limit=8)
        iterations += found.iterations
        if found.agreement <= best.agreement:
            break
        best = found
    return Direction(_normalised(best.vector), best.agreement, iterations)


def _pursuit(phi: Sensing, signs: Vector, s: int, x: Vector, flips: int, limit: int) -> Direction:
    """Return the iterate from ``x``, not normalised, that agrees with most signs.

    It ends at full agreement, or when three consecutive iterations lower the objective by less than 2 %.
    """
    epsilon = 0.01 if phi.n < 10_000 else 0.01 / math.log(phi.n)
    hinge = _hinge(signs * phi.matvec(x), epsilon, flips)
    objective = float(hinge @ hinge)
    previous = np.empty(0, np.intp)
    best = Direction(x, -1.0, 0)
    resting = 0
    for iteration in range(1, limit + 1):
        gradient = -phi.rmatvec(signs * hinge)
        candidates = _candidates(x, gradient, s)
        A = (phi.columns(candidates) * signs[:, None]).T  # (candidates, d)
        start = x[candidates]
        trial, chosen = _projected_step(A, start, gradient[candidates], objective, s, epsilon, flips)
        support = candidates[chosen]
        if np.array_equal(support, previous) and (active := np.flatnonzero(trial.hinge > 0)).size:
            values = np.zeros_like(start)
            values[chosen] = _least_squares(A[np.ix_(chosen, active)], epsilon)
            pursued = _tried(A, values, epsilon, flips)
            if pursued.improves(trial.objective, trial.values):
                trial = pursued
        previous = support
        x = np.zeros(phi.n)
        x[candidates] = trial.values
        resting = resting + 1 if trial.objective >= 0.98 * objective else 0
        hinge, objective = trial.hinge, trial.objective
        agreement = float(np.mean(trial.margins > 0))
        if agreement > best.agreement:
            best = Direction(x, agreement, iteration)
        if agreement == 1 or objective < 1e-18 or resting == 3:
            break
    return best._replace(iterations=iteration)


def _candidates(x: Vector, gradient: Vector, s: int) -> NDArray[np.intp]:
    """Return every coordinate that can be among the s largest of some x - alpha gradient."""
    outside = gradient.copy()
    outside[x != 0] = 0
    return np.union1d(np.flatnonzero(x), largest(np.abs(outside), s))


def _projected_step(
    A: Vector, start: Vector, gradient: Vector, objective: float, s: int, epsilon: float, flips: int
) -> tuple[_Trial, NDArray[np.intp]]:
    """Return the first step of decreasing length that improves, or else the last, and its support."""
    for halvings in range(20):
        z = start - gradient * 4.0**-halvings
        chosen = largest(np.abs(z), s)
        values = np.zeros_like(z)
        values[chosen] = z[chosen]
        trial = _tried(A, values, epsilon, flips)
        if trial.improves(objective, start):
            break
    return trial, chosen


def _tried(A: Vector, values: Vector, epsilon: float, flips: int) -> _Trial:
    margins: Vector = np.einsum("jp,j->p", A, values)
    hinge = _hinge(margins, epsilon, flips)
    return _Trial(values, margins, hinge, float(hinge @ hinge))


def _hinge(margins: Vector, epsilon: float, flips: int) -> Vector:
    hinge = np.maximum(0, epsilon - margins)
    if flips:
        hinge[largest(hinge, flips)] = 0
    return hinge


def _least_squares(rows: Vector, epsilon: float) -> Vector:
    """Return argmin_t ||rows^T t - epsilon 1|| for rows (s, active)."""
    s, active = rows.shape
    if active < s:
        return np.asarray(np.linalg.lstsq(rows.T, np.full(active, epsilon), rcond=None)[0], np.float64)
    return np.linalg.solve(rows @ rows.T + 1e-12 * np.eye(s), epsilon * rows.sum(1))


def biht(phi: Sensing, signs: Vector, s: int) -> Direction:
    """Decode by binary iterative hard thresholding; returns the iterate that agrees with most signs.

    Parameters as for ``gpsp``. Better with few measurements (d about 15 s), with up to 300 iterations; for
    d >= 25 s it ends after 30 iterations without an improvement.
    """
    patience = 30 if phi.d >= 25 * s else 300
    x = _normalised(project(phi.rmatvec(signs) / phi.d, s))
    best = Direction(x, -1.0, 0)
    for iteration in range(1, 301):
        found = np.where(phi.matvec(x) > 0, 1.0, -1.0)
        agreement = float(np.mean(found == signs))
        if agreement > best.agreement:
            best = Direction(x, agreement, iteration)
        if agreement == 1 or iteration - best.iterations == patience:
            break
        x = _normalised(project(x + phi.rmatvec(signs - found) / phi.d, s))
    return best._replace(iterations=iteration)


def _normalised(v: Vector) -> Vector:
    norm = float(np.linalg.norm(v))
    return v / norm if norm > 0 else v


_DECODERS: dict[str, Callable[[Sensing, Vector, int], Direction]] = {"gpsp": gpsp, "biht": biht}


@dataclass(frozen=True)
class OneBit(Codec):
    """The one-bit codec: 64 + d bits, 8 + ceil(d / 8) bytes per message, whatever n.

    The payload is the norm, a little-endian float64, and the signs, one bit each, the first in the most
    significant bit, padded with zeros.

    Parameters
    ----------
    s : int
        The sparsity level to decode, >= 1. At n = 1000, recovering the support needs d >= 25 s, an error of
        4 % d >= 50 s.
    d : int
        The number of measurements, >= 1.
    gamma : float (default: 5.0)
        The base of the literal expansion, in (1, 1e100]; without effect otherwise.
    expand : {"consistent", "literal"}
        The inverse of companding: exact for an exact direction, or as printed in Algorithm 2.
    compand : {"log", "none"}
        The measured vector: sign(w) log(1 + |w|), or w, which has a smaller error but needs a larger d for
        the support.
    decoder : {"gpsp", "biht"}
        The solver of problem (9).
    phi : {"gaussian", "srht"}
        The paper's Gaussian matrix, of 4 d n bytes; or a subsampled randomized Hadamard transform
        (``HadamardSensing``), which recovers as well and needs 6 to 12 n bytes.
    phi_density : float (default: 1.0)
        The fraction of nonzeros of a Gaussian Phi, in [0.5, 1]; with fewer, too many rows miss the support.
    memory_limit : int (default: 256 MiB)
        The most bytes of sensing matrices that a process keeps, >= 0. A matrix has 4 d n.

    Raises
    ------
    ValueError
        If a value is not valid.
    """

    s: int
    d: int
    gamma: float = 5.0
    expand: str = "consistent"
    compand: str = "log"
    decoder: str = "gpsp"
    phi: str = "gaussian"
    phi_density: float = 1.0
    memory_limit: int = MEMORY_LIMIT

    def __post_init__(self) -> None:
        at_least(1, s=self.s, d=self.d)
        in_range("gamma", self.gamma, 1.0, 1e100, open_below=True)
        for key, names in (
            ("expand", ("consistent", "literal")),
            ("compand", ("log", "none")),
            ("decoder", tuple(_DECODERS)),
            ("phi", MATRICES),
        ):
            one_of(key, getattr(self, key), names)
        in_range("phi_density", self.phi_density, 0.5, 1.0)
        if self.phi != "gaussian" and self.phi_density != 1:
            raise ValueError(f"phi_density must be 1 with phi = {self.phi!r}, got {self.phi_density!r}")
        at_least(0, memory_limit=self.memory_limit)

    def bits(self, size: int, payload: bytes | None = None) -> int:
        """Return the paper's bits of a message, 64 + d."""
        return 64 + self.d

    def work_bytes(self, n: int) -> int:
        """Return the bytes of the submatrix, (d, at most 2 s), needed to decode a message."""
        return 8 * self.d * min(2 * self.s, n)

    def encode(self, v: ArrayLike, seed: Seed) -> bytes:
        """Return the payload of a vector (n,), measured with the matrix of ``seed``.

        A vector of a norm below 1e-150 is sent as 0.

        Raises
        ------
        ValueError
            If the vector is not finite, or its norm is above 1e150.
        """
        vector = finite_vector("w", v)
        return self.encode_with(self._sensing(seed, vector.size), vector)

    def encode_with(self, phi: Sensing, w: ArrayLike) -> bytes:
        """Return the payload of a vector (n,), measured with a given matrix (d, n)."""
        vector = finite_vector("w", w)
        with np.errstate(over="ignore"):  # an overflow becomes infinite and is refused
            norm = float(np.linalg.norm(vector))
        if norm > _LARGEST_NORM:
            raise ValueError(f"w must have a norm of at most {_LARGEST_NORM}, got {norm!r}")
        if norm < _SMALLEST_NORM:
            return bytes(self._bytes)
        # The base cancels in x / ||x||, so the bits do not depend on gamma.
        x = compand(vector) if self.compand == "log" else vector
        positive = phi.matvec(_normalised(x)) > 0
        return struct.pack("<d", norm) + np.packbits(positive).tobytes()

    def decode(self, payload: bytes, size: int, seed: Seed = ()) -> Vector | None:
        """Return the vector (size,) of a payload, with its norm and at most s nonzeros.

        Returns
        -------
        NDArray of float64 (n,) or None
            None if the decoder found nothing: then exclude that neighbor.

        Raises
        ------
        PayloadError
            If the bytes are not a message: ``wrong size``, ``non-finite``, ``bad norm``, ``bad padding``.
        """
        norm, signs = self._unpacked(payload)
        if norm < _SMALLEST_NORM:
            return np.zeros(size)
        return self._vector(self._sensing(seed, size), norm, signs)

    def decode_with(self, phi: Sensing, payload: bytes) -> Vector | None:
        """Return ``decode`` with a given matrix (d, n)."""
        norm, signs = self._unpacked(payload)
        return np.zeros(phi.n) if norm < _SMALLEST_NORM else self._vector(phi, norm, signs)

    def decode_many(self, payloads: Sequence[bytes], size: int, seeds: Sequence[Seed]) -> list[Vector | None]:
        """Return ``decode`` of each payload, None if its bytes are malformed; equal ones are decoded once.

        Messages of one matrix are decoded consecutively, so that it is drawn once. Equal messages share a
        read-only array.
        """
        messages = [(tuple(seed), payload) for seed, payload in zip(seeds, payloads, strict=True)]
        decoded = {(seed, sent): self.decoded(sent, size, seed) for seed, sent in sorted(set(messages))}
        for vector in decoded.values():
            if vector is not None:
                vector.flags.writeable = False
        return [decoded[message] for message in messages]

    @property
    def _bytes(self) -> int:
        return _NORM_BYTES + bytes_of(self.d)

    def _sensing(self, seed: Seed, n: int) -> Sensing:
        return shared_sensing(tuple(seed), self.d, n, self.phi_density, self.memory_limit, kind=self.phi)

    def _unpacked(self, payload: bytes) -> tuple[float, Vector]:
        if len(payload) != self._bytes:
            raise PayloadError("wrong size", f"{len(payload)} bytes, expected {self._bytes} for d = {self.d}")
        norm = float(struct.unpack_from("<d", payload)[0])
        if not math.isfinite(norm):
            raise PayloadError("non-finite", f"the norm is {norm}")
        if not 0 <= norm <= _LARGEST_NORM:
            raise PayloadError("bad norm", f"{norm!r} is not between 0 and {_LARGEST_NORM}")
        bits = bits_in(np.frombuffer(payload, np.uint8, offset=_NORM_BYTES), self.d)
        return norm, np.where(bits, 1.0, -1.0)

    def _vector(self, phi: Sensing, norm: float, signs: Vector) -> Vector | None:
        v = _DECODERS[self.decoder](phi, signs, self.s).vector
        support = np.flatnonzero(v)
        if support.size == 0:
            return None
        z = np.zeros_like(v)
        if self.compand == "none":
            z[support] = _of_norm(v[support], np.asarray(norm))
        elif self.expand == "literal":
            z[support] = expand_literal(v[support], norm, self.gamma)
        else:
            z[support] = expand(v[support], norm)
        return z
