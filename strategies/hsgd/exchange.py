"""One local interval of HSGD over messages: the requests, the checks of replies, and failed parties.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 10 to 26. ``algorithm.py`` states
the effect of failures. If a group skips an interval after one side has made its steps, that side undoes them
(``since``).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import MetricRecord, RecordDict

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Row, Steps, Together
from hedgerow.strategies.hsgd.messages import (
    Books,
    Head,
    Schema,
    Share,
    Theta,
    Vector,
    records,
    refused_peers,
)
from hedgerow.strategies.hsgd.parties import Group, PartyLinks
from hedgerow.strategies.hsgd.privacy import RecordExposure
from hedgerow.strategies.node import Node
from hedgerow.wire.message_types import EXCHANGE, UPDATE
from hedgerow.wire.parties import INTRODUCTIONS
from hedgerow.wire.records import PayloadError, records_of

Scalar = bool | int | float | str
Refused = Mapping[str, Sequence[str]]
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


@dataclass(frozen=True)
class Interval:
    """A local interval: its settings, and what its exchanges need."""

    terms: IntervalTerms
    schema: Schema
    links: PartyLinks
    books: Books
    exposure: RecordExposure
    hold: Hold | None = None  # None for no bounds.
    beside: bool = False  # Whether it is no part of the round's training.


@dataclass(frozen=True, eq=False)
class Local:
    """A group in a round."""

    group: Group
    start: Theta  # The model at the round's start.
    ids: tuple[str, ...] = ()  # A_m of the current interval, without people whose party did not answer.
    # theta_{2,m,n} of the devices that trained in the interval; in JFL, in the round.
    device_models: Mapping[str, Vector] = field(default_factory=dict)
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
    def people_of(self) -> dict[int, Sequence[str]]:
        """The nodes with this interval's devices, each with its people."""
        if self.group.hosted:
            return {self.group.node_of[self.ids[0]]: self.ids}
        return {self.group.node_of[person]: [person] for person in self.ids}

    @property
    def model(self) -> Theta | None:
        """The group's model at the end of the round; None if it missed the last interval."""
        if self.lost or self.uploaded is None:
            return None
        head = len(self.start.head)
        return Theta(self.uploaded[:head], self.uploaded[head:], self.device)

    def skipping(self, reason: str, now: "Local") -> "Local":
        """Return this group, as it was before an interval, when it skips it; ``now`` has its people."""
        return replace(self, ids=now.ids or self.ids, lost=reason, missed=now.missed + 1)


class Swap(NamedTuple):
    """A group after the exchange, with each person's encodings unless it skips the interval."""

    before: Local  # The group before the interval.
    now: Local
    head: Head = b""  # The hospital's; with pairs that the server can read, one per person of ``zeta1``.
    zeta1: Mapping[str, Share] = {}
    zeta2: Mapping[str, Share] = {}


class ExchangeReply(NamedTuple):
    """A party's reply to an exchange, with the peers that it refused, by reason."""

    head: Head  # Empty from a device or edge.
    shares: Sequence[Share]  # One per person, or one for all.
    refused: Refused


class UpdateReply(NamedTuple):
    """A party's reply to an update, with the peers that it refused, by reason."""

    refused: Refused
    blocks: Vector | None = None  # None if the party could open nothing that it received.
    loss: float | None = None
    metrics: RecordDict | None = None


# Of each node that is asked, its group and its people in the interval.
Asked = Mapping[int, tuple[Local, Sequence[str]]]


# The exchange: encodings.


def exchanged(interval: Interval, groups: Iterable[Local], run: RoundContext) -> Steps[list[Swap]]:
    """Let hospitals send their heads and zeta_1, and devices zeta_2; return each group with its encodings.

    Batches are reduced to the people with both encodings.
    """
    terms, names = interval.terms, interval.links.names
    before = [replace(one, lost="") for one in groups]
    interval.exposure.exchange({g.group.number: g.ids for g in before}, starts=terms.starts)
    now = [_introduced(one, names) for one in before] if interval.links.sealed else before
    asked = _asked(now)
    hospitals, devices = list[Ask](), list[Ask]()
    for one in now:
        if one.lost:
            continue
        starts, pairs_at_edge = one.at is None, interval.schema.pairs and one.group.hosted
        coding = {"compress": interval.schema.compressed}
        batch = {"ids": list(one.ids), "grouping": "pairs" if interval.schema.pairs else "group"}
        since = {} if one.at in (None, terms.t) else {"since": one.at}
        config: dict[str, Any] = {**batch, **coding, **since}
        blocks = records(head=one.start.head, hospital=one.start.hospital) if starts else {}
        hospitals.append(_request(interval, one, config, {one.group.hospital: blocks}, first=True))
        config = config if one.group.hosted else coding
        devices.append(_request(interval, one, config, _device_models(one), first=True))
        # Devices keep no model between a round's intervals, but pairs on an edge node do.
        interval.books.models_down(
            one.group.number, len(one.ids), to_group=starts, to_devices=starts or not pairs_at_edge
        )

    def read(node: Node, content: RecordDict) -> Row:
        return Row(_exchange_reply(interval, *asked[node.partition_id], node.partition_id, content), 0)

    config = {"t": terms.t, **terms.noise, **terms.uploads_noise}
    replies = yield from _made(interval, EXCHANGE, config, (hospitals, devices), read, run)
    return _swapped(interval, before, now, asked, replies)


def _introduced(one: Local, names: Mapping[int, str]) -> Local:
    """Return a group without people whose party is not introduced; sealed links need the parties' keys."""
    there = tuple(person for person in one.ids if one.group.node_of[person] in names)
    if not there or one.group.hospital not in names:
        return one.skipping("not introduced", one)
    return replace(one, ids=there)


def _asked(groups: Iterable[Local]) -> Asked:
    return {
        node: (one, people)
        for one in groups
        if not one.lost
        for node, people in {one.group.hospital: one.ids, **one.people_of}.items()
    }


def _device_models(one: Local) -> dict[int, Mapping[str, Any]]:
    """Return the records with which each device node starts its interval."""
    if one.group.hosted:
        blocks = records(device=one.device) if one.at is None else {}
        return dict.fromkeys(one.people_of, blocks)
    models = {node: one.device_models.get(person, one.device) for node, (person,) in one.people_of.items()}
    # One record per distinct model.
    made = {id(model): records(device=model) for model in models.values()}
    return {node: made[id(model)] for node, model in models.items()}


def _request(
    interval: Interval,
    one: Local,
    config: Mapping[str, Any],
    parts: Mapping[int, Mapping[str, Any]],
    *,
    first: bool,
) -> Ask:
    """Return the request to one side of a group; ``parts`` has each node's records.

    On sealed links, ``first`` requests of an interval carry the introductions of peers that are new.
    """
    keyed: dict[str, dict[int, Any]] = {}
    for node, made in parts.items():
        for key, record in made.items():
            keyed.setdefault(key, {})[node] = record
    if interval.links.sealed:
        at_hospital = one.group.hospital in parts
        peers = _hospitals_peers(one) if at_hospital else [one.group.hospital]
        config = {**config, **interval.links.config(peers)}
        if first and (lacking := interval.links.lacking(dict.fromkeys(parts, peers))):
            keyed[INTRODUCTIONS] = lacking
    return Ask([*parts], None, config, keyed, pool=one.group.number)


def _hospitals_peers(one: Local) -> list[int]:
    """Return one node per person, or one edge for all."""
    return [one.group.node_of[person] for person in (one.ids[:1] if one.group.hosted else one.ids)]


def _made(
    interval: Interval,
    kind: str,
    config: Mapping[str, Any],
    sides: Iterable[Sequence[Ask]],
    reads: Callable[[Node, RecordDict], Row],
    run: RoundContext,
) -> Steps[list[tuple[int, Any]]]:
    """Send the requests of both sides at once; return the replies by partition id, side by side."""
    exchanges = [
        Exchange(kind, asks, config, reads=reads, unbooked=(INTRODUCTIONS,), beside=interval.beside)
        for asks in sides
    ]
    replies = yield Together(tuple(exchange.prepared(run) for exchange in exchanges))
    return [
        reply
        for chunks in replies
        for columns in chunks
        for reply in zip(columns.nodes, columns.rows, strict=True)
    ]


def _exchange_reply(
    interval: Interval, one: Local, people: Sequence[str], node: int, content: RecordDict
) -> ExchangeReply:
    """Return a party's valid reply to the exchange; PayloadError otherwise."""
    content, refused = refused_peers(content) if interval.links.sealed else (content, {})
    if node != one.group.hospital:
        return ExchangeReply(b"", interval.schema.device_exchange(content, len(people)), refused)
    head, shares = interval.schema.hospital_exchange(content, len(people), one.group.hosted)
    if isinstance(head, np.ndarray) and interval.hold is not None:
        # In a round's first exchange the hospital returns the head that it was sent.
        interval.hold(head, one.start.head, "first head" if one.at is None else "head in a round")
    return ExchangeReply(head, shares, refused)


def _swapped(
    interval: Interval,
    before: Sequence[Local],
    now: Sequence[Local],
    asked: Asked,
    replies: Iterable[tuple[int, ExchangeReply]],
) -> list[Swap]:
    """Return each group with its encodings, and the people that have both."""
    links, of_hospital = interval.links, dict[int, tuple[Head, Mapping[str, Share]]]()
    zeta2: dict[int, dict[str, Share]] = {one.group.number: {} for one in now}
    for node, reply in replies:
        one, people = asked[node]
        m, hospital, shares = one.group.number, node == one.group.hospital, reply.shares
        if links.sealed:
            links.met(node, _hospitals_peers(one) if hospital else [one.group.hospital], reply.refused)
            links.withheld += sum(not len(share) for share in shares)
        each = shares if len(shares) == len(people) else [shares[0]] * len(people)
        found = {person: share for person, share in zip(people, each, strict=True) if len(share)}
        if hospital:
            of_hospital[m] = reply.head, found
        else:
            zeta2[m] |= found
        interval.books.encodings_to_edge(m, len(people), one.group.hosted, hospital=hospital)
    swaps = []
    for was, one in zip(before, now, strict=True):
        if one.lost:
            swaps.append(Swap(was, one))
            continue
        m, heard = one.group.number, one.group.number in of_hospital
        head, zeta1 = of_hospital.get(m, (b"", {}))
        there = [p for p in one.ids if p in zeta2[m] and (p in zeta1 or not heard)]
        after = replace(one, ids=tuple(there) or one.ids)
        if not there or not heard:
            after = was.skipping("no encodings", after)
        swaps.append(Swap(was, after, head, zeta1, zeta2[m]))
    return swaps


# The update: steps.


def stepped(interval: Interval, swaps: Iterable[Swap], run: RoundContext) -> Steps[list[Local]]:
    """Let both sides make Q steps with the other's encodings; return the groups with their models."""
    terms, links = interval.terms, interval.links
    swaps, hospitals, devices = list(swaps), list[Ask](), list[Ask]()
    asked = _asked(swap.now for swap in swaps)
    coding = {"compress": interval.schema.compressed, "pairs": interval.schema.pairs} if links.sealed else {}
    for swap in swaps:
        one = swap.now
        if one.lost:
            continue
        interval.exposure.update(one.group, one.ids, pairs=interval.schema.pairs, ends=terms.uploads)
        interval.books.encodings_relayed(one.group.number, len(one.ids), one.group.hosted)
        batch = {"ids": list(one.ids), "upload": terms.uploads}
        zeta2 = records(zeta2=_shares(interval, one, swap.zeta2, one.ids))
        hospitals.append(
            _request(interval, one, {**batch, **coding}, {one.group.hospital: zeta2}, first=False)
        )
        parts = {node: _for_devices(interval, swap, ids) for node, ids in one.people_of.items()}
        config = {**(batch if one.group.hosted else {}), **coding}
        devices.append(_request(interval, one, config, parts, first=False))

    def read(node: Node, content: RecordDict) -> Row:
        return Row(_update_reply(interval, *asked[node.partition_id], node.partition_id, content), 0)

    schedule = {"eta0": terms.eta0, "eta-period": terms.eta_period, "mu": terms.mu}
    config = {"t": terms.t, "steps": terms.steps, **schedule, **terms.uploads_noise}
    replies = dict((yield from _made(interval, UPDATE, config, (hospitals, devices), read, run)))
    if links.sealed:
        for node, reply in replies.items():
            one = asked[node][0]
            hospital = node == one.group.hospital
            links.met(node, _hospitals_peers(one) if hospital else [one.group.hospital], reply.refused)
            if reply.refused:
                links.count_unopened(reply.refused)
    if not interval.beside:
        run.contents += [
            reply.metrics
            for node, reply in replies.items()
            if reply.metrics is not None and node == asked[node][0].group.hospital
        ]
    return [swap.now if swap.now.lost else _trained(interval, swap, replies) for swap in swaps]


def _shares(
    interval: Interval, one: Local, encodings: Mapping[str, Share], ids: Sequence[str]
) -> list[Share]:
    """Return people's encodings; between a hospital and its edge, all are in one sealed share."""
    whole = interval.links.sealed and one.group.hosted
    return [encodings[person] for person in (ids[:1] if whole else ids)]


def _for_devices(interval: Interval, swap: Swap, ids: Sequence[str]) -> Mapping[str, Any]:
    """Return the head and only these people's rows of zeta_1."""
    zeta1, head = _shares(interval, swap.now, swap.zeta1, ids), swap.head
    if interval.schema.pairs and isinstance(head, np.ndarray):
        # A row per person that the hospital was asked for.
        rows = [list(swap.zeta1).index(person) for person in ids]
        head = head[rows if swap.now.group.hosted else rows[0]]
    return records(head=head, zeta1=zeta1)


def _update_reply(
    interval: Interval, one: Local, people: Sequence[str], node: int, content: RecordDict
) -> UpdateReply:
    """Return a party's valid reply to the update; PayloadError otherwise."""
    content, refused = refused_peers(content) if interval.links.sealed else (content, {})
    if refused and not len(content):
        return UpdateReply(refused)
    schema, hold, group, count = interval.schema, interval.hold, one.group, len(people)
    metrics = records_of(content, MetricRecord)
    if refused and node == group.hospital:
        count -= len(_unread(interval, one, refused))
    if (claimed := next(iter(metrics.values()), MetricRecord()).get("num-examples")) != count:
        raise PayloadError("bad weight", f"num-examples={claimed}, expected {count}")
    if node != group.hospital:
        device = schema.device_update(content, interval.terms.uploads or not group.hosted)
        if device.size and hold is not None:
            hold(device, one.device_models.get(people[0], one.device), "device")
        return UpdateReply(refused, device, None, RecordDict({**metrics}))
    loss, head, hospital = schema.hospital_update(content, count, interval.terms.uploads)
    if interval.terms.uploads and hold is not None:
        hold(head, one.start.head, "head")
        hold(hospital, one.start.hospital, "hospital")
    blocks = np.concatenate([head, hospital], axis=-1)
    return UpdateReply(refused, blocks, loss, RecordDict({**metrics}))


def _unread(interval: Interval, one: Local, refused: Refused) -> set[str]:
    """Return the people whose encodings a hospital of devices could not open."""
    if one.group.hosted:
        return set()
    names = {name for those in refused.values() for name in those}
    return {person for person in one.ids if interval.links.names.get(one.group.node_of[person]) in names}


def _trained(interval: Interval, swap: Swap, replies: Mapping[int, UpdateReply]) -> Local:
    """Return a group with the models of its hospital, and of its devices whose steps count."""
    one, group, terms, pairs = swap.now, swap.now.group, interval.terms, interval.schema.pairs
    people_of = one.people_of
    made = {node: reply.blocks for node, reply in replies.items() if reply.blocks is not None}
    of_hospital = replies.get(group.hospital)
    unread = _unread(interval, one, of_hospital.refused) if of_hospital and of_hospital.refused else set()
    trained = [node for node in sorted(people_of) if node in made and unread.isdisjoint(people_of[node])]
    device_models, averaged = dict(one.device_models), one.averaged
    for node in trained:
        if not group.hosted:
            device_models[people_of[node][0]] = made[node]
        elif terms.uploads:  # An edge node sends its mean at the end of the round.
            averaged = made[node]
        if terms.uploads or not (pairs and group.hosted):
            counted = terms.uploads or not pairs
            interval.books.models_to_edge(group.number, len(people_of[node]), counted)
    needed = {group.hospital, *(people_of if group.hosted else ())}
    if of_hospital is None or not needed <= made.keys():
        return swap.before.skipping("no update", one)
    left = tuple(person for person in one.ids if person not in unread)
    if terms.uploads:
        interval.books.to_cloud(group.number, len(left))
    return replace(
        one, ids=left, averaged=averaged, trained=tuple(trained), loss=of_hospital.loss,
        device_models={p: model for p, model in device_models.items() if p not in unread},
        uploaded=made[group.hospital] if terms.uploads else None, at=terms.t + terms.steps,
    )  # fmt: skip
