"""What stands in place of HSGD's means, (1) of devices and (2) of groups: robust rules, or secure sums.

What cannot be is refused before a run, or, where only the parties know, before its first round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Self

import numpy as np
from flwr.common import log

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.hsgd.aggregators import Combine
from hedgerow.strategies.hsgd.groups import Group, PairingError
from hedgerow.strategies.hsgd.system import System
from hedgerow.strategies.secure_sums import SecureSum, parse_secure_sum
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.masked_sums import LEAST_MEMBERS, MAX_MEMBERS
from hedgerow.wire.robust_means import Aggregation, parse_aggregation

__all__ = ["MANY_DEVICES", "Means"]

_ALONE = "a sum of fewer tells of each: of a device alone in it, which has one person, it tells the features"


# Devices in a sum in which hardly any unit of a small first layer is one person's alone.
MANY_DEVICES = 16


@dataclass(frozen=True)
class Means:
    """The rules of a run.

    Parameters
    ----------
    groups, devices : Aggregation
        Of the cloud's mean of groups; of an edge's mean of devices, and of JFL's pairs.
    sums : SecureSum or None
        Whether the server sees means alone.
    least_devices : int (default: 16)
        Devices without which there is no sum of a batch's.
    """

    groups: Aggregation
    devices: Aggregation
    sums: SecureSum | None
    least_devices: int = MANY_DEVICES

    @classmethod
    def of(
        cls,
        aggregation: str,
        device_aggregation: str | None,
        secure_sum: bool | SecureSum,
        min_sum_devices: int = MANY_DEVICES,
    ) -> Self:
        """Return the rules of some settings; ValueError where they do not go together."""
        devices = aggregation if device_aggregation is None else device_aggregation
        sums = parse_secure_sum(secure_sum)
        int_at_least(LEAST_MEMBERS if sums is None else sums.min_nodes, min_sum_devices=min_sum_devices)
        if min_sum_devices > MAX_MEMBERS:
            raise ValueError(f"min_sum_devices is {min_sum_devices!r}; valid is at most {MAX_MEMBERS}")
        means = cls(parse_aggregation(aggregation), parse_aggregation(devices), sums, min_sum_devices)
        if means.sums is not None and (rule := means._robust):
            raise ValueError(
                f"aggregation is {str(rule)!r}; valid with secure_sum is 'mean': a sum gives no other"
            )
        return means

    @property
    def _robust(self) -> Aggregation | None:
        return next((rule for rule in (self.groups, self.devices) if not rule.is_mean), None)

    def check(self, system: System, num_groups: int | None, *, sealed: bool, adaptive: bool) -> None:
        """Raise ValueError if these means are none of a run of these settings."""
        rule, sums = self._robust, self.sums
        if adaptive and (rule is not None or sums is not None):
            what = "secure_sum is set" if rule is None else f"aggregation is {str(rule)!r}"
            raise ValueError(f"{what}; valid with adaptive are plain means, which its estimates are of")
        if _one_model(system) and num_groups is not None and num_groups < self.groups.least:
            raise ValueError(
                f"aggregation is {str(self.groups)!r}, which needs {self.groups.least} groups; num_groups is "
                f"{num_groups}"
            )
        if sums is None:
            return
        if sums.noise is not None:
            raise ValueError("secure_sum.noise is set; valid in HSGD is None: upload_noise is its noise")
        if not sealed:
            raise ValueError(
                "sealed is False; valid with secure_sum is True: heads and encodings that the server reads "
                "tell what a sum hides"
            )
        if not _one_model(system):
            alone = "the one hospital" if system.merged else "a group that is kept apart"
            raise ValueError(
                f"secure_sum is set; valid is False in {system.method}: {alone} is alone in its sum"
            )
        if num_groups is not None and num_groups < sums.min_nodes:
            raise ValueError(_too_few_groups("num_groups", num_groups, sums))

    def check_groups(self, groups: Sequence[tuple[Group, int]], system: System, *, whole: bool) -> None:
        """Warn of groups too small for these means.

        Parameters
        ----------
        groups : Sequence of (Group, |A_m|)
            The groups that a run starts with, at least one.
        system : System
            The run's.
        whole : bool
            Whether a local interval is a global one.

        Raises
        ------
        PairingError
            Where not one is large enough, or there are too few of them.
        """
        if _one_model(system) and len(groups) < self.groups.least:
            log(WARNING, "%d groups are too few for %s: their median is taken.", len(groups), self.groups)
        least = self.devices.least
        averaged = [(g, a) for g, a in groups if system.pairs or not g.hosted]
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
        if devices and system.pairs and not whole:
            raise PairingError(
                "method is jfl with devices as nodes; valid with secure_sum is local_interval = "
                "global_interval: between intervals the server hands each device its own model"
            )
        alone = [g.number for g, a in devices if not self.least_devices <= a <= MAX_MEMBERS]
        if alone and len(alone) == len(groups):
            raise PairingError(
                f"batches have {min(a for _, a in devices)} to {max(a for _, a in devices)} devices; valid "
                f"with secure_sum is {self.least_devices} (min_sum_devices) to {MAX_MEMBERS}: {_ALONE}"
            )
        if alone:
            log(WARNING, "Groups %s have no sum of devices, so that their theta_2 stays: %s.", alone, _ALONE)
        if few := [a for _, a in devices if self.least_devices <= a < MANY_DEVICES]:
            log(
                WARNING,
                "Sums of %d devices: of a unit that one person alone turns on their mean still tells the "
                "features, not of whom; larger batches, or noisy uploads, hide them.",
                min(few),
            )

    def combine(self, rule: Aggregation, federation: Federation) -> Combine | None:
        """Return what a rule makes of updates, the median of too few; None of the mean."""
        if rule.is_mean:
            return None
        return lambda updates: federation.combined(rule, updates, np.ones(len(updates)))

    def __str__(self) -> str:
        if self.sums is not None:
            return f"secure sums, {self.sums}"
        return f"{self.groups} of groups, {self.devices} of devices"


def _one_model(system: System) -> bool:
    return system.aggregate and not system.merged


def _too_few_groups(key: str, count: int, sums: SecureSum) -> str:
    return (
        f"{key} is {count}; valid with secure_sum is {sums.min_nodes} or more: hospitals and edges are in a "
        "sum each, and one of fewer tells of each"
    )
