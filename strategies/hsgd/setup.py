"""How HSGD's parties form groups, and how they do on dealt data, whose parties may contradict each other.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", the baselines of the experiments. Differs: the paper
assumes that both sides know the same people.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.groups import Group, PairingError, faults
from hedgerow.strategies.hsgd.introductions import Introduction, introduction
from hedgerow.strategies.hsgd.matching import Form, Matching, match
from hedgerow.strategies.hsgd.parties import QUESTIONS, Parties

__all__ = ["DealtSetup", "Setup"]


class Setup(ABC):
    """How the parties form groups: before the first round, and again as they join, leave and return.

    - ``num_groups``: Groups from this number on are excluded; None for no limit.
    - ``sealed``: Whether hospital and devices encrypt their messages to each other.
    - ``read``: Returns a party's introduction, or raises PayloadError.
    - ``encodings``: e1 and e2, by majority of each side at the start.
    - ``sizes``: People of each group's hospital, also for groups without a part in the run; empty if only
      matched people count.
    - ``counts``: Excluded parties and unmatched people, by reason.
    - ``away``: Offline parties that belong to the round and are not in ``counts``.
    """

    # Whether the groups train; False if a trained model is only evaluated.
    trains = True
    # The expected number of groups in a round.
    due = 0

    def __init__(
        self,
        federation: Federation,
        num_groups: int | None,
        sealed: bool,
        read: Callable[[RecordDict], Introduction],
    ) -> None:
        self.federation, self.num_groups, self.sealed = federation, num_groups, sealed
        self.parties = Parties(federation, sealed, read)
        self.encodings = 0, 0
        self.sizes: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self.away = 0
        self._standing: dict[int, Group] = {}

    @abstractmethod
    def begin(self, grid: Grid) -> Matching:
        """Return the groups to start with; PairingError with the reasons if there is none."""

    @abstractmethod
    def refresh(self, grid: Grid, raised: Collection[int]) -> Matching | None:
        """Return the groups of the parties that are online; None if nothing changed.

        ``raised`` are the parties that raised an error in the last round: they may have restarted.
        """

    def initial_model(self, form: Form) -> ArrayRecord | None:
        """Return the initial model if it depends on the parties' data."""
        return None

    def state_dict(self) -> Any:
        """Return what the parties agreed on, for a checkpoint."""
        return None

    def load_state_dict(self, agreed: Any, sizes: Mapping[int, int]) -> None:
        """Restore a checkpoint, with the groups' sizes."""
        self.sizes = dict(sizes)


class DealtSetup(Setup):
    """The groups of parties whose introductions confirm each other.

    Of conflicting claims, that of the partition to which the data are dealt takes precedence: hospitals have
    the first partitions, followed by one edge each, or by the devices, group by group in the order of the
    hospital's people. Other parties are queried again, see ``Parties``.
    """

    def __init__(self, federation: Federation, num_groups: int | None, sealed: bool) -> None:
        super().__init__(federation, num_groups, sealed, introduction)
        self.due = num_groups or 0
        self._unmatched: Counter[str] = Counter()
        # The parties of the last groups.
        self._taking_part: set[int] = set()

    def begin(self, grid: Grid) -> Matching:
        """Query all parties and return the groups."""
        restored = dict(self.sizes)
        self.parties.ask(grid, self.parties.present(grid), QUESTIONS)
        parties = self.parties.known
        self.encodings = self._lengths(parties)
        matching = self._match(grid, parties)
        if not matching.groups:
            raise PairingError(self._faults(parties, restored))
        return matching

    def refresh(self, grid: Grid, raised: Collection[int]) -> Matching | None:
        """Query unknown parties when due; return the groups if any answered. Get restarted parties' keys."""
        answered = self.parties.ask(grid, self._unknown(self.parties.strangers(grid)), 1)
        if answered:  # They may complete groups of other excluded parties.
            self.parties.ask(grid, self._unknown(self.parties.present(grid)), 1)
        matching = self._match(grid, self.parties.known) if answered else None
        self._count(grid)
        if self.sealed:
            restarted = self.parties.restarted(grid) | (set(raised) & self.parties.present(grid).keys())
            if asked := self._taking_part & restarted:
                self.parties.renew(grid, asked)
        return matching

    def _count(self, grid: Grid) -> None:
        left = self.parties.left_out(grid)
        # Offline, or suspended after invalid replies.
        away = len(self.federation.gather(grid).nodes) - len(self.parties.known) - left.total()
        self.counts = self._unmatched + left + Counter({"left-out-away": away})

    def _unknown(self, partitions: Collection[int]) -> list[int]:
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
        self._taking_part = {i for group in found.groups for i in group.partitions}
        self._standing |= found.standing
        numbers, there = {group.number for group in found.groups}, found.partitions
        for i, one in left.items():
            if i not in there:
                reasons[i] = "left-out-contradicted" if one.group in numbers else "left-out-no-group"
        self.parties.settled(there)
        for i, reason in reasons.items():
            self.parties.doubt(i, reason)
        self._unmatched = +Counter({key: found.counts[key] for key in found.counts if key[:9] == "unmatched"})
        self._count(grid)
        for reason, number in sorted(self.counts.items()):
            log(WARNING, "Parties: %s: %d", reason, number)
        return found

    def _lengths(self, parties: Mapping[int, Introduction]) -> tuple[int, int]:
        """Return e1 and e2, by majority of each side; on a tie, those whose sum is an input of the head."""
        layout = self.federation.known_layout()
        shapes = zip(layout.keys, layout.shapes, strict=True)
        widths = {shape[1] for key, shape in shapes if key.startswith("head.") and len(shape) > 1}
        sides = []
        for at_hospital in (True, False):
            own = [one.shape[0] for one in parties.values() if (one.role == "hospital") is at_hospital]
            if not own:
                raise PairingError(self._faults(parties, {}))
            sides.append(Counter(own))

        def rank(pair: tuple[int, int]) -> tuple[int, bool]:
            return sides[0][pair[0]] + sides[1][pair[1]], sum(pair) in widths

        return max(((one, other) for one in sides[0] for other in sides[1]), key=rank)

    def _faults(self, parties: Mapping[int, Introduction], sizes: Mapping[int, int]) -> str:
        found = faults(parties, self.num_groups)
        claimed = {one.group: len(one.ids) for one in parties.values() if one.role == "hospital"}
        if wrong := {m: n for m, n in sorted(claimed.items()) if sizes.get(m, n) != n}:
            found.append(f"groups must have {dict(sizes)} people, as in the checkpoint, got {wrong}")
        found += [f"{number} x {reason}" for reason, number in sorted(self.counts.items())]
        return "; ".join(found) or "no hospital is online"


def _as_dealt(parties: Mapping[int, Introduction]) -> dict[int, Group]:
    """Return the groups that follow from the partition ids alone."""
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
