"""Who the parties of a run on dealt data are, where one of them may tell what others contradict.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", the baselines of the experiments. Differs: the
paper takes for granted that both sides know the same people.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING

from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.groups import Group, PairingError, faults
from hedgerow.strategies.hsgd.introductions import Introduction, introduction
from hedgerow.strategies.hsgd.matching import Form, Matching, match
from hedgerow.strategies.hsgd.parties import QUESTIONS, Parties

__all__ = ["DealtSetup"]


@dataclass
class DealtSetup:
    """Who belongs together, as far as parties bear each other out.

    Where two claim the same, the one goes first that is where data are dealt to: hospitals have the first
    partitions, then come an edge for each or device after device, group by group, each in the order of its
    hospital's people. Who takes no part is asked again, see ``Parties``.
    """

    federation: Federation  # Whose nodes they are.
    # Groups from this number on are left out; None for as many as there are parties.
    num_groups: int | None = None
    sealed: bool = False  # Whether hospital and devices seal what they tell each other.
    # Of the head's matrices: of encodings that as many parties tell, those go first that add up to one.
    widths: Collection[int] = ()
    encodings: tuple[int, int] = (0, 0)  # e1 and e2, as most parties of each side said at the start.
    # How many people each group's hospital told, also of groups that sit out.
    sizes: dict[int, int] = field(default_factory=dict)
    # Parties that are left out, by reason, and people whom one side alone has.
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.parties = Parties(self.federation, self.sealed, introduction)
        self._standing: dict[int, Group] = {}
        self._unmatched: Counter[str] = Counter()

    def run(self, grid: Grid, sizes: Mapping[int, int]) -> Matching:
        """Ask all, and return the groups; ``sizes`` are those of a checkpoint.

        Raises
        ------
        PairingError
            If no group is left, naming what is wrong with each.
        """
        self.sizes = dict(sizes)
        self.parties.ask(grid, self.parties.present(grid), QUESTIONS)
        parties = self.parties.known
        self.encodings = self._lengths(parties)
        matching = self._match(grid, parties)
        if not matching.groups:
            raise PairingError(self._faults(parties, sizes))
        return matching

    def refresh(self, grid: Grid) -> tuple[Matching | None, set[int]]:
        """Ask those who take no part where it is their time; return the groups if one told, and who told."""
        told = self.parties.ask(grid, self._outside(self.parties.strangers(grid)), 1)
        if told:  # What others of its group lacked may be there now.
            told |= self.parties.ask(grid, self._outside(self.parties.present(grid)), 1)
        matching = self._match(grid, self.parties.known) if told else None
        self._count(grid)
        return matching, told

    def _count(self, grid: Grid) -> None:
        left = self.parties.left_out(grid)
        # Offline, or at rest for answers that were none.
        away = len(self.federation.gather(grid).nodes) - len(self.parties.known) - left.total()
        self.counts = self._unmatched + left + Counter({"left-out-away": away})

    def _outside(self, partitions: Collection[int]) -> list[int]:
        """Return those of some partitions that nothing is known of."""
        known = self.parties.known
        return [i for i in partitions if i not in known]

    def _match(self, grid: Grid, parties: Mapping[int, Introduction]) -> Matching:
        limit = len(parties) if self.num_groups is None else self.num_groups
        hospital, device = self.encodings
        form = Form((hospital,), (device,), (), (), ())
        reasons = {}
        for i, one in parties.items():
            if not form.fits(one):
                reasons[i] = "left-out-other-form"
            elif one.group >= limit:
                reasons[i] = "left-out-no-such-group"
            elif one.role == "hospital" and self.sizes.get(one.group, len(one.ids)) != len(one.ids):
                reasons[i] = "left-out-other-size"
        left = {i: one for i, one in parties.items() if i not in reasons}
        found = match(left, form, standing={**_as_dealt(parties), **self._standing})
        found.groups = [
            replace(group, ids=tuple(p for p in left[group.hospital].ids if p in group.hosts))
            for group in found.groups
        ]
        self.sizes |= {group.number: len(left[group.hospital].ids) for group in found.groups}
        self._standing |= found.standing
        numbers, there = {group.number for group in found.groups}, found.partitions
        for i, one in left.items():
            if i not in there:
                reasons[i] = "left-out-contradicted" if one.group in numbers else "left-out-no-group"
        self.parties.settled(there)
        for i, reason in reasons.items():
            self.parties.doubt([i], reason)
        self._unmatched = +Counter({key: found.counts[key] for key in found.counts if key[:9] == "unmatched"})
        self._count(grid)
        for reason, number in sorted(self.counts.items()):
            log(WARNING, "Parties: %s: %d", reason, number)
        return found

    def _lengths(self, parties: Mapping[int, Introduction]) -> tuple[int, int]:
        """Return e1 and e2, as most parties of each side told."""
        sides = []
        for at_hospital in (True, False):
            told = [one.shape[0] for one in parties.values() if (one.role == "hospital") is at_hospital]
            if not told:
                raise PairingError(self._faults(parties, {}))
            sides.append(Counter(told))

        def rank(pair: tuple[int, int]) -> tuple[int, bool]:
            return sides[0][pair[0]] + sides[1][pair[1]], sum(pair) in self.widths

        return max(((one, other) for one in sides[0] for other in sides[1]), key=rank)

    def _faults(self, parties: Mapping[int, Introduction], sizes: Mapping[int, int]) -> str:
        found = faults(parties, self.num_groups)
        told = {one.group: len(one.ids) for one in parties.values() if one.role == "hospital"}
        if wrong := {m: n for m, n in sorted(told.items()) if sizes.get(m, n) != n}:
            found.append(f"groups must have {dict(sizes)} people, as in the checkpoint, got {wrong}")
        found += [f"{number} x {reason}" for reason, number in sorted(self.counts.items())]
        return "; ".join(found) or "no hospital is there"


def _as_dealt(parties: Mapping[int, Introduction]) -> dict[int, Group]:
    """Return the groups that partition ids make up, of parties that tell nothing else."""
    hospitals = [i for i in sorted(parties) if parties[i].role == "hospital"]
    roles = Counter(one.role for one in parties.values() if one.role != "hospital")
    if not hospitals or not roles:
        return {}
    hosted = roles["edge"] > roles["device"]
    groups, first = {}, len(hospitals)
    for m, i in enumerate(hospitals):
        ids: Sequence[str] = parties[i].ids
        hosts = {p: first + (0 if hosted else n) for n, p in enumerate(ids)}
        first += 1 if hosted else len(ids)
        groups[m] = Group(m, i, tuple(ids), hosts, hosted)
    return groups
