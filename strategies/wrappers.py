"""Strategies that other strategies wrap, as Flower's differential privacy wraps any.

A wrapper may hand other arrays to ``configure_train`` than ``aggregate_train`` returned, and may change
replies before ``aggregate_train`` sees them. A strategy that ignores such arrays sends nodes a model without
the wrapper's noise; one whose replies are no models has them clipped as if they were.
"""

import sys
from collections.abc import Iterator

from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from hedgerow.wire.records import view

__all__ = ["Handed", "chain", "is_flowers", "outer_strategies"]


class Handed:
    """What a record of arrays held; it differs from the record if that is changed in place afterwards."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self._arrays = dict(arrays.items())

    def differs(self, arrays: ArrayRecord) -> bool:
        """Return whether a record holds other bits under the same keys, or has other keys."""
        if self._arrays.keys() != arrays.keys():
            return True
        return any(_differ(array, arrays[key]) for key, array in self._arrays.items())


def _differ(one: Array, other: Array) -> bool:
    if one is other:
        return False
    if (one.dtype, tuple(one.shape)) != (other.dtype, tuple(other.shape)):
        return True
    return view(one).tobytes() != view(other).tobytes()


def chain(strategy: Strategy) -> Iterator[Strategy]:
    """Yield a strategy, and those that it wraps."""
    inner: object = strategy
    while isinstance(inner, Strategy):
        yield inner
        inner = vars(inner).get("strategy")


def outer_strategies(strategy: Strategy) -> Iterator[Strategy]:
    """Yield the strategies that called this one, from the inside out, up to this one's own ``start``.

    A wrapper keeps the strategy that it wraps, which does not know of it: callers are all there is to go by.
    """
    frame, found = sys._getframe(1), list[Strategy]()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is strategy and frame.f_code.co_name == "start":
            return
        if (
            isinstance(caller, Strategy)
            and caller is not strategy
            and all(caller is not one for one in found)
        ):
            found.append(caller)
            yield caller
        frame = frame.f_back  # type: ignore[assignment]


def is_flowers(strategy: Strategy) -> bool:
    """Return whether a strategy is one of Flower's own, or derived from one."""
    return any(cls is not Strategy and cls.__module__.startswith("flwr.") for cls in type(strategy).__mro__)
