"""HSGD's two means, (1) of a group's devices and (2) of groups: plain, robust or within secure sums.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning". With secure sums, parties keep their updated models,
and one more exchange, ``train.upload``, collects them masked. Masks require identical content for all members
of a sum (the model that they started from, and the list of members), and an update's content differs by node.
The loss is a mean within the hospitals' sum. Invalid combinations are refused before a run, or before its
first round if they depend on the parties.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any, NamedTuple, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.aggregate import Aggregator, Choice, Mean, WeightedMean, means_of
from hedgerow.strategies.aggregate.secure_sums import SecureSum, SecureSums, SummedUpdate, parse_secure_sum
from hedgerow.strategies.exchange import Ask, Exchange, Models, Steps, together
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.groups import Group, PairingError
from hedgerow.strategies.hsgd.interval import Hold, Interval, Local
from hedgerow.strategies.hsgd.system import MethodVariant
from hedgerow.strategies.hsgd.theta import Theta
from hedgerow.strategies.inbox import ExchangeReport, Node
from hedgerow.strategies.parts import Part
from hedgerow.strategies.run import Run
from hedgerow.strategies.vectors import RunningMean
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.masked_sums import LEAST_MEMBERS, MAX_MEMBERS
from hedgerow.wire.message_types import UPLOAD
from hedgerow.wire.records import payload_bytes, to_record
from hedgerow.wire.robust_means import Aggregation

__all__ = ["RECOMMENDED_SUM_SIZE", "Asked", "Averages", "Means", "PlainMeans", "Summed", "mean_of_models"]

Vector = NDArray[Any]
Asked = str | Aggregation | Aggregator
Pools = Mapping[int, tuple[Vector, Mapping[int, Vector]]]

_ALONE = (
    "a smaller sum reveals its members: for a single device, which has one person, it reveals the features"
)

# With this many devices in a sum, hardly any unit of a small first layer is active for one person only.
RECOMMENDED_SUM_SIZE = 16


@dataclass(frozen=True)
class Means:
    """The aggregation rules of a run."""

    groups: Choice  # At the cloud.
    devices: Choice  # At an edge, and for JFL's pairs.
    sums: SecureSum | None  # Set if the server sees only means.
    least_devices: int = RECOMMENDED_SUM_SIZE  # Minimum devices of a batch in a sum.

    @classmethod
    def of(
        cls,
        aggregation: Asked,
        device_aggregation: Asked | None,
        secure_sum: bool | SecureSum,
        min_sum_devices: int = RECOMMENDED_SUM_SIZE,
    ) -> Self:
        """Return the rules for these settings; ValueError if they are incompatible."""
        groups = Choice.of(aggregation)
        devices = Choice(groups.rule) if device_aggregation is None else Choice.of(device_aggregation)
        sums = parse_secure_sum(secure_sum)
        int_at_least(LEAST_MEMBERS if sums is None else sums.min_nodes, min_sum_devices=min_sum_devices)
        if min_sum_devices > MAX_MEMBERS:
            raise ValueError(f"min_sum_devices must be at most {MAX_MEMBERS}, got {min_sum_devices!r}")
        means = cls(groups, devices, sums, min_sum_devices)
        if sums is not None and (rule := means._robust):
            raise ValueError(f"aggregation must be 'mean' with secure_sum, got {str(rule)!r}")
        return means

    @property
    def _robust(self) -> Choice | None:
        return next((rule for rule in (self.groups, self.devices) if not rule.is_mean), None)

    def check(self, variant: MethodVariant, num_groups: int | None, *, sealed: bool, adaptive: bool) -> None:
        """Raise ValueError if these rules are incompatible with the run's other settings."""
        rule, sums = self._robust, self.sums
        if adaptive and (rule is not None or sums is not None):
            what = "secure_sum" if rule is None else f"aggregation = {str(rule)!r}"
            raise ValueError(f"adaptive must be None with {what}: its estimates need plain means")
        if variant.has_cloud and num_groups is not None and num_groups < self.groups.rule.least:
            raise ValueError(
                f"aggregation is {str(self.groups)!r}, which needs {self.groups.rule.least} groups; "
                f"num_groups is {num_groups}"
            )
        if sums is None:
            return
        if sums.noise is not None:
            raise ValueError("secure_sum.noise must be None in HSGD: upload_noise is its noise")
        if not sealed:
            raise ValueError(
                "sealed must be True with secure_sum: heads and encodings that the server can read reveal "
                "what a sum hides"
            )
        if not variant.has_cloud:
            alone = "the only hospital" if variant.merged else "a group with its own model"
            raise ValueError(f"secure_sum must be False in {variant.method}: {alone} is alone in its sum")
        if num_groups is not None and num_groups < sums.min_nodes:
            raise ValueError(_too_few_groups("num_groups", num_groups, sums))

    def check_groups(
        self, groups: Sequence[tuple[Group, int]], variant: MethodVariant, *, whole: bool
    ) -> None:
        """Warn of groups too small for these means.

        - ``groups``: The groups that a run starts with, at least one.
        - ``whole``: Whether a local interval is a global one.

        Raises
        ------
        PairingError
            Where not one is large enough, or there are too few of them.
        """
        if variant.has_cloud and len(groups) < self.groups.rule.least:
            log(WARNING, "%d groups are too few for %s: their median is taken.", len(groups), self.groups)
        least = self.devices.rule.least
        averaged = [(g, a) for g, a in groups if variant.pairs or not g.hosted]
        small = [g.number for g, a in averaged if a < least]
        if small and len(small) == len(groups):
            raise PairingError(
                f"device_aggregation is {str(self.devices)!r}, which needs {least} devices; batches have "
                f"{max(a for _, a in groups)} at most"
            )
        if small:
            log(WARNING, "Batches of fewer than %d devices, in groups %s, take their median.", least, small)
        if self.sums is None:
            return
        if len(groups) < self.sums.min_nodes:
            raise PairingError(_too_few_groups("groups", len(groups), self.sums))
        devices = [(g, a) for g, a in groups if not g.hosted]
        if devices and variant.pairs and not whole:
            raise PairingError(
                "local_interval must be global_interval in jfl with devices as nodes and secure_sum: "
                "between intervals the server hands each device its own model"
            )
        alone = [g.number for g, a in devices if not self.least_devices <= a <= MAX_MEMBERS]
        if alone and len(alone) == len(groups):
            raise PairingError(
                f"batches must have {self.least_devices} (min_sum_devices) to {MAX_MEMBERS} devices with "
                f"secure_sum, got {min(a for _, a in devices)} to {max(a for _, a in devices)}: {_ALONE}"
            )
        if alone:
            log(WARNING, "Groups %s have no sum of devices, so they keep their theta_2: %s.", alone, _ALONE)
        if few := [a for _, a in devices if self.least_devices <= a < RECOMMENDED_SUM_SIZE]:
            log(
                WARNING,
                "Sums of %d devices: if a unit is active for one person only, the mean reveals that person's "
                "features, though not the person; larger batches or noisy uploads hide them.",
                min(few),
            )

    def plain(self, *, apart: bool = False) -> "PlainMeans":
        """Return the means without secure sums; groups that are kept ``apart`` have no rule."""
        default = PlainMeans()
        groups = default.groups if apart else self.groups.aggregator(default.groups)
        return PlainMeans(groups, self.devices.aggregator(default.devices))

    @property
    def parts(self) -> list[Part]:
        """The aggregators with state."""
        owns: tuple[Any, ...] = self.groups.own, self.devices.own
        return [own for own in owns if isinstance(own, Part)]

    def __str__(self) -> str:
        if self.sums is not None:
            return f"secure sums, {self.sums}"
        return f"{self.groups} of groups, {self.devices} of devices"


def _too_few_groups(key: str, count: int, sums: SecureSum) -> str:
    return (
        f"{key} must be at least {sums.min_nodes} with secure_sum, got {count}: hospitals and edges are "
        "summed separately, and a smaller sum reveals its members"
    )


class GroupsMean(NamedTuple):
    """The mean of groups, and their number."""

    theta: Theta
    groups: int


@dataclass(frozen=True)
class ByPeople(WeightedMean):
    """The mean weighted by each group's number of people."""

    def weight(self, run: Run, node: int, claimed: float) -> float:
        """Return K_m."""
        return claimed


_ALIKE = WeightedMean(by_examples=False)


def mean_of_models(
    theta: Theta, models: Mapping[int, tuple[int, Theta]], run: Run, aggregator: Aggregator = ByPeople()
) -> Steps[Theta]:
    """Return the weighted mean of models; ``models`` maps an aggregator's node id to (K_m, model)."""
    rows = {m: model.whole for m, (_, model) in models.items()}
    people = {m: float(size) for m, (size, _) in models.items()}
    means = yield from means_of(aggregator, {0: (theta.whole, rows)}, run, people, ByPeople().reply_weight)
    return theta.like(means[0].model()) if rows else theta


@dataclass(frozen=True)
class PlainMeans:
    """Means of models that the server sees."""

    groups: Aggregator = ByPeople()
    devices: Aggregator = _ALIKE  # And of JFL's pairs.

    def of_devices(self, interval: Interval, groups: Sequence[Local], run: Run) -> Steps[list[Local]]:
        """Average the devices that answered, (1); a group without any keeps its theta_2."""
        if interval.schema.pairs:
            return (yield from self._of_pairs(interval, groups, run))
        left = [one for one in groups if not one.lost and not one.group.hosted]
        rows = {one.group.number: (one.device, _by_host(one, one.own)) for one in left if one.own}
        return _with_devices(groups, (yield from self._of(rows, run)))

    def _of(self, rows: Pools, run: Run) -> Steps[Mapping[int, Mean]]:
        return means_of(self.devices, rows, run, weigh=_ALIKE.reply_weight)

    def _of_pairs(self, interval: Interval, groups: Sequence[Local], run: Run) -> Steps[list[Local]]:
        """Average JFL's pairs at the end of a round: the hospitals' halves, and the devices'."""
        if not interval.terms.uploads:
            return list(groups)
        there = [(one, one.uploaded) for one in groups if one.uploaded is not None]
        pairs = {one.group.number: (np.concatenate(one.start[:2]), dict(enumerate(up))) for one, up in there}
        halves = yield from self._of(pairs, run)
        rows = {
            one.group.number: (one.device, _by_host(one, {p: one.device_of(p) for p in one.ids}))
            for one, _ in there
            if not one.group.hosted
        }
        groups = _with_devices(groups, (yield from self._of(rows, run)))
        types = {one.group.number: up.dtype for one, up in there}
        means = {m: mean.model().astype(types[m]) for m, mean in halves.items()}
        return [replace(one, uploaded=means.get(one.group.number, one.uploaded)) for one in groups]

    def of_groups(self, theta: Theta, groups: Sequence[Local], run: Run) -> Steps[GroupsMean]:
        """Average the groups that did not miss the last interval, (2)."""
        there = sorted((one for one in groups if one.model is not None), key=lambda one: one.group.number)
        models = {one.group.hospital: (one.group.size, one.model) for one in there if one.model is not None}
        return GroupsMean((yield from mean_of_models(theta, models, run, self.groups)), len(models))


def _by_host(one: Local, models: Mapping[str, Vector]) -> dict[int, Vector]:
    return {one.group.hosts[person]: models[person] for person in one.ids if person in models}


def _with_devices(groups: Sequence[Local], means: Mapping[int, Mean]) -> list[Local]:
    """Return the groups with the means of their devices, if any."""
    return [
        replace(one, averaged=means[m].model().astype(one.device.dtype))
        if (m := one.group.number) in means and not one.lost
        else one
        for one in groups
    ]


# Keys of the sums over hospitals and over edges; a sum over the devices of group m has the key m >= 0.
_HOSPITALS, _EDGES = -1, -2
_LINKS = {_HOSPITALS: ("cloud->hospital", "hospital->cloud"), _EDGES: ("cloud->edge", "edge->cloud")}
_OF_DEVICES = ("edge->device", "device->edge")
_NAMES = {_HOSPITALS: "The cloud's mean of hospitals", _EDGES: "The cloud's mean of edges"}


@dataclass(frozen=True, eq=False)
class _Upload(Exchange):
    """``train.upload``; ``blocks`` has the blocks that each pool started from, by name."""

    blocks: Mapping[int, Mapping[str, Vector]] = field(default_factory=dict)
    hold: Hold = lambda made, sent, part: None

    def check(self, federation: Federation, move: Vector, sent: Vector) -> None:
        """Check how far each block of a mean is from its start."""
        pool = next(ask.pool for ask in self.asks if ask.model is sent)
        ends = np.cumsum([len(block) for block in self.blocks[pool].values()])[:-1]
        for (name, block), part in zip(self.blocks[pool].items(), np.split(sent + move, ends), strict=True):
            self.hold(part, block, name)


class _Blocks(Models):
    """Nodes add up the blocks that they started from."""

    def bits(self, layout: Any) -> int:
        """Return 0: ``books.py`` counts the paper's bits of the content of a sum."""
        return 0

    def summed(self, model: Vector, layout: Any) -> ArrayRecord:
        return to_record({"model": model})


class Summed(SecureSums):
    """The secure sums of a run: the server sees only means.

    A group whose devices have no mean keeps its theta_2. A party that is lost in ``train.upload`` alone is
    missing from its own sum; the other half of its group may be in its sum.

    - ``settings``: The settings; the loss is the only metric that is averaged.
    - ``losses``: Whether hospitals report a loss within their sum.
    - ``least_devices``: Minimum devices of a batch in a sum.
    - ``hold``: Raises PayloadError if a mean is too far from its start; takes mean, start and block name.
    - ``people``: Returns the largest weight of each group's hospital and edge, in people.
    """

    def __init__(
        self,
        settings: SecureSum,
        federation: Federation,
        losses: bool,
        least_devices: int,
        hold: Hold,
        people: Callable[[], Mapping[int, float]],
    ) -> None:
        self._hold, self._least_devices, self._people = hold, least_devices, people
        settings = replace(settings, metrics=("loss",) if losses else ())
        super().__init__(settings, federation, down_link=_OF_DEVICES[0], up_link=_OF_DEVICES[1])

    def forget(self) -> None:
        """Forget the run."""
        super().forget()
        self._run: Run | None = None
        self._weights: dict[int, float] = {}
        # Of the current exchange: members that answered, the means, and the metrics of each sum.
        self._answered: set[int] = set()
        self._found: Mapping[int, Mean] = {}
        self._metrics: dict[int, RecordDict] = {}

    @property
    def report(self) -> ExchangeReport:
        """The report over all exchanges of the round."""
        return self.federation.report if self._run is None else self._run.whole

    def weight_of(self, member: int) -> float:
        """Return a member's largest weight: 1 for a device, else the people that other parties confirm."""
        return self._weights[member]

    def least_of(self, group: int) -> int:
        """Return the minimum number of members of a sum."""
        return self._least_devices if group >= 0 else self.settings.min_nodes

    def called(self, group: int) -> str:
        """Return a sum's name for logs."""
        return _NAMES.get(group, f"Group {group}")

    def book(self, server_round: int, member: int, carried: int, *, down: bool) -> None:
        """Book a transfer on the link between a party and its averaging node."""
        group = self._group_of[member]
        link = _LINKS.get(group, _OF_DEVICES)[0 if down else 1]
        m = group if group >= 0 else member
        self.federation.ledger.book(server_round, link, m, m, 0, carried)

    def choose(self, server_round: int, groups: Mapping[int, Sequence[Node]]) -> Steps[list[Node]]:
        """Begin a round; devices are asked for their keys first."""
        order = sorted(groups, key=lambda pool: (pool < 0, abs(pool)))
        return (yield from super().choose(server_round, {pool: groups[pool] for pool in order}))

    def plan_for(self, group: int, common: RecordDict, start: ArrayRecord) -> ConfigRecord:
        """Return the plan of a sum, and book its transfer to the members."""
        plan = super().plan_for(group, common, start)
        size = payload_bytes(plan) + sum(payload_bytes(record) for record in common.array_records.values())
        assert self._run is not None
        for member in sorted(at for at, of in self._group_of.items() if of == group):
            self.book(self._run.round, member, size, down=True)
        return plan

    def checked(self, node: Node, content: RecordDict) -> Any:
        """Return the content of a valid reply, and note its arrival."""
        masked = super().checked(node, content)
        self._answered.add(node.partition_id)
        return masked

    def counted(self, run: Run, pool: int, update: SummedUpdate) -> None:
        """Keep the metrics of a sum; those of the hospitals' sum are the round's."""
        self._metrics[pool] = update.metrics

    def enough(self) -> bool:
        """Return True: the number of groups decides whether a round counts."""
        return True

    # The means.

    def of_devices(self, interval: Interval, groups: Sequence[Local], run: Run) -> Steps[list[Local]]:
        """Sum the devices, and at the end of a round hospitals and edges too."""
        left = [one for one in groups if not one.lost]
        self._run, self._answered, self._metrics = run, set(), {}
        (self._found,) = yield from together(self.means(run.prepared(self._due(interval, left)), run))
        for one in left:
            m, group = one.group.number, one.group
            if not group.hosted and (count := sum(i in self._answered for i in one.trained)):
                interval.books.models_to_edge(run.round, m, count)
            if group.hospital in self._answered:
                interval.books.to_cloud(run.round, m, 1)
        return _with_devices(groups, {m: mean for m, mean in self._found.items() if m >= 0})

    def _due(self, interval: Interval, left: Sequence[Local]) -> _Upload:
        """Return the exchange of the sums that are due."""
        pools: dict[int, tuple[dict[int, float], dict[str, Vector]]] = {}
        people = self._people() if interval.terms.uploads else {}
        for one in left:
            group, m, most = one.group, one.group.number, people.get(one.group.number, float(one.group.size))
            if not group.hosted and one.trained:
                pools[m] = dict.fromkeys(one.trained, 1.0), {"device": one.device}
            if not interval.terms.uploads:
                continue
            blocks = {"head": one.start.head, "hospital": one.start.hospital}
            pools.setdefault(_HOSPITALS, ({}, blocks))[0][group.hospital] = most
            if group.hosted:
                pools.setdefault(_EDGES, ({}, {"device": one.start.device}))[0][next(iter(one.hosts))] = most
        self._weights = {i: weight for weights, _ in pools.values() for i, weight in weights.items()}
        asks = [
            Ask(
                sorted(weights),
                np.concatenate([*blocks.values()]),
                arrays=to_record(blocks),
                pool=pool,
                bits=0,
            )
            for pool, (weights, blocks) in sorted(pools.items())
        ]
        blocks_of = {pool: blocks for pool, (_, blocks) in pools.items()}
        return _Upload(
            UPLOAD, asks, interval.terms.upload, coding=_Blocks(), blocks=blocks_of, hold=self._hold
        )

    def of_groups(self, theta: Theta, groups: Sequence[Local], run: Run) -> Steps[GroupsMean]:
        """Combine the means of hospitals and of edges, or of devices where they are nodes, (2)."""
        yield from ()
        found = self._found
        if _HOSPITALS not in found:
            return GroupsMean(theta, 0)
        there = [one for one in groups if not one.lost and one.group.hospital in found[_HOSPITALS].nodes]
        device = RunningMean()
        for one in there:
            if not one.group.hosted:
                device.add(float(one.group.size), one.device)
        if _EDGES in found:
            device.add(found[_EDGES].weight, found[_EDGES].model())
        if device.value is None:
            return GroupsMean(theta, 0)
        run.contents.append(self._metrics[_HOSPITALS])
        whole = np.concatenate([found[_HOSPITALS].model(), device.value])
        return GroupsMean(theta.like(whole), len(there))


# Both have ``of_devices``, (1), and ``of_groups``, (2).
Averages = PlainMeans | Summed
