"""HSGD's groups: one hospital, and the device of each of its people or one edge with all devices.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", section III and line 13 of Algorithm 1.
Differs: the paper assumes that both sides know the same people; here it is checked before training.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hedgerow.strategies.hsgd.introductions import Introduction
from hedgerow.wire.failures import RunFailedError
from hedgerow.wire.printable import quoted
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["Group", "PairingError", "batch_size", "draw", "faults"]

_SHOWN = 5


class PairingError(RunFailedError, ValueError):
    """The parties form no valid groups: a side lacks people, or has them twice."""


@dataclass(frozen=True)
class Group:
    """One hospital, its people, and their devices."""

    number: int  # m, from 0.
    hospital: int  # The hospital's partition id.
    ids: tuple[str, ...]  # The people, in the order of the hospital's rows.
    hosts: Mapping[str, int]  # Partition id of the node with each person's device.
    hosted: bool  # Whether one edge node hosts all devices.

    @property
    def size(self) -> int:
        """K_m, the group's people."""
        return len(self.ids)

    @property
    def partitions(self) -> set[int]:
        """The partition ids of all its nodes."""
        return {self.hospital, *self.hosts.values()}

    def people_at(self, host: int) -> list[str]:
        """Return whose devices a node has."""
        return [person for person in self.ids if self.hosts[person] == host]


def batch_size(participation: float, size: int) -> int:
    """Return |A_m| = max(1, floor(alpha K_m)); an alpha of a / K_m is taken for a, whatever its rounding."""
    return max(1, int(participation * size * (1 + 1e-12)))


def draw(
    group: Group, count: int, *, seed: int, t: int, purpose: Purpose = Purpose.PARTICIPATION, number: int = 0
) -> list[str]:
    """Return A_m of the interval that starts at t: ``count`` people, in the hospital's order.

    It depends only on seed, t and m, not on P, the order of nodes or other draws. ``number`` distinguishes
    several draws of one purpose at one t.
    """
    stream = generator(seed, round=t, partition_id=group.number, purpose=purpose)
    for _ in range(number + 1):
        chosen = stream.choice(group.size, count, replace=False)
    return [group.ids[i] for i in sorted(chosen.tolist())]


def faults(parties: Mapping[int, Introduction], num_groups: int | None = None) -> list[str]:
    """Return why the parties, by partition id, form no groups with the same people on both sides.

    ``num_groups`` is the required number of groups; None for the number of hospitals.
    """
    hospitals = [party.group for party in parties.values() if party.role == "hospital"]
    count = len(hospitals) if num_groups is None else num_groups
    found: list[str] = []
    for m in sorted({party.group for party in parties.values()} | set(range(count))):
        members = [parties[i] for i in sorted(parties) if parties[i].group == m]
        own = _faults(members) if m < count else [f"no such group (groups are 0 to {count - 1})"]
        found += [f"group {m}: {fault}" for fault in own]
    return found


def _faults(members: Sequence[Introduction]) -> list[str]:
    by_role = {role: [one for one in members if one.role == role] for role in ("hospital", "device", "edge")}
    if len(by_role["hospital"]) != 1:
        return [f"it must have one hospital, got {len(by_role['hospital'])}"]
    edges, devices = by_role["edge"], by_role["device"]
    if len(edges) > 1 or (edges and devices):
        return [f"it must have one edge or devices alone, got {len(edges)} edges and {len(devices)} devices"]
    faults = [f"a device must have one person, got {len(one.ids)}" for one in devices if len(one.ids) != 1]
    at_hospital = by_role["hospital"][0].ids
    at_devices = [person for one in (*edges, *devices) for person in one.ids]
    for where, ids in (("the hospital has", at_hospital), ("the devices have", at_devices)):
        twice = [person for person, times in Counter(ids).items() if times > 1]
        faults += [f"{where} twice {_shown(twice)}"] if twice else []
    lacking = _missing(at_hospital, at_devices)
    faults += [f"no device of {_shown(lacking)}"] if lacking else []
    lacking = _missing(at_devices, at_hospital)
    return faults + ([f"the hospital lacks {_shown(lacking)}"] if lacking else [])


def _shown(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(map(quoted, ids[:_SHOWN])) + more


def _missing(wanted: Sequence[str], there: Sequence[str]) -> list[str]:
    known = set(there)
    return [person for person in wanted if person not in known]
