"""Noise within secure sums, for client-level differential privacy.

Papers: P. Kairouz, Z. Liu, T. Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning
with Secure Aggregation" (ICML 2021): each node clips its update and adds a share of the noise on the sum's
grid of integers (``wire/discrete_gaussian.py``, ``wire/masked_sums.py``). M. Bun, T. Steinke (2016):
zero-concentrated DP, which adds up over releases.
Differs: updates are not rotated, and are rounded towards zero instead of at random. With the fine steps of
32-bit sums neither matters, and rounding never increases a norm. No amplification by subsampling is claimed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hedgerow.strategies.parts.privacy import LOST_ROUNDS, SEEDED, Noise, PrivacyReport, open_paths
from hedgerow.wire.checks import in_range
from hedgerow.wire.gaussian_dp import optimal_zcdp_epsilon

# Paths on which a node's data are disclosed without noise.
EVALUATION, OWN_DATA = "evaluation", "own-data"

REASONS = {
    EVALUATION: "nodes report losses of models on their own data",
    OWN_DATA: "nodes with own data report shapes, classes, or sums of features or scores without noise",
    SEEDED: "noise is drawn from the run's seed, and anyone who knows it can remove the noise",
    LOST_ROUNDS: "the run was resumed, and releases after the checkpoint are unknown",
}

# Why a model with counters, such as those of batch normalisation, cannot have noise.
NO_COUNTERS = "noise on the running statistics of batch normalisation makes variances negative"

COVERS = (
    "all data of one node, replaced by any other, against any party that sees all sums and models and knows "
    "all other updates: the server, eavesdroppers, and any one other node; not that a node takes part, when, "
    "or its number of examples; each member that reveals its noise to the server removes one share of it"
)


@dataclass(frozen=True)
class SumNoise(Noise):
    """Clipping and noise of a node's contribution to a sum.

    Parameters
    ----------
    clip : float
        C, > 0: the largest norm of a node's update, over all arrays.
    multiplier : float
        z, about 1e-3 to 1e6: the standard deviation of the noise on a sum, over C, with the fewest survivors
        of a sum; with more of them it is a little larger. On a mean of s nodes it is z C / s.
    delta : float (default: 1e-5)
        The delta of the reported epsilon, in (0, 1); should be below one over the number of nodes.
    source : {"entropy", "seed"} (default: "entropy")
        The operating system's entropy; or the run's seed: reproducible, but anyone who knows it can remove
        the noise.
    unprotected : tuple of str (default: ())
        Other paths on which nodes disclose their data, keys of ``REASONS``.
    """

    unprotected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        in_range("clip", self.clip, 0.0, 1e30, open_below=True)
        in_range("multiplier", self.multiplier, 1e-3, 1e6)
        super().__post_init__()
        if not set(self.unprotected) <= REASONS.keys():
            raise ValueError(f"unprotected must be some of {sorted(REASONS)}, got {self.unprotected!r}")

    def of_plan(self) -> dict[str, Any]:
        """Return the settings as fields of a ``SumPlan``."""
        return {"norm": float(self.clip), "multiplier": float(self.multiplier), "noise_source": self.source}


class SumReleases:
    """The number of each node's noisy sums and their total rho; lost and repeated sums count too."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, float]] = {}
        self._resumed = False

    def count(self, members: Iterable[int], rho: float) -> None:
        """Count one sum of these nodes, of zero-concentrated DP rho."""
        for member in members:
            made, spent = self._made.get(member, (0, 0.0))
            self._made[member] = made + 1, spent + rho

    def report(self, noise: SumNoise, unprotected: Iterable[str] = ()) -> "SumPrivacyReport":
        """Return the report for the most exposed node."""
        disclosed = {*noise.unprotected, *unprotected}
        paths = open_paths(disclosed, seeded=noise.source == "seed", resumed=self._resumed)
        made, rho = max(self._made.values(), key=lambda one: one[1], default=(0, 0.0))
        alone = optimal_zcdp_epsilon(rho, noise.delta) if rho else 0.0
        return SumPrivacyReport(math.inf if paths else alone, noise.delta, paths, made, rho, alone)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        return {str(member): [made, rho] for member, (made, rho) in sorted(self._made.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self._made = {int(member): (int(made), float(rho)) for member, (made, rho) in state.items()}
        self._resumed = True


@dataclass(frozen=True)
class SumPrivacyReport(PrivacyReport):
    """The privacy guarantee of noisy sums for the most exposed node."""

    reasons = REASONS

    releases: int  # Number of the node's sums.
    rho: float  # Their total rho of zero-concentrated DP.
    # Epsilon of these sums alone, with noise that no party can remove.
    releases_epsilon: float
    covers: str = COVERS  # What is protected, against which parties, and what is not.

    @property
    def figures(self) -> dict[str, float]:
        """Number of releases, and their epsilon alone."""
        return {"releases": self.releases, "releases-epsilon": self.releases_epsilon}

    def __str__(self) -> str:
        """Return the report in one line."""
        if self.unprotected:
            return (
                f"no guarantee, epsilon = infinity: {self.why} (noise alone: {self.releases_epsilon:.4g}; "
                f"{self.releases} releases)"
            )
        return (
            f"({self.epsilon:.4g}, {self.delta:.3g})-DP over {self.releases} releases (zCDP: rho = "
            f"{self.rho:.4g}); covers {self.covers}"
        )
