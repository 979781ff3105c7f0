"""The weighted mean of replies, and the protocol of aggregators."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from flwr.app import MetricRecord
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Columns, Exchange, Steps, Vector, Weigh
from hedgerow.strategies.vectors import DeviceRows
from hedgerow.wire.records import only_record


class Mean(Protocol):
    """The aggregate of the replies of one pool."""

    @property
    def nodes(self) -> Collection[int]:
        """Partition ids, ascending."""

    @property
    def weight(self) -> float:
        """The nodes' total weight."""

    def model(self, stayed: float = 0.0) -> NDArray[np.float64]:
        """Return the mean (M,), with nodes of total weight ``stayed`` at the model that they were sent."""


class Aggregator(Protocol):
    """Makes a training exchange and aggregates the replies of each pool.

    Its ``means`` is a generator: it yields the exchange, and may yield questions before and after. A mean of
    replies has the method's weights: ``WeightedMean()``.
    """

    def means(self, exchange: Exchange, run: RoundContext) -> Steps[Mapping[int, Mean]]:
        """Make an exchange; return the means of the pools that have one."""


@dataclass(frozen=True, eq=False)
class ServerUpdate:
    """A model plus an update that does not depend on missing nodes.

    Parameters
    ----------
    nodes : Sequence[int]
        The nodes with an accepted reply.
    weight : float
        Their total weight.
    start : NDArray
        The model that they were sent, (M,).
    move : NDArray
        The update, (M,).
    """

    nodes: Sequence[int]
    weight: float
    start: Vector
    move: NDArray[np.float64]

    def model(self, stayed: float = 0.0) -> NDArray[np.float64]:
        """Return the model (M,)."""
        moved: NDArray[np.float64] = self.start + self.move
        return moved


@dataclass(frozen=True, eq=False)
class FixedResult:
    """A model (M,) in place of a mean; it does not depend on missing nodes."""

    nodes: Collection[int]
    weight: float
    taken: NDArray[np.float64]

    def model(self, stayed: float = 0.0) -> NDArray[np.float64]:
        """Return the model (M,)."""
        return self.taken


@dataclass
class SumOfRows:
    """A pool's weighted sum of rows, in the order of partition ids, on the rows' device."""

    start: Vector
    changes: bool
    total: NDArray[np.float64] | Tensor
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, node: int, row: Vector | Tensor, weight: float) -> None:
        """Add a row (M,)."""
        self.weights[node] = self.weights.get(node, 0.0) + weight  # A buffer may hold two of a node.
        if isinstance(row, Tensor):
            # Not in one fused kernel, which may round once while the host rounds twice.
            self.total = torch.as_tensor(self.total, device=row.device) + row.double() * weight
        else:
            self.total += np.multiply(row, weight, dtype=np.float64)

    @property
    def nodes(self) -> Collection[int]:
        """The summed rows' nodes."""
        return self.weights

    @property
    def weight(self) -> float:
        """Their total weight."""
        return sum(self.weights.values())

    def model(self, stayed: float = 0.0) -> NDArray[np.float64]:
        """Return the mean (M,), see ``Mean.model``."""
        weight, total = self.weight + stayed, self.total
        if isinstance(total, Tensor):
            total = total.numpy(force=True)
        if self.changes:
            mean: NDArray[np.float64] = self.start + total / weight
        else:
            mean = (total + stayed * self.start if stayed else total) / weight
        return mean


@dataclass(frozen=True)
class WeightedMean:
    """The mean by the method's weights, by examples, or the plain mean.

    Parameters
    ----------
    by_examples : bool or None (default: None)
        Whether a node's weight is its number of examples; else 1. None for the weights of the exchange's
        method (``Exchange.weigh``), unless a subclass has its own.
    """

    by_examples: bool | None = None

    def weights(self, run: RoundContext, replies: Columns) -> Sequence[float]:
        """Return the replies' weights (K,): the examples that each node claimed first, bounded, or 1."""
        if self.by_examples is False:
            return [1.0] * len(replies.nodes)
        return run.sizes(replies.nodes, replies.claimed)

    def means(self, exchange: Exchange, run: RoundContext) -> Steps[Mapping[int, Mean]]:
        """Return each pool's mean, summed in float64 as replies come."""
        sums: dict[int, SumOfRows] = {}
        own = self.by_examples is not None or type(self).weights is not WeightedMean.weights
        weigh = self.weights if own or exchange.weigh is None else exchange.weigh
        for replies in (yield exchange):
            rows = replies.rows.tensor if isinstance(replies.rows, DeviceRows) else replies.rows
            weights = weigh(run, replies)
            for node, pool, row, weight in zip(replies.nodes, replies.pools, rows, weights, strict=True):
                if pool not in sums:
                    start = exchange.sent(pool)
                    sums[pool] = SumOfRows(start, exchange.coding.changes, np.zeros(start.shape, np.float64))
                sums[pool].add(node, row, weight)
        return sums


@dataclass(frozen=True)
class MeanByMetric(WeightedMean):
    """The mean weighted by a metric of each reply, at most the examples that its node claimed first."""

    metric: str = ""

    def weights(self, run: RoundContext, replies: Columns) -> Sequence[float]:
        """Return each reply's metric, up to its node's examples; without messages, the examples."""
        examples = super().weights(run, replies)
        if not replies.replies:
            return examples
        metrics = [only_record(reply.content, MetricRecord, "bad metrics") for reply in replies.replies]
        return [min(most, float(one[self.metric])) for most, one in zip(examples, metrics, strict=True)]  # type: ignore[arg-type]


def means_of(
    aggregator: Aggregator,
    pools: Mapping[int, tuple[Vector, Mapping[int, Vector]]],
    run: RoundContext,
    claimed: Mapping[int, float] | None = None,
    weigh: Weigh | None = None,
) -> Steps[Mapping[int, Mean]]:
    """Return an aggregator's means of given rows, without an exchange.

    Parameters
    ----------
    aggregator : Aggregator
        Any but secure sums.
    pools : Mapping[int, tuple of NDArray and Mapping[int, NDArray]]
        By pool, the model that its members were sent (M,), and each member's row (M,).
    run : RoundContext
        The current attempt of the round.
    claimed : Mapping[int, float] or None (default: None)
        The examples that each member claims; None for 1 each.
    weigh : Callable or None (default: None)
        The method's weights, as in ``Exchange``.
    """
    asks = [Ask(list(rows), sent, pool=pool) for pool, (sent, rows) in pools.items()]
    of = [(i, pool, row) for pool, (_, rows) in pools.items() for i, row in rows.items()]
    exchange = Exchange("", asks, weigh=weigh)
    steps = aggregator.means(exchange, run)
    next(steps)
    nodes, numbers, rows = zip(*of, strict=True) if of else ((), (), ())
    sizes = [1.0 if claimed is None else claimed[i] for i in nodes]
    columns = Columns(nodes, numbers, rows, sizes, [])
    for part in run.parts.hooks["learnt"] if nodes else ():
        part.learnt(exchange, columns, run)
    try:
        step = steps.send(iter([columns]))
        while True:
            step = steps.send((yield step))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
