"""HSGD's Algorithm 1, and its two means: (1) of a group's devices, and (2) of groups, plain or robust.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1 with (1), (2) and (5) to (7). C-HSGD,
JFL, TDCD and C-TDCD are groupings and compressions of the same rounds.
Differs: devices are averaged before groups, over the set that just trained: (2) needs (1) of that iteration,
which the printed order has not computed yet. Parties can fail. A device without a reply to the exchange is
not in the batch; one without a reply to the update is not in the average, and if all fail, theta_2 stays. If
the hospital, the edge node, or in the exchange all devices of a group fail, the group skips the interval and
keeps its three blocks. If it skips the interval before a global aggregation, it is not in (2): the server has
no head and hospital's encoder that were not uploaded.

Notation: group m has the model theta_m = (theta_0, theta_1, theta_2), its head, hospital's encoder and
devices' encoder, and K_m people; A_m are those in a local interval. A round is a global interval of P
iterations, in P / Q local intervals, each with an exchange and an update at both sides.

There are no secure sums: members of a sum must get the same instructions, and HSGD's parties get different
ones (batches, iterations, partners). Invalid combinations of means are refused before a run, or before its
first round if they depend on the parties.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any, NamedTuple, Self

import numpy as np
from flwr.common import log

from hedgerow.strategies.aggregate import Aggregator, Choice, Mean, WeightedMean, means_of
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Columns, RoundFailedError, Steps, Vector
from hedgerow.strategies.hsgd.adaptive import Pace
from hedgerow.strategies.hsgd.exchange import (
    Group,
    Interval,
    Local,
    Theta,
    ThetaBlocks,
    batch_size,
    draw,
    exchanged,
    stepped,
)
from hedgerow.strategies.hsgd.membership import PairingError
from hedgerow.strategies.hsgd.theory import MethodVariant
from hedgerow.strategies.method import Method
from hedgerow.strategies.parts import Part
from hedgerow.wire.robust_means import Aggregation

Asked = str | Aggregation | Aggregator


@dataclass(frozen=True, eq=False)
class State:
    """The cloud's state after a round."""

    theta: Theta  # The global model, (2); without aggregation, the mean of the groups' models.
    t: int = 0  # Iterations so far.
    # Without aggregation: K_m and theta_m of each group that has trained.
    apart: Mapping[int, tuple[int, Theta]] = field(default_factory=dict)
    first: Theta | None = None  # The start of groups that have not; None with a global model.

    def start(self, m: int) -> Theta:
        """Return the model from which group m starts a round."""
        if self.first is None:
            return self.theta
        return self.apart[m][1] if m in self.apart else self.first


class Algorithm(Method[State]):
    """Algorithm 1, line by line; ``HSGD`` adds the settings."""

    state_class = State
    groups: Sequence[Group]
    averages: Means
    participation: float
    aggregate: bool
    pairs: bool  # JFL: whether every sampled pair has its own model in a round.

    @property
    @abstractmethod
    def pace(self) -> Pace:
        """P, Q and eta in use."""

    @abstractmethod
    def interval(self, t: int, run: RoundContext, *, starts: bool, uploads: bool) -> Interval:
        """Return the exchanges of the local interval that starts at t."""

    def begin(self, model: Vector) -> State:
        """Return theta^0."""
        theta = ThetaBlocks(self.federation.known_layout()).split(model)
        return State(theta, first=None if self.aggregate else theta)

    def unstepped(self) -> str | None:
        """Return why no server step can act on (1) and (2)."""
        return "its two means are of parts of a model, by devices and by groups"

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Make P iterations in P / Q local intervals, then average the groups."""
        P, Q = self.pace.P, self.pace.Q
        groups = [Local(group, state.start(group.number)) for group in self.groups]
        for t in range(state.t, state.t + P, Q):
            starts, uploads = t == state.t, t + Q == state.t + P
            groups = [self.drawn(local, t, starts) for local in groups]  # line 13
            interval = self.interval(t, run, starts=starts, uploads=uploads)
            groups = yield from local_interval(interval, groups, self.averages, run)
        if missed := sum(local.missed for local in groups):
            run.metrics["missed-intervals"] = missed
        return (yield from self.global_aggregation(state, groups, run))

    def drawn(self, local: Local, t: int, starts: bool) -> Local:
        """Draw A_m; in JFL it stays for the round, without people whose party failed."""
        if self.pairs and not starts:
            return local
        count = batch_size(self.participation, local.group.size)
        ids = draw(local.group, count, seed=self.settings.seed, t=t)
        return replace(local, ids=tuple(ids), device_models=local.device_models if self.pairs else {})

    def global_aggregation(self, state: State, groups: Sequence[Local], run: RoundContext) -> Steps[State]:
        """Average the remaining groups, weighted by their people, (2)."""
        mean = yield from self.averages.of_groups(state.theta, groups, run)
        least = max(1, min(self.settings.min_train_nodes, len(self.groups)))
        if mean.groups < least:
            raise RoundFailedError
        run.metrics["groups"] = mean.groups
        t = state.t + self.pace.P
        if state.first is None:
            return State(mean.theta, t)
        # Without a cloud, each group continues from its own model, absent ones from their last.
        now = {local.group.number: (local.group.size, local.model or local.start) for local in groups}
        apart = dict(sorted({**state.apart, **now}.items()))
        return State((yield from mean_of_models(state.theta, apart, run)), t, apart, state.first)

    def model(self, state: State) -> Vector:
        """Return theta."""
        return ThetaBlocks(self.federation.known_layout()).join(state.theta)


def local_interval(
    interval: Interval, groups: Iterable[Local], averages: Means, run: RoundContext
) -> Steps[list[Local]]:
    """Exchange encodings, make Q steps on both sides, and average the devices of each group."""
    swaps = yield from exchanged(interval, groups, run)  # Lines 14 to 18: head and zeta_1, zeta_2.
    groups = yield from stepped(interval, swaps, run)  # (5), (6) at hospitals and (7) at devices.
    return (yield from averages.of_devices(interval, groups, run))  # (1)


# The two means.


class GroupsMean(NamedTuple):
    """The mean of groups, and their number."""

    theta: Theta
    groups: int


@dataclass(frozen=True)
class ByPeople(WeightedMean):
    """The mean weighted by each group's number of people."""

    def weights(self, run: RoundContext, replies: Columns) -> Sequence[float]:
        """Return K_m of each group."""
        return replies.claimed


_ALIKE = WeightedMean(by_examples=False)


def mean_of_models(
    theta: Theta,
    models: Mapping[int, tuple[int, Theta]],
    run: RoundContext,
    aggregator: Aggregator = ByPeople(),
) -> Steps[Theta]:
    """Return the weighted mean of models; ``models`` maps an aggregator's node id to (K_m, model)."""
    rows = {m: model.whole for m, (_, model) in models.items()}
    people = {m: float(size) for m, (size, _) in models.items()}
    means = yield from means_of(aggregator, {0: (theta.whole, rows)}, run, people, ByPeople().weights)
    return theta.like(means[0].model()) if rows else theta


@dataclass(frozen=True)
class Means:
    """Means of models that the server sees."""

    groups: Aggregator = ByPeople()
    devices: Aggregator = _ALIKE  # And of JFL's pairs.

    def of_devices(
        self, interval: Interval, groups: Sequence[Local], run: RoundContext
    ) -> Steps[list[Local]]:
        """Average the devices that answered, (1); a group without any keeps its theta_2."""
        if interval.schema.pairs:
            return (yield from self._of_pairs(interval, groups, run))
        left = [local for local in groups if not local.lost and not local.group.hosted]
        rows = {
            local.group.number: (local.device, _by_node(local, local.device_models))
            for local in left
            if local.device_models
        }
        if not rows:
            return list(groups)
        return _with_devices(groups, (yield from means_of(self.devices, rows, run, weigh=_ALIKE.weights)))

    def _of_pairs(self, interval: Interval, groups: Sequence[Local], run: RoundContext) -> Steps[list[Local]]:
        """Average JFL's pairs at the end of a round: the hospitals' halves, and the devices'."""
        if not interval.terms.uploads:
            return list(groups)
        there = [(local, local.uploaded) for local in groups if local.uploaded is not None]
        pairs = {
            local.group.number: (np.concatenate(local.start[:2]), dict(enumerate(up))) for local, up in there
        }
        halves = yield from means_of(self.devices, pairs, run, weigh=_ALIKE.weights)
        rows = {
            local.group.number: (
                local.device,
                _by_node(local, {p: local.device_models.get(p, local.device) for p in local.ids}),
            )
            for local, _ in there
            if not local.group.hosted
        }
        groups = _with_devices(groups, (yield from means_of(self.devices, rows, run, weigh=_ALIKE.weights)))
        types = {local.group.number: up.dtype for local, up in there}
        means = {m: mean.model().astype(types[m]) for m, mean in halves.items()}
        return [replace(local, uploaded=means.get(local.group.number, local.uploaded)) for local in groups]

    def of_groups(self, theta: Theta, groups: Sequence[Local], run: RoundContext) -> Steps[GroupsMean]:
        """Average the groups that did not miss the last interval, (2)."""
        models = {}
        for local in sorted(groups, key=lambda local: local.group.number):
            if (model := local.model) is not None:
                models[local.group.hospital] = local.group.size, model
        return GroupsMean((yield from mean_of_models(theta, models, run, self.groups)), len(models))


def _by_node(local: Local, models: Mapping[str, Vector]) -> dict[int, Vector]:
    return {local.group.node_of[person]: models[person] for person in local.ids if person in models}


def _with_devices(groups: Sequence[Local], means: Mapping[int, Mean]) -> list[Local]:
    """Return the groups with the means of their devices, if any."""
    return [
        replace(local, averaged=means[m].model().astype(local.device.dtype))
        if (m := local.group.number) in means and not local.lost
        else local
        for local in groups
    ]


# The user's choice of them.


@dataclass(frozen=True)
class ChosenMeans:
    """The aggregation rules of a run."""

    groups: Choice  # At the cloud.
    devices: Choice  # At an edge, and for JFL's pairs.

    @classmethod
    def of(cls, aggregation: Asked, device_aggregation: Asked | None) -> Self:
        """Return the rules for these settings; ValueError for an unknown one."""
        groups = Choice.of(aggregation)
        devices = Choice(groups.rule) if device_aggregation is None else Choice.of(device_aggregation)
        return cls(groups, devices)

    @property
    def _robust(self) -> Choice | None:
        return next((rule for rule in (self.groups, self.devices) if not rule.is_mean), None)

    def check(self, variant: MethodVariant, num_groups: int | None, *, adaptive: bool) -> None:
        """Raise ValueError if these rules are incompatible with the run's other settings."""
        if adaptive and (rule := self._robust) is not None:
            raise ValueError(
                f"adaptive must be None with aggregation = {str(rule)!r}: its estimates need plain means"
            )
        if variant.has_cloud and num_groups is not None and num_groups < self.groups.rule.least:
            raise ValueError(
                f"aggregation is {str(self.groups)!r}, which needs {self.groups.rule.least} groups; "
                f"num_groups is {num_groups}"
            )

    def check_groups(self, groups: Sequence[tuple[Group, int]], variant: MethodVariant) -> None:
        """Warn of groups too small for these means.

        ``groups`` has those that a run starts with, at least one.

        Raises
        ------
        PairingError
            Where not one is large enough.
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

    def means(self, *, apart: bool = False) -> Means:
        """Return the means; groups that are kept ``apart`` have no rule."""
        default = Means()
        groups = default.groups if apart else self.groups.aggregator(default.groups)
        return Means(groups, self.devices.aggregator(default.devices))

    @property
    def parts(self) -> list[Part]:
        """The aggregators with state."""
        owns: tuple[Any, ...] = self.groups.own, self.devices.own
        return [own for own in owns if isinstance(own, Part)]

    def __str__(self) -> str:
        return f"{self.groups} of groups, {self.devices} of devices"
