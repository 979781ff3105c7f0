"""One local interval of HSGD over messages: the exchange of encodings, then Q steps on both sides.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 10 to 26.
Differs: parties can fail. A device that is silent before the swap is not in the batch; one that is silent
after it is not in the average; where all are, theta_2 stays. A group whose hospital, whose edge node or all
of whose devices before the swap are silent sits out this interval: its three blocks stay what they were,
also where one side has made its steps, which that side then takes back (``since``). Missing the interval
before a global aggregation, it is not in that: the server knows no head and no hospital's encoder that was
not uploaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from hedgerow.strategies.hsgd.aggregators import Combine, EdgeAggregator, Theta, moved
from hedgerow.strategies.hsgd.books import Books
from hedgerow.strategies.hsgd.groups import Group
from hedgerow.strategies.hsgd.messages import (
    INTRODUCTIONS,
    Encodings,
    Heads,
    Schema,
    SealedForAll,
    Vector,
    instruction,
)
from hedgerow.strategies.hsgd.sealing import Refused, SealedLinks, refusals
from hedgerow.strategies.inbox import Reply
from hedgerow.wire.records import PayloadError, records_of
from hedgerow.wire.sealed import HEAD_KEY_BYTES, SEAL_BYTES

__all__ = ["GroupRound", "LocalInterval", "Terms"]

Scalar = bool | int | float | str
Contents = list[tuple[int, RecordDict]]


@dataclass(frozen=True)
class Terms:
    """What every party is told of an interval.

    Parameters
    ----------
    t : int
        Its first iteration, counted from the start of the run.
    steps : int
        Q.
    starts, uploads : bool
        Whether it is the first of its round, and whether it is the last.
    eta0 : float
        Learning rate of iteration 0.
    eta_period : int
        Iterations after which it is halved; 0 for never.
    mu : float
        L2 regularisation of both encoders.
    noise : Mapping[str, Scalar]
        What an exchange tells of noise on encodings.
    uploads_noise : Mapping[str, Scalar]
        What all messages tell of noise on uploads.
    links : SealedLinks or None
        The links on which hospital and devices talk past the server; None where it reads along.
    summed : bool
        Whether parties keep what their steps make until it goes into a sum, see ``sums.py``.
    extra : Mapping[str, Any]
        The train config of the run.
    """

    t: int
    steps: int
    starts: bool
    uploads: bool
    eta0: float
    eta_period: int = 0
    mu: float = 0.0
    noise: Mapping[str, Scalar] = field(default_factory=dict)
    uploads_noise: Mapping[str, Scalar] = field(default_factory=dict)
    links: SealedLinks | None = None
    summed: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def exchange(self, **more: Scalar | list[str]) -> ConfigRecord:
        """Return the config of an exchange."""
        return ConfigRecord({**self.extra, "t": self.t, **self.noise, **self.uploads_noise, **more})

    def update(self, **more: Scalar | list[str]) -> ConfigRecord:
        """Return the config of an update."""
        schedule = {"eta0": self.eta0, "eta-period": self.eta_period, "mu": self.mu}
        told = {"t": self.t, "steps": self.steps, **schedule, **self.uploads_noise}
        return ConfigRecord({**self.extra, **told, **({"summed": True} if self.summed else {}), **more})

    def upload(self) -> ConfigRecord:
        """Return the config of an upload within sums, the same for all members."""
        told = {"t": self.t + self.steps, "sealed": True, **self.uploads_noise}
        return ConfigRecord({**self.extra, **told})

    @property
    def told(self) -> bool:
        """Whether replies tell the model at the end of a round."""
        return self.uploads and not self.summed


class GroupRound:
    """A group in one round: what it started from, how far it came, and why it is out of an interval.

    Parameters
    ----------
    group : Group
        The group.
    start : Theta
        The model at the round's start.
    pairs : bool (default: False)
        Whether every pair has its own model.
    combine : Combine or None (default: None)
        The rule in place of means of devices, and of the pairs' models at the hospital.
    """

    def __init__(
        self, group: Group, start: Theta, pairs: bool = False, combine: Combine | None = None
    ) -> None:
        self.group = group
        self.start = start
        self.edge = EdgeAggregator(group, start.device, pairs, combine)
        # Why it sits out the interval at hand.
        self.lost = ""
        # The iteration that its model was made for; None for that of the round's start.
        self.stands_at: int | None = None
        self.missed = 0  # intervals
        self.loss: float | None = None
        # The nodes of the last interval's devices whose steps count.
        self.trained: list[int] = []
        self._combine = combine
        self._uploaded: tuple[Vector, Vector] | None = None

    @property
    def ids(self) -> list[str]:
        """A_m of the interval at hand, less those who were silent."""
        return self.edge.ids

    def upload(self, head: Vector, hospital: Vector) -> None:
        """Take what the hospital uploads, of JFL a row a pair, for which its mean over pairs is taken."""
        if head.ndim == 2 and self._combine is not None:
            whole = np.concatenate([head, hospital], axis=1)
            start = np.concatenate([self.start.head, self.start.hospital])
            both = moved(self._combine, start, list(whole))
            head, hospital = both[: head.shape[1]], both[head.shape[1] :]
        elif head.ndim == 2:
            head, hospital = (_row_mean(block) for block in (head, hospital))
        self._uploaded = head, hospital

    @property
    def model(self) -> Theta | None:
        """The group's model at the end of the round; None if it missed the last interval."""
        if self.lost or self._uploaded is None:
            return None
        return Theta(*self._uploaded, self.edge.model())


def _row_mean(rows: Vector) -> Vector:
    total = np.zeros(rows.shape[1:])
    for row in rows:
        total += row
    mean: Vector = (total / len(rows)).astype(rows.dtype)
    return mean


class Exchanged(NamedTuple):
    """What a party tells its peers: head, None of a device, and encodings; and whom it refused."""

    head: Heads | None
    rows: Encodings
    refused: Mapping[str, Sequence[str]] = MappingProxyType({})


class Updated(NamedTuple):
    """What a party made of its steps, and whose encodings it refused."""

    hospital: bool
    loss: float | None
    blocks: tuple[Vector, ...]
    refused: Mapping[str, Sequence[str]]


class LocalInterval:
    """The two waves of messages of one local interval.

    Parameters
    ----------
    runs : Sequence[GroupRound]
        The groups, also those that sat out the interval before.
    terms : Terms
        What the parties are told.
    schema : Schema
        What a valid reply is.
    books : Books
        Where transfers go.
    server_round : int
        Under which round they are booked.
    hold : Callable[[Vector, Vector, str], None] or None (default: None)
        Raises PayloadError where what a party made of what it was sent, a block of the model by name, is out
        of bounds. None for no bounds.
    """

    def __init__(
        self,
        runs: Sequence[GroupRound],
        terms: Terms,
        schema: Schema,
        books: Books,
        server_round: int,
        hold: Callable[[Vector, Vector, str], None] | None = None,
    ) -> None:
        self._hold = hold or (lambda made, sent, part: None)
        self.runs = list(runs)
        for run in self.runs:
            run.lost = ""
        self.terms = terms
        self.schema = schema
        self._books = books
        self.server_round = server_round
        self._of = {partition: run for run in self.runs for partition in run.group.partitions}
        self._asked: dict[int, list[str]] = {}
        self.contents: list[RecordDict] = []

    # Wave 1.

    def exchange(self) -> Contents:
        """Return who is asked for encodings, and with what."""
        for run in self.runs:
            self._choose_named(run)
        contents = [content for run in self.runs if not run.lost for content in self._exchange_of(run)]
        return [(partition, self._introduced(partition, content)) for partition, content in contents]

    def _choose_named(self, run: GroupRound) -> None:
        """Leave out whose party told no introduction, where links are sealed."""
        if self.terms.links is None:
            return
        names, group = self.terms.links.names, run.group
        there = [person for person in run.ids if group.hosts[person] in names]
        if not there or group.hospital not in names:
            self._lose(run, "not introduced")
        elif len(there) < len(run.ids):
            run.edge.choose(there)

    def _peers(self, run: GroupRound, partition: int) -> list[int]:
        """Return whom a party talks with: one for each of a hospital's people, or one for all."""
        group = run.group
        if partition != group.hospital:
            return [group.hospital]
        return [group.hosts[person] for person in (run.ids[:1] if group.hosted else run.ids)]

    def _linked(self, run: GroupRound, partition: int) -> dict[str, Any]:
        """Return the keys of a config that say whom a party talks with past the server."""
        links = self.terms.links
        return {} if links is None else links.config(self._peers(run, partition))

    def _introduced(self, partition: int, content: RecordDict) -> RecordDict:
        """Return a content with the introductions of peers that are new to a party."""
        links = self.terms.links
        if (
            links is None
            or (new := links.introduce(partition, self._peers(self._of[partition], partition))) is None
        ):
            return content
        return RecordDict({**content, INTRODUCTIONS: new})

    def _exchange_of(self, run: GroupRound) -> Iterator[tuple[int, RecordDict]]:
        group, edge, terms = run.group, run.edge, self.terms
        grouping = "pairs" if self.schema.pairs else "group"
        compress = self.schema.compressed
        common: dict[str, Any] = {"ids": list(run.ids), "grouping": grouping, "compress": compress}
        starts = run.stands_at is None
        start = {"head": run.start.head, "hospital": run.start.hospital} if starts else {}
        if not starts and run.stands_at != terms.t:
            common["since"] = run.stands_at
        self._asked[group.hospital] = list(run.ids)
        yield (
            group.hospital,
            instruction(terms.exchange(**common, **self._linked(run, group.hospital)), **start),
        )
        if starts:
            self._books.from_cloud(self.server_round, group.number)
        if starts or not self._keeps_models(group):
            self._books.model_to_devices(self.server_round, group.number, len(run.ids))
        asked = edge.asked()
        self._asked.update(asked)
        if group.hosted:
            ((partition, ids),) = asked.items()
            model = {"device": edge.model_for(ids)} if starts else {}
            yield partition, instruction(terms.exchange(**common, **self._linked(run, partition)), **model)
            return
        shared: dict[int, RecordDict] = {}
        for partition, ids in asked.items():
            # Devices that start from one model are sent one and the same content.
            theta_2 = edge.model_for(ids)
            if id(theta_2) not in shared:
                config = terms.exchange(compress=compress, **self._linked(run, partition))
                shared[id(theta_2)] = instruction(config, device=theta_2)
            yield partition, shared[id(theta_2)]

    def check_exchange(self, partition: int, content: RecordDict) -> Exchanged:
        """Return what a party tells its peers; PayloadError for other replies."""
        if self.terms.links is None:
            return Exchanged(*self._check_plain(partition, content))
        run, count = self._of[partition], len(self._asked[partition])
        content, refused = refusals(content)
        if partition != run.group.hospital:
            share = self.schema.device_share(content, count)
            return Exchanged(None, SealedForAll(share) if run.group.hosted else share, refused)
        peers = 1 if run.group.hosted else count
        head, shares = self.schema.hospital_shares(content, count, peers)
        return Exchanged(head, SealedForAll(shares) if run.group.hosted else shares, refused)

    def _check_plain(self, partition: int, content: RecordDict) -> tuple[Heads | None, Encodings]:
        count = len(self._asked[partition])
        if partition == self._of[partition].group.hospital:
            head, zeta1 = self.schema.hospital_exchange(content, count)
            if isinstance(head, np.ndarray):
                # Of a round's first exchange it is the head that was sent, whose change would be usual.
                run = self._of[partition]
                self._hold(head, run.start.head, "first head" if run.stands_at is None else "head in a round")
            return head, zeta1
        return None, self.schema.device_exchange(content, count)

    def exchanged(self, replies: Sequence[Reply]) -> None:
        """Take the replies: hand them to the edges, and settle who is in the batch."""
        withheld: set[tuple[int, str]] = set()
        for reply in replies:
            partition, told = reply.node.partition_id, reply.value
            run = self._of[partition]
            ids = self._asked[partition]
            withheld.update(self._withheld(run, partition, told))
            if told.head is not None:
                run.edge.take_hospital(told.head, told.rows)
                seals = self._seals(run, hospital=True, edge=True)
                self._books.head_and_encodings_to_edge(self.server_round, run.group.number, len(ids), seals)
            else:
                run.edge.take_device_encodings(ids, told.rows)
                seals = self._seals(run, ids, hospital=False, edge=False)
                self._books.encodings_to_edge(self.server_round, run.group.number, len(ids), seals)
        for run in self.runs:
            if run.lost:
                continue
            run.edge.keep([p for p in run.ids if (run.group.number, p) not in withheld])
            if not run.edge.swappable:
                self._lose(run, "no encodings")

    def _withheld(self, run: GroupRound, partition: int, told: Exchanged) -> list[tuple[int, str]]:
        """Return the people of whom a party sealed nothing for the other side, which are out of the batch."""
        links, ids = self.terms.links, self._asked[partition]
        if links is None:
            return []
        links.met(partition, self._peers(run, partition), told.refused)
        empty = [row for row, share in enumerate(told.rows) if not len(share)]
        links.withheld += len(empty)
        those = ids if empty and len(told.rows) == 1 else [ids[row] for row in empty]
        return [(run.group.number, person) for person in those]

    def _seals(self, run: GroupRound, ids: Sequence[str] | None = None, *, hospital: bool, edge: bool) -> int:
        """Return the bytes that sealing adds to a hospital's or its devices' share, on an edge's link or not.

        Devices that an edge hosts seal nothing on their way to it.
        """
        if self.terms.links is None or (run.group.hosted and not edge):
            return 0
        shares = 1 if run.group.hosted else len(run.ids if ids is None else ids)
        if not hospital:
            return shares * SEAL_BYTES
        if self.schema.pairs:
            return shares * SEAL_BYTES
        heads = 1 if edge else shares
        return shares * (SEAL_BYTES + HEAD_KEY_BYTES) + heads * SEAL_BYTES

    # Wave 2.

    def update(self) -> Contents:
        """Return who makes local steps, and with what of the other side."""
        return [content for run in self.runs if not run.lost for content in self._update_of(run)]

    def _update_of(self, run: GroupRound) -> Iterator[tuple[int, RecordDict]]:
        group, edge, terms = run.group, run.edge, self.terms
        a = len(run.ids)
        batch: dict[str, Any] = {"ids": list(run.ids), "upload": terms.told}
        self._books.encodings_to_hospital(
            self.server_round, group.number, a, self._seals(run, hospital=False, edge=True)
        )
        self._asked[group.hospital] = list(run.ids)
        config = terms.update(**batch, **self._coding(run, group.hospital))
        yield group.hospital, instruction(config, zeta2=edge.for_hospital())
        self._books.head_and_encodings_to_devices(
            self.server_round, group.number, a, self._seals(run, hospital=True, edge=False)
        )
        for partition, ids in edge.asked().items():
            self._asked[partition] = ids
            head, zeta1 = edge.for_devices(ids)
            config = terms.update(**(batch if group.hosted else {}), **self._coding(run, partition))
            heads = {} if isinstance(head, bytes) and not head else {"head": head}
            yield partition, instruction(config, **heads, zeta1=zeta1)

    def _coding(self, run: GroupRound, partition: int) -> dict[str, Any]:
        """Return the keys of an update's config by which a party opens what it is handed."""
        if self.terms.links is None:
            return {}
        coding = {"compress": self.schema.compressed, "pairs": self.schema.pairs}
        return {**coding, **self._linked(run, partition)}

    def check_update(self, partition: int, content: RecordDict) -> Updated | Refused:
        """Return what a party made of its steps; PayloadError for other replies."""
        if self.terms.links is None:
            return self._check_updated(partition, content, {})
        rest, refused = refusals(content)
        return (
            Refused(refused) if refused and not len(rest) else self._check_updated(partition, rest, refused)
        )

    def _check_updated(
        self, partition: int, content: RecordDict, refused: Mapping[str, Sequence[str]]
    ) -> Updated:
        group, count = self._of[partition].group, len(self._asked[partition])
        if self.terms.links is not None and partition == group.hospital:
            count -= len(self._unread(partition, refused))
        if _told(content) != count:
            raise PayloadError("bad weight", f"num-examples={_told(content)}, expected {count}")
        if partition == group.hospital:
            loss, head, hospital = self.schema.hospital_update(content, count, self.terms.told)
            if self.terms.told:
                start = self._of[partition].start
                self._hold(head, start.head, "head")
                self._hold(hospital, start.hospital, "hospital")
            return Updated(True, loss, (head, hospital), refused)
        device = self.schema.device_update(content, self._tells_device(group))
        if device.size:
            self._hold(device, self._of[partition].edge.model_for(self._asked[partition]), "device")
        return Updated(False, None, (device,), refused)

    def _unread(self, partition: int, refused: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the people whose encodings a hospital of devices could not open."""
        links, run = self.terms.links, self._of[partition]
        if links is None or run.group.hosted:
            return []
        names = {name for those in refused.values() for name in those}
        return [p for p in self._asked[partition] if links.names.get(run.group.hosts[p]) in names]

    def _tells_device(self, group: Group) -> bool:
        """Return whether a device, or an edge, tells its model after these steps."""
        return self.terms.told if group.hosted else not self.terms.summed

    def updated(self, replies: Sequence[Reply]) -> None:
        """Take the replies: average the devices, and note what hospitals upload."""
        unread = self._read(replies)
        for run in self.runs:
            run.trained = []
        answered = set()
        for reply in replies:
            partition, made = reply.node.partition_id, reply.value
            run = self._of[partition]
            if isinstance(made, Refused):
                continue
            answered.add(partition)
            if made.hospital:
                self._note_hospital(run, made.loss, made.blocks)
                if not self.terms.summed:
                    self.contents.append(reply.metrics)
            elif not any((run.group.number, person) in unread for person in self._asked[partition]):
                self._note_device(run, partition, made)
        for run in self.runs:
            if run.lost:
                continue
            edge_node = next(iter(run.edge.asked())) if run.group.hosted else run.group.hospital
            if not {run.group.hospital, edge_node} <= answered:
                self._lose(run, "no update")
                continue
            if gone := [p for p in run.ids if (run.group.number, p) in unread]:
                run.edge.leave_out(gone)
            run.edge.aggregate()
            run.stands_at = self.terms.t + self.terms.steps
            if self.terms.told:
                self._books.to_cloud(self.server_round, run.group.number, len(run.ids))

    def _note_device(self, run: GroupRound, partition: int, made: Updated) -> None:
        """Take what a device, or an edge, made; where it goes into a sum, note that there is something."""
        run.trained.append(partition)
        if self._tells_device(run.group):
            run.edge.take_device_model(self._asked[partition], made.blocks[0])
        elif not run.group.hosted:
            return
        if self.terms.uploads or not self._keeps_models(run.group):
            counted = self.terms.uploads or not self.schema.pairs
            self._books.models_to_edge(
                self.server_round, run.group.number, len(self._asked[partition]), counted
            )

    def _read(self, replies: Sequence[Reply]) -> set[tuple[int, str]]:
        """Note what parties could not open, and return the people whose encodings a hospital could not."""
        links, unread = self.terms.links, set()
        for reply in replies if links is not None else ():
            partition, made = reply.node.partition_id, reply.value
            run, refused = self._of[partition], made.refused
            assert links is not None
            links.met(partition, self._peers(run, partition), refused)
            links.count_unopened(refused)
            if partition == run.group.hospital:
                unread |= {(run.group.number, person) for person in self._unread(partition, refused)}
        return unread

    def _keeps_models(self, group: Group) -> bool:
        """Whether devices keep theta_2 from one interval of a round to the next: pairs that an edge hosts."""
        return self.schema.pairs and group.hosted

    def _note_hospital(self, run: GroupRound, loss: float | None, blocks: tuple[Vector, ...]) -> None:
        run.loss = loss
        if self.terms.told:
            run.upload(*blocks)

    def _lose(self, run: GroupRound, reason: str) -> None:
        """Have a group sit out the interval."""
        run.lost = reason
        run.missed += 1
        run.edge.undo()
        if not run.ids:  # Of JFL they are those of the round.
            run.edge.ids = list(self._asked[run.group.hospital])


def _told(content: RecordDict) -> Any:
    return next(iter(records_of(content, MetricRecord).values()), MetricRecord()).get("num-examples")
