"""What the server knows of links between hospital and devices: that it reads along, or names and public keys.

Sealed, peers that are new to each other are told each other's introduction beside the exchange. It is not
booked: a run that goes on repeats it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.common import log

from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.hsgd.groups import Group
from hedgerow.strategies.hsgd.introductions import LinkIntroduction
from hedgerow.strategies.hsgd.messages import Encodings, Heads, Schema, SealedForAll
from hedgerow.strategies.introductions import Introductions
from hedgerow.strategies.parts import Part
from hedgerow.strategies.run import Run
from hedgerow.wire.limits import MAX_PLACES
from hedgerow.wire.parties import EVALUATED, MALFORMED, REFUSED
from hedgerow.wire.sealed import HEAD_KEY_BYTES, REASONS, SEAL_BYTES

__all__ = ["PartyLinks", "Refused", "SealedPartyLinks"]

_REASONS = (*REASONS, MALFORMED)


@dataclass(frozen=True)
class Refused:
    """An answer that says that its sender could use nothing of what it was handed: whose, by reason."""

    refused: Mapping[str, tuple[str, ...]]


class PartyLinks(Part):
    """Links on which the server reads along."""

    name = "links"
    sealed = False

    def begin(self, run: int) -> None:
        """Begin a run, or one that goes on."""

    def place(self, groups: Iterable[Group]) -> None:
        """Take who talks with whom."""

    def introduced(self, i: int, told: LinkIntroduction | None) -> None:
        """Take a party's own introduction."""

    def takes_part(self, i: int) -> bool:
        """Return whether a party can be talked with."""
        return True

    def named(self, i: int) -> str | None:
        """Return what peers call a party."""
        return None

    def config(self, peers: Iterable[int]) -> dict[str, Any]:
        """Return the keys of a message's config that say who its receiver's peers are."""
        return {}

    def coding(self, schema: Schema) -> dict[str, Any]:
        """Return the keys of an update's config by which a party opens what it is handed."""
        return {}

    def introduce(self, i: int, peers: Iterable[int]) -> ConfigRecord | None:
        """Return the introductions that a party lacks, by name; None where it has all."""
        return None

    def met(self, i: int, peers: Iterable[int], refused: Mapping[str, Iterable[str]]) -> set[int]:
        """Note that a party knows its peers but those that it refused, and return these."""
        return set()

    def refusals(self, content: RecordDict) -> tuple[RecordDict, dict[str, tuple[str, ...]]]:
        """Return the rest of an answer, and whom it names as refused, by reason."""
        return content, {}

    def of_hospital(
        self, schema: Schema, content: RecordDict, a: int, hosted: bool
    ) -> tuple[Heads, Encodings]:
        """Return a hospital's head and zeta_1 of ``a`` people; PayloadError for anything else."""
        return schema.hospital_exchange(content, a)

    def of_device(
        self, schema: Schema, content: RecordDict, a: int, hosted: bool, kind: str = "zeta2"
    ) -> Encodings:
        """Return a device's or edge's zeta_2; PayloadError for anything else."""
        return schema.device_exchange(content, a)

    def for_scores(
        self, told: Mapping[int, Encodings], hosts: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return what a hospital is handed of these hosts' encodings: the rows at (host, place)."""
        return {"zeta2": np.stack([told[i][place] for i, place in rows])}

    def empty(self, rows: Encodings) -> list[int]:
        """Return, and count, the shares that a party withheld."""
        return []

    def count_unopened(self, refused: Mapping[str, Iterable[str]]) -> None:
        """Count shares that did not open."""

    def seals(self, schema: Schema, a: int, hosted: bool, *, hospital: bool, edge: bool) -> int:
        """Return the bytes that sealing adds to a hospital's or its devices' share, or on an edge's link."""
        return 0

    def log(self) -> None:
        """Log who trusts whom."""


class SealedPartyLinks(PartyLinks):
    """Links that the server cannot read.

    Parameters
    ----------
    seed : int
        The run's, which keys of simulated nodes follow from.

    Attributes
    ----------
    names : dict of int to str
        What peers call each party, by partition id; who has none takes no part.
    withheld, unopened : int and Counter of str
        Shares of the round that their senders did not seal, and that their receivers refused, by reason.
    """

    sealed = True

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.forget()

    def forget(self) -> None:
        """Know nobody."""
        self._introductions = Introductions()
        self.names: dict[int, str] = {}
        # By partition id: whom a party talks with, in any batch.
        self._neighbours: dict[int, set[int]] = {}
        self._of_name: dict[str, int] = {}
        self.withheld = 0
        self.unopened: Counter[str] = Counter()

    def begin(self, run: int) -> None:
        """Begin a run, or one that goes on: under another id all nodes have other keys."""
        self._introductions.begin(run)

    def place(self, groups: Iterable[Group]) -> None:
        """Take who talks with whom: a hospital with all of its people's hosts."""
        for group in groups:
            self._neighbours.setdefault(group.hospital, set()).update(group.hosts.values())
            for host in group.hosts.values():
                self._neighbours.setdefault(host, set()).add(group.hospital)

    def opened(self, run: Run) -> Steps[None]:
        """Count anew what is refused."""
        self.withheld, self.unopened = 0, Counter()
        yield from ()

    def takes_part(self, i: int) -> bool:
        """Return whether a party told its keys."""
        return i in self.names

    def named(self, i: int) -> str | None:
        """Return what peers call a party."""
        return self.names.get(i)

    def coding(self, schema: Schema) -> dict[str, Any]:
        """Return how what was sealed is coded."""
        return {"compress": schema.compressed, "pairs": schema.pairs}

    def refusals(self, content: RecordDict) -> tuple[RecordDict, dict[str, tuple[str, ...]]]:
        """Return the rest of an answer, and whom it names as refused, by reason."""
        told = content.get(REFUSED)
        if not isinstance(told, ConfigRecord):
            return content, {}
        refused = {}
        for reason in _REASONS:
            names = told.get(reason)
            if isinstance(names, list) and names:
                refused[reason] = tuple(dict.fromkeys(map(str, names)))
        return RecordDict({key: record for key, record in content.items() if key != REFUSED}), refused

    def of_hospital(
        self, schema: Schema, content: RecordDict, a: int, hosted: bool
    ) -> tuple[Heads, Encodings]:
        """Return the sealed head, and a share for each peer."""
        head, shares = schema.hospital_shares(content, a, 1 if hosted else a)
        return head, SealedForAll(shares) if hosted else shares

    def of_device(
        self, schema: Schema, content: RecordDict, a: int, hosted: bool, kind: str = "zeta2"
    ) -> Encodings:
        """Return the one share for the hospital, sealed as ``kind``."""
        share = schema.device_share(content, a, kind)
        return SealedForAll(share) if hosted else share

    def for_scores(
        self, told: Mapping[int, Encodings], hosts: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return the hosts' shares."""
        return {EVALUATED: [told[i][0] for i in hosts]}

    def empty(self, rows: Encodings) -> list[int]:
        """Return, and count, the shares that a party withheld."""
        found = [row for row, share in enumerate(rows) if not len(share)]
        self.withheld += len(found)
        return found

    def seals(self, schema: Schema, a: int, hosted: bool, *, hospital: bool, edge: bool) -> int:
        """Return the bytes that sealing adds; devices that an edge hosts seal nothing on their way to it."""
        if hosted and not edge:
            return 0
        shares = 1 if hosted else a
        if not hospital or schema.pairs:
            return shares * SEAL_BYTES
        heads = 1 if edge else shares
        return shares * (SEAL_BYTES + HEAD_KEY_BYTES) + heads * SEAL_BYTES

    def introduced(self, i: int, told: LinkIntroduction | None) -> None:
        """Take a party's own introduction; without one, or under another's name, it takes no part."""
        claimed = told is None or self._of_name.get(told.name, i) != i or _is_anothers(told.name, i)
        if told is None or claimed or self.names.get(i, told.name) != told.name:
            log(WARNING, "Partition %d told no introduction, or one under another name.", i)
            return
        if i in self.names:  # Who tells it anew may have forgotten whom it knew.
            self._introductions.confirm(i, (), list(self._introductions.of))
        self.names[i], self._of_name[told.name] = told.name, i
        self._introductions.take(i, told.introduction, told.pinned)

    def log(self) -> None:
        """Log who trusts whom."""
        pinning, all_of = len(self._introductions.pinning), len(self._introductions.of)
        log(INFO, "Links are sealed: %d of %d parties pin their peers' keys, the others", pinning, all_of)
        log(INFO, "trust the first that they are told.")

    def config(self, peers: Iterable[int]) -> dict[str, bool | int | list[str]]:
        """Return the keys of a message's config that say who its receiver's peers are."""
        return {"sealed": True, "seed": self._seed, "peers": [self.names[j] for j in peers]}

    def introduce(self, i: int, peers: Iterable[int]) -> ConfigRecord | None:
        """Return the introductions that a party lacks, by name; None where it has all.

        The first of them name all its neighbours, those without an introduction yet with empty bytes: a party
        trusts nobody who is named later.
        """
        told = self._introductions.for_receiver(i, peers)
        if not told:
            return None
        named = {j: b"" for j in sorted(self._neighbours.get(i, ())) if j in self.names}
        return ConfigRecord({self.names[j]: one for j, one in {**named, **told}.items()})

    def met(self, i: int, peers: Iterable[int], refused: Mapping[str, Iterable[str]]) -> set[int]:
        """Note that a party knows its peers but those that it refused, and return these."""
        peers, those = list(peers), {name for names in refused.values() for name in names}
        strangers = {self._of_name[name] for name in those if name in self._of_name}.intersection(peers)
        self._introductions.confirm(i, peers, strangers)
        return strangers

    def count_unopened(self, refused: Mapping[str, Iterable[str]]) -> None:
        """Count shares that did not open."""
        self.unopened.update({reason: len(list(names)) for reason, names in refused.items()})

    def ended(self, run: Run) -> None:
        """Tell the round's counts."""
        run.told |= {
            "pinning": len(self._introductions.pinning),
            "withheld": self.withheld,
            "unopened": sum(self.unopened.values()),
            **{f"unopened-{why.replace(' ', '-')}": n for why, n in sorted(self.unopened.items())},
        }


def _is_anothers(name: str, i: int) -> bool:
    """Return whether a name is that of another place: nodes are called by their partition ids.

    The number of a node that has a name alone is no place's.
    """
    return name.isascii() and name.isdigit() and int(name) < MAX_PLACES and int(name) != i
