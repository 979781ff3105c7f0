"""What the server knows of links between hospital and devices that it cannot read: names, and public keys.

Peers that are new to each other are told each other's introduction beside the exchange. It is not booked: a
run that goes on repeats it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ConfigRecord, RecordDict
from flwr.common import log

from hedgerow.strategies.gossip.introductions import Introductions
from hedgerow.strategies.hsgd.groups import Group
from hedgerow.strategies.hsgd.messages import REFUSED, LinkIntroduction
from hedgerow.wire.limits import MAX_PLACES
from hedgerow.wire.sealed import REASONS

__all__ = ["Refused", "SealedLinks", "refusals"]

# What was sealed by its sender is not what was agreed on.
_REASONS = (*REASONS, "malformed contents")


@dataclass(frozen=True)
class Refused:
    """An answer that says that its sender could use nothing of what it was handed: whose, by reason."""

    refused: Mapping[str, tuple[str, ...]]


def refusals(content: RecordDict) -> tuple[RecordDict, dict[str, tuple[str, ...]]]:
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


class SealedLinks:
    """The links of a run.

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

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._introductions = Introductions()
        self.names: dict[int, str] = {}
        # By partition id: whom a party talks with, in any batch.
        self._neighbours: dict[int, set[int]] = {}
        self._of_name: dict[str, int] = {}
        self.begin_round()

    def begin(self, run: int) -> None:
        """Begin a run, or one that goes on: under another id all nodes have other keys."""
        self._introductions.begin(run)

    def place(self, groups: Iterable[Group]) -> None:
        """Take who talks with whom: a hospital with all of its people's hosts."""
        for group in groups:
            self._neighbours.setdefault(group.hospital, set()).update(group.hosts.values())
            for host in group.hosts.values():
                self._neighbours.setdefault(host, set()).add(group.hospital)

    def begin_round(self) -> None:
        """Count anew what is refused."""
        self.withheld = 0
        self.unopened: Counter[str] = Counter()

    def take(self, i: int, told: LinkIntroduction | None) -> None:
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

    def metrics(self) -> dict[str, int]:
        """Return the round's counts."""
        counts = {
            f"unopened-{why.replace(' ', '-')}": number for why, number in sorted(self.unopened.items())
        }
        pinning = len(self._introductions.pinning)
        return {
            "pinning": pinning,
            "withheld": self.withheld,
            "unopened": sum(self.unopened.values()),
            **counts,
        }


def _is_anothers(name: str, i: int) -> bool:
    """Return whether a name is that of another place: nodes are called by their partition ids.

    The number of a node that has a name alone is no place's.
    """
    return name.isascii() and name.isdigit() and int(name) < MAX_PLACES and int(name) != i
