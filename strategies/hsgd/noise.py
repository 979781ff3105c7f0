"""Noise on HSGD's encodings, and what it promises each person.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", which names differential privacy as an addition.
Ours: each party clips its rows and adds normal noise; a row is released in every exchange that its person is
asked to, and these are composed exactly (J. Dong, A. Roth, W. Su, 2022, section 3.2). The promise covers
encodings alone: the models that are uploaded are computed from the data without noise.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hedgerow.strategies.privacy import gaussian_epsilon
from hedgerow.wire.checks import in_range

__all__ = ["EmbeddingNoise", "Exposure"]


@dataclass(frozen=True)
class EmbeddingNoise:
    """Clipping and noise of a row of encodings.

    Parameters
    ----------
    clip : float
        The norm C that a row has at most, > 0. Another person's row is at most 2 C away.
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
        If a number is out of range.
    """

    clip: float
    multiplier: float
    delta: float = 1e-5
    source: Literal["entropy", "seed"] = "entropy"

    def __post_init__(self) -> None:
        in_range("clip", self.clip, 0.0, 1e100, open_below=True)
        in_range("multiplier", self.multiplier, 0.0, 1e100, open_below=True)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta is {self.delta!r}; valid is a number in (0, 1)")
        if self.source not in ("entropy", "seed"):
            raise ValueError(f"source is {self.source!r}; valid is 'entropy' or 'seed'")

    def instructions(self, seed: int) -> dict[str, float | int | str]:
        """Return the settings as keys of an exchange's config."""
        settings = {"clip": self.clip, "noise-multiplier": self.multiplier}
        return {**settings, "noise-source": self.source, "seed": seed}

    def epsilon(self, releases: int) -> float:
        """Return epsilon at delta of so many releases of one row, >= 0, against its replacement."""
        if releases == 0:
            return 0.0
        return gaussian_epsilon(2 * math.sqrt(releases) / self.multiplier, self.delta)


class Exposure:
    """How often each person's rows were asked for; a lost reply counts, for it may have been seen."""

    def __init__(self) -> None:
        self._exchanges: Counter[tuple[int, str]] = Counter()

    def count(self, group: int, ids: Iterable[str]) -> None:
        """Count one exchange of these people of a group."""
        self._exchanges.update((group, person) for person in ids)

    @property
    def most(self) -> int:
        """Exchanges of the person who took part most often."""
        return max(self._exchanges.values(), default=0)

    def metrics(self, noise: EmbeddingNoise) -> dict[str, float | int]:
        """Return the accounts of the person who took part most often.

        ``epsilon-device`` and ``epsilon-hospital`` are of the row on that side alone, ``epsilon`` of both
        halves of the person's record together.
        """
        one_side = noise.epsilon(self.most)
        return {
            "epsilon-device": one_side,
            "epsilon-hospital": one_side,
            "epsilon": noise.epsilon(2 * self.most),
            "delta": noise.delta,
            "exchanges": self.most,
        }

    def state_dict(self) -> list[list[int | str]]:
        """Return the counts, for a checkpoint."""
        return [[m, person, count] for (m, person), count in sorted(self._exchanges.items())]

    def load_state_dict(self, state: Iterable[list[int | str]]) -> None:
        """Restore the counts of a checkpoint."""
        self._exchanges = Counter({(int(m), str(person)): int(count) for m, person, count in state})
