"""Noise on what nodes tell: its settings, and the report of what it promises.

A run is a composition of Gaussian mechanisms, whose exact epsilon is Gaussian DP's (J. Dong, A. Roth, W. Su,
2022, Corollary 2.13 and section 3.2) or zero-concentrated DP's (M. Bun, T. Steinke, 2016). Nothing is
subsampled. Where something of the data is told that no noise covers, epsilon is infinite, and the report has
the reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from hedgerow.wire.checks import in_range, one_of, probability

__all__ = ["LOST_ROUNDS", "MONITOR", "SEEDED", "NodeNoise", "Noise", "PrivacyReport", "open_paths"]

# Paths on which something of the data is told that no noise covers, or nobody counts.
SEEDED, MONITOR, LOST_ROUNDS = "seeded-noise", "monitor", "lost-rounds"


@dataclass(frozen=True)
class Noise:
    """Clipping and noise.

    Parameters
    ----------
    clip : float
        C, > 0: the norm to which something is clipped.
    multiplier : float
        Standard deviation of the noise over C, > 0.
    delta : float (default: 1e-5)
        At which epsilon is told, in (0, 1).
    source : {"entropy", "seed"} (default: "entropy")
        Where nodes draw it: from the operating system; or from the run's seed, so that a simulation can be
        repeated, and whoever knows the seed can take the noise off.

    Raises
    ------
    ValueError
        If one is out of range.
    """

    clip: float
    multiplier: float
    delta: float = 1e-5
    source: Literal["entropy", "seed"] = "entropy"

    def __post_init__(self) -> None:
        in_range("clip", self.clip, 0.0, 1e100, open_below=True)
        in_range("multiplier", self.multiplier, 0.0, 1e100, open_below=True)
        probability(delta=self.delta)
        one_of("source", self.source, ("entropy", "seed"))


def open_paths(paths: Iterable[str], *, seeded: bool, resumed: bool) -> tuple[str, ...]:
    """Return the paths without protection, sorted: those given, and what seed or resumption adds.

    Noise of a seed comes out the same again, so that a resumed run has told nothing else.
    """
    more = [SEEDED] if seeded else [LOST_ROUNDS] if resumed else []
    return tuple(sorted({*paths, *more}))


@dataclass(frozen=True)
class PrivacyReport:
    """What noise promises whomever most was told of.

    Parameters
    ----------
    epsilon : float
        At delta; infinite where something was told without noise.
    delta : float
        Its delta.
    unprotected : tuple of str
        The paths that make it infinite, keys of ``reasons``.
    """

    # Why each path is open, in words.
    reasons: ClassVar[Mapping[str, str]]

    epsilon: float
    delta: float
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
        """What else a round's record says."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return the report for a round's record, with a flag for each path that is not protected."""
        flags = {f"unprotected-{path}": 1 for path in self.unprotected}
        return {"epsilon": self.epsilon, "delta": self.delta, **self.figures, **flags}


class NodeNoise(Protocol):
    """Noise that nodes put on what they compute, and its account."""

    @property
    def mode(self) -> str:
        """``none`` where there is no noise."""

    @property
    def noise_source(self) -> str | None:
        """Where nodes draw it, as in ``Noise``; None for what the mode has."""

    def metrics(self, count: int, unprotected: Iterable[str] = ()) -> dict[str, float]:
        """Return what a round's record says of ``count`` releases; nothing without noise."""

    def report(
        self,
        count: int,
        delta: float | None = None,
        *,
        numerical: bool = False,
        unprotected: Iterable[str] = (),
    ) -> PrivacyReport:
        """Account for a node's ``count`` releases, at a total ``delta``; ValueError without noise."""
