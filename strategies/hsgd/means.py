"""HSGD's two means: (1) of a group's devices and (2) of groups, and the user's choice of them.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", (1) and (2).

There are no secure sums: members of a sum must get the same instructions, and HSGD's parties get different
ones (batches, iterations, partners). Invalid combinations of means are refused before a run, or before its
first round if they depend on the parties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any, Self

import numpy as np
from flwr.common import log

from hedgerow.strategies.aggregate import Aggregator, Choice, Mean, WeightedMean, means_of
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Columns, Steps
from hedgerow.strategies.hsgd.exchange import Group, Interval, Local, Theta
from hedgerow.strategies.hsgd.membership import PairingError
from hedgerow.strategies.hsgd.theory import MethodVariant
from hedgerow.strategies.parts import Part
from hedgerow.wire.robust_means import Aggregation

Asked = str | Aggregation | Aggregator


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
    if not rows:
        return theta
    blocks = zip(theta.split(means[0].model()), theta, strict=True)
    return Theta(*(mean.astype(block.dtype) for mean, block in blocks))


@dataclass(frozen=True)
class Means:
    """Means of models that the server sees."""

    groups: Aggregator = ByPeople()
    devices: Aggregator = _ALIKE  # And of JFL's pairs.

    def of_devices(
        self, interval: Interval, groups: Sequence[Local], run: RoundContext
    ) -> Steps[list[Local]]:
        """Average the devices that answered, (1); a group without any keeps its theta_2.

        JFL's pairs are averaged at the end of a round: the hospitals' halves, then the devices'.
        """
        pairs, halves, devices = interval.schema.pairs, dict[int, Mean](), dict[int, Mean]()
        if pairs and not interval.uploads:
            return list(groups)
        if pairs:
            there = {
                local.group.number: (np.concatenate(local.start[:2]), dict(enumerate(local.uploaded)))
                for local in groups
                if local.uploaded is not None
            }
            halves |= yield from means_of(self.devices, there, run, weigh=_ALIKE.weights)
        rows = {}
        for local in groups:
            models = local.device_models
            if pairs:  # A pair without an update keeps theta_2.
                models = {person: models.get(person, local.device) for person in local.ids}
            if not local.lost and not local.group.hosted and models:
                at = {local.group.node_of[person]: models[person] for person in local.ids if person in models}
                rows[local.group.number] = local.device, at
        if rows:
            devices |= yield from means_of(self.devices, rows, run, weigh=_ALIKE.weights)
        averaged = []
        for local in groups:
            m, uploaded = local.group.number, local.uploaded
            if m in devices:
                local = replace(local, averaged=devices[m].model().astype(local.device.dtype))  # noqa: PLW2901
            if uploaded is not None and m in halves:
                local = replace(local, uploaded=halves[m].model().astype(uploaded.dtype))  # noqa: PLW2901
            averaged.append(local)
        return averaged

    def of_groups(self, theta: Theta, groups: Sequence[Local], run: RoundContext) -> Steps[tuple[Theta, int]]:
        """Average the groups that did not miss the last interval, (2); return the mean and their number."""
        models = {}
        for local in sorted(groups, key=lambda local: local.group.number):
            if (model := local.model) is not None:
                models[local.group.hospital] = local.group.size, model
        return (yield from mean_of_models(theta, models, run, self.groups)), len(models)


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

    def check(self, variant: MethodVariant, num_groups: int | None, *, adaptive: bool) -> None:
        """Raise ValueError if these rules are incompatible with the run's other settings."""
        for rule in (self.groups, self.devices):
            if adaptive and not rule.is_mean:
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
