"""Links between hospital and devices: open, which the server reads, or sealed, of which it knows public keys.

On sealed links, an exchange also carries the introductions of peers that are new to each other. They are not
booked, because a resumed run repeats them.
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


@dataclass(frozen=True)
class Refused:
    """A reply whose sender could open nothing that it received: the refused peers, by reason."""

    refused: Mapping[str, tuple[str, ...]]


class PartyLinks(Part):
    """Open links: the server reads heads and encodings."""

    name = "links"
    sealed = False

    def begin(self, run: int) -> None:
        """Begin or resume a run."""

    def place(self, groups: Iterable[Group]) -> None:
        """Set the groups, and with them each party's peers."""

    def introduced(self, i: int, link: LinkIntroduction | None) -> None:
        """Take a party's introduction of itself."""

    def takes_part(self, i: int) -> bool:
        """Return whether a party can take part."""
        return True

    def named(self, i: int) -> str | None:
        """Return a party's name among its peers."""
        return None

    def config(self, peers: Iterable[int]) -> dict[str, Any]:
        """Return the config keys that name a receiver's peers."""
        return {}

    def coding(self, schema: Schema) -> dict[str, Any]:
        """Return the config keys with which a party decodes sealed data."""
        return {}

    def introduce(self, i: int, peers: Iterable[int]) -> ConfigRecord | None:
        """Return the introductions that a party lacks, by name; None if it has all."""
        return None

    def met(self, i: int, peers: Iterable[int], refused: Mapping[str, Iterable[str]]) -> set[int]:
        """Note which introductions a party has: its peers' except the refused ones; return the refused."""
        return set()

    def refusals(self, content: RecordDict) -> tuple[RecordDict, dict[str, tuple[str, ...]]]:
        """Split a reply into its other records and the refused peers' names, by reason."""
        return content, {}

    def of_hospital(
        self, schema: Schema, content: RecordDict, a: int, hosted: bool
    ) -> tuple[Heads, Encodings]:
        """Return a hospital's head and zeta_1 of ``a`` people; PayloadError if invalid."""
        return schema.hospital_exchange(content, a)

    def of_device(
        self, schema: Schema, content: RecordDict, a: int, hosted: bool, kind: str = "zeta2"
    ) -> Encodings:
        """Return a device's or edge's zeta_2; PayloadError if invalid."""
        return schema.device_exchange(content, a)

    def for_scores(
        self, encodings: Mapping[int, Encodings], hosts: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return the encodings that a hospital scores: the rows at (host, place), or the hosts' shares."""
        return {"zeta2": np.stack([encodings[i][place] for i, place in rows])}

    def empty(self, rows: Encodings) -> list[int]:
        """Count and return the shares that a party withheld."""
        return []

    def count_unopened(self, refused: Mapping[str, Iterable[str]]) -> None:
        """Count shares that did not open."""

    def seals(self, schema: Schema, a: int, hosted: bool, *, hospital: bool, edge: bool) -> int:
        """Return the bytes that sealing adds to a transfer of the hospital's or the devices' ``a`` rows."""
        return 0

    def log(self) -> None:
        """Log how many parties pin their peers' keys."""


class SealedPartyLinks(PartyLinks):
    """Links that the server cannot read.

    - ``seed``: The run's seed, from which simulated nodes derive their keys.
    - ``names``: Each party's name by partition id; a party without one takes no part.
    - ``withheld``, ``unopened``: The round's shares that senders withheld, and that receivers refused.
    """

    sealed = True

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.forget()

    def forget(self) -> None:
        """Forget all parties."""
        self._introductions = Introductions()
        self.names: dict[int, str] = {}
        # All possible peers of a party, by partition id.
        self._neighbours: dict[int, set[int]] = {}
        self._of_name: dict[str, int] = {}
        self.withheld = 0
        self.unopened: Counter[str] = Counter()

    def begin(self, run: int) -> None:
        """Begin or resume a run; under another run id all nodes have other keys."""
        self._introductions.begin(run)

    def place(self, groups: Iterable[Group]) -> None:
        """Make each hospital and its people's hosts neighbours."""
        for group in groups:
            self._neighbours.setdefault(group.hospital, set()).update(group.hosts.values())
            for host in group.hosts.values():
                self._neighbours.setdefault(host, set()).add(group.hospital)

    def opened(self, run: Run) -> Steps[None]:
        """Reset the round's counts."""
        self.withheld, self.unopened = 0, Counter()
        yield from ()

    def takes_part(self, i: int) -> bool:
        """Return whether a party has sent its keys."""
        return i in self.names

    def named(self, i: int) -> str | None:
        """Return a party's name among its peers."""
        return self.names.get(i)

    def coding(self, schema: Schema) -> dict[str, Any]:
        """Return the coding of sealed data."""
        return {"compress": schema.compressed, "pairs": schema.pairs}

    def refusals(self, content: RecordDict) -> tuple[RecordDict, dict[str, tuple[str, ...]]]:
        """Split a reply into its other records and the refused peers' names, by reason."""
        record = content.get(REFUSED)
        if not isinstance(record, ConfigRecord):
            return content, {}
        refused = {}
        for reason in (*REASONS, MALFORMED):
            names = record.get(reason)
            if isinstance(names, list) and names:
                refused[reason] = tuple(dict.fromkeys(map(str, names)))
        return RecordDict({key: record for key, record in content.items() if key != REFUSED}), refused

    def of_hospital(
        self, schema: Schema, content: RecordDict, a: int, hosted: bool
    ) -> tuple[Heads, Encodings]:
        """Return the sealed head and a share per peer."""
        head, shares = schema.hospital_shares(content, a, 1 if hosted else a)
        return head, SealedForAll(shares) if hosted else shares

    def of_device(
        self, schema: Schema, content: RecordDict, a: int, hosted: bool, kind: str = "zeta2"
    ) -> Encodings:
        """Return the one share for the hospital, sealed as ``kind``."""
        share = schema.device_share(content, a, kind)
        return SealedForAll(share) if hosted else share

    def for_scores(
        self, encodings: Mapping[int, Encodings], hosts: Sequence[int], rows: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Return the hosts' shares."""
        return {EVALUATED: [encodings[i][0] for i in hosts]}

    def empty(self, rows: Encodings) -> list[int]:
        """Count and return the shares that a party withheld."""
        found = [row for row, share in enumerate(rows) if not len(share)]
        self.withheld += len(found)
        return found

    def seals(self, schema: Schema, a: int, hosted: bool, *, hospital: bool, edge: bool) -> int:
        """Return the bytes that sealing adds; devices on an edge node seal nothing between them and it."""
        if hosted and not edge:
            return 0
        shares = 1 if hosted else a
        if not hospital or schema.pairs:
            return shares * SEAL_BYTES
        heads = 1 if edge else shares
        return shares * (SEAL_BYTES + HEAD_KEY_BYTES) + heads * SEAL_BYTES

    def introduced(self, i: int, link: LinkIntroduction | None) -> None:
        """Take a party's introduction; without one, or under another party's name, it takes no part."""
        claimed = link is None or self._of_name.get(link.name, i) != i or _is_anothers(link.name, i)
        if link is None or claimed or self.names.get(i, link.name) != link.name:
            log(WARNING, "Partition %d sent no introduction, or one under another name.", i)
            return
        if i in self.names:  # A new introduction means that it may have lost its peers' introductions.
            self._introductions.confirm(i, (), list(self._introductions.of))
        self.names[i], self._of_name[link.name] = link.name, i
        self._introductions.take(i, link.introduction, link.pinned)

    def log(self) -> None:
        """Log how many parties pin their peers' keys."""
        pinning, all_of = len(self._introductions.pinning), len(self._introductions.of)
        log(INFO, "Links are sealed: %d of %d parties pin their peers' keys, the others", pinning, all_of)
        log(INFO, "trust the first that they receive.")

    def config(self, peers: Iterable[int]) -> dict[str, bool | int | list[str]]:
        """Return the config keys that name a receiver's peers."""
        return {"sealed": True, "seed": self._seed, "peers": [self.names[j] for j in peers]}

    def introduce(self, i: int, peers: Iterable[int]) -> ConfigRecord | None:
        """Return the introductions that a party lacks, by name; None if it has all.

        The first record names all neighbours, with empty bytes for those whose introduction comes later: a
        party trusts no name that is added afterwards.
        """
        lacking = self._introductions.for_receiver(i, peers)
        if not lacking:
            return None
        named = {j: b"" for j in sorted(self._neighbours.get(i, ())) if j in self.names}
        return ConfigRecord({self.names[j]: one for j, one in {**named, **lacking}.items()})

    def met(self, i: int, peers: Iterable[int], refused: Mapping[str, Iterable[str]]) -> set[int]:
        """Note which introductions a party has: its peers' except the refused ones; return the refused."""
        peers, those = list(peers), {name for names in refused.values() for name in names}
        strangers = {self._of_name[name] for name in those if name in self._of_name}.intersection(peers)
        self._introductions.confirm(i, peers, strangers)
        return strangers

    def count_unopened(self, refused: Mapping[str, Iterable[str]]) -> None:
        """Count shares that did not open."""
        self.unopened.update({reason: len(list(names)) for reason, names in refused.items()})

    def ended(self, run: Run) -> None:
        """Report the round's counts."""
        run.metrics |= {
            "pinning": len(self._introductions.pinning),
            "withheld": self.withheld,
            "unopened": sum(self.unopened.values()),
            **{f"unopened-{why.replace(' ', '-')}": n for why, n in sorted(self.unopened.items())},
        }


def _is_anothers(name: str, i: int) -> bool:
    """Return whether a name is another party's partition id; numbers from MAX_PLACES on are no ids."""
    return name.isascii() and name.isdigit() and int(name) < MAX_PLACES and int(name) != i
