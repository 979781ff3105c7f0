"""One local interval of HSGD over messages: the exchange of encodings, then Q steps on both sides.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, lines 10 to 26.
Differs: parties can fail. A device that is silent before the swap is not in the batch; one that is silent
after it is not in the average; where all are, theta_2 stays. A group whose hospital, whose edge node or all
of whose devices before the swap are silent is left out until the next global aggregation: its hospital has
not made the steps that the others have.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from hedgerow.strategies.exchange import Reply
from hedgerow.strategies.hsgd.aggregators import EdgeAggregator, Theta
from hedgerow.strategies.hsgd.books import Books
from hedgerow.strategies.hsgd.groups import Group
from hedgerow.strategies.hsgd.messages import Encodings, Heads, Schema, Vector, instruction
from hedgerow.wire.records import PayloadError, records_of

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
    extra: Mapping[str, Any] = field(default_factory=dict)

    def exchange(self, **more: Scalar | list[str]) -> ConfigRecord:
        """Return the config of an exchange."""
        return ConfigRecord({**self.extra, "t": self.t, **self.noise, **more})

    def update(self, **more: Scalar | list[str]) -> ConfigRecord:
        """Return the config of an update."""
        schedule = {"eta0": self.eta0, "eta-period": self.eta_period, "mu": self.mu}
        return ConfigRecord({**self.extra, "t": self.t, "steps": self.steps, **schedule, **more})


class GroupRound:
    """A group in one round: what it started from, how far it came, and why it was lost.

    Parameters
    ----------
    group : Group
        The group.
    start : Theta
        The model at the round's start.
    pairs : bool (default: False)
        Whether every pair has its own model.
    """

    def __init__(self, group: Group, start: Theta, pairs: bool = False) -> None:
        self.group = group
        self.start = start
        self.edge = EdgeAggregator(group, start.device, pairs)
        self.lost = ""
        self.loss: float | None = None
        self._uploaded: tuple[Vector, Vector] | None = None

    @property
    def ids(self) -> list[str]:
        """A_m of the interval at hand, less those who were silent."""
        return self.edge.ids

    def upload(self, head: Vector, hospital: Vector) -> None:
        """Take what the hospital uploads, of JFL a row a pair, for which its mean over pairs is taken."""
        if head.ndim == 2:
            head, hospital = (_row_mean(block) for block in (head, hospital))
        self._uploaded = head, hospital

    @property
    def model(self) -> Theta | None:
        """The group's model at the end of the round; None if it was lost."""
        if self.lost or self._uploaded is None:
            return None
        return Theta(*self._uploaded, self.edge.model())


def _row_mean(rows: Vector) -> Vector:
    total = np.zeros(rows.shape[1:])
    for row in rows:
        total += row
    mean: Vector = (total / len(rows)).astype(rows.dtype)
    return mean


class LocalInterval:
    """The two waves of messages of one local interval, for all groups that are still in the round.

    Parameters
    ----------
    runs : Sequence[GroupRound]
        The groups; those that are lost are left out.
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
        self.runs = [run for run in runs if not run.lost]
        self.terms = terms
        self.schema = schema
        self._books = books
        self._round = server_round
        self._of = {partition: run for run in self.runs for partition in run.group.partitions}
        self._asked: dict[int, list[str]] = {}
        self.contents: list[RecordDict] = []

    # Wave 1.

    def exchange(self) -> Contents:
        """Return who is asked for encodings, and with what."""
        return [content for run in self.runs for content in self._exchange_of(run)]

    def _exchange_of(self, run: GroupRound) -> Iterator[tuple[int, RecordDict]]:
        group, edge, terms = run.group, run.edge, self.terms
        grouping = "pairs" if self.schema.pairs else "group"
        compress = self.schema.compressed
        common: dict[str, Any] = {"ids": list(run.ids), "grouping": grouping, "compress": compress}
        start = {"head": run.start.head, "hospital": run.start.hospital} if terms.starts else {}
        self._asked[group.hospital] = list(run.ids)
        yield group.hospital, instruction(terms.exchange(**common), **start)
        if terms.starts:
            self._books.from_cloud(self._round, group.number)
        if terms.starts or not self._keeps_models(group):
            self._books.model_to_devices(self._round, group.number, len(run.ids))
        asked = edge.asked()
        self._asked.update(asked)
        if group.hosted:
            ((partition, ids),) = asked.items()
            model = {"device": edge.model_for(ids)} if terms.starts else {}
            yield partition, instruction(terms.exchange(**common), **model)
            return
        shared: dict[int, RecordDict] = {}
        for partition, ids in asked.items():
            # Devices that start from one model are sent one and the same content.
            theta_2 = edge.model_for(ids)
            if id(theta_2) not in shared:
                shared[id(theta_2)] = instruction(terms.exchange(compress=compress), device=theta_2)
            yield partition, shared[id(theta_2)]

    def check_exchange(self, partition: int, content: RecordDict) -> tuple[Heads | None, Encodings]:
        """Return head, where the sender is a hospital, and encodings; PayloadError for other replies."""
        count = len(self._asked[partition])
        if partition == self._of[partition].group.hospital:
            head, zeta1 = self.schema.hospital_exchange(content, count)
            if isinstance(head, np.ndarray):
                # Of a round's first exchange it is the head that was sent, whose change would be usual.
                part = "first head" if self.terms.starts else "head in a round"
                self._hold(head, self._of[partition].start.head, part)
            return head, zeta1
        return None, self.schema.device_exchange(content, count)

    def exchanged(self, replies: Sequence[Reply]) -> None:
        """Take the replies: hand them to the edges, and settle who is in the batch."""
        for reply in replies:
            partition, (head, rows) = reply.node.partition_id, reply.value
            run = self._of[partition]
            ids = self._asked[partition]
            if head is not None:
                run.edge.take_hospital(head, rows)
                self._books.head_and_encodings_to_edge(self._round, run.group.number, len(ids))
            else:
                run.edge.take_device_encodings(ids, rows)
                self._books.encodings_to_edge(self._round, run.group.number, len(ids))
        for run in self.runs:
            run.edge.drop_silent()
            if not run.edge.swappable:
                self._lose(run, "no encodings")

    # Wave 2.

    def update(self) -> Contents:
        """Return who makes local steps, and with what of the other side."""
        return [content for run in self.runs if not run.lost for content in self._update_of(run)]

    def _update_of(self, run: GroupRound) -> Iterator[tuple[int, RecordDict]]:
        group, edge, terms = run.group, run.edge, self.terms
        a = len(run.ids)
        batch: dict[str, Any] = {"ids": list(run.ids), "upload": terms.uploads}
        self._books.encodings_to_hospital(self._round, group.number, a)
        self._asked[group.hospital] = list(run.ids)
        yield group.hospital, instruction(terms.update(**batch), zeta2=edge.for_hospital())
        self._books.head_and_encodings_to_devices(self._round, group.number, a)
        for partition, ids in edge.asked().items():
            self._asked[partition] = ids
            head, zeta1 = edge.for_devices(ids)
            config = terms.update(**batch) if group.hosted else terms.update()
            yield partition, instruction(config, head=head, zeta1=zeta1)

    def check_update(self, partition: int, content: RecordDict) -> tuple[float | None, tuple[Vector, ...]]:
        """Return the loss, where the sender is a hospital, and what it uploads; PayloadError otherwise."""
        group, count = self._of[partition].group, len(self._asked[partition])
        if _told(content) != count:
            raise PayloadError("bad weight", f"num-examples={_told(content)}, expected {count}")
        if partition == group.hospital:
            loss, head, hospital = self.schema.hospital_update(content, count, self.terms.uploads)
            if self.terms.uploads:
                start = self._of[partition].start
                self._hold(head, start.head, "head")
                self._hold(hospital, start.hospital, "hospital")
            return loss, (head, hospital)
        device = self.schema.device_update(content, self.terms.uploads or not group.hosted)
        if device.size:
            self._hold(device, self._of[partition].edge.model_for(self._asked[partition]), "device")
        return None, (device,)

    def updated(self, replies: Sequence[Reply]) -> None:
        """Take the replies: average the devices, and note what hospitals upload."""
        answered = {reply.node.partition_id for reply in replies}
        for reply in replies:
            partition, (loss, blocks) = reply.node.partition_id, reply.value
            run = self._of[partition]
            if loss is not None:
                self._note_hospital(run, loss, blocks)
                self.contents.append(reply.metrics)
                continue
            if self.terms.uploads or not run.group.hosted:
                run.edge.take_device_model(self._asked[partition], blocks[0])
            if self.terms.uploads or not self._keeps_models(run.group):
                counted = self.terms.uploads or not self.schema.pairs
                self._books.models_to_edge(
                    self._round, run.group.number, len(self._asked[partition]), counted
                )
        for run in self.runs:
            if run.lost:
                continue
            edge_node = next(iter(run.edge.asked())) if run.group.hosted else run.group.hospital
            if not {run.group.hospital, edge_node} <= answered:
                self._lose(run, "no update")
            run.edge.aggregate()
            if self.terms.uploads and not run.lost:
                self._books.to_cloud(self._round, run.group.number, len(run.ids))

    def _keeps_models(self, group: Group) -> bool:
        """Whether devices keep theta_2 from one interval of a round to the next: pairs that an edge hosts."""
        return self.schema.pairs and group.hosted

    def _note_hospital(self, run: GroupRound, loss: float, blocks: tuple[Vector, ...]) -> None:
        run.loss = loss
        if self.terms.uploads:
            run.upload(*blocks)

    def _lose(self, run: GroupRound, reason: str) -> None:
        run.lost = reason
        run.edge.forget_encodings()


def _told(content: RecordDict) -> Any:
    return next(iter(records_of(content, MetricRecord).values()), MetricRecord()).get("num-examples")
