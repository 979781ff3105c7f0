"""Differential privacy of CEPS's noisy gradients: the paper's claim for a run, and what accountants give.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", eq. (13), Theorems 2
and 3. Its algorithm keeps the noise-free gradient and sends results computed from it again and again, which
the theorems do not cover (mode ``paper``, no guarantee). Ours: the mode ``sound``, which clips gradients and
keeps the noise in the state. Then every message is post-processing of the noisy gradients, and a run is a
composition of Gaussian mechanisms. Nodes draw discrete noise on a grid, wider by the rounding error, so that
the continuous mechanism's exact epsilon is an upper bound of theirs
(``wire.discrete_gaussian.deviation_of``).
Accountants: zero-concentrated DP (M. Bun, T. Steinke, 2016) and, exact, Gaussian DP (J. Dong, A. Roth,
W. Su, 2022, Corollary 2.13 and section 3.2), which needs no numerical composition: nothing is subsampled.
Google's dp-accounting, if installed, gives the same to nine digits by numerical composition, in seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self, get_args

from hedgerow.strategies.parts.privacy import LOST_ROUNDS, MONITOR, SEEDED, PrivacyReport, open_paths
from hedgerow.wire.checks import int_at_least, one_of, positive, probability
from hedgerow.wire.extras import needed
from hedgerow.wire.gaussian_dp import gaussian_delta, gaussian_epsilon, zcdp, zcdp_epsilon

PrivacyMode = Literal["none", "paper", "sound"]

KEPT_GRADIENTS = "kept-gradients"
_REASONS = {
    KEPT_GRADIENTS: "the noise does not stay in what is sent",
    SEEDED: "noise is drawn from the run's seed, and whoever knows it takes the noise off",
    MONITOR: "the monitor reveals the exact objective",
    LOST_ROUNDS: "the run was resumed, and no ledger says what nodes released after the checkpoint",
}

# The largest sqrt(releases) / noise multiplier that dp-accounting composes in seconds.
_LARGEST_COMPOSED = 10.0

_COVERS = (
    "one record of a node, replaced by another, against whoever sees all that nodes tell and knows all other "
    "records; not the number of records, nor when a node is there"
)


@dataclass(frozen=True)
class Privacy:
    """The noise on the nodes' gradients, eq. (13).

    Parameters
    ----------
    mode : {"none", "paper", "sound"} (default: "none")
        No noise; the noise of Algorithm 1, which guarantees nothing; or clipped gradients with noise that
        stays in the state.
    epsilon, delta : float (default: 0.5, 1e-5)
        Of one release: epsilon > 0, delta in (0, 1). They set the noise by eq. (13) and are no guarantee for
        the run, which ``report`` accounts for. The paper uses delta = 0.5, which guarantees nothing.
    sensitivity : float (default: 0.1)
        u_i of eq. (13) in mode ``paper``, > 0; assumes gradients of norm at most u_i / 2.
    clip : float (default: 1.0)
        C in mode ``sound``, > 0: the norm to which each record's gradient is clipped. Replacing one of n_i
        records then moves their mean by at most 2 C / n_i, the sensitivity in eq. (13).
    noise_source : {"entropy", "seed"} or None (default: None)
        The source of the nodes' noise: the operating system, or the run's seed, which makes a simulation
        repeatable and lets anyone with the seed remove the noise. None is entropy in mode ``sound``, else the
        seed.
    """

    mode: PrivacyMode = "none"
    epsilon: float = 0.5
    delta: float = 1e-5
    sensitivity: float = 0.1
    clip: float = 1.0
    noise_source: Literal["entropy", "seed"] | None = None

    def __post_init__(self) -> None:
        if self.noise_source not in (None, "entropy", "seed"):
            raise ValueError(f"noise_source must be 'entropy', 'seed' or None, got {self.noise_source!r}")
        one_of("mode", self.mode, get_args(PrivacyMode))
        positive(epsilon=self.epsilon)
        probability(delta=self.delta)
        positive(sensitivity=self.sensitivity, clip=self.clip)

    @property
    def noise_multiplier(self) -> float:
        """The noise's standard deviation over the sensitivity, sqrt(2 ln(1.25 / delta)) / epsilon."""
        return math.sqrt(noise_variance(self.epsilon, self.delta, 1.0))

    def instructions(self) -> dict[str, str | float]:
        """Return the settings as keys of a message's config."""
        source = {} if self.noise_source is None else {"noise-source": self.noise_source}
        return {
            "privacy": self.mode,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "sens": self.sensitivity,
            "clip": self.clip,
            **source,
        }

    @classmethod
    def for_run(cls, epsilon: float, delta: float, count: int, clip: float = 1.0) -> Self:
        """Return the sound mode with the least noise that makes ``count`` releases (epsilon, delta)-DP."""
        step = math.sqrt(2 * math.log(1.25 / delta)) / calibrated_multiplier(epsilon, delta, count)
        return cls("sound", epsilon=step, delta=delta, clip=clip)

    def metrics(self, count: int, unprotected: Iterable[str] = ()) -> dict[str, float]:
        """Return the metrics of a round after ``count`` releases; none without noise."""
        return {} if self.mode == "none" else self.report(count, unprotected=unprotected).metrics()

    def report(
        self,
        count: int,
        delta: float | None = None,
        *,
        numerical: bool = False,
        unprotected: Iterable[str] = (),
    ) -> "GradientReport":
        """Account for a node's ``count`` releases, at a total ``delta`` (None: that of one release).

        ``numerical`` also runs dp-accounting, which takes seconds for many releases. ``unprotected`` are keys
        of ``GradientReport.reasons``: unprotected paths of the run beyond these settings. A ValueError if the
        mode is ``none``.
        """
        if self.mode == "none":
            raise ValueError("mode must be 'paper' or 'sound', got 'none': there is no noise to account for")
        int_at_least(1, count=count)
        delta = self.delta if delta is None else delta
        probability(delta=delta)
        claimed_epsilon, claimed_delta = claimed_total(self.epsilon, self.delta, count)
        rho = count * zcdp(self.noise_multiplier)
        kept = {KEPT_GRADIENTS} if self.mode == "paper" else set()
        seeded = self.noise_source == "seed" or (self.mode == "paper" and self.noise_source is None)
        paths = open_paths({*unprotected, *kept}, seeded=seeded, resumed=False)
        sound, alone = not paths, math.inf
        if self.mode == "sound":
            alone = _exact_epsilon(math.sqrt(count) / self.noise_multiplier, delta)
        return GradientReport(
            epsilon=alone if sound else math.inf,
            delta=delta,
            unprotected=paths,
            count=count,
            step=(self.epsilon, self.delta),
            step_epsilon=_exact_epsilon(1 / self.noise_multiplier, self.delta) if sound else math.inf,
            claimed_epsilon=claimed_epsilon,
            claimed_delta=claimed_delta,
            rho=rho if sound else math.inf,
            zcdp_epsilon=zcdp_epsilon(rho, delta) if sound else math.inf,
            releases_epsilon=alone,
            numerical_epsilon=numerical_epsilon(self.noise_multiplier, count, delta)
            if sound and numerical
            else None,
        )


@dataclass(frozen=True)
class GradientReport(PrivacyReport):
    """The privacy loss of a node's releases: epsilon is exact, and all is infinite without a guarantee."""

    reasons = _REASONS

    count: int  # Releases: noisy gradients, the first included.
    # (epsilon, delta) of one release as claimed by Theorem 2. Its calibration is not proved for epsilon > 1.
    step: tuple[float, float]
    step_epsilon: float  # Exact epsilon of one release at its delta.
    # Of the run as claimed by Theorem 3; a delta >= 1 is vacuous.
    claimed_epsilon: float
    claimed_delta: float
    rho: float  # Zero-concentrated DP of the run.
    zcdp_epsilon: float  # Of the run at ``delta``, from rho: an upper bound.
    # ``epsilon`` if the noisy gradients were the only release and their noise could not be removed; infinite
    # in mode ``paper``.
    releases_epsilon: float
    covers: str = _COVERS  # What is protected, against whom, and what is not.
    # The same by dp-accounting; None if not requested, not installed, or too slow.
    numerical_epsilon: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The number of releases, and their privacy loss alone."""
        return {"releases": self.count, "releases-epsilon": self.releases_epsilon}

    def metrics(self) -> dict[str, float]:
        """Return a round's metrics, including the paper's claim and zCDP's bound."""
        claim = {"claimed-epsilon": self.claimed_epsilon, "claimed-delta": self.claimed_delta}
        spent = {"epsilon": self.epsilon, "zcdp-epsilon": self.zcdp_epsilon}
        return {**claim, **spent, **super().metrics()}

    def __str__(self) -> str:
        """Return the report in one line."""
        vacuous = ", vacuous" if self.claimed_delta >= 1 else ""
        claim = f"Theorem 3 claims ({self.claimed_epsilon:.4g}, {self.claimed_delta:.3g}){vacuous}"
        if not self.guaranteed:
            alone = "" if self.releases_epsilon == math.inf else f"noise alone: {self.releases_epsilon:.4g}; "
            return f"no guarantee, epsilon = infinity: {self.why} ({alone}{self.count} releases; {claim})"
        also = "" if self.numerical_epsilon is None else f"dp-accounting: {self.numerical_epsilon:.4g}; "
        return (
            f"({self.epsilon:.4g}, {self.delta:.3g})-DP over {self.count} releases "
            f"({also}zCDP: {self.zcdp_epsilon:.4g}; {claim}); covers {self.covers}"
        )


def releases(iterations: int, kappa: int) -> int:
    """Return how many gradients a node releases in K iterations, 1 + floor((K - 1) / kappa)."""
    int_at_least(1, iterations=iterations, kappa=kappa)
    return 1 + (iterations - 1) // kappa


def noise_variance(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the variance of eq. (13), 2 ln(1.25 / delta) u^2 / epsilon^2.

    Examples
    --------
    >>> round(noise_variance(0.5, 0.5, 0.1), 10)
    0.0733032585
    """
    return 2 * math.log(1.25 / delta) * (sensitivity / epsilon) ** 2


def claimed_total(epsilon: float, delta: float, periods: int) -> tuple[float, float]:
    """Return Theorem 3's claim for ``periods`` >= 1 releases: advanced composition with slack delta.

    Examples
    --------
    >>> [round(x, 9) for x in claimed_total(0.1, 1e-6, 10)]
    [1.767429054, 1.1e-05]
    """
    growth = math.sqrt(2 * periods * math.log(1 / delta)) * epsilon
    try:
        return growth + periods * epsilon * math.expm1(epsilon), (periods + 1) * delta
    except OverflowError:
        return math.inf, (periods + 1) * delta


def _exact_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon; beyond its formula's range, in the hundreds, zCDP's upper bound."""
    try:
        return gaussian_epsilon(mu, delta)
    except OverflowError:
        return zcdp_epsilon(mu**2 / 2, delta)


def numerical_epsilon(multiplier: float, count: int, delta: float) -> float | None:
    """Return epsilon at delta of ``count`` Gaussian releases by dp-accounting.

    None if it is not installed, or if sqrt(count) / multiplier is above 10: epsilon is then in the hundreds,
    and the composition takes minutes, or more memory than available.
    """
    if math.sqrt(count) / multiplier > _LARGEST_COMPOSED:
        return None
    try:
        from dp_accounting import GaussianDpEvent  # noqa: PLC0415
        from dp_accounting.pld import PLDAccountant  # noqa: PLC0415
    except ImportError:
        return None
    return float(PLDAccountant().compose(GaussianDpEvent(multiplier), count).get_epsilon(delta))


def calibrated_multiplier(epsilon: float, delta: float, count: int) -> float:
    """Return the least noise, in sensitivities, for ``count`` releases to be (epsilon, delta)-DP together."""
    positive(epsilon=epsilon)
    probability(delta=delta)
    int_at_least(1, count=count)
    low, high = 1e-12, 1.0
    while gaussian_delta(high, epsilon) < delta:
        high *= 2
    brentq = needed("scipy.optimize", "math").brentq
    mu = brentq(lambda mu: gaussian_delta(mu, epsilon) - delta, low, high, xtol=1e-14, rtol=1e-13)
    return float(math.sqrt(count) / mu)
