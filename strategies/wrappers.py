"""Detection of strategies that wrap others, such as Flower's differential privacy.

A wrapper may pass other arrays to ``configure_train`` than ``aggregate_train`` returned, and may change
replies before ``aggregate_train`` sees them. A strategy that ignores such arrays would send nodes a model
without the wrapper's noise, and replies that are not models would be clipped as if they were.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
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


def _compared(configure_train: Callable[..., Any]) -> Callable[..., Any]:
    """Compare the arrays of a round with those that the previous round returned."""

    @wraps(configure_train)
    def compared(
        self: "WrappedStrategy", server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Any:
        self._continue_from(server_round, arrays)
        return configure_train(self, server_round, arrays, config, grid)

    return compared


def _kept(aggregate_train: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the returned arrays for the comparison in the next round."""

    @wraps(aggregate_train)
    def kept(self: "WrappedStrategy", server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = aggregate_train(self, server_round, replies)
        if arrays is not None:
            self._handed = Handed(arrays)
        return arrays, metrics

    return kept


class WrappedStrategy(Strategy):
    """A strategy that sees when the strategy around it changes the model.

    A method's state may hold more than the arrays that Flower's loop passes from round to round. So that a
    wrapper's change, such as the noise of differential privacy, is never lost, each ``configure_train``
    compares its arrays with those that the last ``aggregate_train`` returned. If bits differ, the method
    continues from the new arrays (``adopt``), or raises ValueError, which is the default. Every subclass's
    methods are wrapped with this comparison.
    """

    # The secure sums of a method; None without them.
    sums: object | None = None
    # The arrays that the next round's are compared with; None before a run's first round.
    _handed: Handed | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the methods of a round with the comparison of arrays, see the class."""
        super().__init_subclass__(**options)
        for name, rule in (("configure_train", _compared), ("aggregate_train", _kept)):
            if name in vars(cls):
                setattr(cls, name, rule(vars(cls)[name]))

    @property
    @abstractmethod
    def completed_rounds(self) -> int:
        """Number of completed rounds."""

    @abstractmethod
    def current_arrays(self) -> ArrayRecord | None:
        """Return the global model of the completed rounds; None before the first."""

    @property
    @abstractmethod
    def own_start(self) -> bool:
        """Whether the rounds need a ``start`` of the class's own, which a wrapper does not run."""

    @abstractmethod
    def _restart(self) -> None:
        """Begin a new run."""

    def adopt(self, arrays: ArrayRecord) -> None:
        """Continue from other arrays than the last round returned; ValueError if the method cannot."""
        raise self.not_movable()

    def not_movable(self) -> ValueError:
        """Return the error of a method that cannot continue from other arrays than its own."""
        why = self.unwrapped()
        return ValueError(
            f"arrays of configure_train are not those that {type(self).__name__} returned from "
            f"aggregate_train, and it cannot continue from them{f': {why}' if why else ''}. A wrapper that "
            "changes the model, as by noise, would have no effect"
        )

    def unwrapped(self) -> str | None:
        """Return why Flower's wrappers cannot wrap this strategy; None if replies are whole models."""
        return "what its nodes reply is no model that a wrapper could clip or add noise to"

    def _continue_from(self, server_round: int, arrays: ArrayRecord) -> None:
        """Adopt a round's arrays if they are not those that the previous round returned.

        A caller who starts again at round 1 begins a new run.
        """
        if server_round == 1 and self.completed_rounds:
            self._restart()
            self._handed = None
        if self._handed is None:
            self._check_wrappers()
            known = None if server_round == 1 else self.current_arrays()
            self._handed = Handed(arrays if known is None else known)
        if self._handed.differs(arrays):
            self.adopt(arrays)
            self._handed = Handed(arrays)

    def _check_wrappers(self) -> None:
        """Raise ValueError if a wrapper bypasses ``start``, or changes replies that are not models."""
        own = type(self).__name__
        for outer in outer_strategies(self):
            name = type(outer).__name__
            if type(outer).__module__.startswith("hedgerow."):
                continue
            if is_flowers(outer) and self.sums is not None:
                raise ValueError(
                    f"strategy of {name} must have no secure_sum, got {own} with one: its nodes reply with "
                    f"masked words, which {name} cannot clip; use SecureSum(noise=SumNoise(...)) without "
                    f"{name}"
                )
            if is_flowers(outer) and (why := self.unwrapped()) is not None:
                raise ValueError(f"strategy of {name} is {own}, which it cannot wrap: {why}")
            if self.own_start:
                raise ValueError(
                    f"strategy of {name} must have no start of its own, got {own}: its rounds need what its "
                    f"start does, and {name} runs another"
                )
