"""The driver of methods: a round is a generator of exchanges, run by Flower's loop and by hedgerow's.

It sends, checks and books for all methods. Everything but the algorithm is an aggregator or a part.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from functools import cached_property, partial
from io import BytesIO
from logging import INFO
from types import FunctionType
from typing import Any, ClassVar, Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.aggregate.mean import Aggregator, Mean, WeightedMean
from hedgerow.strategies.at_once import at_once
from hedgerow.strategies.buffer import Buffer
from hedgerow.strategies.buffered import Buffered, refusal
from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange, Question, RoundFailedError, Steps, Together, Vector
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.messenger import Messenger, Sending, send
from hedgerow.strategies.parts.acknowledgements import Acknowledgements
from hedgerow.strategies.parts.part import Part, Parts
from hedgerow.strategies.parts.server_step import ServerStep
from hedgerow.strategies.round_end import TooFewRepliesError
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.strategies.wrappers import Handed
from hedgerow.wire.printable import quoted

S = TypeVar("S")


class Method(FederatedStrategy, Generic[S]):
    """A Flower ``Strategy`` of a method with ``begin``, ``round`` and ``model`` on a frozen ``State``.

    Parameters
    ----------
    federation : Federation
        The nodes.
    aggregator : Aggregator (default: WeightedMean())
        How replies are aggregated.
    parts : Sequence[Part] (default: ())
        Additions to the algorithm, such as compression.
    mean : WeightedMean (default: WeightedMean())
        The method's own mean: its weights are those of every aggregator.
    """

    state_class: ClassVar[type]

    def __init__(
        self,
        federation: Federation,
        *,
        aggregator: Aggregator | None = None,
        parts: Sequence[Part] = (),
        mean: WeightedMean | None = None,
    ) -> None:
        self.mean = mean or WeightedMean()
        self.aggregator = aggregator or self.mean
        # An aggregator that keeps state is a part too.
        kept: list[Part] = [self.aggregator] if isinstance(self.aggregator, Part) else []
        self.server_step: ServerStep | None = federation.settings.server_step
        if self.server_step is not None:
            if not isinstance(self.server_step, ServerStep):
                raise ValueError(f"server_step must be None or a ServerStep, got {quoted(self.server_step)}")
            if why := self.unstepped():
                raise ValueError(f"server_step must be None with {type(self).__name__}: {why}")
            kept.append(self.server_step)
        self.buffered: Buffered | None = None
        own = (*parts, *kept, *federation.settings.parts)
        if federation.settings.local_layers and not any(
            isinstance(part, Acknowledgements) and part.keeps_state for part in own
        ):
            own = (*own, Acknowledgements())
        self.parts = Parts(own)
        alone = [type(part).__name__ for part in self.parts if not part.with_sums]
        if alone and self.sums is not None:
            raise ValueError(
                f"parts must work without single updates and node state if secure_sum is set, got "
                f"{', '.join(alone)}"
            )
        super().__init__(federation)
        if (buffer := Buffer.of(federation.settings.buffer)) is not None:
            if why := refusal(self, Method):
                raise ValueError(f"buffer must be None with {type(self).__name__}: {why}")
            self.buffered = Buffered(self, buffer)

    # The algorithm.

    @abstractmethod
    def begin(self, model: Vector) -> S:
        """Return the state before the first round, from the initial model (M,); M is 0 if nodes have it."""

    @abstractmethod
    def round(self, state: S, run: RoundContext) -> Steps[S]:
        """Yield the exchanges of a round, and return the state after it.

        At least one exchange must be of the category ``train``, unless the run ends (``finished``). The first
        of these goes through Flower's loop, and its replies are those that a round counts. A failed round is
        repeated from the same state, so a round must not change anything else.
        """

    @abstractmethod
    def model(self, state: S) -> Vector:
        """Return the model (M,) of a state."""

    def means(self, exchange: Exchange, run: RoundContext) -> Steps[Mapping[int, Mean]]:
        """Make a training exchange; return the aggregate of each pool's replies."""
        asked = replace(exchange.prepared(run), weigh=self.mean.weights)
        means = yield from self.aggregator.means(asked, run)
        return means if self.server_step is None else self.server_step.stepped(means, exchange, run)

    def unstepped(self) -> str | None:
        """Return why no ``ServerStep`` can act on the method's means; None if one can."""
        return None

    def unbuffered(self) -> str | None:
        """Return why a buffer cannot hold replies to earlier models (``Buffer``); None if it can.

        It can if rows of earlier rounds mean the same as those of this one: a round makes one training
        exchange with one model, and its state depends on the mean of the rows alone, as for a server step.
        """
        return self.unstepped()

    def buffered_round(self, state: S, run: RoundContext) -> Steps[S]:
        """Return a round of a run with a buffer: ``round``, unless its rows mean another thing each round."""
        return self.round(state, run)

    def ended(self, state: S, run: RoundContext) -> None:
        """Called with the state after each completed round."""

    def moved(self, state: S, model: Vector) -> S:
        """Return the state after a wrapper has changed its model; ValueError if it cannot."""
        raise self.not_movable()

    @property
    def iterations(self) -> int | None:
        """Local iterations since the start; None if the method does not count them."""
        return None

    def summary(self) -> None:
        """Log the settings of aggregator and parts."""
        log(INFO, "\t├──> Aggregator: %s", type(self.aggregator).__name__)
        for line in [line for part in self.parts for line in part.describe()]:
            log(INFO, "\t├──> %s", line)
        self.log_keys()

    # State.

    def saved(self, state: S) -> dict[str, Any]:
        """Return a state's fields, for a checkpoint."""
        return {one.name: getattr(state, one.name) for one in fields(state)}  # type: ignore[arg-type]

    def restored(self, saved: Mapping[str, Any]) -> S:
        """Return the state of a checkpoint."""
        return self.state_class(**saved)  # type: ignore[no-any-return]

    def _forget(self) -> None:
        self.state: S | None = None
        # The current round, until it ends: its steps, and its training exchange.
        self._pending: tuple[Messenger, Steps[S], Exchange | Together] | None = None
        # The state of the caller's own parts and aggregator before the attempt, until the round counts.
        for cached in ("_owned", "_stateless"):  # it may have another aggregator
            self.__dict__.pop(cached, None)
        self._before: list[tuple[Any, Any]] = []
        self._attributes: list[dict[str, object]] = []
        for part in self.parts:
            part.forget()
        if self.sums is not None:
            self.sums.forget()
        if self._kept is not None:
            self._kept.forget()
        if self.buffered is not None:
            self.buffered.forget()

    def _state(self) -> dict[str, Any]:
        return {
            "method": self.saved(self._known_state()),
            "parts": {part.name: part.state_dict() for part in self.parts},
            **({"aggregator": self._kept.state_dict()} if self._kept is not None else {}),
            **({"buffer": self.buffered.state_dict()} if self.buffered is not None else {}),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        if "parts" not in state:
            raise ValueError(f"state is none of {type(self).__name__}: it was written by an earlier version")
        self.state = self.restored(state["method"])
        for part in self.parts:
            part.load_state_dict(state["parts"].get(part.name, {}))
        if self._kept is not None and "aggregator" in state:
            self._kept.load_state_dict(state["aggregator"])
        if self.buffered is not None and "buffer" in state:
            self.buffered.load_state_dict(state["buffer"])

    @property
    def _kept(self) -> Any:
        """The aggregator, if it keeps state and is neither a part nor the secure sums."""
        own: Any = self.aggregator
        return None if isinstance(own, Part) or own is self.sums or not hasattr(own, "state_dict") else own

    @cached_property
    def _owned(self) -> list[Any]:
        """The caller's own parts and aggregator that keep state; the suite's parts commit in ``ended``."""
        own = [*self.settings.parts, *(one for one in [self.aggregator] if isinstance(one, Part)), self._kept]
        return [one for one in own if one is not None]

    @cached_property
    def _stateless(self) -> list[Any]:
        """The caller's own parts and aggregator that have no ``state_dict``: no round may change them."""
        aggregator = [] if any(one is self.aggregator for one in self.settings.parts) else [self.aggregator]
        return [
            one
            for one in (*self.settings.parts, *aggregator)
            if getattr(type(one), "state_dict", Part.state_dict) is Part.state_dict
            and not type(one).__module__.startswith("hedgerow.")
        ]

    def _take(self) -> None:
        """Take the state of the caller's own parts and aggregator."""
        self._put_back()
        self._before = [(one, deepcopy(one.state_dict())) for one in self._owned]
        self._attributes = [_attributes(one) for one in self._stateless]

    def _check_unchanged(self, server_round: int) -> None:
        """Raise ValueError if a round has changed what no checkpoint or repeated round has."""
        for one, before in zip(self._stateless, self._attributes, strict=True):
            now = _attributes(one)
            if moved := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
                what = "aggregation" if one is self.aggregator else "parts"
                raise ValueError(
                    f"{what} must have state_dict, load_state_dict and forget if a round changes their "
                    f"attributes, got {type(one).__name__}, of which round {server_round} changed "
                    f"{', '.join(moved)}: a repeated or resumed round would start elsewhere (leave what is "
                    "only a cache out of state_dict)"
                )

    def _put_back(self) -> None:
        """Restore what was taken before an attempt that did not count."""
        for one, state in self._before:
            one.load_state_dict(state)
        self._before = []

    def _known_state(self) -> S:
        if self.state is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self.state

    def current_arrays(self) -> ArrayRecord | None:
        """Return the model of the completed rounds; None before the first."""
        return None if self.state is None else self._arrays(self.model(self.state))

    def _arrays(self, model: Vector) -> ArrayRecord:
        arrays = self.federation.known_layout().unflatten(model)
        return self.federation.whole(arrays) if self.federation.frozen else arrays

    def adopt(self, arrays: ArrayRecord) -> None:
        """Continue from other arrays than the last round returned; ValueError if the method cannot."""
        if self.state is not None:  # Else the round begins with its arrays.
            dtype = self.model(self.state).dtype
            self.state = self.moved(
                self.state, self.federation.known_layout().flatten(self.federation.travelling(arrays), dtype)
            )

    # Flower's interface: its loop makes the round's training exchange; all others go over the grid.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return the messages of the round's training exchange; none if nothing is left to do."""
        if self.buffered is not None:
            raise ValueError(
                f"buffer must be None for {type(self).__name__} if another strategy runs its rounds"
            )
        self._to_training(server_round, arrays, config, grid)
        if self._pending is None:
            return []
        messenger, _, step = self._pending
        return self._messages(messenger.to_send(step))

    def train_at_once(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[ArrayRecord | None, MetricRecord | None] | list[Message]:
        """Make a round without messages, with the same result; if it needs messages, return them.

        It needs them if the grid answers nothing else, or if a subclass overrides the handling of messages.
        """
        if self.buffered is not None:
            self._continue_from(server_round, arrays)
            new, metrics = self.buffered.train(server_round, arrays, config, grid)
            self._handed = self._handed if new is None else Handed(new)
            return new, metrics
        hooks = ["configure_train", "aggregate_train"]
        if type(self).table_metrics is Method.table_metrics:  # Else the subclass overrides both.
            hooks.append("train_metrics")
        if any(getattr(getattr(self, hook), "__func__", None) is not getattr(Method, hook) for hook in hooks):
            return list(self.configure_train(server_round, arrays, config, grid))
        self._continue_from(server_round, arrays)
        self._to_training(server_round, arrays, config, grid)
        if self._pending is None:
            return []
        messenger, steps, made = self._pending
        sending = messenger.to_send(made)
        columns = None if isinstance(made, Together) else at_once(messenger, made, sending)
        if columns is None:
            return self._messages(sending)
        self._pending = None
        new, metrics = self._finished(messenger, steps, columns)
        if new is not None:
            self._handed = Handed(new)
        return new, metrics

    def _to_training(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> None:
        """Begin a round, and run it up to its training exchange."""
        self._pending = None
        if self.finished:
            return
        online = self.federation.open_round(grid).present
        if self.state is None:
            self.state = self.begin(self.federation.vector(arrays))
        if self._owned or self._stateless:
            self._take()
        before, state = partial(self.model, self.state), self.state
        run = RoundContext(self.federation, server_round, dict(config), online, self.parts, grid, before)
        messenger, steps = Messenger(run), self._steps(self.state, run)
        try:
            step = next(steps)
            while isinstance(step, Question) or not step.trains:
                step = send(steps, messenger.answered(step))
        except RoundFailedError:
            self._put_back()
            return
        except StopIteration as end:
            self.state = end.value
            if not self.finished:
                self.state = state
                self._put_back()
                raise TooFewRepliesError(
                    f"Round {server_round}: round of {type(self).__name__} must yield an Exchange of the "
                    "category 'train' (message type 'train' or 'train.…') unless the run ends, got none."
                ) from None
            return
        self._pending = messenger, steps, step

    def _messages(self, sending: Sending) -> list[Message]:
        """Open the round's training exchange, and return its messages."""
        assert self._pending is not None
        messenger, _, step = self._pending
        run, group = messenger.context, messenger.group(step, alone=False)
        messenger.book_sent(step, sending)
        self.federation.open_exchange(
            run.round, sending.nodes, messenger.reader(step), offline=sending.offline, group=group
        )
        messages = sending.messages(step.kind, group, self.federation.timeout)
        for part in self.parts.hooks["extra_messages"]:
            for exchange in step.exchanges:
                messages += part.extra_messages(exchange, sending.nodes, run)
        return messages

    def _steps(self, state: S, run: RoundContext) -> Steps[S]:
        for part in self.parts.hooks["opened"]:
            yield from part.opened(run)
        make = self.round if self.buffered is None else self.buffered_round
        return (yield from make(state, run))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Finish the round; if there are too few replies, return None and keep the state."""
        if self._pending is None:
            return None, None
        (messenger, steps, made), self._pending = self._pending, None
        for part in self.parts.hooks["arrived"]:
            for exchange in made.exchanges:
                replies = part.arrived(replies, exchange, messenger.context)
        accepted = self.federation.accept(replies)
        if isinstance(made, Together):
            came: Any = messenger.read_together(made, list(accepted), self.federation.report)
        else:
            came = messenger.columns(made, accepted)
        return self._finished(messenger, steps, came)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        metrics = super().aggregate_evaluate(server_round, replies)
        if self.buffered is not None:
            self.buffered.settle()
        return metrics

    def _finished(
        self, messenger: Messenger, steps: Steps[S], replies: Any
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Run the round from its training exchange to its end."""
        run = messenger.context
        try:
            step = send(steps, replies)
            while True:
                step = send(steps, messenger.answered(step))
        except RoundFailedError:
            self._put_back()
            return None, None
        except StopIteration as end:
            self.state = state = end.value
        self._before = []
        self.federation.completed = run.round
        for part in self.parts.hooks["ended"]:
            part.ended(run)
        self.ended(state, run)
        if self._stateless:
            self._check_unchanged(run.round)
        table = run.table
        metrics = self.train_metrics(run.contents) if table is None else self.table_metrics(table)
        metrics.update(run.metrics)
        return self.current_arrays(), metrics

    def table_metrics(self, table: Mapping[str, NDArray[Any]]) -> MetricRecord:
        """Return the round's metrics from the nodes' metrics, as columns (K,) by name."""
        limits = self.federation.limits
        return limits.counted(self.federation.evaluation.of_columns(table, limits.claims.metrics_ratio))

    def train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Return the round's metrics from the nodes' replies."""
        limits = self.federation.limits
        return limits.counted(self.federation.evaluation.of_training(contents, limits.claims.metrics_ratio))


class _Values(pickle.Pickler):
    """Writes values of any classes and functions, also of local ones, which pickle finds by no name."""

    def reducer_override(self, value: Any) -> Any:
        is_named = isinstance(value, type | FunctionType) and value.__module__ != "builtins"
        return (int, (id(value),)) if is_named else NotImplemented


def _attributes(one: Any) -> dict[str, object]:
    """Return an object's attributes as bytes that change when a value does.

    Pickle follows arrays, generators and nested objects alike, so no type has to be known here. Of what it
    cannot follow, such as a lock or an open file, only a replacement is seen.
    """
    state = object.__getstate__(one)
    plain, slots = state if isinstance(state, tuple) else (state, None)
    found: dict[str, object] = {}
    for key, value in {**(plain or {}), **(slots or {})}.items():
        try:
            _Values(written := BytesIO()).dump(value)
            found[key] = written.getvalue()
        except Exception:  # Anything can be raised.
            found[key] = id(value)
    return found
