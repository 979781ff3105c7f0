"""Noise on the messages of HSGD's parties, and each person's privacy against the server.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", which names differential privacy as an addition.
Ours: each party clips its rows of encodings and adds discrete Gaussian noise on a grid, no less private than
the continuous noise that is counted here (``wire.discrete_gaussian.deviation_of``). It also clips the change
of its upload as a whole, and adds noise to it. A person's releases are composed exactly (J. Dong, A. Roth,
W. Su, 2022, section 3.2): each is a Gaussian mechanism of sensitivity 2 C, however it depends on earlier
ones. If anything about a record is sent on another path, epsilon is infinite.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.parts import Part
from hedgerow.strategies.parts.privacy import LOST_ROUNDS, SEEDED, Noise, PrivacyReport, open_paths
from hedgerow.wire.gaussian_dp import gaussian_epsilon


@dataclass(frozen=True)
class EmbeddingNoise(Noise):
    """Clipping and noise of a row of encodings; parameters as in ``Noise``.

    ``clip`` is the largest norm C of a row. Another person's row is at most 2 C away.
    """

    # Before its keys in a message's config.
    prefix: ClassVar = ""

    def instructions(self, seed: int) -> dict[str, float | int | str]:
        """Return the settings as keys of a message's config."""
        settings = {f"{self.prefix}clip": self.clip, f"{self.prefix}noise-multiplier": self.multiplier}
        return {**settings, "noise-source": self.source, "seed": seed}


@dataclass(frozen=True)
class UploadNoise(EmbeddingNoise):
    """Clipping and noise of a party's upload; parameters as in ``Noise``.

    ``clip`` is the largest norm C of the change since the server sent the model: of a device's model over an
    interval, and over a round of a hospital's head and encoder together, or of an edge's mean. Hospitals then
    report no loss.
    """

    prefix = "upload-"


class RecordExposure(Part):
    """Counts the noisy releases that depend on each person's record.

    Every request counts: a lost reply may have been seen, and so may those of a repeated round. Counted are
    noisy encodings of either half, and noisy uploads of the person's device and of the hospital or edge that
    trained on the record. A hospital trains on its people between two aggregations and sends the head on, so
    uploads of all devices of the group in later intervals of the round count too.

    - ``noise``: On encodings; None for none.
    - ``uploads``: On uploads; None for none.
    - ``hidden``: Whether encodings and heads are sealed, so that the server does not see them.
    - ``open_paths``: Paths without noise in any case.
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
        """Reset the counts."""
        self._releases: dict[tuple[int, str], list[int]] = {}
        # The round's participants, by group.
        self._there: dict[int, set[str]] = {}
        self._open: set[str] = set(self._always)
        self._resumed = False

    def opened(self, run: RoundContext) -> Steps[None]:
        """Begin a round, in which devices start from the server's model."""
        self._there = {}
        yield from ()

    def ended(self, run: RoundContext) -> None:
        """Report the account."""
        if (report := self.report()) is not None:
            run.metrics |= report.metrics()

    def exchange(self, people: Mapping[int, Collection[str]], *, starts: bool) -> None:
        """Count an encoding of each half, and note heads that are sent between aggregations.

        ``people`` has A_m by group.
        """
        for m, ids in people.items() if self.noise is not None else ():
            for person in ids:
                self._of(m, person)[0] += 2
        if not starts and not self.hidden:
            self.note_open(HEADS)

    def update(self, m: int, ids: Collection[str], *, hosted: bool, pairs: bool, ends: bool) -> None:
        """Count the uploads of group m after one interval's steps.

        - ``ids``: A_m.
        - ``hosted``: Whether its devices are on an edge node, which uploads at the end of the round.
        - ``pairs``: Whether every pair has its own model, which depends on no other person.
        - ``ends``: Whether the round ends; hospitals then upload.
        """
        if self.uploads is None:
            return
        those = set(ids)
        there = self._there.setdefault(m, set())
        if not hosted:
            for person in those:
                self._of(m, person)[1] += 1
            for person in there if not pairs else ():
                self._of(m, person)[1] += len(those - {person})
        there |= those
        if ends:
            for person in there:
                self._of(m, person)[1] += 2 if hosted else 1

    def note_open(self, *paths: str) -> None:
        """Note paths on which something about the records was sent without noise."""
        self._open.update(paths)

    def _of(self, group: int, person: str) -> list[int]:
        return self._releases.setdefault((group, person), [0, 0])

    def report(self) -> "Report | None":
        """Return the account of the most exposed person; None without noise."""
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
        epsilon = gaussian_epsilon(math.sqrt(mu2(most)), delta) if mu2(most) else 0.0
        return Report(math.inf if unprotected else epsilon, delta, unprotected, *most)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        counts = [[m, person, *own] for (m, person), own in sorted(self._releases.items())]
        return {"releases": counts, "open": sorted(self._open)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts from a checkpoint."""
        self._resumed = True
        self._releases = {(int(m), str(person)): [int(e), int(u)] for m, person, e, u in state["releases"]}
        self._open = {*self._always, *(str(path) for path in state["open"])}


# Paths on which something about a record is sent without noise.
UPLOADS, ENCODINGS, HEADS, SUMS = "uploads", "encodings", "heads", "sums"

REASONS = {
    UPLOADS: "models are uploaded without noise",
    ENCODINGS: "encodings are sent without noise",
    HEADS: "heads are sent without noise between aggregations (P > Q)",
    SUMS: "sums of features or counts of classes are sent without noise before training",
    SEEDED: "noise is drawn from the run's seed, which the server knows",
    LOST_ROUNDS: "the run was resumed, and nobody knows what was released after the checkpoint",
}


@dataclass(frozen=True)
class Report(PrivacyReport):
    """Privacy of the most exposed person against the server, by Gaussian DP under replacement."""

    reasons = REASONS

    # Counted releases with noise.
    encodings: int
    uploads: int

    @property
    def figures(self) -> dict[str, float]:
        """The numbers of released encodings and uploads."""
        return {"encodings-released": self.encodings, "uploads-released": self.uploads}

    def __str__(self) -> str:
        """Return the report in one line."""
        if self.unprotected:
            return f"epsilon = infinity: {self.why}"
        return (
            f"({self.epsilon:.4g}, {self.delta:.3g})-DP of each training person's record against the server, "
            f"over {self.encodings} encodings and {self.uploads} uploads"
        )
