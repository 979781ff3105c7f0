"""One local interval of HSGD over messages: the requests, the checks of replies, and failed parties.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 10 to 26. ``algorithm.py`` states
the effect of failures. If a group skips an interval after one side has made its steps, that side undoes them
(``since``).
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
# Takes an updated block of the model, the block that was sent, and its name; PayloadError if too far apart.
Hold = Callable[[Vector, Vector, str], None]


@dataclass(frozen=True)
class IntervalTerms:
    """The settings of an interval, the same for every party."""

    t: int  # Its first iteration, counted from the start of the run.
    steps: int  # Q.
    starts: bool  # Whether it is the first of its round.
    uploads: bool  # Whether it is the last of its round.
    eta0: float  # Learning rate of iteration 0.
    eta_period: int = 0  # Iterations between halvings; 0 for never.
    mu: float = 0.0  # L2 regularisation of both encoders.
    noise: Mapping[str, Scalar] = field(default_factory=dict)  # Config of the noise on encodings.
    uploads_noise: Mapping[str, Scalar] = field(default_factory=dict)  # Config of the noise on uploads.

    @property
    def exchange(self) -> dict[str, Scalar]:
        """The common config of an exchange."""
        return {"t": self.t, **self.noise, **self.uploads_noise}

    @property
    def update(self) -> dict[str, Scalar]:
        """The common config of an update."""
        schedule = {"eta0": self.eta0, "eta-period": self.eta_period, "mu": self.mu}
        return {"t": self.t, "steps": self.steps, **schedule, **self.uploads_noise}


@dataclass(frozen=True, eq=False)
class Local:
    """A group in a round."""

    group: Group
    start: Theta  # The model at the round's start.
    ids: tuple[str, ...] = ()  # A_m of the current interval, without people whose party did not answer.
    # theta_{2,m,n} of the devices that trained in the interval; in JFL, in the round.
    own: Mapping[str, Vector] = field(default_factory=dict)
    at: int | None = None  # The iteration of its model; None for the model of the round's start.
    lost: str = ""  # Why it skips the current interval; empty if it does not.
    missed: int = 0  # Number of skipped intervals.
    trained: tuple[int, ...] = ()  # The last interval's device nodes whose steps count.
    loss: float | None = None  # The hospital's last reported loss.
    # Head and hospital's encoder, once uploaded: (n0 + n1,), in JFL (pairs, n0 + n1).
    uploaded: Vector | None = None
    averaged: Vector | None = None  # theta_{2,m}, (n2,), if it has changed in the round.

    @property
    def device(self) -> Vector:
        """theta_{2,m}, (n2,)."""
        return self.start.device if self.averaged is None else self.averaged

    @property
    def hosts(self) -> dict[int, list[str]]:
        """The nodes that host this interval's devices, each with its people."""
        if self.group.hosted:
            return {self.group.hosts[self.ids[0]]: list(self.ids)}
        return {self.group.hosts[person]: [person] for person in self.ids}

    def device_of(self, person: str) -> Vector:
        """Return the current theta_2 of a person's device."""
        return self.own.get(person, self.device)

    @property
    def model(self) -> Theta | None:
        """The group's model at the end of the round; None if it missed the last interval."""
        if self.lost or self.uploaded is None:
            return None
        head = len(self.start.head)
        return Theta(self.uploaded[:head], self.uploaded[head:], self.device)


class PeerUpdate(NamedTuple):
    """A party's reply to an exchange, with the peers that it refused, by reason."""

    head: Heads | None  # None from a device or edge.
    rows: Encodings
    refused: Mapping[str, Sequence[str]] = MappingProxyType({})


class Updated(NamedTuple):
    """A party's reply to an update, with the peers that it refused, by reason."""

    loss: float | None
    blocks: Vector
    metrics: RecordDict
    refused: Mapping[str, Sequence[str]]


@dataclass
class _Swap:
    """A group's exchanged data: the hospital's head and zeta_1, a row per person, and zeta_2 by person."""

    head: Heads | None = None
    zeta1: Encodings | None = None
    zeta2: dict[str, Encodings] = field(default_factory=dict)


@dataclass
class Interval:
    """The exchange and the update of one local interval."""

    terms: IntervalTerms
    schema: Schema
    links: PartyLinks
    books: Books
    round: int  # The round of the booked transfers.
    exposure: RecordExposure
    hold: Hold | None = None  # None for no bounds.
    contents: list[RecordDict] = field(default_factory=list)  # Receives the hospitals' metrics.
    beside: bool = False  # Whether it is no part of the round's training.

    def __post_init__(self) -> None:
        # Groups before the interval by number, groups by partition id, people per request, swaps by group.
        self._before: dict[int, Local] = {}
        self._of: dict[int, Local] = {}
        self._asked: dict[int, list[str]] = {}
        self._swaps: dict[int, _Swap] = {}

    # The exchange: encodings.

    def begin(self, groups: Iterable[Local]) -> list[Local]:
        """Begin with A_m of each group, without people whose party is not introduced."""
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
            asks.append(self._ask(one, self._exchange_config(one), {one.group.hospital: blocks}))
            if starts:
                self.books.from_cloud(self.round, m)
            if starts or not self._keeps_models(one.group):
                self.books.model_to_devices(self.round, m, len(one.ids))
        return self._exchange(EXCHANGE, asks, self.terms.exchange)

    def encode_at_devices(self, groups: Sequence[Local]) -> Exchange:
        """Ask devices or edges for zeta_2."""
        asks = []
        for one in _left(groups):
            if one.group.hosted:
                blocks = records(device=one.device) if one.at is None else {}
                asks.append(self._ask(one, self._exchange_config(one), dict.fromkeys(one.hosts, blocks)))
                continue
            models = {i: one.device_of(person) for i, (person,) in one.hosts.items()}
            # One record per distinct model.
            made = {id(model): records(device=model) for model in models.values()}
            own = {i: made[id(model)] for i, model in models.items()}
            asks.append(self._ask(one, {"compress": self.schema.compressed}, own))
        return self._exchange(EXCHANGE, asks, self.terms.exchange)

    def _exchange_config(self, one: Local) -> dict[str, Any]:
        """Return a hospital's or an edge's own config of an exchange."""
        coding = {"grouping": "pairs" if self.schema.pairs else "group", "compress": self.schema.compressed}
        since = {} if one.at in (None, self.terms.t) else {"since": one.at}
        return {"ids": list(one.ids), **coding, **since}

    def _ask(self, one: Local, config: Mapping[str, Any], blocks: Mapping[int, Mapping[str, Any]]) -> Ask:
        """Return the request to one side of a group; ``blocks`` has each node's records."""
        hosts, everyone, own = one.hosts, list(one.ids), dict[str, dict[int, Any]]()
        for i, parts in blocks.items():
            self._asked[i] = hosts.get(i, everyone)
            for key, record in parts.items():
                own.setdefault(key, {})[i] = record
        config = {**config, **self.links.config(self._peers(one, next(iter(blocks))))}
        return Ask([*blocks], None, config, own, pool=one.group.number)

    def _exchange(self, kind: str, asks: Sequence[Ask], config: Mapping[str, Any]) -> Exchange:
        if kind == EXCHANGE:
            asks = [self._introduced(ask) for ask in asks]
        reads = self.check_exchange if kind == EXCHANGE else self.check_update
        return Exchange(kind, asks, config, reads=reads, unbooked=(INTRODUCTIONS,), beside=self.beside)

    def _introduced(self, ask: Ask) -> Ask:
        """Return a request with the introductions of peers that are new to each party."""
        new = {i: self.links.introduce(i, self._peers(self._of[i], i)) for i in ask.nodes}
        lacking = {i: record for i, record in new.items() if record is not None}
        return replace(ask, own={**ask.own, INTRODUCTIONS: lacking}) if lacking else ask

    def _peers(self, one: Local, partition: int) -> list[int]:
        """Return a party's peers: of a hospital one per person, or one edge for all."""
        group = one.group
        if partition != group.hospital:
            return [group.hospital]
        return [group.hosts[person] for person in (one.ids[:1] if group.hosted else one.ids)]

    def check_exchange(self, node: Node, content: RecordDict) -> Row:
        """Return a party's valid reply to the exchange; PayloadError otherwise."""
        at = node.partition_id
        one, count = self._of[at], len(self._asked[at])
        content, refused = self.links.refusals(content)
        if at != one.group.hospital:
            rows = self.links.of_device(self.schema, content, count, one.group.hosted)
            return Row(PeerUpdate(None, rows, refused), 0)
        head, zeta1 = self.links.of_hospital(self.schema, content, count, one.group.hosted)
        if isinstance(head, np.ndarray) and self.hold is not None:
            # In a round's first exchange the hospital returns the head that it was sent.
            self.hold(head, one.start.head, "first head" if one.at is None else "head in a round")
        return Row(PeerUpdate(head, zeta1, refused), 0)

    def swapped(self, groups: Sequence[Local], replies: Iterable[tuple[int, PeerUpdate]]) -> list[Local]:
        """Take the replies, and reduce each batch to the people with encodings."""
        self._swaps = {one.group.number: _Swap() for one in groups}
        withheld: set[tuple[int, str]] = set()
        for at, reply in replies:
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

    def _withheld(self, one: Local, at: int, reply: PeerUpdate) -> list[str]:
        """Return the people for whom a party withheld its share: they leave the batch."""
        ids = self._asked[at]
        self.links.met(at, self._peers(one, at), reply.refused)
        empty = self.links.empty(reply.rows)
        return ids if empty and len(reply.rows) == 1 else [ids[row] for row in empty]

    # The update: steps.

    def step_at_hospitals(self, groups: Sequence[Local]) -> Exchange:
        """Ask hospitals for Q steps with the batch's zeta_2."""
        asks = []
        for one in _left(groups):
            m, a, swap = one.group.number, len(one.ids), self._swaps[one.group.number]
            self.exposure.update(one, pairs=self.schema.pairs, ends=self.terms.uploads)
            seals = self.links.seals(self.schema, a, one.group.hosted, hospital=False, edge=True)
            self.books.encodings_to_hospital(self.round, m, a, seals)
            config = {
                "ids": list(one.ids),
                "upload": self.terms.uploads,
                **self.links.coding(self.schema),
            }
            zeta2 = records(zeta2=_joined(swap.zeta2, one.ids))
            asks.append(self._ask(one, config, {one.group.hospital: zeta2}))
            seals = self.links.seals(self.schema, a, one.group.hosted, hospital=True, edge=False)
            self.books.head_and_encodings_to_devices(self.round, m, a, seals)
        return self._exchange(UPDATE, asks, self.terms.update)

    def step_at_devices(self, groups: Sequence[Local]) -> Exchange:
        """Ask devices or edges for Q steps with the head and their own rows of zeta_1."""
        asks = []
        for one in _left(groups):
            batch = {"ids": list(one.ids), "upload": self.terms.uploads} if one.group.hosted else {}
            own = {i: self._for_devices(one, ids) for i, ids in one.hosts.items()}
            asks.append(self._ask(one, {**batch, **self.links.coding(self.schema)}, own))
        return self._exchange(UPDATE, asks, self.terms.update)

    def _for_devices(self, one: Local, ids: Sequence[str]) -> Mapping[str, Any]:
        """Return the head and only these people's rows of zeta_1."""
        swap = self._swaps[one.group.number]
        assert swap.head is not None
        assert swap.zeta1 is not None
        rows, head = [one.ids.index(person) for person in ids], swap.head
        zeta1 = picked(swap.zeta1, rows)
        if isinstance(head, np.ndarray):
            own = head if not self.schema.pairs else head[rows if one.group.hosted else rows[0]]
            return records(head=own, zeta1=zeta1)
        # The sealed heads of pairs are inside their shares.
        return records(head=head, zeta1=zeta1) if head else records(zeta1=zeta1)

    def check_update(self, node: Node, content: RecordDict) -> Row:
        """Return a party's valid reply to the update; PayloadError otherwise."""
        content, refused = self.links.refusals(content)
        if refused and not len(content):
            return Row(Refused(refused), 0)
        at = node.partition_id
        one, count = self._of[at], len(self._asked[at])
        group = one.group
        metrics = records_of(content, MetricRecord)
        if at == group.hospital:
            count -= len(self._unread(at, refused))
        if (claimed := next(iter(metrics.values()), MetricRecord()).get("num-examples")) != count:
            raise PayloadError("bad weight", f"num-examples={claimed}, expected {count}")
        if at != group.hospital:
            device = self.schema.device_update(content, self._sends_device(group))
            if device.size and self.hold is not None:
                self.hold(device, one.device_of(self._asked[at][0]), "device")
            return Row(Updated(None, device, RecordDict({**metrics}), refused), 0)
        loss, head, hospital = self.schema.hospital_update(content, count, self.terms.uploads)
        if self.terms.uploads and self.hold is not None:
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

    def _sends_device(self, group: Group) -> bool:
        """Return whether a device or an edge replies with its model."""
        return self.terms.uploads or not group.hosted

    def _keeps_models(self, group: Group) -> bool:
        """Return whether devices keep theta_2 between a round's intervals, as pairs on an edge node do."""
        return self.schema.pairs and group.hosted

    def stepped(
        self, groups: Sequence[Local], replies: Sequence[tuple[int, Updated | Refused]]
    ) -> list[Local]:
        """Take the replies: the models of hospitals, edges and devices."""
        unread: set[tuple[int, str]] = set()
        for at, reply in replies:
            one = self._of[at]
            self.links.met(at, self._peers(one, at), reply.refused)
            self.links.count_unopened(reply.refused)
            if at == one.group.hospital:
                unread |= {(one.group.number, person) for person in self._unread(at, reply.refused)}
        made = {at: reply for at, reply in replies if isinstance(reply, Updated)}
        self.contents += [made[at].metrics for at in made if at == self._of[at].group.hospital]
        return [one if one.lost else self._trained(one, made, unread) for one in groups]

    def _trained(self, one: Local, made: Mapping[int, Updated], unread: set[tuple[int, str]]) -> Local:
        group, m = one.group, one.group.number
        counts = {
            at: ids for at, ids in one.hosts.items()
            if at in made and not any((m, person) in unread for person in ids)
        }  # fmt: skip
        own, averaged = dict(one.own), one.averaged
        for at, ids in sorted(counts.items()):
            if self._sends_device(group):
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
        if self.terms.uploads:
            self.books.to_cloud(self.round, m, len(left))
        hospital, gone = made[group.hospital], set(one.ids) - set(left)
        return replace(
            one, ids=left, own={person: model for person, model in own.items() if person not in gone},
            averaged=averaged, trained=tuple(counts), loss=hospital.loss,
            uploaded=hospital.blocks if self.terms.uploads else None,
            at=self.terms.t + self.terms.steps,
        )  # fmt: skip

    def _lost(self, one: Local, reason: str) -> Local:
        """Return a group that skips the interval, with its model from before."""
        before = self._before[one.group.number]
        return replace(before, ids=one.ids or before.ids, lost=reason, missed=one.missed + 1)


def _left(groups: Iterable[Local]) -> Iterator[Local]:
    return (one for one in groups if not one.lost)


def _joined(zeta2: Mapping[str, Encodings], ids: Sequence[str]) -> Encodings:
    """Return zeta_2 with a row per person."""
    rows = [zeta2[person] for person in ids]
    if isinstance(rows[0], SealedForAll):
        return rows[0]
    if isinstance(rows[0], list):
        return [row[0] for row in rows if isinstance(row, list)]
    return np.concatenate([row for row in rows if isinstance(row, np.ndarray)])
