"""HSGD's parties: their introductions, how they form groups, and who is there before each round.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", section III, line 13 of Algorithm 1, and the
baselines of the experiments. Differs: the paper assumes that both sides know the same people; here it is
checked before training.

Two sides of a group are matched by the ids of their people; with own data these are keyed hashes, under a
key that the server does not know. Conflicting claims are resolved by matches: of two hospitals of a group,
the one with more matches counts; of two nodes with a person's device, the first. A later party never replaces
an earlier one.

Parties may join, leave, reconnect and restart. A party's role and group are fixed for the run by its first
introduction, and must equal those in the registry (``registry.py``; the group is the text of its number), if
it has any. A party without a valid introduction, or that cannot follow the agreement, is excluded and queried
again after 2, 4, 8, … 64 rounds, or at once if it reconnects under another node id.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Question, Steps, answered
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.exchange import Group, LinkIntroduction, PartyLinks
from hedgerow.strategies.hsgd.theory import MethodVariant
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Reply
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts import Part
from hedgerow.strategies.roster import rounds_away
from hedgerow.strategies.whoami import RAISED
from hedgerow.wire.failures import RunFailedError
from hedgerow.wire.limits import MAX_FEATURES, MAX_SAMPLES
from hedgerow.wire.message_types import PAIR
from hedgerow.wire.parties import INTRODUCTIONS, ROLES
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, config_in
from hedgerow.wire.sealed import INTRODUCTION_BYTES
from hedgerow.wire.seeds import Purpose, generator

_LONGEST_NAME = 64
_HASH = 32
# Longest name of a class or feature.
_MOST_TEXT = 200

# Introductions.


@dataclass(frozen=True)
class Introduction:
    """A party's introduction, without data and labels."""

    role: str  # {"hospital", "device", "edge"}
    group: int  # m, from 0.
    ids: tuple[str, ...]  # Its people, in the order of its rows; with own data, keyed hashes.
    shape: tuple[int, ...]  # Of one person's half; with dealt data, the length of an encoding.
    features: tuple[str, ...] = ()  # Names of its columns; empty if they have none.
    labelled: bool = True  # Whether it has labels.
    classes: tuple[str, ...] = ()  # Names of a hospital's classes.
    link: LinkIntroduction | None = None  # Set if links are sealed.

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Shape and sorted columns, which must be equal for all parties of a side."""
        return self.shape, tuple(sorted(self.features))


def introduction(content: RecordDict, *, own: bool = False) -> Introduction:
    """Return a party's introduction; PayloadError if invalid.

    ``own`` if it has its own file: its ids are then hashes, and it has a shape in place of an encoding.
    """
    if list(content) != ["pair"]:
        raise PayloadError("unknown record", f"{sorted(content)}, expected only pair")
    pair = config_in(content, "pair")
    if (role := pair.get("role")) not in ROLES:
        raise PayloadError("bad pair", f"role={role!r}, expected one of {', '.join(ROLES)}")
    group, ids = _integer(pair, "group", 0), _texts(pair, "ids")
    if not 0 < len(ids) <= MAX_SAMPLES or len(set(ids)) < len(ids):
        raise PayloadError("bad pair", f"ids must be 1 to {MAX_SAMPLES} different ids")
    link = None
    if "introduction" in pair:
        name, keys = pair.get("name"), pair["introduction"]
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise PayloadError("bad pair", "name must be a short text")
        if not isinstance(keys, bytes) or len(keys) != INTRODUCTION_BYTES:
            raise PayloadError("bad pair", f"introduction must have {INTRODUCTION_BYTES} bytes")
        link = LinkIntroduction(name, keys, pair.get("pinned") is True)
    if not own:
        return Introduction(str(role), group, ids, (_integer(pair, "encoding", 1),), link=link)
    if not all(len(one) == _HASH and set(one) <= set("0123456789abcdef") for one in ids):
        raise PayloadError("bad pair", f"ids must be hashes of {_HASH} hexadecimal digits")
    sides: Any = pair.get("shape")
    if (
        not isinstance(sides, list)
        or not sides
        or not all(isinstance(n, int) and 0 < n < 2**31 for n in sides)
    ):
        raise PayloadError("bad pair", "shape must be a list of integers > 0")
    if math.prod(sides) > MAX_FEATURES:
        raise PayloadError("bad pair", f"shape must have at most {MAX_FEATURES} features")
    features, classes = _texts(pair, "features", _MOST_TEXT), _texts(pair, "classes", _MOST_TEXT)
    if len(features) not in (0, sides[-1]):
        raise PayloadError("bad pair", "features must be a list with a name for each column")
    labelled = pair.get("labelled") is True
    return Introduction(str(role), group, ids, tuple(sides), features, labelled, classes, link)


def _texts(pair: ConfigRecord, key: str, most: float = math.inf) -> tuple[str, ...]:
    value = pair.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and len(one) <= most for one in value):
        raise PayloadError("bad pair", f"{key} must be a list of short texts")
    return tuple(map(str, value))


def _integer(pair: ConfigRecord, key: str, least: int) -> int:
    number = pair.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise PayloadError("bad pair", f"{key}={number!r}, expected an integer >= {least}")
    return number


# Queries of the parties.


Check = Callable[[int, RecordDict], Any]


class Conversation:
    """A series of exchanges outside training, with one report.

    - ``booked``: Whether to book the transfers through the hub. Introductions are never booked, alone or
      inside a message, because a resumed run repeats them.
    """

    def __init__(self, federation: Federation, grid: Grid, *, booked: bool = True) -> None:
        self._federation, self._grid, self._booked = federation, grid, booked
        self._round = federation.completed
        self._number = 0
        self.report = ExchangeReport()

    def ask(
        self,
        message_type: str,
        contents: Sequence[tuple[int, RecordDict]],
        check: Check,
        timeout: float | None = None,
    ) -> list[Reply]:
        """Make an exchange, and return the valid replies sorted by partition id."""
        roster = self._federation.gather(self._grid)
        nodes = [(roster.nodes[partition], content) for partition, content in contents]
        there = {node: content for node, content in nodes if node.node_id in roster.online}
        self.report.rejected["offline"] += len(nodes) - len(there)
        self._number += 1
        question = Question(
            message_type,
            f"{self._round}-{self._number}",
            there,
            lambda node, content: check(node.partition_id, content),
            ended=self._ended,
            timeout=timeout,
            booked=self._booked,
            unbooked=(INTRODUCTIONS,),
        )
        return list(answered(self._federation, self._grid, self._round, question))

    def _ended(self, inbox: Inbox) -> None:
        if not self._booked:
            # Introductions are asked for several times in a row: an error there is no strike.
            inbox.refused -= inbox.report.errors.keys()
        self._federation.judge(inbox)
        self.report.sent += inbox.report.sent
        self.report.accepted += inbox.report.accepted
        self.report.rejected += inbox.report.rejected
        self.report.errors |= inbox.report.errors


# Queries for an introduction before the first round, for parties that do not answer.
QUESTIONS = 3


class Parties:
    """The parties' introductions, by partition id.

    - ``sealed``: Whether parties must send the keys of sealed links.
    - ``own``: Whether they have their own files.
    - ``grid``: Flower's grid, set when a round begins.
    """

    grid: Grid

    def __init__(self, federation: Federation, *, sealed: bool, own: bool) -> None:
        self._federation, self._sealed, self._own = federation, sealed, own
        self._known: dict[int, Introduction] = {}
        # The node id of each introduction.
        self._node_ids: dict[int, int] = {}
        # Role and group of each party's first introduction.
        self._claims: dict[int, tuple[str, int]] = {}
        # How often each partition and node id was excluded.
        self._times: Counter[tuple[int, int]] = Counter()
        # Excluded parties: the round of the next query, the node id, and the reason.
        self._outside: dict[int, tuple[int, int, str]] = {}
        # New introductions, until their keys are taken.
        self.news: dict[int, Introduction] = {}

    def present(self) -> Mapping[int, int]:
        """Return the node ids of online parties, by partition id, ascending."""
        return self._federation.gather(self.grid).node_ids

    def there(self) -> dict[int, Introduction]:
        """Return the known parties that are online under the node id of their introduction."""
        present = self.present()
        return {i: one for i, one in self.known.items() if present.get(i) == self._node_ids[i]}

    @property
    def known(self) -> dict[int, Introduction]:
        """The introductions of all parties that are not excluded, online or not."""
        return dict(sorted(self._known.items()))

    def strangers(self) -> list[int]:
        """Return the unknown online parties for which a query is due."""
        found = []
        for i, node_id in self.present().items():
            if self._node_ids.get(i) == node_id:
                continue
            again, refused, _ = self._outside.get(i, (0, node_id, ""))
            if refused != node_id or again <= self._federation.completed:
                found.append(i)
        return found

    def left_out(self) -> Counter[str]:
        """Count the excluded parties that are online, by reason."""
        present = self.present()
        return Counter(why for i, (_, node_id, why) in self._outside.items() if present.get(i) == node_id)

    def ask(self, partitions: Iterable[int], questions: int) -> set[int]:
        """Query parties for introductions, at most so many times; return those now known."""
        silent, answered = set(partitions), set[int]()
        talk = Conversation(self._federation, self.grid, booked=False)
        for _ in range(questions):
            if not silent:
                break
            for reply in self._query(talk, silent):
                answered.add(reply.node.partition_id)
                self._take(reply.node, reply.value)
            silent -= answered
        if silent:
            present = self.present()
            for i in silent & present.keys():
                self.leave_out(i, "left-out-no-introduction", present[i])
            reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(talk.report.rejected.items()))
            text = "%d nodes gave no valid introduction (%s); their own logs say why."
            log(WARNING, text, len(silent), reasons)
        return answered & self._known.keys()

    def renew(self, partitions: Collection[int], raised: Collection[int]) -> None:
        """Query those of these known parties that may have restarted: their new introductions count for keys.

        They raised an error, or are online under another node id than that of their introduction.
        """
        present = self.present()
        known = [i for i in partitions if i in self._known and i in present]
        asked = [i for i in known if i in raised or present[i] != self._node_ids[i]]
        if not asked:
            return
        for reply in self._query(Conversation(self._federation, self.grid, booked=False), asked):
            self.news[reply.node.partition_id] = reply.value
            self._node_ids[reply.node.partition_id] = reply.node.node_id

    def _query(self, talk: Conversation, partitions: Iterable[int]) -> list[Reply]:
        sealed = {"sealed": True} if self._sealed else {}
        config = ConfigRecord({"seed": self._federation.settings.seed, **sealed})
        contents = [(i, RecordDict({"config": config})) for i in sorted(partitions)]
        timeout = min(self._federation.timeout, self._federation.settings.max_wait)
        return talk.ask(PAIR, contents, lambda _, reply: introduction(reply, own=self._own), timeout)

    def _take(self, node: Node, one: Introduction) -> None:
        partition, node_id = node.partition_id, node.node_id
        registered = self._federation.settings.registry is not None
        for what, claimed in (("role", one.role), ("group", str(one.group))) if registered else ():
            if getattr(node, what) not in ("", claimed):
                self.leave_out(partition, f"left-out-another-{what}-than-registered", node_id)
                return
        if self._claims.setdefault(partition, (one.role, one.group)) != (one.role, one.group):
            self.leave_out(partition, "left-out-another-role", node_id)
            return
        self._known[partition], self._node_ids[partition] = one, node_id
        self.news[partition] = one

    def doubt(self, partition: int, reason: str) -> None:
        """Exclude a contradicted party; its next introduction may have another role or group."""
        self.leave_out(partition, reason)
        self._claims.pop(partition, None)

    def settled(self, partitions: Collection[int]) -> None:
        """Note that these parties are ready."""
        self._outside = {i: why for i, why in self._outside.items() if i not in partitions}

    def leave_out(
        self, partition: int, reason: str, node_id: int | None = None, *, soon: bool = False
    ) -> None:
        """Exclude a party for some rounds, twice as many each time; the first time for none if ``soon``."""
        node_id = self._node_ids.get(partition, 0) if node_id is None else node_id
        self._times[partition, node_id] += 1
        times = self._times[partition, node_id]
        rounds = 0 if soon and times == 1 else rounds_away(times)
        self._outside[partition] = self._federation.completed + rounds, node_id, reason
        self._known.pop(partition, None)
        self._node_ids.pop(partition, None)


# Matching.


class PairingError(RunFailedError, ValueError):
    """The parties form no valid groups: a side lacks people, or has them twice."""


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


_SHOWN = 5


def faults(parties: Mapping[int, Introduction], num_groups: int | None = None) -> list[str]:
    """Return why the parties, by partition id, form no groups with the same people on both sides.

    ``num_groups`` is the required number of groups; None for the number of hospitals.
    """
    hospitals = [party.group for party in parties.values() if party.role == "hospital"]
    count = len(hospitals) if num_groups is None else num_groups
    found: list[str] = []
    for m in sorted({party.group for party in parties.values()} | set(range(count))):
        members = [parties[i] for i in sorted(parties) if parties[i].group == m]
        own = _faults(members) if m < count else [f"no such group (groups are 0 to {count - 1})"]
        found += [f"group {m}: {fault}" for fault in own]
    return found


def _faults(members: Sequence[Introduction]) -> list[str]:
    roles = Counter(one.role for one in members)
    if roles["hospital"] != 1:
        return [f"it must have one hospital, got {roles['hospital']}"]
    if roles["edge"] > 1 or (roles["edge"] and roles["device"]):
        return [
            f"it must have one edge or devices alone, got {roles['edge']} edges and {roles['device']} devices"
        ]
    at_hospital = next(dict.fromkeys(one.ids) for one in members if one.role == "hospital")
    devices = Counter(person for one in members if one.role != "hospital" for person in one.ids)
    sides = {
        "the devices have twice": [person for person, times in devices.items() if times > 1],
        "no device of": [person for person in at_hospital if person not in devices],
        "the hospital lacks": [person for person in devices if person not in at_hospital],
    }
    return [f"{what} {_shown(ids)}" for what, ids in sides.items() if ids]


def _shown(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(map(quoted, ids[:_SHOWN])) + more


# The groups of a run.


class Members(Part, ABC):
    """The groups of a run: formed before the first round, and again as parties join, leave and return.

    - ``num_groups``: Groups from this number on are excluded; None for no limit.
    - ``variant``: The method.
    - ``links``: The parties' links, which get their keys.
    - ``check``: Raises PairingError if a run cannot start with these groups.

    Attributes
    ----------
    groups : list of Group
        The round's groups.
    matching : Matching or None
        The last matching, with the held-out people.
    encodings : tuple of two int
        e1 and e2, by majority of each side at the start.
    sizes : list of int
        People per group; 0 for a group that has not taken part yet.
    counts : Counter of str
        Excluded parties and unmatched people, by reason.
    away : int
        Offline parties that belong to the round and are not in ``counts``.
    report : ExchangeReport
        Over all exchanges of a round's last attempt.
    """

    name = "members"
    # Whether the parties have their own files.
    own_files = False
    # Whether the groups train; False if a trained model is only evaluated.
    trains = True
    # The expected number of groups in a round.
    due = 0

    def __init__(
        self,
        federation: Federation,
        num_groups: int | None,
        variant: MethodVariant,
        links: PartyLinks,
        check: Callable[[Matching], None],
    ) -> None:
        self.federation, self.num_groups, self.sealed = federation, num_groups, links.sealed
        self._variant, self._links, self._check = variant, links, check
        self.forget()

    def forget(self) -> None:
        """Forget all parties."""
        self.parties = Parties(self.federation, sealed=self.sealed, own=self.own_files)
        self.groups: list[Group] = []
        self.matching: Matching | None = None
        self.encodings = 0, 0
        self.sizes: list[int] = []
        self.counts: Counter[str] = Counter()
        self.away = 0
        self.report = ExchangeReport()
        # The groups that the run started with, and all groups with their people.
        self._first: set[int] = set()
        self._standing: dict[int, Group] = {}

    @abstractmethod
    def first_groups(self) -> Matching:
        """Return the groups to start with; PairingError with the reasons if there is none."""

    @abstractmethod
    def refresh(self, raised: Collection[int]) -> Matching | None:
        """Return the groups of the parties that are online; None if nothing changed.

        ``raised`` are the parties that raised an error in the last round: they may have restarted.
        """

    @abstractmethod
    def sizes_of(self, groups: Sequence[Group]) -> Mapping[int, int]:
        """Return the people per group, by number, now that these groups take part."""

    def initial_model(self, form: PartyForm) -> ArrayRecord | None:
        """Return the initial model if it depends on the parties' data."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what the parties agreed on and the groups' sizes, for a checkpoint."""
        return {"agreed": None, "sizes": list(self.sizes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.sizes = [int(size) for size in state["sizes"]]

    def begin(self, grid: Grid) -> ArrayRecord | None:
        """Form the groups; return the initial model if it depends on the parties' data."""
        self.parties.grid = grid
        matching = self.first_groups()
        if self._variant.merged and len(matching.groups) > 1:
            raise PairingError(
                f"{self._variant.method} must have one hospital, or aggregate=False, got "
                f"{len(matching.groups)} hospitals"
            )
        if self.trains:
            self._check(matching)
        self._first = {group.number for group in matching.groups}
        self._take_part(matching)
        self._introduce()
        if self.sealed:
            self._links.introductions.log()
        return self.initial_model(matching.form)

    def opened(self, run: RoundContext) -> Steps[None]:
        """Update the groups, and get the keys of new parties."""
        raised = {i for i, error in self.report.errors.items() if error.code == RAISED}
        self.report = run.whole
        assert run.grid is not None
        if self.matching is not None:
            self.parties.grid = run.grid
            matching = self.refresh(raised)
            if matching is not None:
                if self._variant.merged:  # Only the first hospital.
                    matching.groups = [group for group in matching.groups if group.number in self._first]
                self._take_part(matching)
            if self.parties.news:
                self._introduce()
            if self.away:
                self.report.rejected["offline"] += self.away
        yield from ()

    def ended(self, run: RoundContext) -> None:
        """Report lost groups, excluded parties and unmatched people."""
        run.metrics["lost-groups"] = max(len(self.groups), self.due) - run.metrics["groups"]
        run.metrics |= {reason: number for reason, number in sorted(self.counts.items()) if number}

    def _introduce(self) -> None:
        parties = self.parties
        known, news, parties.news = parties.known, parties.news, {}
        for i, one in sorted(news.items()) if self.sealed else ():
            if i in known:
                self._links.introduced(i, one.link)

    def _take_part(self, matching: Matching) -> None:
        self.matching, self.groups = matching, matching.groups
        if self.sealed:
            self._links.place([*matching.groups, *matching.held_out.values()])
        sizes = self.sizes_of(self.groups)
        self.sizes = [sizes.get(m, 0) for m in range(max(sizes, default=-1) + 1)]


class DealtMembers(Members):
    """The groups of parties whose introductions confirm each other.

    Of conflicting claims, that of the partition to which the data are dealt takes precedence: hospitals have
    the first partitions, followed by one edge each, or by the devices, group by group in the order of the
    hospital's people. Other parties are queried again, see ``Parties``.
    """

    def forget(self) -> None:
        """Forget all parties."""
        super().forget()
        self.due = self.num_groups or 0
        # The people of each group's hospital, also of groups that do not take part now.
        self._people: dict[int, int] = {}
        self._unmatched: Counter[str] = Counter()
        # The parties of the last groups.
        self._taking_part: set[int] = set()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        super().load_state_dict(state)
        self._people = {m: size for m, size in enumerate(self.sizes) if size}

    def sizes_of(self, groups: Sequence[Group]) -> Mapping[int, int]:
        """Return the people of every hospital that has taken part."""
        return self._people

    def first_groups(self) -> Matching:
        """Query all parties and return the groups."""
        restored = dict(self._people)
        self.parties.ask(self.parties.present(), QUESTIONS)
        parties = self.parties.known
        self.encodings = self._lengths(parties)
        matching = self._match(parties)
        if not matching.groups:
            raise PairingError(self._faults(parties, restored))
        return matching

    def refresh(self, raised: Collection[int]) -> Matching | None:
        """Query unknown parties when due; return the groups if any answered. Get restarted parties' keys."""
        known = self.parties.known
        unknown = [i for i in self.parties.strangers() if i not in known]
        answered = self.parties.ask(unknown, 1) if unknown else set()
        if answered:  # They may complete groups of excluded parties.
            known = self.parties.known
            self.parties.ask([i for i in self.parties.present() if i not in known], 1)
        matching = self._match(self.parties.known) if answered else None
        self._count()
        if self.sealed:
            self.parties.renew(self._taking_part, raised)
        return matching

    def _count(self) -> None:
        left = self.parties.left_out()
        # Offline, or suspended after invalid replies.
        away = len(self.federation.gather(self.parties.grid).nodes) - len(self.parties.known) - left.total()
        self.counts = self._unmatched + left + Counter({"left-out-away": away})

    def _match(self, parties: Mapping[int, Introduction]) -> Matching:
        limit = len(parties) if self.num_groups is None else self.num_groups
        hospital, device = self.encodings
        form = PartyForm((hospital,), (device,), (), (), ())
        reasons = {}
        for i, one in parties.items():
            if not form.fits(one):
                reasons[i] = "left-out-other-form"
            elif one.group >= limit:
                reasons[i] = "left-out-no-such-group"
            elif one.role == "hospital" and self._people.get(one.group, len(one.ids)) != len(one.ids):
                reasons[i] = "left-out-other-size"
        left = {i: one for i, one in parties.items() if i not in reasons}
        found = match(left, form, standing={**_as_dealt(parties), **self._standing})
        found.groups = [
            replace(group, ids=tuple(p for p in left[group.hospital].ids if p in group.node_of))
            for group in found.groups
        ]
        self._people |= {group.number: len(left[group.hospital].ids) for group in found.groups}
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
        self._count()
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
