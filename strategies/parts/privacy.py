"""Settings of the noise on nodes' releases, and the report of its privacy guarantee.

A run is a composition of Gaussian mechanisms, with epsilon by Gaussian DP (exact; J. Dong, A. Roth, W. Su,
2022, Corollary 2.13 and section 3.2) or zero-concentrated DP (M. Bun, T. Steinke, 2016). There is no
subsampling. If a run discloses anything about the data without noise, epsilon is infinite, and the report
has the reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from hedgerow.wire.checks import in_range, one_of, probability

# Paths on which data are disclosed without noise, or without being counted.
SEEDED, MONITOR, LOST_ROUNDS = "seeded-noise", "monitor", "lost-rounds"


@dataclass(frozen=True)
class Noise:
    """Clipping and noise."""

    # C, > 0: the clipping norm.
    clip: float
    # Standard deviation of the noise over C, > 0.
    multiplier: float
    # The delta of the reported epsilon, in (0, 1).
    delta: float = 1e-5
    # The operating system's entropy; or the run's seed: reproducible, but anyone who knows it can remove the
    # noise.
    source: Literal["entropy", "seed"] = "entropy"

    def __post_init__(self) -> None:
        in_range("clip", self.clip, 0.0, 1e100, open_below=True)
        in_range("multiplier", self.multiplier, 0.0, 1e100, open_below=True)
        probability(delta=self.delta)
        one_of("source", self.source, ("entropy", "seed"))


def open_paths(paths: Iterable[str], *, seeded: bool, resumed: bool) -> tuple[str, ...]:
    """Return the paths without protection, sorted: those given, and the ones of seed or resumption.

    Seeded noise is the same when a run is resumed, so that repeated rounds disclose nothing new.
    """
    more = [SEEDED] if seeded else [LOST_ROUNDS] if resumed else []
    return tuple(sorted({*paths, *more}))


@dataclass(frozen=True)
class PrivacyReport:
    """The privacy guarantee for the most exposed party."""

    # Why each path is open.
    reasons: ClassVar[Mapping[str, str]]

    # At ``delta``; infinite if anything was disclosed without noise.
    epsilon: float
    delta: float
    # The paths that make ``epsilon`` infinite, keys of ``reasons``.
    unprotected: tuple[str, ...]

    @property
    def guaranteed(self) -> bool:
        """Whether no path is open."""
        return not self.unprotected

    @property
    def why(self) -> str:
        """Why the open paths are open."""
        return "; ".join(self.reasons[path] for path in self.unprotected)

    @property
    def figures(self) -> Mapping[str, float]:
        """Further figures for a round's record."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return the report for a round's record, with a flag for each path that is not protected."""
        flags = {f"unprotected-{path}": 1 for path in self.unprotected}
        return {"epsilon": self.epsilon, "delta": self.delta, **self.figures, **flags}


class NodeNoise(Protocol):
    """Noise that nodes add to their results, and its accounting."""

    @property
    def mode(self) -> str:
        """``none`` without noise."""

    @property
    def noise_source(self) -> str | None:
        """As ``source`` of ``Noise``; None for the mode's default."""

    def instructions(self) -> Mapping[str, str | float]:
        """Return the settings as keys of a message's config."""

    def metrics(self, count: int, unprotected: Iterable[str] = ()) -> dict[str, float]:
        """Return the metrics of ``count`` releases for a round's record; empty without noise."""

    def report(
        self,
        count: int,
        delta: float | None = None,
        *,
        numerical: bool = False,
        unprotected: Iterable[str] = (),
    ) -> PrivacyReport:
        """Account for a node's ``count`` releases, at a total ``delta``; ValueError without noise."""
