"""Hard thresholding: the projection on the set of s-sparse vectors.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", the projection P_Omega
of (3) and (4). The projection is set-valued: here ties go to the smallest index.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hedgerow.wire.checks import at_least


def project(v: ArrayLike, s: int) -> NDArray[np.float64]:
    """Return P_Omega(v): the ``s`` entries of largest magnitude, zeros elsewhere.

    - ``v``: (n,), a finite vector.
    - ``s``: The sparsity level, >= 1; for s >= n the projection is the identity.

    Returns
    -------
    NDArray of float64 (n,)
        A new array.

    Raises
    ------
    ValueError
        If ``v`` is not a finite vector or ``s`` < 1.
    """
    at_least(1, s=s)
    vector = finite_vector("v", v)
    kept = largest(np.abs(vector), s)
    projected = np.zeros_like(vector)
    projected[kept] = vector[kept]
    return projected


def largest(magnitudes: NDArray[Any], s: int) -> NDArray[np.intp]:
    """Return the ascending indices of the ``s`` largest of the magnitudes (n,); all indices if s >= n.

    Ties go to the smallest index, as in a stable sort by decreasing magnitude, but in O(n).
    """
    if s >= magnitudes.size:
        return np.arange(magnitudes.size)
    threshold = np.partition(magnitudes, magnitudes.size - s)[magnitudes.size - s]
    chosen = np.flatnonzero(magnitudes >= threshold)
    if surplus := chosen.size - s:
        ties = np.flatnonzero(magnitudes[chosen] == threshold)
        chosen = np.delete(chosen, ties[-surplus:])
    return chosen


def finite_vector(key: str, v: ArrayLike) -> NDArray[np.float64]:
    """Return ``v`` as float64 (n,); ValueError, naming it ``key``, if it is not a finite vector."""
    vector = np.asarray(v, np.float64)
    if vector.ndim != 1:
        raise ValueError(f"{key} must be a vector (n,), got the shape {vector.shape}")
    if not np.isfinite(vector).all():
        raise ValueError(f"{key} must be finite, got NaN or infinite entries")
    return vector
