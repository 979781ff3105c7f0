"""Discrete Gaussian noise, exact in integers and from a cryptographic stream, and the privacy of its sums.

Papers: C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy" (NeurIPS 2020),
Algorithms 1 to 3; P. Kairouz, Z. Liu, T. Steinke, "The Distributed Discrete Gaussian Mechanism for Federated
Learning with Secure Aggregation" (ICML 2021), Theorem 1.
Differences: many numbers are drawn at once, each by the same coin flips as the paper's loop; the scale of the
discrete Laplace proposals is sigma instead of floor(sigma) + 1, which the algorithm allows; proposals beyond
100 sigma, with probability below e^-100, are rejected, so that 64 bits suffice.
"""

import os
from collections.abc import Callable
from math import ceil, exp, floor, pi, sqrt
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from hedgerow.wire.checks import at_least, require

KEY_BYTES = 32
MAX_DEVIATION = 2**24
_FURTHEST = 100
# The shares of tries that yield a number for large sigma: 1 - 1/e, and sqrt(pi / (2 e)).
_LAPLACE_SHARE, _GAUSSIAN_SHARE = 0.632, 0.760

Whole = NDArray[np.int64]
Flags = NDArray[np.bool_]


class CoinFlips:
    """Uniform integers from the key stream of ChaCha20.

    - ``key``: 32 bytes; None to draw them from the operating system.
    """

    def __init__(self, key: bytes | None = None) -> None:
        # Each key has one stream, so its nonce does not matter.
        cipher = Cipher(ChaCha20(os.urandom(KEY_BYTES) if key is None else key, bytes(16)), mode=None)
        self._stream = cipher.encryptor()

    def below(self, bound: int, count: int) -> Whole:
        """Return ``count`` integers, uniform in 0, …, bound - 1; 1 <= bound <= 2^62."""
        if bound == 1:
            return np.zeros(count, np.int64)
        bits = (bound - 1).bit_length()
        word = next(np.dtype(f"<u{size}") for size in (1, 2, 4, 8) if bits <= 8 * size)
        mask, largest = word.type((1 << bits) - 1), word.type(bound - 1)
        drawn = self._words(count, word) & mask
        while (above := (drawn > largest).nonzero()[0]).size:
            drawn[above] = self._words(above.size, word) & mask
        whole: Whole = drawn.astype(np.int64)
        return whole

    def _words(self, count: int, word: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(self._stream.update(bytes(word.itemsize * count)), word)


def discrete_gaussian(deviation: int, count: int, flips: CoinFlips) -> Whole:
    """Return ``count`` integers y, each with probability ~ exp(-y^2 / (2 sigma^2)), Algorithm 3.

    - ``deviation``: sigma, 1 to 2^24.
    - ``count``: Number of draws, >= 0.

    Raises
    ------
    ValueError
        If sigma is out of range.
    """
    at_least(1, deviation=deviation)
    require("deviation", deviation, f"an integer from 1 to {MAX_DEVIATION}", deviation <= MAX_DEVIATION)

    def propose(number: int) -> Whole:
        y = _collected(lambda more: _laplace(deviation, more, flips), number, _LAPLACE_SHARE)
        y = y[np.abs(y) <= _FURTHEST * deviation]
        # exp(-(|y| - sigma)^2 / (2 sigma^2)), as ``ones`` flips of exp(-1) and one flip for the rest.
        ones, rest = np.divmod((np.abs(y) - deviation) ** 2, 2 * deviation**2)
        accepted = _exponential(rest, 2 * deviation**2, flips)
        left = np.flatnonzero(accepted & (ones > 0))
        while left.size:
            heads = _exponential(np.ones(left.size, np.int64), 1, flips)
            accepted[left[~heads]] = False
            ones[left] -= 1
            left = left[heads & (ones[left] > 0)]
        return y[accepted]

    return _collected(propose, count, _GAUSSIAN_SHARE)


def _laplace(scale: int, number: int, flips: CoinFlips) -> Whole:
    """Return the results of ``number`` tries: integers with probability ~ exp(-|y| / scale), Algorithm 2."""
    u = flips.below(scale, number)
    u = u[_exponential(u, scale, flips)]
    v = np.zeros(u.size, np.int64)
    left = np.arange(u.size)
    while left.size:
        left = left[_exponential(np.ones(left.size, np.int64), 1, flips)]
        v[left] += 1
    magnitudes = u + scale * v
    negative = flips.below(2, u.size) == 1
    # Zero must not count for both signs.
    kept = ~(negative & (magnitudes == 0))
    y: Whole = np.where(negative, -magnitudes, magnitudes)[kept]
    return y


def _exponential(numerators: Whole, denominator: int, flips: CoinFlips) -> Flags:
    """Return a coin flip for each number x, heads with probability exp(-x / denominator), Algorithm 1.

    0 <= x <= denominator.
    """
    heads = np.zeros(numerators.size, bool)
    left, k = np.arange(numerators.size), 1
    while left.size:
        going = flips.below(denominator, left.size) < numerators[left]
        if k > 1:
            going &= flips.below(k, left.size) == 0
        if k % 2:
            heads[left[~going]] = True
        left, k = left[going], k + 1
    return heads


def _collected(tries: Callable[[int], Whole], count: int, share: float) -> Whole:
    """Return the first ``count`` results of tries, of which about ``share`` succeed.

    Whether a try succeeds must be independent of its number.
    """
    found: list[Whole] = []
    missing = count
    while missing > 0:
        some = tries(ceil((missing + 4 * sqrt(missing)) / share) + 16)[:missing]
        found.append(some)
        missing -= some.size
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def deviation_of(gaussian: float) -> int:
    """Return an integer deviation whose discrete noise is as private as continuous Gaussian noise.

    Discrete Gaussian noise of sigma^2 = s^2 + r^2 is, up to a factor, continuous noise of deviation s that is
    then rounded at random, to y with probability ~ exp(-(y - x)^2 / (2 r^2)). For each x these sum to
    sqrt(2 pi) r within a factor of 1 +- 3 exp(-2 pi^2 r^2), by Poisson summation. So the discrete mechanism
    has the (epsilon, delta) of the continuous one of deviation s, up to a factor of e^(+-10^-75) per number
    at r = 3, which is used here: over any feasible composition that is less than the rounding of a report.
    (Its zero-concentrated DP is that of sigma without any such term, Theorem 4 of Canonne et al.; rejecting
    values beyond 100 sigma adds a delta of e^-4999.)

    - ``gaussian``: s, in steps of the grid, > 0; may be too small by a part in 10^10.
    """
    # (s + 3)^2 >= s^2 + 9.
    return floor(gaussian * (1 + 2.0**-32)) + 4


def concentration(sensitivity: float, deviation: int, shares: int, size: int) -> float:
    """Return rho of the zero-concentrated DP of a sum to which members added discrete Gaussian noise.

    Theorem 1 of Kairouz et al. in its last form: the sum of ``shares`` such noises is not quite discrete
    Gaussian, which costs tau = 10 sum_k exp(-2 pi^2 sigma^2 k / (k + 1)), negligible for sigma >= 2.

    - ``sensitivity``: A member's largest effect on the sum, in the 2-norm.
    - ``deviation``: sigma of one member's noise, >= 1, in the same unit.
    - ``shares``: The number of members whose noise is relied on, >= 1.
    - ``size``: The dimension d of the sum.
    """
    tau = 10 * sum(exp(-2 * pi**2 * deviation**2 * k / (k + 1)) for k in range(1, shares))
    epsilon = sensitivity / (sqrt(shares) * deviation) + tau * sqrt(size)
    return epsilon**2 / 2
