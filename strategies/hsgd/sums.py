"""Secure sums of HSGD: of devices, of hospitals and of edges the server sees means alone.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", (1) and (2), whose means they are. Differs: parties
keep what their steps made, and one more exchange, ``train.upload``, gathers it masked: all members of a sum
are sent one and the same content (the model that they started from, and who is in the sum), as the masks
want, which what hospital and devices hand each other is not. The loss is a mean within the hospitals' sum.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.aggregators import Theta
from hedgerow.strategies.hsgd.books import Books
from hedgerow.strategies.hsgd.interval import GroupRound
from hedgerow.strategies.hsgd.messages import instruction
from hedgerow.strategies.hsgd.waves import Waves
from hedgerow.strategies.inbox import ExchangeReport, Reply
from hedgerow.strategies.secure_sums import SecureSum, SecureSums, SummedUpdate
from hedgerow.strategies.vectors import WeightedMean
from hedgerow.wire.message_types import UPLOAD
from hedgerow.wire.records import PayloadError, payload_bytes

__all__ = ["Averaged", "PartySums"]

# The sums over hospitals and over edges, beside those over the devices of group m >= 0.
_HOSPITALS, _EDGES = -1, -2
_LINKS = {_HOSPITALS: ("cloud->hospital", "hospital->cloud"), _EDGES: ("cloud->edge", "edge->cloud")}
_OF_DEVICES = ("edge->device", "device->edge")
_NAMES = {_HOSPITALS: "The cloud's mean of hospitals", _EDGES: "The cloud's mean of edges"}

Vector = NDArray[Any]


@dataclass(frozen=True)
class _Due:
    """One sum: the most that each member counts, by partition id, and the blocks that all began with."""

    weights: Mapping[int, float]
    start: Mapping[str, Vector]


class _Mean(NamedTuple):
    """What is known of a sum: the mean of its members' blocks (n,), in float64."""

    mean: Vector
    update: SummedUpdate


class Averaged(NamedTuple):
    """The mean of groups: head and hospital's encoder as one vector, theta_2, metrics, and of how many."""

    head_and_hospital: Vector
    device: Vector
    metrics: RecordDict
    groups: int


class PartySums(SecureSums):
    """The sums of a run, one exchange after the other.

    Parameters
    ----------
    settings : SecureSum
        The settings; of the metrics the loss is averaged, and no other.
    federation : Federation
        Whose nodes they are.
    losses : bool
        Whether hospitals tell a loss within their sum.
    least_devices : int
        Devices without which there is no sum of a batch's.
    hold : Callable[[Vector, Vector, str], None]
        Raises PayloadError where a mean, of what was sent, is out of bounds; the third is the block's name.
    """

    def __init__(
        self,
        settings: SecureSum,
        federation: Federation,
        losses: bool,
        least_devices: int,
        hold: Callable[[Vector, Vector, str], None],
    ) -> None:
        self._hold, self._least_devices = hold, least_devices
        self._due: dict[int, _Due] = {}
        self._waves: Waves | None = None
        told = replace(settings, metrics=("loss",) if losses else ())
        super().__init__(told, federation, down_link=_OF_DEVICES[0], up_link=_OF_DEVICES[1])

    @property
    def report(self) -> ExchangeReport:
        """Of all waves of the round."""
        return self.federation.report if self._waves is None else self._waves.report

    def weight_of(self, member: int) -> float:
        """Return the most that a member counts: 1 of a device, and what others bear out of the rest."""
        return self._due[self._group_of[member]].weights[member]

    def least_of(self, group: int) -> int:
        """Return how many members a sum must have."""
        return self._least_devices if group >= 0 else self.settings.min_nodes

    def called(self, group: int) -> str:
        """Return what a log calls a sum."""
        return _NAMES.get(group, f"Group {group}")

    def book(self, server_round: int, member: int, carried: int, *, down: bool) -> None:
        """Book on the link between a party and who would average it."""
        group = self._group_of[member]
        link = _LINKS.get(group, _OF_DEVICES)[0 if down else 1]
        m = group if group >= 0 else member
        self.federation.ledger.book(server_round, link, m, m, 0, carried)

    def open(
        self,
        server_round: int,
        grid: Grid,
        waves: Waves,
        runs: Iterable[GroupRound],
        config: ConfigRecord,
        cloud: Theta | None = None,
        people: Mapping[int, float] | None = None,
    ) -> list[Message]:
        """Announce the sums of groups that are left, and return the messages to their members.

        ``cloud`` is the model that the round started from, where it ends: then hospitals and edges are summed
        too, each of which counts by its people, at most as many as ``people`` has by group. Without it,
        devices alone.
        """
        left = [run for run in runs if not run.lost]
        self._due, self._waves = _due(left, cloud, people or {}), waves
        roster = self.federation.gather(grid)
        groups = {
            number: [n for i in sorted(one.weights) if (n := roster.nodes[i]).node_id in roster.online]
            for number, one in self._due.items()
        }
        chosen = self.members(server_round, grid, groups)
        contents = {
            number: self.announce(number, instruction(config, **self._due[number].start))
            for number in sorted({self._group_of[node.partition_id] for node in chosen})
        }
        addressed = [(node.partition_id, contents[self._group_of[node.partition_id]]) for node in chosen]
        messages = waves.open(
            grid, UPLOAD, addressed, lambda i, content: self.checked(roster.nodes[i], content)
        )
        self.note_left_out()
        for partition, content in addressed:
            told = sum(payload_bytes(record) for name, record in content.items() if name != "config")
            self.book(server_round, partition, told, down=True)
        return messages

    def close(
        self, server_round: int, replies: Sequence[Reply], runs: Iterable[GroupRound], books: Books
    ) -> Averaged | None:
        """Give groups the means of their devices, and return that of the groups; None where there is none.

        Where devices have no mean, theta_2 stays. A party that is lost in this wave alone is not in its own
        sum; the other half of its group may be.
        """
        means = self._means(server_round, replies)
        told = Counter(reply.node.partition_id for reply in replies)
        left = [run for run in runs if not run.lost]
        for run in left:
            if not run.group.hosted and (count := sum(told[i] for i in run.trained)):
                books.models_to_edge(server_round, run.group.number, count)
            if told[run.group.hospital]:
                books.to_cloud(server_round, run.group.number, 1)
            if (own := means.get(run.group.number)) is not None:
                run.edge.take_sum(own.mean.astype(run.start.device.dtype))
        if _HOSPITALS not in means:
            return None
        head_and_hospital, update = means[_HOSPITALS]
        summed = [run for run in left if run.group.hospital in update.survivors]
        device = WeightedMean()
        for run in summed:
            if not run.group.hosted:
                device.add(float(run.group.size), run.edge.model())
        if _EDGES in means:
            device.add(means[_EDGES].update.weight, means[_EDGES].mean)
        if device.value is None:
            return None
        return Averaged(head_and_hospital, device.value, update.metrics, len(summed))

    def _means(self, server_round: int, replies: Sequence[Reply]) -> dict[int, _Mean]:
        for reply in replies:
            self.book_shares(server_round, reply)
        found = {}
        for number, update in sorted(self.unmask(server_round, replies).items()):
            start = self._due[number].start
            mean = np.concatenate([block.astype(np.float64) for block in start.values()]) + update.mean
            ends = np.cumsum([len(block) for block in start.values()])[:-1]
            try:
                for name, part in zip(start, np.split(mean, ends), strict=True):
                    self._hold(part, start[name], name)
            except PayloadError as error:
                self.lose(update, error.reason)
                continue
            found[number] = _Mean(mean, update)
        return found


def _due(runs: Iterable[GroupRound], cloud: Theta | None, people: Mapping[int, float]) -> dict[int, _Due]:
    """Return the sums over what groups hold."""
    due: dict[int, _Due] = {}
    hospitals: dict[int, float] = {}
    edges: dict[int, float] = {}
    for run in runs:
        group = run.group
        most = people.get(group.number, float(group.size))
        hospitals[group.hospital] = most
        if group.hosted:
            edges[next(iter(run.edge.asked()))] = most
        elif run.trained:
            devices = dict.fromkeys(run.trained, 1.0)
            due[group.number] = _Due(devices, {"device": run.edge.model_for(run.ids)})
    if cloud is not None and hospitals:
        due[_HOSPITALS] = _Due(hospitals, {"head": cloud.head, "hospital": cloud.hospital})
    if cloud is not None and edges:
        due[_EDGES] = _Due(edges, {"device": cloud.device})
    return due
