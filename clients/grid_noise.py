"""The discrete Gaussian mechanism on a fixed-point grid: what a node tells with noise is a point of it.

Papers: C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy" (NeurIPS 2020);
I. Mironov, "On Significance of the Least Significant Bits for Differential Privacy" (CCS 2012): sums of a
number and floating-point noise tell the number by which doubles they can be. Here a vector is rounded to
multiples of a step, integers from a cryptographic stream are added as integers, and only the sum becomes
floating point again. Whatever the vector is, the same points can come out.
"""

from dataclasses import dataclass
from math import ceil, frexp, isfinite, log2, sqrt
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from hedgerow.wire.discrete_gaussian import (
    KEY_BYTES,
    MAX_DEVIATION,
    CoinFlips,
    deviation_of,
    discrete_gaussian,
)

__all__ = ["GridNoise", "noise_key"]

Vector = NDArray[np.float64]

# Steps that a number has at most, before noise: with it they are below 2^53, exact in float64.
_LARGEST = 2**52
# The clip is at most 2^40 steps, so that numbers up to 4096 times the clip are told apart.
_FINEST = 40


@dataclass(frozen=True)
class GridNoise:
    """A grid, and the noise on it."""

    exponent: int  # The step is 2^exponent, so that going to the grid and back rounds nothing else.
    deviation: int  # Of the noise, in steps: 1 to 2^24.

    @classmethod
    def of(cls, multiplier: float, clip: float, size: int, records: int = 1) -> "GridNoise":
        """Return the finest grid on which a mean of clipped vectors can be told, and its noise.

        Exchanging one record moves the mean by 2 C / m; what is computed of it, by D steps at most:

            D = (2 C / m) (1 + 2^-52 (m^2 + n + 8)) / step + 2 sqrt(n)

        The first term has the errors of clipping and of adding m vectors up in float64. Of the second, half
        is that each of two vectors is rounded to the grid, by half a step a number; half that adding what
        reads no data, a regulariser, rounds in float64, by no more than that as long as numbers are below
        2^52 steps. The noise has the least deviation for which it is no less private than a continuous
        Gaussian of ``multiplier`` D (``discrete_gaussian.deviation_of``): an accountant that counts
        ``multiplier`` sensitivities of Gaussian noise is an upper bound.

        - ``multiplier``: z, the noise's deviation in sensitivities, > 0.
        - ``clip``: C > 0, the norm of each record's vector.
        - ``size``: n >= 1, numbers of the vector.
        - ``records``: m >= 1, records of the mean.

        Raises
        ------
        ValueError
            If z is above 2^22 / sqrt(n), where rounding would count for more than the data; or C or z are so
            large or small that float64 has no such grid.
        """
        largest = MAX_DEVIATION / (4 * sqrt(size))
        if not 0 < multiplier <= largest:
            raise ValueError(
                f"the noise must be above 0 and at most {largest:g} sensitivities on {size} numbers, got "
                f"{multiplier:g}"
            )
        sensitivity = 2 * clip / records * (1 + 2.0**-52 * (records**2 + size + 8))
        if not (isfinite(sensitivity) and sensitivity > 0):
            raise ValueError(f"clip must be a norm above rounding, got {clip!r} for {records} records")
        exponent = max(ceil(log2(clip)) - _FINEST, frexp(multiplier)[1] + frexp(sensitivity)[1] - 26)

        def deviation(exponent: int) -> int:
            # log2's and this product's roundings are of relative 2^-50, which ``deviation_of`` has room for.
            steps = sensitivity * 2.0**-exponent + 2 * sqrt(size)
            return deviation_of(multiplier * steps)

        if not -960 <= exponent <= 900:
            raise ValueError(f"clip must be nearer to 1, got {clip!r} with noise {multiplier:g}")
        while deviation(exponent) > MAX_DEVIATION:
            exponent += 1
        return cls(exponent, deviation(exponent))

    @property
    def step(self) -> float:
        """The distance of two points."""
        return 2.0**self.exponent

    def __call__(self, values: NDArray[Any], key: bytes) -> Vector:
        """Return numbers, of any shape, as multiples of the step with noise.

        Numbers beyond 2^52 steps, infinite ones too, are told as if they were there, and what is no number as
        0: none of them moves more than it would have.

        - ``key``: 32 bytes, of which the noise is drawn: secret, and used for one call.
        """
        largest = _LARGEST * self.step
        within = np.clip(np.where(np.isnan(values), 0.0, np.asarray(values, np.float64)), -largest, largest)
        whole = np.rint(np.ldexp(within, -self.exponent)).astype(np.int64)
        noise = discrete_gaussian(self.deviation, whole.size, CoinFlips(key)).reshape(whole.shape)
        noisy: Vector = np.ldexp((whole + noise).astype(np.float64), self.exponent)
        return noisy


def noise_key(root: int, partition_id: int, index: int) -> bytes:
    """Return the key of a node's noise for one release, by HKDF-SHA256.

    - ``root``: What all of the node's noise comes from, >= 0: of the operating system and secret, or a run's
      seed.
    - ``partition_id``, ``index``: The node, and which of its releases it is.
    """
    secret = root.to_bytes(max(1, -(-root.bit_length() // 8)))
    about = f"hedgerow noise {partition_id} {index}".encode()
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=about).derive(secret)
