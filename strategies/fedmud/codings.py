"""How a reply's arrays become a row: the uncoded part, and what the arrays of the coded layers stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.aggregate.mean import Aggregator, FixedResult, Mean
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange, Row, Steps, Vector
from hedgerow.strategies.fedmud.projection import nearest_factors
from hedgerow.strategies.vectors import joined, split
from hedgerow.wire.lowrank import Factorisation
from hedgerow.wire.records import Layout, PayloadError

Decode = Callable[[ArrayRecord, int], NDArray[Any]]


class Coded:
    """Rows (theta_i, c_i): the uncoded part, of the layout ``rest``, and a method's decoding of all else.

    ``bits`` is the paper's count for a reply; ``decode`` returns c_i, (c,), of a node's other arrays, and
    raises PayloadError if they are invalid.
    """

    changes = False

    def __init__(self, rest: Layout, bits: int, decode: Decode) -> None:
        self.rest, self.decode, self._bits = rest, decode, bits

    def read(self, record: ArrayRecord, sent: Vector, layout: Layout, node: int) -> Row:
        """Return the row."""
        rest, coded = ArrayRecord(), ArrayRecord()
        for key, array in record.items():
            (rest if key in self.rest.slices else coded)[key] = array
        theta = self.rest.flatten(rest, sent.dtype)
        return Row(np.concatenate([theta, self.decode(coded, node)]), self._bits)

    def bits(self, layout: Layout) -> int:
        """Return the paper's count."""
        return self._bits

    def summed(self, model: Vector, layout: Layout) -> ArrayRecord:
        """Return nothing: these arrays cannot be summed."""
        return ArrayRecord()

    def change(self, numbers: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Return the numbers unchanged."""
        return numbers


class Factors(Coded):
    """Rows (theta_i, F_i): factors are averaged one by one, eq. (4), and can be summed.

    ``frozen`` are the factors that are not trained.
    """

    def __init__(self, rest: Layout, bits: int, plan: Factorisation, frozen: Mapping[str, Tensor]) -> None:
        shapes = plan.shapes
        factors = Layout(tuple(shapes), tuple(shapes.values()), ("float32",) * len(shapes))
        super().__init__(rest, bits, lambda coded, node: factors.flatten(coded, np.float32))
        self.plan, self.frozen = plan, frozen
        keys, dtypes = rest.keys + factors.keys, rest.dtypes + factors.dtypes
        self._all = Layout(keys, rest.shapes + factors.shapes, dtypes, rest.origin)

    def update(self, row: Vector) -> NDArray[np.float32]:
        """Return Delta (D,) of the factors of a row."""
        factors = split(row[self.rest.size :], self.plan.shapes)
        deltas = self.plan.deltas(factors, self.frozen)
        return joined(deltas, [layer.key for layer in self.plan.layers])

    def summed(self, model: Vector, layout: Layout) -> ArrayRecord:
        """Return rest and factors, in the order of their keys."""
        return ArrayRecord(dict(sorted(self._all.unflatten(model).items())))

    def change(self, numbers: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
        """Return the change of theta and F."""
        change, at = np.zeros(self._all.size), 0
        for key in sorted(self._all.keys):
            where = self._all.slices[key]
            size = where.stop - where.start
            change[where] = numbers[at : at + size]
            at += size
        return change


class _Updates(Coded):
    """Rows (theta_i - theta, Delta_i - Delta): changes of the updates that factors stand for."""

    changes = True

    def __init__(self, factors: Factors, start: Vector) -> None:
        self.factors, self.start, self._delta = factors, start, factors.update(start)

    def read(self, record: ArrayRecord, sent: Vector, layout: Layout, node: int) -> Row:
        """Return the row; PayloadError for finite factors with a product that overflows."""
        row = self.factors.read(record, self.start, layout, node)
        d = self.factors.rest.size
        update = self.factors.update(row.vector) - self._delta
        if not np.isfinite(update).all():
            raise PayloadError("non-finite", "the update that the reply stands for overflows")
        return Row(np.concatenate([row.vector[:d] - self.start[:d].astype(np.float64), update]), row.bits)


class _WithUpdates(Coded):
    """Rows (theta_i, F_i, Delta_i)."""

    def __init__(self, factors: Factors) -> None:
        self.factors = factors

    def read(self, record: ArrayRecord, sent: Vector, layout: Layout, node: int) -> Row:
        """Return the row."""
        row = self.factors.read(record, sent, layout, node)
        return replace(row, vector=np.concatenate([row.vector, self.factors.update(row.vector)]))


def as_updates(exchange: Exchange) -> Exchange:
    """Return an exchange of factors with rows (theta_i - theta, Delta_i - Delta), which are linear."""
    factors, (ask,) = exchange.coding, exchange.asks
    assert isinstance(factors, Factors)
    sent, d = exchange.sent(ask.pool), factors.rest.size
    delta, bounded = factors.update(sent), dict(exchange.bounded)
    if delta.size:
        bounded["coded"] = slice(d, None), delta
    asks = [replace(ask, model=np.concatenate([sent[:d], delta]))]
    return replace(exchange, asks=asks, coding=_Updates(factors, sent), bounded=bounded)


def with_updates(exchange: Exchange) -> Exchange:
    """Return an exchange of factors with rows (theta_i, F_i, Delta_i)."""
    factors, (ask,) = exchange.coding, exchange.asks
    assert isinstance(factors, Factors)
    sent = exchange.sent(ask.pool)
    start = np.concatenate([sent, factors.update(sent)])
    return replace(exchange, asks=[replace(ask, model=start)], coding=_WithUpdates(factors))


@dataclass(frozen=True)
class Reconstructing:
    """An aggregator of factors that also reconstructs the update of every reply.

    A robust rule is applied to the updates, but its result is in general no product of factors: the factors
    become those with the nearest update. If one factor of each product is frozen (F and AAD), the possible
    updates are a linear space. It contains every valid reply and every mean of replies, and its nearest point
    is no further from any of them than the rule's own result. So the rule's guarantee still holds, merges
    stay as small as before, and the result for a mean is the mean of the factors.
    """

    aggregator: Aggregator  # Of rows: of factors, or of updates.
    of_updates: bool  # Aggregate updates, which are linear in the factors.
    # Report ``aggregation-bias`` each round, the largest entry of W* - W: the error of eq. (7), the mean of
    # factors, against eq. (6), the mean of updates.
    measures: bool

    @property
    def each_once(self) -> bool:
        """Whether a node may have one reply at most in a buffer, as in ``Robust``."""
        return getattr(self.aggregator, "each_once", False)

    def means(self, exchange: Exchange, run: RoundContext) -> Steps[Mapping[int, Mean]]:
        """Return the mean factors of the one pool."""
        factors, (ask,) = exchange.coding, exchange.asks
        assert isinstance(factors, Factors)
        sent = exchange.sent(ask.pool)
        d, size = factors.rest.size, sent.size
        asked = as_updates(exchange) if self.of_updates else with_updates(exchange)
        means = yield from self.aggregator.means(asked, run)
        found: dict[int, Mean] = {}
        for pool, mean in means.items():
            row = mean.model()
            if self.of_updates:
                wanted = row[d:]
                row = np.concatenate([row[:d], nearest_factors(factors.plan, factors.frozen, wanted)])
            else:
                row, wanted = row[:size], row[size:]
            if self.measures:
                bias = np.abs(wanted - factors.update(row))
                run.metrics["aggregation-bias"] = float(bias.max(initial=0.0))
            found[pool] = FixedResult(mean.nodes, mean.weight, row)
        return found
