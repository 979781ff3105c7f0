"""HSGD's parties: their groups and introductions, and who is there.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", section III and line 13 of Algorithm 1.
Differs: the paper assumes that both sides know the same people; here it is checked before training.

Parties may join, leave, reconnect and restart. A party's role and group are fixed for the run by its first
introduction, and must equal those in the registry (``registry.py``; the group is the text of its number), if
it has any. A party without a valid introduction, or that cannot follow the agreement, is excluded and queried
again after 2, 4, 8, … 64 rounds, or at once if it reconnects under another node id.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any, cast

from flwr.app import ConfigRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Question, Steps, answered
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import ExchangeReport, Inbox, Reply
from hedgerow.strategies.introductions import Introductions
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts import Part
from hedgerow.strategies.roster import rounds_away
from hedgerow.wire.failures import RunFailedError
from hedgerow.wire.limits import MAX_FEATURES, MAX_PLACES, MAX_SAMPLES
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


@dataclass(frozen=True)
class LinkIntroduction:
    """A party's introduction to its peers on sealed links: its name, keys, and whether it pins theirs."""

    name: str
    introduction: bytes
    pinned: bool


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


def introduction(content: RecordDict) -> Introduction:
    """Return the introduction of a party with dealt data; PayloadError if invalid."""
    pair = config_in(content, "pair")
    role, group, encoding = _role(pair), _integer(pair, "group", 0), _integer(pair, "encoding", 1)
    ids = _ids(pair)
    _check_alone(content)
    return Introduction(role, group, ids, (encoding,), link=_link(pair))


def own_introduction(content: RecordDict) -> Introduction:
    """Return the introduction of a party with its own file and hashed ids; PayloadError if invalid."""
    pair = config_in(content, "pair")
    role, group = _role(pair), _integer(pair, "group", 0)
    _check_alone(content)
    ids, shape = _ids(pair), pair.get("shape")
    if not all(len(one) == _HASH and set(one) <= set("0123456789abcdef") for one in ids):
        raise PayloadError("bad pair", f"ids must be hashes of {_HASH} hexadecimal digits")
    whole = isinstance(shape, list) and all(isinstance(n, int) and 0 < n < 2**31 for n in shape)
    if not whole or not shape:
        raise PayloadError("bad pair", "shape must be a list of integers > 0")
    sides = tuple(cast(list[int], shape))
    if math.prod(sides) > MAX_FEATURES:
        raise PayloadError("bad pair", f"shape must have at most {MAX_FEATURES} features")
    features, classes = _texts(pair, "features", _MOST_TEXT), _texts(pair, "classes", _MOST_TEXT)
    if len(features) not in (0, sides[-1]):
        raise PayloadError("bad pair", "features must be a list with a name for each column")
    labelled = pair.get("labelled") is True
    return Introduction(role, group, ids, sides, features, labelled, classes, _link(pair))


def _check_alone(content: RecordDict) -> None:
    if list(content) != ["pair"]:
        raise PayloadError("unknown record", f"{sorted(content)}, expected only pair")


def _ids(pair: ConfigRecord) -> tuple[str, ...]:
    ids = _texts(pair, "ids")
    if not 0 < len(ids) <= MAX_SAMPLES or len(set(ids)) < len(ids):
        raise PayloadError("bad pair", f"ids must be 1 to {MAX_SAMPLES} different ids")
    return ids


def _texts(pair: ConfigRecord, key: str, most: float = math.inf) -> tuple[str, ...]:
    value = pair.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and len(one) <= most for one in value):
        raise PayloadError("bad pair", f"{key} must be a list of short texts")
    return tuple(map(str, value))


def _link(pair: ConfigRecord) -> LinkIntroduction | None:
    if "introduction" not in pair:
        return None
    name, one = pair.get("name"), pair.get("introduction")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise PayloadError("bad pair", "name must be a short text")
    if not isinstance(one, bytes) or len(one) != INTRODUCTION_BYTES:
        raise PayloadError("bad pair", f"introduction must have {INTRODUCTION_BYTES} bytes")
    return LinkIntroduction(name, one, pair.get("pinned") is True)


def _role(pair: ConfigRecord) -> str:
    role = pair.get("role")
    if role not in ROLES:
        raise PayloadError("bad pair", f"role={role!r}, expected one of {', '.join(ROLES)}")
    return str(role)


def _integer(pair: ConfigRecord, key: str, least: int) -> int:
    number = pair.get(key)
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise PayloadError("bad pair", f"{key}={number!r}, expected an integer >= {least}")
    return number


_SHOWN = 5


class PairingError(RunFailedError, ValueError):
    """The parties form no valid groups: a side lacks people, or has them twice."""


@dataclass(frozen=True)
class Group:
    """One hospital, its people, and their devices."""

    number: int  # m, from 0.
    hospital: int  # The hospital's partition id.
    ids: tuple[str, ...]  # The people, in the order of the hospital's rows.
    node_of: Mapping[str, int]  # Partition id of the node with each person's device.
    hosted: bool  # Whether one edge node hosts all devices.

    @property
    def size(self) -> int:
        """K_m, the group's people."""
        return len(self.ids)

    @property
    def partitions(self) -> set[int]:
        """The partition ids of all its nodes."""
        return {self.hospital, *self.node_of.values()}

    def people_at(self, node: int) -> list[str]:
        """Return whose devices a node has."""
        return [person for person in self.ids if self.node_of[person] == node]


def batch_size(participation: float, size: int) -> int:
    """Return |A_m| = max(1, floor(alpha K_m)); an alpha of a / K_m is taken for a, whatever its rounding."""
    return max(1, int(participation * size * (1 + 1e-12)))


def draw(
    group: Group, count: int, *, seed: int, t: int, purpose: Purpose = Purpose.PARTICIPATION, number: int = 0
) -> list[str]:
    """Return A_m of the interval that starts at t: ``count`` people, in the hospital's order.

    It depends only on seed, t and m, not on P, the order of nodes or other draws. ``number`` distinguishes
    several draws of one purpose at one t.
    """
    stream = generator(seed, round=t, partition_id=group.number, purpose=purpose)
    for _ in range(number + 1):
        chosen = stream.choice(group.size, count, replace=False)
    return [group.ids[i] for i in sorted(chosen.tolist())]


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
    by_role = {role: [one for one in members if one.role == role] for role in ("hospital", "device", "edge")}
    if len(by_role["hospital"]) != 1:
        return [f"it must have one hospital, got {len(by_role['hospital'])}"]
    edges, devices = by_role["edge"], by_role["device"]
    if len(edges) > 1 or (edges and devices):
        return [f"it must have one edge or devices alone, got {len(edges)} edges and {len(devices)} devices"]
    faults = [f"a device must have one person, got {len(one.ids)}" for one in devices if len(one.ids) != 1]
    at_hospital = by_role["hospital"][0].ids
    at_devices = [person for one in (*edges, *devices) for person in one.ids]
    for where, ids in (("the hospital has", at_hospital), ("the devices have", at_devices)):
        twice = [person for person, times in Counter(ids).items() if times > 1]
        faults += [f"{where} twice {_shown(twice)}"] if twice else []
    lacking = _missing(at_hospital, at_devices)
    faults += [f"no device of {_shown(lacking)}"] if lacking else []
    lacking = _missing(at_devices, at_hospital)
    return faults + ([f"the hospital lacks {_shown(lacking)}"] if lacking else [])


def _shown(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(map(quoted, ids[:_SHOWN])) + more


def _missing(wanted: Sequence[str], there: Sequence[str]) -> list[str]:
    known = set(there)
    return [person for person in wanted if person not in known]


Check = Callable[[int, RecordDict], Any]


class Conversation:
    """A series of exchanges outside training, with one report.

    - ``booked``: Whether to book the transfers through the hub. Introductions are never booked, alone or
      inside a message, because a resumed run repeats them.
    """

    def __init__(self, federation: Federation, server_round: int, *, booked: bool = True) -> None:
        self._federation, self._round, self._booked = federation, server_round, booked
        self._number = 0
        self.report = ExchangeReport()

    def ask(
        self,
        grid: Grid,
        message_type: str,
        contents: Sequence[tuple[int, RecordDict]],
        check: Check,
        timeout: float | None = None,
    ) -> list[Reply]:
        """Make an exchange, and return the valid replies sorted by partition id."""
        roster = self._federation.gather(grid)
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
        return list(answered(self._federation, grid, self._round, question))

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
    - ``read``: Returns an introduction, or raises PayloadError.
    """

    def __init__(
        self,
        federation: Federation,
        sealed: bool = False,
        read: Callable[[RecordDict], Introduction] = own_introduction,
    ) -> None:
        self._federation, self._read, self._sealed = federation, read, sealed
        self._known: dict[int, Introduction] = {}
        # The node id of each introduction.
        self._node_ids: dict[int, int] = {}
        # Role and group of each party's first introduction.
        self._claims: dict[int, tuple[str, int]] = {}
        # How often each partition and node id was excluded.
        self._times: Counter[tuple[int, int]] = Counter()
        # Excluded parties: the round of the next query, the node id, and the reason.
        self._outside: dict[int, tuple[int, int, str]] = {}
        # Introductions since the last ``take_news``.
        self._news: dict[int, Introduction] = {}

    def present(self, grid: Grid) -> Mapping[int, int]:
        """Return the node ids of online parties, by partition id, ascending."""
        return self._federation.gather(grid).node_ids

    def there(self, grid: Grid) -> dict[int, Introduction]:
        """Return the known parties that are online under the node id of their introduction."""
        present = self.present(grid)
        return {i: one for i, one in self.known.items() if present.get(i) == self._node_ids[i]}

    @property
    def known(self) -> dict[int, Introduction]:
        """The introductions of all parties that are not excluded, online or not."""
        return dict(sorted(self._known.items()))

    def strangers(self, grid: Grid) -> list[int]:
        """Return the unknown online parties for which a query is due."""
        found = []
        for i, node_id in self.present(grid).items():
            if self._node_ids.get(i) == node_id:
                continue
            again, refused, _ = self._outside.get(i, (0, node_id, ""))
            if refused != node_id or again <= self._federation.completed:
                found.append(i)
        return found

    def left_out(self, grid: Grid) -> Counter[str]:
        """Count the excluded parties that are online, by reason."""
        present = self.present(grid)
        return Counter(why for i, (_, node_id, why) in self._outside.items() if present.get(i) == node_id)

    def ask(self, grid: Grid, partitions: Iterable[int], questions: int) -> set[int]:
        """Query parties for introductions, at most so many times; return those now known."""
        silent, answered = set(partitions), set[int]()
        if not silent:
            return answered
        talk = Conversation(self._federation, self._federation.completed, booked=False)
        for _ in range(questions):
            if not silent:
                break
            for reply in self._query(talk, grid, silent):
                answered.add(reply.node.partition_id)
                self._take(reply.node, reply.value)
            silent -= answered
        if silent:
            present = self.present(grid)
            for i in silent & present.keys():
                self.leave_out(i, "left-out-no-introduction", present[i])
            reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(talk.report.rejected.items()))
            text = "%d nodes gave no valid introduction (%s); their own logs say why."
            log(WARNING, text, len(silent), reasons)
        return answered & self._known.keys()

    def renew(self, grid: Grid, partitions: Iterable[int]) -> None:
        """Query known parties that may have restarted; their new introductions count for their keys alone."""
        talk = Conversation(self._federation, self._federation.completed, booked=False)
        for reply in self._query(talk, grid, partitions):
            self._news[reply.node.partition_id] = reply.value
            self._node_ids[reply.node.partition_id] = reply.node.node_id

    def restarted(self, grid: Grid) -> set[int]:
        """Return the known parties that are online under another node id than that of their introduction."""
        present = self.present(grid)
        return {i for i in self._known.keys() & present.keys() if present[i] != self._node_ids[i]}

    def take_news(self) -> dict[int, Introduction]:
        """Return the known parties' introductions since the last call."""
        news, self._news = self._news, {}
        return {i: one for i, one in sorted(news.items()) if i in self._known}

    def _query(self, talk: Conversation, grid: Grid, partitions: Iterable[int]) -> list[Reply]:
        sealed = {"sealed": True} if self._sealed else {}
        config = ConfigRecord({"seed": self._federation.settings.seed, **sealed})
        contents = [(i, RecordDict({"config": config})) for i in sorted(partitions)]
        timeout = min(self._federation.timeout, self._federation.settings.max_wait)
        return talk.ask(grid, PAIR, contents, lambda _, content: self._read(content), timeout)

    def _take(self, node: Node, one: Introduction) -> None:
        partition, node_id = node.partition_id, node.node_id
        if (reason := _mismatch(node, one, self._federation)) is not None:
            self.leave_out(partition, reason, node_id)
            return
        if self._claims.setdefault(partition, (one.role, one.group)) != (one.role, one.group):
            self.leave_out(partition, "left-out-another-role", node_id)
            return
        self._known[partition], self._node_ids[partition] = one, node_id
        self._news[partition] = one

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


def _mismatch(node: Node, one: Introduction, federation: Federation) -> str | None:
    """Return the reason if a party's role or group differs from the registered one."""
    if federation.settings.registry is None:
        return None
    for what, claimed in (("role", one.role), ("group", str(one.group))):
        if getattr(node, what) not in ("", claimed):
            return f"left-out-another-{what}-than-registered"
    return None


class PartyLinks(Part):
    """The links of hospital and devices: open, or sealed, of which the server knows public keys.

    On sealed links an exchange also carries the introductions of peers that are new to each other. They are
    not booked, because a resumed run repeats them.

    - ``sealed``: Whether they are sealed; open links need nothing of this class.
    - ``seed``: The run's seed, from which simulated nodes derive their keys.
    - ``names``: Each party's name by partition id; a party without one takes no part.
    - ``withheld``, ``unopened``: The round's shares that senders withheld, and that receivers refused.
    """

    name = "links"

    def __init__(self, sealed: bool, seed: int) -> None:
        self.sealed, self._seed = sealed, seed
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
        """Make each hospital and the nodes of its people's devices neighbours."""
        for group in groups:
            self._neighbours.setdefault(group.hospital, set()).update(group.node_of.values())
            for node in group.node_of.values():
                self._neighbours.setdefault(node, set()).add(group.hospital)

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
        self._introductions.log()

    def opened(self, run: RoundContext) -> Steps[None]:
        """Reset the round's counts."""
        self.withheld, self.unopened = 0, Counter()
        yield from ()

    def ended(self, run: RoundContext) -> None:
        """Report the round's counts."""
        if self.sealed:
            run.metrics |= self._introductions.metrics(self.withheld, self.unopened)

    def config(self, peers: Iterable[int]) -> dict[str, bool | int | list[str]]:
        """Return the config keys that name a receiver's peers."""
        return {"sealed": True, "seed": self._seed, "peers": [self.names[j] for j in peers]}

    def lacking(self, peers_of: Mapping[int, Iterable[int]]) -> dict[int, ConfigRecord]:
        """Return the introductions that parties lack, by partition id and name; parties with all are missing.

        The first record names all neighbours, with empty bytes for those whose introduction comes later: a
        party trusts no name that is added afterwards.
        """
        records = {}
        for i, peers in peers_of.items():
            if new := self._introductions.for_receiver(i, peers):
                named = {j: b"" for j in sorted(self._neighbours.get(i, ())) if j in self.names}
                records[i] = ConfigRecord({self.names[j]: one for j, one in {**named, **new}.items()})
        return records

    def met(self, i: int, peers: Iterable[int], refused: Mapping[str, Iterable[str]]) -> set[int]:
        """Note which introductions a party has: its peers' except the refused ones; return the refused."""
        peers, those = list(peers), {name for names in refused.values() for name in names}
        strangers = {self._of_name[name] for name in those if name in self._of_name}.intersection(peers)
        self._introductions.confirm(i, peers, strangers)
        return strangers

    def count_unopened(self, refused: Mapping[str, Iterable[str]]) -> None:
        """Count shares that did not open."""
        self.unopened.update({reason: len(list(names)) for reason, names in refused.items()})


def _is_anothers(name: str, i: int) -> bool:
    """Return whether a name is another party's partition id; numbers from MAX_PLACES on are no ids."""
    return name.isascii() and name.isdigit() and int(name) < MAX_PLACES and int(name) != i
