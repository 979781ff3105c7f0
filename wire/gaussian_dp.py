"""The exact privacy of Gaussian mechanisms and of their composition.

Papers: Gaussian DP (J. Dong, A. Roth, W. Su, 2022, Corollary 2.13 and section 3.2), which needs no numerical
composition without subsampling; zero-concentrated DP (M. Bun, T. Steinke, 2016), with the conversion of
C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential Privacy" (NeurIPS 2020), Corollary
13.
"""

import math

from hedgerow.wire.extras import needed


def zcdp(multiplier: float) -> float:
    """Return rho of one Gaussian release with a deviation of ``multiplier`` (> 0) sensitivities."""
    return 1 / (2 * multiplier**2)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return an epsilon of rho-zCDP at delta, rho + 2 sqrt(rho ln(1 / delta))."""
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def optimal_zcdp_epsilon(rho: float, delta: float) -> float:
    """Return the least known epsilon of rho-zCDP at delta, rho > 0.

    The least over alpha > 1 of alpha rho + ln(1 - 1 / alpha) - ln(alpha delta) / (alpha - 1); each alpha is
    valid.
    """

    # Unimodal in ln(alpha - 1); the search begins at the simple formula's alpha.
    def at(log: float) -> float:
        above = math.exp(log)
        return (1 + above) * rho - math.log1p(1 / above) - math.log((1 + above) * delta) / above

    middle = 0.5 * math.log(math.log(1 / delta) / rho)
    low, high, golden = middle - 5.0, middle + 5.0, (math.sqrt(5) - 1) / 2
    for _ in range(100):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if at(left) <= at(right) else (left, high)
    return max(at((low + high) / 2), 0.0)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Return the exact delta at epsilon >= 0 of a mu-Gaussian-DP mechanism, mu > 0.

    A Gaussian mechanism has mu = sensitivity / standard deviation. The adaptive composition of k mechanisms
    has the root of the sum of the squares.
    """
    log_ndtr = needed("scipy.special", "math").log_ndtr
    above = log_ndtr(mu / 2 - epsilon / mu)
    # Phi(a) - e^epsilon Phi(b), in logarithms because both are tiny for a small delta.
    return float(math.exp(above) * -math.expm1(min(epsilon + log_ndtr(-mu / 2 - epsilon / mu) - above, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest epsilon at delta in (0, 1) of a mu-Gaussian-DP mechanism, mu > 0."""
    brentq, ndtr = needed("scipy.optimize", "math").brentq, needed("scipy.special", "math").ndtr
    if 2 * ndtr(mu / 2) - 1 <= delta:
        return 0.0
    upper = zcdp_epsilon(mu**2 / 2, delta)
    root: float = brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, upper, xtol=1e-12)
    return root
