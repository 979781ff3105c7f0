"""Detection of strategies that wrap others, such as Flower's differential privacy.

A wrapper may pass other arrays to ``configure_train`` than ``aggregate_train`` returned, and may change
replies before ``aggregate_train`` sees them. A strategy that ignores such arrays would send nodes a model
without the wrapper's noise, and replies that are not models would be clipped as if they were.
"""

import sys
from collections.abc import Iterator

from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy

from hedgerow.wire.records import view


class Handed:
    """A snapshot of an ArrayRecord; later changes of the record in place show as a difference."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self._arrays = dict(arrays.items())

    def differs(self, arrays: ArrayRecord) -> bool:
        """Return whether a record holds other bits under the same keys, or has other keys."""
        if self._arrays.keys() != arrays.keys():
            return True
        pairs = ((array, arrays[key]) for key, array in self._arrays.items())
        return any(one is not other and _differ(one, other) for one, other in pairs)


def _differ(one: Array, other: Array) -> bool:
    if (one.dtype, tuple(one.shape)) != (other.dtype, tuple(other.shape)):
        return True
    return view(one).tobytes() != view(other).tobytes()


def chain(strategy: Strategy) -> Iterator[Strategy]:
    """Yield a strategy and the strategies that it wraps."""
    inner: object = strategy
    while isinstance(inner, Strategy):
        yield inner
        inner = vars(inner).get("strategy")


def outer_strategies(strategy: Strategy) -> Iterator[Strategy]:
    """Yield the strategies that called this one, from the inside out, up to this one's own ``start``.

    A wrapped strategy has no reference to its wrapper, so this inspects the call stack.
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
