"""Rounds of a method without any network: each node's work is a function of arrays."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hedgerow.strategies import Ask, Columns, Exchange, Method, Run
from hedgerow.wire import Layout

__all__ = ["Work", "rounds"]

# (node, what it was asked, what all were told) -> what it learnt, as a row of the exchange's coding
Work = Callable[[int, Ask, dict[str, Any]], np.ndarray]


def rounds(
    method: Method[Any], start: np.ndarray, sizes: Sequence[float], work: Work, count: int
) -> Iterator[Any]:
    """Yield the state after each round; every round is made twice, and ends in the same state."""
    federation = method.federation
    federation.layout = Layout(("x",), (start.shape,), (str(start.dtype),))
    federation.sizes = dict(enumerate(sizes))
    state = method.begin(start)
    for number in range(1, count + 1):
        run = Run(federation, number, {}, range(len(sizes)), method.parts)
        ends = [_end(method.round(state, run), work) for _ in range(2)]
        for one, other in zip(vars(ends[0]).values(), vars(ends[1]).values(), strict=True):
            np.testing.assert_array_equal(one, other)
        state = ends[0]
        yield state


def _end(steps: Any, work: Work) -> Any:
    replies = None
    while True:
        try:
            exchange = steps.send(replies)
        except StopIteration as end:
            return end.value
        replies = iter([_columns(exchange, work)])


def _columns(exchange: Exchange, work: Work) -> Columns:
    asked = exchange.asked
    rows = [work(i, ask, {**exchange.config, **ask.config}) for i, ask in asked.items()]
    return Columns(list(asked), [ask.pool for ask in asked.values()], rows, [1.0] * len(rows), [])
