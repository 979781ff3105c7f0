"""The two tiers that average in HSGD: an edge its devices, the cloud its groups.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", (1), (2) and lines 10 to 21 of Algorithm 1.
Differs: devices are averaged before groups are, over the set that just trained: (2) needs (1) of that
iteration, which the printed order has not computed yet.

A rule that some lying parties cannot ruin may stand in place of either mean; it is taken of updates, each of
which is one: no device counts more than another, nor any group for the people that it tells of.

Only an edge touches encodings. The cloud has no way to take one: it is handed models and group sizes.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.hsgd.groups import Group
from hedgerow.strategies.hsgd.messages import Encodings, Heads, SealedForAll, picked
from hedgerow.strategies.vectors import WeightedMean
from hedgerow.wire.records import Layout

__all__ = ["Blocks", "CloudAggregator", "Combine", "EdgeAggregator", "Theta", "mean_of", "moved"]

Vector = NDArray[Any]
# Returns what a rule makes of updates (n, d), n >= 1, in float64.
Combine = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class Theta(NamedTuple):
    """Head (n0,), hospital's encoder (n1,) and devices' encoder (n2,), as vectors."""

    head: Vector
    hospital: Vector
    device: Vector


class Blocks:
    """Where a model's three blocks stand in its flat vector: keys ``head.*``, ``hospital.*``, ``device.*``.

    Raises
    ------
    ValueError
        If a key belongs to no block, a block is empty, or an array is not of floating point.
    """

    def __init__(self, layout: Layout) -> None:
        where: dict[str, list[NDArray[np.intp]]] = {name: [] for name in Theta._fields}
        for (key, part), dtype in zip(layout.slices.items(), layout.dtypes, strict=True):
            block = key.partition(".")[0]
            if block not in where:
                raise ValueError(
                    f"initial_arrays has the key {key!r}; valid is head.*, hospital.* or device.*"
                )
            if np.dtype(dtype).kind != "f":
                raise ValueError(f"initial_arrays[{key!r}] is {dtype}; valid is a floating-point type")
            where[block].append(np.arange(part.start, part.stop))
        for block, parts in where.items():
            if not parts or not sum(map(len, parts)):
                raise ValueError(f"initial_arrays has no key {block}.*; valid is at least one with entries")
        self._where = Theta(*(np.concatenate(parts) for parts in where.values()))
        self.sizes = tuple(map(len, self._where))

    def split(self, vector: Vector) -> Theta:
        """Return a flat vector's blocks, each in the order of the keys."""
        return Theta(*(vector[where] for where in self._where))

    def join(self, theta: Theta) -> Vector:
        """Return the flat vector of the blocks."""
        vector = np.empty(sum(self.sizes), np.result_type(*theta))
        for where, block in zip(self._where, theta, strict=True):
            vector[where] = block
        return vector


class EdgeAggregator:
    """One group's edge in one round: it swaps encodings between hospital and devices, and averages devices.

    Where a node is the edge itself, only encodings and what it uploads pass here.

    Parameters
    ----------
    group : Group
        The group.
    theta : Vector
        theta_2 of the round's start (n2,).
    pairs : bool (default: False)
        Whether each device keeps its own model until the end of the round (JFL).
    combine : Combine or None (default: None)
        The rule in place of the mean of devices; None for the mean.
    """

    def __init__(
        self, group: Group, theta: Vector, pairs: bool = False, combine: Combine | None = None
    ) -> None:
        self.group = group
        self.pairs = pairs
        self._combine = combine
        self.ids: list[str] = []
        self._theta = theta
        self._own: dict[str, Vector] = {}  # theta_{2,m,n} of the devices that trained
        self._before: dict[str, Vector] = {}  # the same before the interval at hand
        # What an edge node averaged, or devices whose models the server did not see.
        self._uploaded: Vector | None = None
        self.forget_encodings()

    def forget_encodings(self) -> None:
        """Delete what was relayed: it is of no use after the interval."""
        self._zeta2: dict[str, Encodings] = {}
        self._zeta1: Encodings | None = None
        self._head: Heads | None = None

    @property
    def holds_encodings(self) -> bool:
        """Whether anything of the swap is still here."""
        return bool(self._zeta2) or self._zeta1 is not None or self._head is not None

    # Before the local steps.

    def choose(self, ids: Sequence[str]) -> None:
        """Begin an interval with A_m, in the hospital's order."""
        self.ids = list(ids)
        if not self.pairs:
            self._own = {}
        self._before = dict(self._own)

    def undo(self) -> None:
        """End an interval that the group sits out: theta_2 is what it was before."""
        self._own = self._before
        self.forget_encodings()

    def keep(self, chosen: Collection[str]) -> None:
        """Take all others out of A_m, who are as silent."""
        self._zeta2 = {person: rows for person, rows in self._zeta2.items() if person in chosen}
        self.drop_silent()

    def leave_out(self, people: Collection[str]) -> None:
        """Take people out of A_m after the swap, with the models of their devices."""
        self.ids = [person for person in self.ids if person not in people]
        self._own = {person: own for person, own in self._own.items() if person not in people}

    def asked(self) -> dict[int, list[str]]:
        """Return the nodes that host this interval's devices, and whose."""
        if self.group.hosted:
            return {self.group.hosts[self.ids[0]]: list(self.ids)}
        return {self.group.hosts[person]: [person] for person in self.ids}

    def model_for(self, ids: Sequence[str]) -> Vector:
        """Return theta_2 that these devices start the interval from."""
        return self._own.get(ids[0], self._theta) if self.pairs else self._theta

    def take_device_encodings(self, ids: Sequence[str], rows: Encodings) -> None:
        """Take the rows of zeta2 that a node sent for its people."""
        for row, person in enumerate(ids):
            self._zeta2[person] = picked(rows, [row])

    def take_hospital(self, head: Heads, zeta1: Encodings) -> None:
        """Take the hospital's head and zeta1, a row for each of ``ids``."""
        self._head, self._zeta1 = head, zeta1

    def drop_silent(self) -> None:
        """Take those out of A_m whose encodings did not come."""
        there = [row for row, person in enumerate(self.ids) if person in self._zeta2]
        if len(there) == len(self.ids):
            return
        if self._zeta1 is not None:
            self._zeta1 = picked(self._zeta1, there)
        if self.pairs and isinstance(self._head, np.ndarray):
            self._head = self._head[there]
        self.ids = [self.ids[row] for row in there]

    @property
    def swappable(self) -> bool:
        """Whether the hospital and at least one device sent what the other needs."""
        return self._zeta1 is not None and bool(self._zeta2)

    def for_hospital(self) -> Encodings:
        """Return zeta2, a row for each of ``ids``."""
        rows = [self._zeta2[person] for person in self.ids]
        if isinstance(rows[0], SealedForAll):
            return rows[0]
        if isinstance(rows[0], list):
            return [row[0] for row in rows if isinstance(row, list)]
        return np.concatenate([row for row in rows if isinstance(row, np.ndarray)])

    def for_devices(self, ids: Sequence[str]) -> tuple[Heads, Encodings]:
        """Return the head and these people's rows of zeta1, and no one else's."""
        assert self._head is not None
        assert self._zeta1 is not None
        place = {person: row for row, person in enumerate(self.ids)}
        rows = [place[person] for person in ids]
        if not self.pairs or isinstance(self._head, bytes):
            return self._head, picked(self._zeta1, rows)
        return self._head[rows if self.group.hosted else rows[0]], picked(self._zeta1, rows)

    # After them.

    def take_device_model(self, ids: Sequence[str], theta_2: Vector) -> None:
        """Take a device's model, or an edge node's mean."""
        if self.group.hosted:
            self._uploaded = theta_2
        else:
            self._own[ids[0]] = theta_2

    def aggregate(self) -> None:
        """Average the devices that answered, (1); keep theta_2 where none did."""
        if self._uploaded is not None:
            self._theta = self._uploaded
        elif self._own and not self.pairs:
            self._theta = self._mean([self._own[person] for person in self.ids if person in self._own])
        self.forget_encodings()

    def take_sum(self, theta_2: Vector) -> None:
        """Take the mean of devices whose models only they know: theta_2 from here on."""
        self._theta = self._uploaded = theta_2

    def model(self) -> Vector:
        """Return theta_{2,m}: what the last ``aggregate`` left, of JFL the mean over the pairs."""
        if not self.pairs or self.group.hosted or self._uploaded is not None:
            return self._theta
        return self._mean([self.model_for([person]) for person in self.ids])

    def device_variance(self, start: Vector, eta: float, gradient: Vector) -> tuple[float, int]:
        """Return the sum over devices of ||g_n - gradient||^2 after one step of ``eta``, and their number.

        Only this scalar leaves the edge.
        """
        draws = [(start.astype(np.float64) - own) / eta - gradient for own in self._own.values()]
        return float(sum(draw @ draw for draw in draws)), len(draws)

    def _mean(self, models: Sequence[Vector]) -> Vector:
        if self._combine is not None:
            return moved(self._combine, self._theta, models)
        mean = WeightedMean()
        for model in models:
            mean.add(1.0, model)
        assert mean.value is not None
        return mean.value.astype(self._theta.dtype)


class CloudAggregator:
    """The cloud: theta = sum_m K_m / K theta_m over the groups that it is handed, (2)."""

    def __init__(self) -> None:
        self._means = [WeightedMean() for _ in Theta._fields]
        self._dtype: np.dtype[Any] | None = None

    def add(self, size: int, theta: Theta) -> None:
        """Add a group's model with its weight K_m, all of its people, >= 1."""
        self._dtype = theta.head.dtype
        for mean, block in zip(self._means, theta, strict=True):
            mean.add(float(size), block)

    @property
    def value(self) -> Theta | None:
        """The global model, of the groups' dtype; None of no group."""
        values = [mean.value for mean in self._means]
        if self._dtype is None:
            return None
        return Theta(*(value.astype(self._dtype) for value in values if value is not None))


def moved(combine: Combine, start: Vector, models: Sequence[Vector]) -> Vector:
    """Return a model (d,) after what a rule makes of its updates, which led to ``models``, one at least."""
    before = start.astype(np.float64)
    model: Vector = (before + combine(np.stack(models) - before)).astype(start.dtype)
    return model


def mean_of(models: Mapping[int, tuple[int, Theta]]) -> Theta | None:
    """Return the mean of models by group, each with its weight, in the order of groups."""
    cloud = CloudAggregator()
    for m in sorted(models):
        cloud.add(*models[m])
    return cloud.value
