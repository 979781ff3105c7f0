"""Rounds of a method without any network: each node's work is a function of arrays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hedgerow.strategies import Ask, Columns, Exchange, Method, RoundContext, Together
from hedgerow.wire import Layout

__all__ = ["Work", "rounds", "runs"]

# (node, what it was asked, what all were told) -> what it learnt, as a row of the exchange's coding
Work = Callable[[int, Ask, dict[str, Any]], np.ndarray]


def rounds(
    method: Method[Any],
    start: np.ndarray,
    sizes: Sequence[float],
    work: Work,
    count: int,
    layout: Layout | None = None,
) -> Iterator[Any]:
    """Yield the state after each round; every round is made twice, and ends in the same state."""
    for state, _ in runs(method, start, sizes, work, count, layout):
        yield state


def runs(
    method: Method[Any],
    start: np.ndarray,
    sizes: Sequence[float],
    work: Work,
    count: int,
    layout: Layout | None = None,
) -> Iterator[tuple[Any, RoundContext]]:
    """Yield the state after each round, as ``rounds`` does, and what the round told beside."""
    federation = method.federation
    federation.layout = layout or Layout(("x",), (start.shape,), (str(start.dtype),))
    federation.limits.claims.sizes = dict(enumerate(sizes))
    state = method.begin(start)
    for number in range(1, count + 1):
        tries = [RoundContext(federation, number, {}, range(len(sizes)), method.parts) for _ in range(2)]
        ends = [_end(method.round(state, run), work) for run in tries]
        for one, other in zip(vars(ends[0]).values(), vars(ends[1]).values(), strict=True):
            np.testing.assert_array_equal(one, other)
        state = ends[0]
        for part in method.parts:
            part.ended(tries[0])
        yield state, tries[0]


def _end(steps: Any, work: Work) -> Any:
    replies = None
    while True:
        try:
            exchange = steps.send(replies)
        except StopIteration as end:
            return end.value
        made = [iter([_columns(one, work)]) for one in exchange.exchanges]
        replies = tuple(made) if isinstance(exchange, Together) else made[0]


def _columns(exchange: Exchange, work: Work) -> Columns:
    asked = exchange.asked
    rows = [work(i, ask, {**exchange.config, **ask.config}) for i, ask in asked.items()]
    return Columns(list(asked), [ask.pool for ask in asked.values()], rows, [1.0] * len(rows), [])
