"""The discrete Gaussian mechanism on a fixed-point grid.

Papers: C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy" (NeurIPS 2020);
I. Mironov, "On Significance of the Least Significant Bits for Differential Privacy" (CCS 2012): a number plus
floating-point noise reveals the number through the set of doubles that the sum can take. Here a vector is
rounded to multiples of a step, integer noise from a cryptographic stream is added, and only the sum becomes
floating point. The set of possible results does not depend on the vector.
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

Vector = NDArray[np.float64]

# Largest number before noise, in steps; with noise it stays below 2^53, exact in float64.
_LARGEST = 2**52
# The clip is at most 2^40 steps, so that numbers up to 4096 times the clip are represented.
_FINEST = 40


@dataclass(frozen=True)
class GridNoise:
    """A grid and the noise on it."""

    exponent: int  # the step is 2^exponent, so that scaling rounds nothing
    deviation: int  # of the noise, in steps, 1 to 2^24

    @classmethod
    def of(cls, multiplier: float, clip: float, size: int, records: int = 1) -> "GridNoise":
        """Return the finest grid for a mean of clipped vectors, and its noise.

        Replacing one record moves the mean by at most 2 C / m, and its computed value by at most D steps:

            D = (2 C / m) (1 + 2^-52 (m^2 + n + 8)) / step + 2 sqrt(n)

        The first term includes the float64 errors of clipping and of adding m vectors. Half of the second
        covers rounding both vectors to the grid, half a step per entry; the other half covers the float64
        rounding of adding a regulariser, which reads no data, as long as entries are below 2^52 steps. The
        noise has the smallest deviation that is at least as private as a continuous Gaussian of
        ``multiplier`` D (``discrete_gaussian.deviation_of``), so an accountant that counts ``multiplier``
        sensitivities of Gaussian noise gives an upper bound.

        - ``multiplier``: z, the noise deviation in sensitivities, in (0, 2^22 / sqrt(n)]; above, rounding
          would exceed the data's share.
        - ``clip``: C > 0, the largest norm of a record's vector.
        - ``size``: n >= 1, entries of the vector.
        - ``records``: m >= 1, records in the mean.

        ValueError if z is out of range, or C or z are so large or small that float64 has no such grid.
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
            # The relative rounding errors of log2 and this product, 2^-50, are within deviation_of's margin.
            steps = sensitivity * 2.0**-exponent + 2 * sqrt(size)
            return deviation_of(multiplier * steps)

        if not -960 <= exponent <= 900:
            raise ValueError(f"clip must be nearer to 1, got {clip!r} with noise {multiplier:g}")
        while deviation(exponent) > MAX_DEVIATION:
            exponent += 1
        return cls(exponent, deviation(exponent))

    @property
    def step(self) -> float:
        """The distance between neighbouring points."""
        return 2.0**self.exponent

    def __call__(self, values: NDArray[Any], key: bytes) -> Vector:
        """Return numbers of any shape, rounded to multiples of the step, with noise.

        Numbers are clipped to 2^52 steps and NaN becomes 0, which does not increase the sensitivity.

        - ``key``: 32 secret bytes that seed the noise, used for one call only.
        """
        largest = _LARGEST * self.step
        within = np.clip(np.where(np.isnan(values), 0.0, np.asarray(values, np.float64)), -largest, largest)
        whole = np.rint(np.ldexp(within, -self.exponent)).astype(np.int64)
        noise = discrete_gaussian(self.deviation, whole.size, CoinFlips(key)).reshape(whole.shape)
        noisy: Vector = np.ldexp((whole + noise).astype(np.float64), self.exponent)
        return noisy


def noise_key(root: int, partition_id: int, index: int) -> bytes:
    """Return the key of a node's noise for its release ``index``, by HKDF-SHA256 from the root (>= 0)."""
    secret = root.to_bytes(max(1, -(-root.bit_length() // 8)))
    about = f"hedgerow noise {partition_id} {index}".encode()
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=about).derive(secret)
