"""The step of CHOCO-Gossip that is proved to converge."""

import numpy as np
from numpy.typing import NDArray

from hedgerow.wire.checks import in_range


def choco_step(matrix: NDArray[np.float64], delta: float) -> float:
    """Return the consensus step gamma of CHOCO-Gossip that is proved to converge.

    gamma = rho^2 delta / (16 rho + rho^2 + 4 beta^2 + 2 rho beta^2 - 8 rho delta), rho = 1 - |lambda_2(W)|
    and beta = ||I - W||: A. Koloskova, S. Stich, M. Jaggi, "Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication", Theorem 2. It is very conservative.

    ``matrix`` is W (m, m), symmetric, with rows that sum to one, of a connected graph. ``delta`` in (0, 1] is
    the compressor's quality: E||C(x) - x||^2 <= (1 - delta) ||x||^2.

    Examples
    --------
    >>> choco_step(np.full((2, 2), 0.5), 1.0)  # rho = 1, beta = 1
    0.06666666666666667
    """
    in_range("delta", delta, 0.0, 1.0, open_below=True)
    values = np.linalg.eigvalsh(matrix)  # ascending, the last is 1
    rho = 1 - float(np.abs(values[:-1]).max(initial=0.0))
    beta = 1 - float(values[0])
    return rho**2 * delta / (16 * rho + rho**2 + 4 * beta**2 + 2 * rho * beta**2 - 8 * rho * delta)
