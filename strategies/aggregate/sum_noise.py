"""Noise within secure sums, and what it promises each node: client-level differential privacy.

Papers: P. Kairouz, Z. Liu, T. Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning
with Secure Aggregation" (ICML 2021): each node clips its update and adds a share of the noise on the sum's
grid of integers (``wire/discrete_gaussian.py``, ``wire/masked_sums.py``). M. Bun, T. Steinke (2016):
zero-concentrated DP, which adds up over releases.
Differs: updates are not rotated, and rounded towards zero instead of at random: 32-bit sums have steps so
fine that neither matters, and a norm never grows. No amplification by subsampling is claimed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hedgerow.strategies.parts.privacy import LOST_ROUNDS, SEEDED, Noise, PrivacyReport, open_paths
from hedgerow.wire.checks import in_range
from hedgerow.wire.gaussian_dp import optimal_zcdp_epsilon

__all__ = ["EVALUATION", "NO_COUNTERS", "OWN_DATA", "SumNoise", "SumPrivacyReport", "SumReleases"]

# Paths on which something of a node's data is told without noise.
EVALUATION, OWN_DATA = "evaluation", "own-data"

REASONS = {
    EVALUATION: "nodes tell losses of models on their own data",
    OWN_DATA: "nodes of own data tell shapes, classes, or sums of features or scores without noise",
    SEEDED: "noise is drawn from the run's seed, and whoever knows it takes the noise off",
    LOST_ROUNDS: "the run was resumed, and nobody knows what was released after the checkpoint",
}

# Why a model that counts, as batch normalisation does, takes no noise.
NO_COUNTERS = "noise on the running statistics of batch normalisation makes variances negative"

COVERS = (
    "all data of one node, replaced by any other, against whoever sees all sums and models and knows all "
    "other updates: the server, listeners, and any one other node; not that a node takes part, when, or its "
    "number of examples; members who tell the server their noise take off a share of it each"
)


@dataclass(frozen=True)
class SumNoise(Noise):
    """Clipping and noise of what a node adds to a sum.

    Parameters
    ----------
    clip : float
        C, > 0: the norm that a node's update has at most, all arrays together.
    multiplier : float
        z, about 1e-3 to 1e6: the standard deviation of the noise on a sum over C, however few of the members
        survive, as long as there is a sum; with more of them it is a little larger. On a mean of s nodes it
        is z C / s.
    delta : float (default: 1e-5)
        At which epsilon is told, in (0, 1); below one over the number of nodes.
    source : {"entropy", "seed"} (default: "entropy")
        As in ``Noise``.
    unprotected : tuple of str (default: ())
        Paths beside the sums on which nodes tell of their data, keys of ``REASONS``.

    Raises
    ------
    ValueError
        If one is out of range.
    """

    unprotected: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        in_range("clip", self.clip, 0.0, 1e30, open_below=True)
        in_range("multiplier", self.multiplier, 1e-3, 1e6)
        super().__post_init__()
        if not set(self.unprotected) <= REASONS.keys():
            raise ValueError(f"unprotected must be some of {sorted(REASONS)}, got {self.unprotected!r}")

    def of_plan(self) -> dict[str, Any]:
        """Return the settings as those of a ``SumPlan``."""
        return {
            "norm": float(self.clip),
            "multiplier": float(self.multiplier),
            "noise_source": self.source,
        }


class SumReleases:
    """How many noisy sums each node was asked for, and what they add up to.

    A sum that was lost, or whose round is repeated, counts: a server of another mind may have got it.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, float]] = {}
        self._resumed = False

    def count(self, members: Iterable[int], rho: float) -> None:
        """Count one sum of these nodes, of zero-concentrated DP rho."""
        for member in members:
            made, spent = self._made.get(member, (0, 0.0))
            self._made[member] = made + 1, spent + rho

    def report(self, noise: SumNoise, unprotected: Iterable[str] = ()) -> "SumPrivacyReport":
        """Return what was told of the node of which most was."""
        told = {*noise.unprotected, *unprotected}
        paths = open_paths(told, seeded=noise.source == "seed", resumed=self._resumed)
        made, rho = max(self._made.values(), key=lambda one: one[1], default=(0, 0.0))
        alone = optimal_zcdp_epsilon(rho, noise.delta) if rho else 0.0
        return SumPrivacyReport(math.inf if paths else alone, noise.delta, paths, made, rho, alone)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        return {str(member): [made, rho] for member, (made, rho) in sorted(self._made.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint of a run that goes on."""
        self._made = {int(member): (int(made), float(rho)) for member, (made, rho) in state.items()}
        self._resumed = True


@dataclass(frozen=True)
class SumPrivacyReport(PrivacyReport):
    """What noisy sums promise the node of which most was told."""

    reasons = REASONS

    releases: int  # Sums that the node was asked for.
    rho: float  # What they add up to, of zero-concentrated DP.
    # What epsilon would be if these sums were all that is told, and nobody could take their noise off.
    releases_epsilon: float
    covers: str = COVERS  # Whom it protects, against whom, and what it leaves out.

    @property
    def figures(self) -> dict[str, float]:
        """How many releases, and what they cost alone."""
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
