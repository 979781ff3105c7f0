"""The groups of an HSGD run: how parties form them, and their update before each round.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", the baselines of the experiments. Differs: the paper
assumes that both sides know the same people.

Two sides of a group are matched by the ids of their people; with local data these are keyed hashes, under a
key that the server does not know. Conflicting claims are resolved by matches: of two hospitals of a group,
the one with more matches counts; of two nodes with a person's device, the first. A later party never replaces
an earlier one.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.costs import MethodVariant
from hedgerow.strategies.hsgd.parties import (
    QUESTIONS,
    Group,
    Introduction,
    PairingError,
    Parties,
    PartyLinks,
    faults,
    introduction,
)
from hedgerow.strategies.inbox import ExchangeReport
from hedgerow.strategies.parts import Part
from hedgerow.strategies.whoami import RAISED
from hedgerow.wire.seeds import Purpose, generator


@dataclass(frozen=True)
class PartyForm:
    """Inputs of a model for own data: the halves' shapes and columns, and the classes."""

    hospital_shape: tuple[int, ...]
    device_shape: tuple[int, ...]
    hospital_features: tuple[str, ...]
    device_features: tuple[str, ...]
    classes: tuple[str, ...]

    def fits(self, one: Introduction) -> bool:
        """Return whether a party's half has this form; a hospital must have no other class."""
        hospital = one.role == "hospital"
        shape = self.hospital_shape if hospital else self.device_shape
        features = self.hospital_features if hospital else self.device_features
        return one.form == (shape, tuple(sorted(features))) and set(one.classes) <= set(self.classes)


@dataclass
class Matching:
    """Groups of parties that have the same people."""

    form: PartyForm
    # Groups with a hospital and at least one matched person to train on; people sorted by hash.
    groups: list[Group] = field(default_factory=list)
    # The same groups with their held-out people, if any.
    held_out: dict[int, Group] = field(default_factory=dict)
    # Numbers of people: ``matched``, ``unmatched-hospital`` and ``unmatched-device``; and of excluded
    # parties, by reason.
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def partitions(self) -> dict[int, list[str]]:
        """Each node in a group, with its people: first those that train."""
        people: dict[int, list[str]] = {}
        for group in [*self.groups, *self.held_out.values()]:
            people.setdefault(group.hospital, []).extend(group.ids)
            for person in group.ids:
                people.setdefault(group.node_of[person], []).append(person)
        return people

    @property
    def standing(self) -> dict[int, Group]:
        """Each group with all its people, for a later ``match``."""
        whole = {}
        for group in self.groups:
            held = self.held_out.get(group.number)
            more = ((), {}) if held is None else (held.ids, held.node_of)
            ids, node_of = (*group.ids, *more[0]), {**group.node_of, **more[1]}
            whole[group.number] = Group(group.number, group.hospital, ids, node_of, group.hosted)
        return whole


def form_of(parties: Mapping[int, Introduction], classes: tuple[str, ...] = ()) -> PartyForm | None:
    """Return the most common form of each side, the first on a tie; None if a side is missing.

    Columns have the order of the first party with that form. Classes are as given, or those of all hospitals,
    sorted, numerically if all are integers.
    """
    sides = []
    for at_hospital in (True, False):
        side = [one for _, one in sorted(parties.items()) if (one.role == "hospital") is at_hospital]
        if not side:
            return None
        common, _ = Counter(one.form for one in side).most_common(1)[0]
        sides.append(next(one for one in side if one.form == common))
    hospital, device = sides
    names = {
        name
        for one in parties.values()
        if one.role == "hospital" and one.form == hospital.form
        for name in one.classes
    }
    classes = classes or tuple(sorted(names, key=int if all(map(_is_whole, names)) else str))
    return PartyForm(hospital.shape, device.shape, hospital.features, device.features, classes)


def _is_whole(name: str) -> bool:
    return name.isascii() and name.removeprefix("-").isdigit()


def match(
    parties: Mapping[int, Introduction],
    form: PartyForm,
    *,
    holdout: float = 0.0,
    seed: int = 0,
    num_groups: int | None = None,
    standing: Mapping[int, Group] | None = None,
) -> Matching:
    """Form the groups.

    - ``form``: Parties with another form are excluded.
    - ``holdout``: Fraction of held-out people, in [0, 1). Each person is drawn from seed and hash alone, so
      the draw does not change when others join.
    - ``num_groups``: Parties of groups from this number on are excluded.
    - ``standing``: The previous groups. Their hospital (if it has matches), edge and nodes of people take
      precedence over new claims.
    """
    found = Matching(form)
    members: dict[int, dict[int, Introduction]] = {}
    for partition, one in sorted(parties.items()):
        if not form.fits(one):
            found.counts["left-out-other-form"] += 1
        elif num_groups is not None and one.group >= num_groups:
            found.counts["left-out-no-such-group"] += 1
        else:
            members.setdefault(one.group, {})[partition] = one
    for m, those in sorted(members.items()):
        _match_group(found, m, those, holdout, seed, (standing or {}).get(m))
    return found


def _match_group(
    found: Matching,
    m: int,
    members: Mapping[int, Introduction],
    holdout: float,
    seed: int,
    before: Group | None,
) -> None:
    node_of, hosted = _nodes_of(
        found, {i: one for i, one in members.items() if one.role != "hospital"}, before
    )
    hospitals = {i: one for i, one in members.items() if one.role == "hospital"}
    if not hospitals:
        found.counts["left-out-no-hospital"] += len(members)
        return

    def standing_then_most(i: int) -> tuple[bool, int, int]:
        matches = len(node_of.keys() & set(hospitals[i].ids))
        return before is not None and matches > 0 and i == before.hospital, matches, -i

    at = max(hospitals, key=standing_then_most)
    found.counts["left-out-second-hospital"] += len(hospitals) - 1
    there = set(hospitals[at].ids)
    matched = sorted(there & node_of.keys())
    found.counts["unmatched-hospital"] += len(there) - len(matched)
    found.counts["unmatched-device"] += len(node_of) - len(matched)
    train = [one for one in matched if not holdout or _draw(seed, one) >= holdout]
    if not train and before is None:  # Later, held-out people stay held out.
        train = matched[:1]
    held = sorted(set(matched) - set(train))
    if not train:
        found.counts["left-out-no-match"] += len(members)
        return
    found.counts["matched"] += len(matched)
    found.groups.append(Group(m, at, tuple(train), {one: node_of[one] for one in train}, hosted))
    if held:
        found.held_out[m] = Group(m, at, tuple(held), {one: node_of[one] for one in held}, hosted)


def _nodes_of(
    found: Matching, others: Mapping[int, Introduction], before: Group | None
) -> tuple[dict[str, int], bool]:
    """Return the host of each person's device, and whether it is one edge for all, the largest."""
    had = {} if before is None else before.node_of
    edges = [i for i, one in others.items() if one.role == "edge"]
    if edges and before is not None and not before.hosted and others.keys() & set(had.values()):
        found.counts["left-out-beside-devices"] += len(edges)
        others, edges = {i: one for i, one in others.items() if i not in edges}, []
    node_of: dict[str, int] = {}
    if edges:
        chosen = max(edges, key=lambda i: (i in had.values(), len(others[i].ids), -i))
        found.counts["left-out-beside-an-edge"] += len(others) - 1
        return dict.fromkeys(others[chosen].ids, chosen), True
    for i, one in sorted(others.items(), key=lambda item: (had.get(item[1].ids[0]) != item[0], item[0])):
        if len(one.ids) != 1 or one.ids[0] in node_of:
            found.counts["left-out-second-device"] += 1
        else:
            node_of[one.ids[0]] = i
    return node_of, False


@lru_cache(maxsize=2**17)
def _draw(seed: int, person: str) -> float:
    stream = generator(seed, partition_id=int(person, 16), purpose=Purpose.HOLDOUT)
    return float(stream.random())


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

    def initial_model(self, form: PartyForm) -> ArrayRecord | None:
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
        form = PartyForm((hospital,), (device,), (), (), ())
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
            replace(group, ids=tuple(p for p in left[group.hospital].ids if p in group.node_of))
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
        node_of = {p: first + (0 if hosted else n) for n, p in enumerate(ids)}
        first += 1 if hosted else len(ids)
        groups[m] = Group(m, i, tuple(ids), node_of, hosted)
    return groups


class Members(Part):
    """The groups of a run.

    - ``new_setup``: Returns how the parties of a run form groups.
    - ``check``: Raises PairingError if a run cannot start with these groups.
    - ``groups``: The round's groups.
    - ``matching``: The last matching, with the held-out people.
    - ``sizes``: People per group; 0 for a group that has not taken part yet.
    - ``report``: The report over all exchanges of a round's last attempt.
    """

    name = "members"

    def __init__(
        self,
        new_setup: Callable[[], Setup],
        variant: MethodVariant,
        links: PartyLinks,
        check: Callable[[Matching], None],
    ) -> None:
        self._new_setup, self._variant, self._links, self._check = new_setup, variant, links, check
        self.forget()

    def forget(self) -> None:
        """Forget all parties."""
        self.setup = self._new_setup()
        self.groups: list[Group] = []
        self.matching: Matching | None = None
        self.sizes: list[int] = []
        self.report = ExchangeReport()
        # The groups that the run started with.
        self._first: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the parties' agreement and the groups' sizes, for a checkpoint."""
        return {"agreed": self.setup.state_dict(), "sizes": list(self.sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.sizes = [int(size) for size in state["sizes"]]
        self.setup.load_state_dict(state["agreed"], {m: size for m, size in enumerate(self.sizes) if size})

    @property
    def encodings(self) -> tuple[int, int]:
        """The lengths e1 and e2 of encodings."""
        return self.setup.encodings

    def begin(self, grid: Grid) -> ArrayRecord | None:
        """Form the groups, once per run; return the initial model if it depends on the parties' data."""
        if self.matching is not None:
            return None
        matching = self.setup.begin(grid)
        if self._variant.merged and len(matching.groups) > 1:
            raise PairingError(
                f"{self._variant.method} must have one hospital, or aggregate=False, got "
                f"{len(matching.groups)} hospitals"
            )
        if self.setup.trains:
            self._check(matching)
        self._first = {group.number for group in matching.groups}
        self._take_part(matching)
        self._introduce()
        if self._links.sealed:
            self._links.log()
        return self.setup.initial_model(matching.form)

    def opened(self, run: RoundContext) -> Steps[None]:
        """Update the groups, and get the keys of new parties."""
        raised = {i for i, error in self.report.errors.items() if error.code == RAISED}
        self.report = run.whole
        assert run.grid is not None
        if self.matching is not None:
            matching = self.setup.refresh(run.grid, raised)
            if matching is not None:
                if self._variant.merged:  # Only the first hospital.
                    matching.groups = [group for group in matching.groups if group.number in self._first]
                self._take_part(matching)
            self._introduce()
            if self.setup.away:
                self.report.rejected["offline"] += self.setup.away
        yield from ()

    def ended(self, run: RoundContext) -> None:
        """Report lost groups, excluded parties and unmatched people."""
        run.metrics["lost-groups"] = max(len(self.groups), self.setup.due) - run.metrics["groups"]
        run.metrics |= {reason: number for reason, number in sorted(self.setup.counts.items()) if number}

    def _introduce(self) -> None:
        for i, one in self.setup.parties.take_news().items() if self._links.sealed else ():
            self._links.introduced(i, one.link)

    def _take_part(self, matching: Matching) -> None:
        self.matching, self.groups = matching, matching.groups
        if self._links.sealed:
            self._links.place([*matching.groups, *matching.held_out.values()])
        sizes = self.setup.sizes or {at: group.size for at, group in enumerate(self.groups)}
        self.sizes = [sizes.get(m, 0) for m in range(max(sizes, default=-1) + 1)]
