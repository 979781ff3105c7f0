"""Secret sharing: a threshold of shares recovers the secret, fewer reveal nothing about it.

Method: A. Shamir, "How to Share a Secret" (1979), over GF(2^8), for all bytes at once. Polynomials are drawn
and evaluated in the basis of S.-J. Lin, W.-H. Chung, Y. S. Han, "Novel Polynomial Basis and Its Application
to Reed-Solomon Erasure Codes" (FOCS 2014), Algorithm 1: n log n products for n shares, where Horner's scheme
has n times the threshold. Flower's ``crypto.shamir`` works over GF(2^128) in Python integers and takes some
milliseconds for one secret of 16 bytes among 49 members, of which a node shares 21 per round.
"""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# The points of GF(2^8) other than 0, where the secret is.
MAX_SHARES = 255


def _tables() -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
    """Return powers of the generator 3, their logarithms and all products, of GF(2^8) modulo 0x11B."""
    powers, logarithms, x = np.zeros(510, np.uint8), np.zeros(256, np.int64), 1
    for i in range(255):
        powers[i] = powers[i + 255] = x
        logarithms[x] = i
        x ^= x << 1
        x = x ^ 0x11B if x & 0x100 else x
    products = powers[logarithms[:, None] + logarithms[None, :]]
    products[0, :] = products[:, 0] = 0
    return powers, logarithms, products


_POWERS, _LOGARITHMS, _PRODUCTS = _tables()


def _twists() -> list[NDArray[np.intp]]:
    """Return, for each level i, s_i(b) / s_i(2^i) at the first point b of each block of 2^(i + 1) points.

    s_i is the product of x - a over all a below 2^i, the points of i bits.
    """
    values, twists = np.arange(256, dtype=np.uint8), []
    for level in range(8):
        normal = values[2**level]
        inverse = _POWERS[(255 - _LOGARITHMS[normal]) % 255]
        twists.append(_PRODUCTS[inverse, values[:: 2 ** (level + 1)]].astype(np.intp))
        # s_{i+1}(x) = s_i(x) s_i(x - 2^i) = s_i(x) (s_i(x) - s_i(2^i)): s_i is additive.
        values = _PRODUCTS[values, values ^ normal]
    return twists


_TWISTS = _twists()


def secret_shares(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Return the shares of a secret, that of point i + 1 at index i, each as long as the secret.

    - ``secret``: Any number of bytes. The polynomials' coefficients come from the operating system.
    - ``threshold``, ``count``: Shares needed to recover it, and all shares, 1 <= threshold <= count <= 255.

    Raises
    ------
    ValueError
        If threshold or count is out of range.
    """
    if not 1 <= threshold <= count <= MAX_SHARES:
        raise ValueError(
            f"shares must have 1 <= threshold <= count <= {MAX_SHARES}, got {threshold} of {count}"
        )
    # The i-th element of the basis has degree i, and all but the first are 0 at 0: any coefficients below the
    # threshold are a polynomial of that degree, and the first one is its value at 0.
    levels = count.bit_length()
    values = np.zeros((2**levels, len(secret)), np.uint8)
    values[:threshold] = np.frombuffer(secret + os.urandom((threshold - 1) * len(secret)), np.uint8).reshape(
        threshold, len(secret)
    )
    for level in reversed(range(levels)):
        halves = values.reshape(-1, 2, 2**level, len(secret))
        rows = _TWISTS[level][: len(halves), None, None] * 256
        halves[:, 0] ^= _PRODUCTS.ravel()[rows + halves[:, 1]]
        halves[:, 1] ^= halves[:, 0]
    return [row.tobytes() for row in values[1 : count + 1]]


def combined_shares(points: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """Return the secret with these shares; an arbitrary result if one of them is wrong.

    - ``points``: The points of the shares, 1 to 255, distinct; at least as many as the threshold.
    - ``shares``: One per point, of equal length.

    Raises
    ------
    ValueError
        If points repeat or are out of range, or lengths differ.
    """
    x = np.array(points, np.int64)
    sizes = {len(share) for share in shares}
    if not (0 < len(set(points)) == len(points) == len(shares) and x.min() >= 1 and x.max() <= MAX_SHARES):
        raise ValueError(f"shares must be of different points from 1 to {MAX_SHARES}, got {sorted(points)}")
    if len(sizes) != 1:
        raise ValueError(f"shares must have one length, got {sorted(sizes)} bytes")
    # Lagrange at 0: prod_{m != j} x_m / (x_m - x_j), where minus is exclusive or.
    logs = _LOGARITHMS[x]
    differences = _LOGARITHMS[x[:, None] ^ x[None, :]]
    np.fill_diagonal(differences, 0)
    weights = _POWERS[(logs.sum() - logs - differences.sum(axis=1)) % 255]
    values = np.frombuffer(b"".join(shares), np.uint8).reshape(len(shares), -1)
    terms: NDArray[np.uint8] = _PRODUCTS[weights[:, None], values]
    secret: NDArray[np.uint8] = np.bitwise_xor.reduce(terms, axis=0)
    return secret.tobytes()
