"""Groups of parties with their own people, matched by keyed hashes.

The server sees hashes under a key that it does not know. Conflicting claims are resolved by matches: of two
hospitals of a group, the one with more matches counts; of two hosts of a person, the first. A later party
never replaces an earlier one.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from hedgerow.strategies.hsgd.groups import Group
from hedgerow.strategies.hsgd.introductions import Introduction
from hedgerow.wire.seeds import Purpose, generator

__all__ = ["Form", "Matching", "form_of", "match"]


@dataclass(frozen=True)
class Form:
    """Inputs of a model for own data: the halves' shapes and columns, and the classes."""

    hospital_shape: tuple[int, ...]
    device_shape: tuple[int, ...]
    hospital_features: tuple[str, ...]
    device_features: tuple[str, ...]
    classes: tuple[str, ...]

    def fits(self, one: Introduction) -> bool:
        """Return whether a party's half has this form; a hospital must have no other class."""
        hospital = one.role == "hospital"
        shape = self.hospital_shape if hospital else self.device_shape
        features = self.hospital_features if hospital else self.device_features
        return one.form == (shape, tuple(sorted(features))) and set(one.classes) <= set(self.classes)


@dataclass
class Matching:
    """Groups of parties that have the same people."""

    form: Form
    # Groups with a hospital and at least one matched person to train on; people sorted by hash.
    groups: list[Group] = field(default_factory=list)
    # The same groups with their held-out people, if any.
    held_out: dict[int, Group] = field(default_factory=dict)
    # Numbers of people: ``matched``, ``unmatched-hospital`` and ``unmatched-device``; and of excluded
    # parties, by reason.
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def partitions(self) -> dict[int, list[str]]:
        """Each node in a group, with its people: first those that train."""
        people: dict[int, list[str]] = {}
        for group in [*self.groups, *self.held_out.values()]:
            people.setdefault(group.hospital, []).extend(group.ids)
            for person in group.ids:
                people.setdefault(group.hosts[person], []).append(person)
        return people

    @property
    def standing(self) -> dict[int, Group]:
        """Each group with all its people, for a later ``match``."""
        whole = {}
        for group in self.groups:
            held = self.held_out.get(group.number)
            more = ((), {}) if held is None else (held.ids, held.hosts)
            ids, hosts = (*group.ids, *more[0]), {**group.hosts, **more[1]}
            whole[group.number] = Group(group.number, group.hospital, ids, hosts, group.hosted)
        return whole


def form_of(parties: Mapping[int, Introduction], classes: tuple[str, ...] = ()) -> Form | None:
    """Return the most common form of each side, the first on a tie; None if a side is missing.

    Columns have the order of the first party with that form. Classes are as given, or those of all hospitals,
    sorted, numerically if all are integers.
    """
    sides = []
    for at_hospital in (True, False):
        side = [one for _, one in sorted(parties.items()) if (one.role == "hospital") is at_hospital]
        if not side:
            return None
        common, _ = Counter(one.form for one in side).most_common(1)[0]
        sides.append(next(one for one in side if one.form == common))
    hospital, device = sides
    names = {
        name
        for one in parties.values()
        if one.role == "hospital" and one.form == hospital.form
        for name in one.classes
    }
    classes = classes or tuple(sorted(names, key=int if all(map(_is_whole, names)) else str))
    return Form(hospital.shape, device.shape, hospital.features, device.features, classes)


def _is_whole(name: str) -> bool:
    return name.isascii() and name.removeprefix("-").isdigit()


def match(
    parties: Mapping[int, Introduction],
    form: Form,
    *,
    holdout: float = 0.0,
    seed: int = 0,
    num_groups: int | None = None,
    standing: Mapping[int, Group] | None = None,
) -> Matching:
    """Form the groups.

    - ``form``: Parties with another form are excluded.
    - ``holdout``: Fraction of held-out people, in [0, 1). Each person is drawn from seed and hash alone, so
      the draw does not change when others join.
    - ``num_groups``: Parties of groups from this number on are excluded.
    - ``standing``: The previous groups. Their hospital (if it has matches), edge and hosts of people take
      precedence over new claims.
    """
    found = Matching(form)
    members: dict[int, dict[int, Introduction]] = {}
    for partition, one in sorted(parties.items()):
        if not form.fits(one):
            found.counts["left-out-other-form"] += 1
        elif num_groups is not None and one.group >= num_groups:
            found.counts["left-out-no-such-group"] += 1
        else:
            members.setdefault(one.group, {})[partition] = one
    for m, those in sorted(members.items()):
        _match_group(found, m, those, holdout, seed, (standing or {}).get(m))
    return found


def _match_group(
    found: Matching,
    m: int,
    members: Mapping[int, Introduction],
    holdout: float,
    seed: int,
    before: Group | None,
) -> None:
    hosts, hosted = _hosts(found, {i: one for i, one in members.items() if one.role != "hospital"}, before)
    hospitals = {i: one for i, one in members.items() if one.role == "hospital"}
    if not hospitals:
        found.counts["left-out-no-hospital"] += len(members)
        return

    def standing_then_most(i: int) -> tuple[bool, int, int]:
        matches = len(hosts.keys() & set(hospitals[i].ids))
        return before is not None and matches > 0 and i == before.hospital, matches, -i

    at = max(hospitals, key=standing_then_most)
    found.counts["left-out-second-hospital"] += len(hospitals) - 1
    there = set(hospitals[at].ids)
    matched = sorted(there & hosts.keys())
    found.counts["unmatched-hospital"] += len(there) - len(matched)
    found.counts["unmatched-device"] += len(hosts) - len(matched)
    train = [one for one in matched if not holdout or _draw(seed, one) >= holdout]
    if not train and before is None:  # Later, held-out people stay held out.
        train = matched[:1]
    held = sorted(set(matched) - set(train))
    if not train:
        found.counts["left-out-no-match"] += len(members)
        return
    found.counts["matched"] += len(matched)
    found.groups.append(Group(m, at, tuple(train), {one: hosts[one] for one in train}, hosted))
    if held:
        found.held_out[m] = Group(m, at, tuple(held), {one: hosts[one] for one in held}, hosted)


def _hosts(
    found: Matching, others: Mapping[int, Introduction], before: Group | None
) -> tuple[dict[str, int], bool]:
    """Return the host of each person's device, and whether it is one edge for all, the largest."""
    had = {} if before is None else before.hosts
    edges = [i for i, one in others.items() if one.role == "edge"]
    if edges and before is not None and not before.hosted and others.keys() & set(had.values()):
        found.counts["left-out-beside-devices"] += len(edges)
        others, edges = {i: one for i, one in others.items() if i not in edges}, []
    hosts: dict[str, int] = {}
    if edges:
        chosen = max(edges, key=lambda i: (i in had.values(), len(others[i].ids), -i))
        found.counts["left-out-beside-an-edge"] += len(others) - 1
        return dict.fromkeys(others[chosen].ids, chosen), True
    for i, one in sorted(others.items(), key=lambda item: (had.get(item[1].ids[0]) != item[0], item[0])):
        if len(one.ids) != 1 or one.ids[0] in hosts:
            found.counts["left-out-second-device"] += 1
        else:
            hosts[one.ids[0]] = i
    return hosts, False


@lru_cache(maxsize=2**17)
def _draw(seed: int, person: str) -> float:
    stream = generator(seed, partition_id=int(person, 16), purpose=Purpose.HOLDOUT)
    return float(stream.random())
