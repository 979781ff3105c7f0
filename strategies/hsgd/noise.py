"""Noise on what HSGD's parties tell, and what it promises each person against the server.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", which names differential privacy as an addition.
Ours: each party clips its rows of encodings and adds discrete Gaussian noise on a grid, no less private than
the continuous noise that is counted here (``wire.discrete_gaussian.deviation_of``); and it clips the change
of what it uploads as a whole, and adds noise to that. What is released of a person is composed exactly
(J. Dong, A. Roth, W. Su, 2022, section 3.2): each release is a Gaussian mechanism of sensitivity 2 C,
whatever it does with earlier ones. Where anything of a record is told on another path, epsilon is infinite.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.parts import Part
from hedgerow.strategies.parts.privacy import LOST_ROUNDS, SEEDED, Noise, PrivacyReport, open_paths
from hedgerow.strategies.run import Run
from hedgerow.wire.gaussian_dp import gaussian_epsilon

if TYPE_CHECKING:
    from hedgerow.strategies.hsgd.interval import Local

__all__ = [
    "ENCODINGS",
    "HEADS",
    "SUMS",
    "UPLOADS",
    "EmbeddingNoise",
    "RecordExposure",
    "Report",
    "UploadNoise",
]


@dataclass(frozen=True)
class EmbeddingNoise(Noise):
    """Clipping and noise of a row of encodings, all as in ``Noise``.

    ``clip`` is the norm C that a row has at most. Another person's row is at most 2 C away.
    """

    def instructions(self, seed: int) -> dict[str, float | int | str]:
        """Return the settings as keys of an exchange's config."""
        settings = {"clip": self.clip, "noise-multiplier": self.multiplier}
        return {**settings, "noise-source": self.source, "seed": seed}


@dataclass(frozen=True)
class UploadNoise(EmbeddingNoise):
    """Clipping and noise of what a party uploads, all as in ``Noise``.

    ``clip`` is the norm C that the change of its model has at most, since the server told it: a device's own
    over an interval, a hospital's head and encoder together, or an edge's mean, over a round. A hospital then
    tells no loss.
    """

    def instructions(self, seed: int) -> dict[str, float | int | str]:
        """Return the settings as keys of a message's config."""
        settings = {"upload-clip": self.clip, "upload-noise-multiplier": self.multiplier}
        return {**settings, "noise-source": self.source, "seed": seed}


class RecordExposure(Part):
    """How often what is computed of each person's record was asked for, and of how much that is told.

    A lost reply counts, for it may have been seen, and so does that of a round which is repeated. What
    counts is what the server may have got of a record: a noisy encoding of either half; a noisy upload of the
    person's own device, of the hospital or edge that trained on the record; and, since a hospital trains on
    its people between two aggregations and hands the head on, of all devices of the group in later intervals
    of the round.

    - ``noise``: On encodings; None for none.
    - ``uploads``: On uploads; None for none.
    - ``hidden``: Whether encodings and heads are sealed, so that the server does not see them.
    - ``open_paths``: Paths on which something is told without noise in any case.
    """

    name = "exposure"

    def __init__(
        self,
        noise: EmbeddingNoise | None = None,
        uploads: UploadNoise | None = None,
        *,
        hidden: bool = False,
        open_paths: Collection[str] = (),
    ) -> None:
        self.noise, self.uploads, self.hidden, self._always = noise, uploads, hidden, open_paths
        self.forget()

    def forget(self) -> None:
        """Have counted nothing."""
        self._releases: dict[tuple[int, str], list[int]] = {}
        # Who took part in the round, by group.
        self._there: dict[int, set[str]] = {}
        self._open: set[str] = set(self._always)
        self._resumed = False

    def opened(self, run: Run) -> Steps[None]:
        """Begin a round, to which devices come with what the server told."""
        self._there = {}
        yield from ()

    def ended(self, run: Run) -> None:
        """Tell the account."""
        if (told := self.told()) is not None:
            run.told |= told.metrics()

    def exchange(self, groups: Iterable["Local"], *, starts: bool) -> None:
        """Count an exchange of encodings, one of each half, and of heads that no aggregation just made."""
        for one in groups if self.noise is not None else ():
            for person in one.ids:
                self._of(one.group.number, person)[0] += 2
        if not starts and not self.hidden:
            self.note_open(HEADS)

    def update(self, one: "Local", *, pairs: bool, ends: bool) -> None:
        """Count what a group is asked to upload after one interval's steps.

        - ``one``: The group. Where an edge hosts its devices that uploads, at the round's end, and no device.
        - ``pairs``: Whether every pair has its own model, on which no other person has an influence.
        - ``ends``: Whether the round ends, at which hospitals upload.
        """
        if self.uploads is None:
            return
        group, hosted = one.group.number, one.group.hosted
        those, there = set(one.ids), self._there.setdefault(group, set())
        if not hosted:
            for person in those:
                self._of(group, person)[1] += 1
            for person in there if not pairs else ():
                self._of(group, person)[1] += len(those - {person})
        there |= those
        if ends:
            for person in there:
                self._of(group, person)[1] += 2 if hosted else 1

    def note_open(self, *paths: str) -> None:
        """Note paths on which something of the records was told without noise."""
        self._open.update(paths)

    def _of(self, group: int, person: str) -> list[int]:
        return self._releases.setdefault((group, person), [0, 0])

    def told(self) -> "Report | None":
        """Return what was told of the person of whom most was; None without any noise."""
        noise, uploads = self.noise, self.uploads
        if noise is None and uploads is None:
            return None
        paths = set(self._open)
        if uploads is None:
            paths.add(UPLOADS)
        if noise is None and not self.hidden:
            paths.add(ENCODINGS)
        seeded = any(one is not None and one.source == "seed" for one in (noise, uploads))
        unprotected = open_paths(paths, seeded=seeded, resumed=self._resumed)
        rates = [0.0 if one is None else 2 / one.multiplier for one in (noise, uploads)]

        def mu2(counts: list[int]) -> float:
            return sum(count * rate**2 for count, rate in zip(counts, rates, strict=True))

        most = max(self._releases.values(), key=mu2, default=[0, 0])
        delta = next(one.delta for one in (noise, uploads) if one is not None)
        told = gaussian_epsilon(math.sqrt(mu2(most)), delta) if mu2(most) else 0.0
        return Report(math.inf if unprotected else told, delta, unprotected, *most)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        counts = [[m, person, *own] for (m, person), own in sorted(self._releases.items())]
        return {"releases": counts, "open": sorted(self._open)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint of a run that goes on."""
        self._resumed = True
        self._releases = {(int(m), str(person)): [int(e), int(u)] for m, person, e, u in state["releases"]}
        self._open = {*self._always, *(str(path) for path in state["open"])}


# Paths on which something of a record is told without noise.
UPLOADS, ENCODINGS, HEADS, SUMS = "uploads", "encodings", "heads", "sums"

REASONS = {
    UPLOADS: "models are uploaded without noise",
    ENCODINGS: "encodings are told without noise",
    HEADS: "heads are told without noise between aggregations (P > Q)",
    SUMS: "sums of features or counts of classes are told without noise before training",
    SEEDED: "noise is drawn from the run's seed, which the server knows",
    LOST_ROUNDS: "the run was resumed, and nobody knows what was released after the checkpoint",
}


@dataclass(frozen=True)
class Report(PrivacyReport):
    """What the server learns of the person of whom it was told most, by Gaussian DP against replacement."""

    reasons = REASONS

    # Releases with noise that are counted.
    encodings: int
    uploads: int

    @property
    def figures(self) -> dict[str, float]:
        """How many encodings and uploads."""
        return {"encodings-released": self.encodings, "uploads-released": self.uploads}

    def __str__(self) -> str:
        """Return the report in one line."""
        if self.unprotected:
            return f"epsilon = infinity: {self.why}"
        return (
            f"({self.epsilon:.4g}, {self.delta:.3g})-DP of each training person's record against the server, "
            f"over {self.encodings} encodings and {self.uploads} uploads"
        )
