"""One local interval of HSGD over messages: what parties are asked, what they tell, and who is out of it.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 10 to 26. Who fails costs what
``algorithm.py`` says. Where a group sits out an interval although one side has made its steps, that side
takes them back (``since``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flwr.app import MetricRecord, RecordDict

from hedgerow.strategies.exchange import Ask, Exchange, Row
from hedgerow.strategies.hsgd.books import Books
from hedgerow.strategies.hsgd.groups import Group
from hedgerow.strategies.hsgd.links import PartyLinks, Refused
from hedgerow.strategies.hsgd.messages import Encodings, Heads, Schema, SealedForAll, Vector, picked, records
from hedgerow.strategies.hsgd.noise import RecordExposure
from hedgerow.strategies.hsgd.theta import Theta
from hedgerow.strategies.inbox import Node
from hedgerow.wire.message_types import EXCHANGE, UPDATE
from hedgerow.wire.parties import INTRODUCTIONS
from hedgerow.wire.records import PayloadError, records_of

__all__ = ["Interval", "IntervalTerms", "Local"]

Scalar = bool | int | float | str
# Raises PayloadError where what a party made of what it was sent, a block of the model by name, is too far.
Hold = Callable[[Vector, Vector, str], None]


@dataclass(frozen=True)
class IntervalTerms:
    """What every party is told of an interval."""

    t: int  # Its first iteration, counted from the start of the run.
    steps: int  # Q.
    # Whether it is the first of its round, and whether it is the last.
    starts: bool
    uploads: bool
    eta0: float  # Learning rate of iteration 0.
    eta_period: int = 0  # Iterations after which it is halved; 0 for never.
    mu: float = 0.0  # L2 regularisation of both encoders.
    noise: Mapping[str, Scalar] = field(default_factory=dict)  # What an exchange tells of noise on encodings.
    # What all messages tell of noise on uploads.
    uploads_noise: Mapping[str, Scalar] = field(default_factory=dict)
    summed: bool = False  # Whether parties keep what their steps make until it goes into a sum.

    @property
    def exchange(self) -> dict[str, Scalar]:
        """What all are told in an exchange."""
        return {"t": self.t, **self.noise, **self.uploads_noise}

    @property
    def update(self) -> dict[str, Scalar]:
        """What all are told in an update."""
        schedule = {"eta0": self.eta0, "eta-period": self.eta_period, "mu": self.mu}
        summed = {"summed": True} if self.summed else {}
        return {"t": self.t, "steps": self.steps, **schedule, **self.uploads_noise, **summed}

    @property
    def upload(self) -> dict[str, Scalar]:
        """What all members of a sum are told."""
        return {"t": self.t + self.steps, "sealed": True, **self.uploads_noise}

    @property
    def told(self) -> bool:
        """Whether replies tell the model at the end of a round."""
        return self.uploads and not self.summed


@dataclass(frozen=True, eq=False)
class Local:
    """A group in a round."""

    group: Group
    start: Theta  # The model at the round's start.
    ids: tuple[str, ...] = ()  # A_m of the interval at hand, less those who were silent.
    # theta_{2,m,n} of the devices that trained; of JFL in the round.
    own: Mapping[str, Vector] = field(default_factory=dict)
    at: int | None = None  # The iteration that its model was made for; None for that of the round's start.
    lost: str = ""  # Why it sits out the interval at hand; empty if it does not.
    missed: int = 0  # Intervals that it sat out.
    trained: tuple[int, ...] = ()  # The nodes of the last interval's devices whose steps count.
    loss: float | None = None  # As the hospital told it last.
    # Head and hospital's encoder as one vector (n0 + n1,), of JFL's pairs a row each, once they are told.
    uploaded: Vector | None = None
    averaged: Vector | None = None  # theta_{2,m} where it has moved in the round, (n2,).

    @property
    def device(self) -> Vector:
        """theta_{2,m}, (n2,)."""
        return self.start.device if self.averaged is None else self.averaged

    @property
    def hosts(self) -> dict[int, list[str]]:
        """The nodes that host this interval's devices, and whose."""
        if self.group.hosted:
            return {self.group.hosts[self.ids[0]]: list(self.ids)}
        return {self.group.hosts[person]: [person] for person in self.ids}

    def device_of(self, person: str) -> Vector:
        """Return theta_2 that a person's device has come to."""
        return self.own.get(person, self.device)

    @property
    def model(self) -> Theta | None:
        """The group's model at the end of the round; None if it missed the last interval."""
        if self.lost or self.uploaded is None:
            return None
        head = len(self.start.head)
        return Theta(self.uploaded[:head], self.uploaded[head:], self.device)


class PeerUpdate(NamedTuple):
    """What a party tells its peers: head, None of a device, and encodings; and whom it refused."""

    head: Heads | None
    rows: Encodings
    refused: Mapping[str, Sequence[str]] = MappingProxyType({})


class Updated(NamedTuple):
    """What a party made of its steps, its metrics, and whose encodings it refused."""

    loss: float | None
    blocks: Vector
    metrics: RecordDict
    refused: Mapping[str, Sequence[str]]


@dataclass
class _Swap:
    """What a group's edge relays: the hospital's head and zeta_1, a row a person, and zeta_2 by person."""

    head: Heads | None = None
    zeta1: Encodings | None = None
    zeta2: dict[str, Encodings] = field(default_factory=dict)


@dataclass
class Interval:
    """The two waves of messages of one local interval."""

    terms: IntervalTerms  # What the parties are told.
    schema: Schema  # What a valid reply is.
    links: PartyLinks  # Whether hospital and devices talk past the server.
    books: Books  # Where transfers go.
    round: int  # Under which round they are booked.
    exposure: RecordExposure  # Counts what is asked for of each person.
    hold: Hold | None = None  # None for no bounds.
    contents: list[RecordDict] = field(default_factory=list)  # Takes the metrics that hospitals tell.
    beside: bool = False  # Whether it stands outside the round's training.

    def __post_init__(self) -> None:
        self._before: dict[int, Local] = {}
        self._of: dict[int, Local] = {}
        # The people that each party was asked of.
        self._asked: dict[int, list[str]] = {}
        self._swaps: dict[int, _Swap] = {}

    # Wave 1: encodings.

    def begin(self, groups: Iterable[Local]) -> list[Local]:
        """Begin with A_m of each group; whose party told no introduction is out of it."""
        groups = [replace(one, lost="") for one in groups]
        self._before = {one.group.number: one for one in groups}
        self.exposure.exchange(groups, starts=self.terms.starts)
        named = []
        for one in groups:
            there = tuple(p for p in one.ids if self.links.takes_part(one.group.hosts[p]))
            introduced = there and self.links.takes_part(one.group.hospital)
            named.append(replace(one, ids=there) if introduced else self._lost(one, "not introduced"))
        self._note(named)
        return named

    def _note(self, groups: Sequence[Local]) -> None:
        self._of = {i: one for one in groups for i in one.group.partitions}

    def encode_at_hospitals(self, groups: Sequence[Local]) -> Exchange:
        """Ask hospitals for head and zeta_1."""
        asks = []
        for one in _left(groups):
            m, starts = one.group.number, one.at is None
            blocks = records(head=one.start.head, hospital=one.start.hospital) if starts else {}
            asks.append(self._ask(one, self._told_of(one), {one.group.hospital: blocks}))
            if starts:
                self.books.from_cloud(self.round, m)
            if starts or not self._keeps_models(one.group):
                self.books.model_to_devices(self.round, m, len(one.ids))
        return self._exchange(EXCHANGE, asks, self.terms.exchange)

    def encode_at_devices(self, groups: Sequence[Local]) -> Exchange:
        """Ask devices, or edges for theirs, for zeta_2."""
        asks = []
        for one in _left(groups):
            if one.group.hosted:
                blocks = records(device=one.device) if one.at is None else {}
                asks.append(self._ask(one, self._told_of(one), dict.fromkeys(one.hosts, blocks)))
                continue
            models = {i: one.device_of(person) for i, (person,) in one.hosts.items()}
            # Devices that start from one model are sent one and the same record.
            made = {id(model): records(device=model) for model in models.values()}
            own = {i: made[id(model)] for i, model in models.items()}
            asks.append(self._ask(one, {"compress": self.schema.compressed}, own))
        return self._exchange(EXCHANGE, asks, self.terms.exchange)

    def _told_of(self, one: Local) -> dict[str, Any]:
        """Return what a hospital or an edge is told in an exchange."""
        coding = {"grouping": "pairs" if self.schema.pairs else "group", "compress": self.schema.compressed}
        since = {} if one.at in (None, self.terms.t) else {"since": one.at}
        return {"ids": list(one.ids), **coding, **since}

    def _ask(self, one: Local, told: Mapping[str, Any], blocks: Mapping[int, Mapping[str, Any]]) -> Ask:
        """Return what nodes of one side of a group are asked; ``blocks`` has the records of each."""
        hosts, everyone, own = one.hosts, list(one.ids), dict[str, dict[int, Any]]()
        for i, parts in blocks.items():
            self._asked[i] = hosts.get(i, everyone)
            for key, record in parts.items():
                own.setdefault(key, {})[i] = record
        told = {**told, **self.links.config(self._peers(one, next(iter(blocks))))}
        return Ask([*blocks], None, told, own, pool=one.group.number)

    def _exchange(self, kind: str, asks: Sequence[Ask], told: Mapping[str, Any]) -> Exchange:
        if kind == EXCHANGE:
            asks = [self._introduced(ask) for ask in asks]
        reads = self.check_exchange if kind == EXCHANGE else self.check_update
        return Exchange(kind, asks, told, reads=reads, unbooked=(INTRODUCTIONS,), beside=self.beside)

    def _introduced(self, ask: Ask) -> Ask:
        """Return an ask with the introductions of peers that are new to each party."""
        new = {i: self.links.introduce(i, self._peers(self._of[i], i)) for i in ask.nodes}
        lacking = {i: record for i, record in new.items() if record is not None}
        return replace(ask, own={**ask.own, INTRODUCTIONS: lacking}) if lacking else ask

    def _peers(self, one: Local, partition: int) -> list[int]:
        """Return whom a party talks with: one for each of a hospital's people, or one for all."""
        group = one.group
        if partition != group.hospital:
            return [group.hospital]
        return [group.hosts[person] for person in (one.ids[:1] if group.hosted else one.ids)]

    def check_exchange(self, node: Node, content: RecordDict) -> Row:
        """Return what a party tells its peers; PayloadError for other replies."""
        at = node.partition_id
        one, count = self._of[at], len(self._asked[at])
        content, refused = self.links.refusals(content)
        if at != one.group.hospital:
            rows = self.links.of_device(self.schema, content, count, one.group.hosted)
            return Row(PeerUpdate(None, rows, refused), 0)
        head, zeta1 = self.links.of_hospital(self.schema, content, count, one.group.hosted)
        if isinstance(head, np.ndarray) and self.hold is not None:
            # Of a round's first exchange it is the head that was sent, whose change would be usual.
            self.hold(head, one.start.head, "first head" if one.at is None else "head in a round")
        return Row(PeerUpdate(head, zeta1, refused), 0)

    def swapped(self, groups: Sequence[Local], told: Iterable[tuple[int, PeerUpdate]]) -> list[Local]:
        """Take the replies, and settle who is in the batch: those who were heard."""
        self._swaps = {one.group.number: _Swap() for one in groups}
        withheld: set[tuple[int, str]] = set()
        for at, reply in told:
            one, ids = self._of[at], self._asked[at]
            m, hosted = one.group.number, one.group.hosted
            withheld |= {(m, person) for person in self._withheld(one, at, reply)}
            if reply.head is not None:
                self._swaps[m].head, self._swaps[m].zeta1 = reply.head, reply.rows
                seals = self.links.seals(self.schema, len(one.ids), hosted, hospital=True, edge=True)
                self.books.head_and_encodings_to_edge(self.round, m, len(ids), seals)
            else:
                for row, person in enumerate(ids):
                    self._swaps[m].zeta2[person] = picked(reply.rows, [row])
                seals = self.links.seals(self.schema, len(ids), hosted, hospital=False, edge=False)
                self.books.encodings_to_edge(self.round, m, len(ids), seals)
        settled = [one if one.lost else self._heard(one, withheld) for one in groups]
        self._note(settled)
        return settled

    def _heard(self, one: Local, withheld: set[tuple[int, str]]) -> Local:
        m = one.group.number
        swap, asked = self._swaps[m], self._asked[one.group.hospital]
        there = [r for r, p in enumerate(one.ids) if p in swap.zeta2 and (m, p) not in withheld]
        ids = tuple(one.ids[row] for row in there)
        if swap.zeta1 is None or not there:
            return self._lost(replace(one, ids=ids or tuple(asked)), "no encodings")
        if len(there) < len(one.ids):
            swap.zeta1 = picked(swap.zeta1, there)
            if self.schema.pairs and isinstance(swap.head, np.ndarray):
                swap.head = swap.head[there]
        return replace(one, ids=ids)

    def _withheld(self, one: Local, at: int, told: PeerUpdate) -> list[str]:
        """Return the people of whom a party sealed nothing for the other side, which are out of the batch."""
        ids = self._asked[at]
        self.links.met(at, self._peers(one, at), told.refused)
        empty = self.links.empty(told.rows)
        return ids if empty and len(told.rows) == 1 else [ids[row] for row in empty]

    # Wave 2: steps.

    def step_at_hospitals(self, groups: Sequence[Local]) -> Exchange:
        """Have hospitals make Q steps with the batch's zeta_2."""
        asks = []
        for one in _left(groups):
            m, a, swap = one.group.number, len(one.ids), self._swaps[one.group.number]
            self.exposure.update(one, pairs=self.schema.pairs, ends=self.terms.uploads)
            seals = self.links.seals(self.schema, a, one.group.hosted, hospital=False, edge=True)
            self.books.encodings_to_hospital(self.round, m, a, seals)
            told = {"ids": list(one.ids), "upload": self.terms.told, **self.links.coding(self.schema)}
            zeta2 = records(zeta2=_joined(swap.zeta2, one.ids))
            asks.append(self._ask(one, told, {one.group.hospital: zeta2}))
            seals = self.links.seals(self.schema, a, one.group.hosted, hospital=True, edge=False)
            self.books.head_and_encodings_to_devices(self.round, m, a, seals)
        return self._exchange(UPDATE, asks, self.terms.update)

    def step_at_devices(self, groups: Sequence[Local]) -> Exchange:
        """Have devices make Q steps with the head and their own row of zeta_1."""
        asks = []
        for one in _left(groups):
            batch = {"ids": list(one.ids), "upload": self.terms.told} if one.group.hosted else {}
            own = {i: self._for_devices(one, ids) for i, ids in one.hosts.items()}
            asks.append(self._ask(one, {**batch, **self.links.coding(self.schema)}, own))
        return self._exchange(UPDATE, asks, self.terms.update)

    def _for_devices(self, one: Local, ids: Sequence[str]) -> Mapping[str, Any]:
        """Return the head and these people's rows of zeta_1, and no one else's."""
        swap = self._swaps[one.group.number]
        assert swap.head is not None
        assert swap.zeta1 is not None
        rows, head = [one.ids.index(person) for person in ids], swap.head
        zeta1 = picked(swap.zeta1, rows)
        if isinstance(head, np.ndarray):
            own = head if not self.schema.pairs else head[rows if one.group.hosted else rows[0]]
            return records(head=own, zeta1=zeta1)
        # The sealed heads of pairs are parts of their shares.
        return records(head=head, zeta1=zeta1) if head else records(zeta1=zeta1)

    def check_update(self, node: Node, content: RecordDict) -> Row:
        """Return what a party made of its steps; PayloadError for other replies."""
        content, refused = self.links.refusals(content)
        if refused and not len(content):
            return Row(Refused(refused), 0)
        at = node.partition_id
        one, count = self._of[at], len(self._asked[at])
        group = one.group
        metrics = records_of(content, MetricRecord)
        if at == group.hospital:
            count -= len(self._unread(at, refused))
        if (told := next(iter(metrics.values()), MetricRecord()).get("num-examples")) != count:
            raise PayloadError("bad weight", f"num-examples={told}, expected {count}")
        if at != group.hospital:
            device = self.schema.device_update(content, self._tells_device(group))
            if device.size and self.hold is not None:
                self.hold(device, one.device_of(self._asked[at][0]), "device")
            return Row(Updated(None, device, RecordDict({**metrics}), refused), 0)
        loss, head, hospital = self.schema.hospital_update(content, count, self.terms.told)
        if self.terms.told and self.hold is not None:
            self.hold(head, one.start.head, "head")
            self.hold(hospital, one.start.hospital, "hospital")
        blocks = np.concatenate([head, hospital], axis=-1)
        return Row(Updated(loss, blocks, RecordDict({**metrics}), refused), 0)

    def _unread(self, at: int, refused: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the people whose encodings a hospital of devices could not open."""
        one = self._of[at]
        if one.group.hosted:
            return []
        names = {name for those in refused.values() for name in those}
        return [p for p in self._asked[at] if self.links.named(one.group.hosts[p]) in names]

    def _tells_device(self, group: Group) -> bool:
        """Return whether a device, or an edge, tells its model after these steps."""
        return self.terms.told if group.hosted else not self.terms.summed

    def _keeps_models(self, group: Group) -> bool:
        """Whether devices keep theta_2 from one interval of a round to the next: pairs that an edge hosts."""
        return self.schema.pairs and group.hosted

    def stepped(self, groups: Sequence[Local], told: Sequence[tuple[int, Updated | Refused]]) -> list[Local]:
        """Take the replies: what hospitals and edges upload, and each device's model."""
        unread: set[tuple[int, str]] = set()
        for at, reply in told:
            one = self._of[at]
            self.links.met(at, self._peers(one, at), reply.refused)
            self.links.count_unopened(reply.refused)
            if at == one.group.hospital:
                unread |= {(one.group.number, person) for person in self._unread(at, reply.refused)}
        made = {at: reply for at, reply in told if isinstance(reply, Updated)}
        if not self.terms.summed:
            hospitals = [at for at in made if at == self._of[at].group.hospital]
            self.contents += [made[at].metrics for at in hospitals]
        return [one if one.lost else self._trained(one, made, unread) for one in groups]

    def _trained(self, one: Local, made: Mapping[int, Updated], unread: set[tuple[int, str]]) -> Local:
        group, m = one.group, one.group.number
        counts = {
            at: ids for at, ids in one.hosts.items()
            if at in made and not any((m, person) in unread for person in ids)
        }  # fmt: skip
        own, averaged = dict(one.own), one.averaged
        for at, ids in sorted(counts.items()):
            if self._tells_device(group):
                if group.hosted:
                    averaged = made[at].blocks
                else:
                    own[ids[0]] = made[at].blocks
            elif not group.hosted:
                continue
            if self.terms.uploads or not self._keeps_models(group):
                counted = self.terms.uploads or not self.schema.pairs
                self.books.models_to_edge(self.round, m, len(ids), counted)
        edge_node = next(iter(one.hosts)) if group.hosted else group.hospital
        if not {group.hospital, edge_node} <= made.keys():
            return self._lost(one, "no update")
        left = tuple(person for person in one.ids if (m, person) not in unread)
        if self.terms.told:
            self.books.to_cloud(self.round, m, len(left))
        hospital, gone = made[group.hospital], set(one.ids) - set(left)
        return replace(
            one, ids=left, own={person: model for person, model in own.items() if person not in gone},
            averaged=averaged, trained=tuple(counts), loss=hospital.loss,
            uploaded=hospital.blocks if self.terms.told else None,
            at=self.terms.t + self.terms.steps,
        )  # fmt: skip

    def _lost(self, one: Local, reason: str) -> Local:
        """Have a group sit out the interval: its model is what it was before."""
        before = self._before[one.group.number]
        return replace(before, ids=one.ids or before.ids, lost=reason, missed=one.missed + 1)


def _left(groups: Iterable[Local]) -> Iterator[Local]:
    return (one for one in groups if not one.lost)


def _joined(zeta2: Mapping[str, Encodings], ids: Sequence[str]) -> Encodings:
    """Return zeta_2, a row for each of ``ids``."""
    rows = [zeta2[person] for person in ids]
    if isinstance(rows[0], SealedForAll):
        return rows[0]
    if isinstance(rows[0], list):
        return [row[0] for row in rows if isinstance(row, list)]
    return np.concatenate([row for row in rows if isinstance(row, np.ndarray)])
