"""Observe a run of any ServerApp: the traffic on its grid and the results of its strategy, by round.

The app needs no change. Its grid counts messages; the configure and aggregate methods of a ``Strategy``
that starts on this grid are wrapped. The same holds for strategies of Flower's legacy API
(``flwr.server.strategy``), in Flower's loop or in a workflow. An app with its own loop can mark its rounds
with ``record_round``.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.common import log, parameters_to_ndarrays
from flwr.server.strategy import Strategy as LegacyStrategy
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from hedgerow.sim.engine.generators import Generators
from hedgerow.sim.runs.checkpoint import CheckpointError
from hedgerow.sim.runs.metered_grid import Meter, MeteredGrid
from hedgerow.wire.carried import Carried, pack_records, unpack_records
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB, Traffic

_Start = Callable[..., Result]
_Method = Callable[..., Any]
_FOLLOWED = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


@dataclass(frozen=True)
class RoundSeen:
    """What was observed in one round.

    Parameters
    ----------
    round : int
        Round number from 1; 0 is the state before training.
    kind : str
        ``"round"`` of a strategy, or ``"exchange"`` of messages without a strategy.
    train, evaluate, central : dict
        Aggregated metrics of the nodes' training and evaluation, and the result of ``evaluate_fn``; empty
        if there are none.
    bits, payload_bytes : int
        Serialised size of all messages' records since the start, both directions, in bits and in bytes.
    by_link : dict[str, Traffic]
        The same by leg: instructions on ``hub->node``, replies on ``node->hub``.
    by_type : dict[str, dict[str, Traffic]]
        The same by message type and leg.
    sim_seconds : float
        Simulated seconds since the start; 0 if the grid has no clock.
    wall_seconds : float
        Real seconds that this round took.
    sent, accepted : int
        This round's instructions of every type, and its replies without an error.
    rejected : dict[str, int]
        Replies lost in this round, by reason: ``error <code>`` or ``no reply``.
    resumed : bool
        Whether the run resumed from a checkpoint before this round without all of the strategy's state.
    """

    round: int
    kind: str
    train: dict[str, Any]
    evaluate: dict[str, Any]
    central: dict[str, Any]
    bits: int
    payload_bytes: int
    by_link: dict[str, Traffic]
    by_type: dict[str, dict[str, Traffic]]
    sim_seconds: float
    wall_seconds: float
    sent: int
    accepted: int
    rejected: dict[str, int]
    resumed: bool = False


@dataclass
class RoundMetrics:
    """The metrics of the current round.

    Parameters
    ----------
    number : int
        Round number from 1; 0 is the state before training.
    train, evaluate, central : dict
        Metrics of the nodes' training, the nodes' evaluation and the server's evaluation, by name: numbers
        or lists of numbers.
    arrays : ArrayRecord or None
        The new global model, if the round made one.
    """

    number: int
    train: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    arrays: ArrayRecord | None = None


class Watch:
    """Observe one run of a ServerApp: inside ``with watch:``, pass ``watch.grid`` to the app.

    A round lasts from one ``configure_train`` with a new round number to the next. If a strategy reports its
    rounds itself (``on_round_end``, as Hedgerow's do), its reports are used instead. Without a strategy each
    exchange is a round: a ``send_and_receive``, or a ``push_messages`` and everything until the next one. An
    exchange just before a strategy starts, or before the first ``record_round``, belongs to the first round.
    A second strategy's rounds continue the first one's numbers.

    Parameters
    ----------
    grid : Grid
        The grid of the ServerApp.
    on_start : Callable[[int or None], None]
        Called before a strategy's first round with its number of rounds, if known.
    on_round_end : Sequence[Callable[[RoundSeen], None]]
        Called after every round, with the strategy's own record if it has one.
    count : bool (default: True)
        Whether to count the traffic. If False, ``grid`` is the given object, for apps that depend on its
        class.

    Attributes
    ----------
    grid : Grid
        The grid to pass to the ServerApp.
    result : Result or None
        The result of the last ``Strategy.start``.
    arrays : ArrayRecord or None
        The newest global model; None before the first.
    started : Mapping[str, Any]
        The arguments of the last ``Strategy.start``, with the strategy as ``self``; empty before the first.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        on_start: Callable[[int | None], None],
        on_round_end: Sequence[Callable[[Any], None]],
        count: bool = True,
    ) -> None:
        self._meter = Meter()
        self._engine = grid
        self.grid: Grid = MeteredGrid(grid, self._meter, self._exchange_begins) if count else grid
        self.result: Result | None = None
        self.arrays: ArrayRecord | None = None
        self.started: Mapping[str, Any] = {}
        self._on_start, self._on_round_end = on_start, tuple(on_round_end)
        self._starts = 0
        # The last reported round, and the number of rounds reported before the current strategy's first.
        self._last, self._base = -1, 0
        self._strategy: Any = None
        self._round: RoundMetrics | None = None
        # Whether a strategy of the legacy API, or the app's own loop, marks the rounds.
        self._own_rounds = self.is_legacy = False
        self._exchanging = self._resumed = False
        self._restored: dict[str, Any] | None = None
        # The changing attributes of a strategy that does not resume itself.
        self._carried: Carried | None = None
        self._generators: Mapping[str, Any] | None = None
        self._since = time.monotonic()

    def __enter__(self) -> Watch:
        _hook()
        self._name_round(0)
        _watching[self.grid] = self
        # A simulation may run inside another's.
        _in_thread.setdefault(threading.get_ident(), []).append(self)
        self._since = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        del _watching[self.grid]
        _in_thread[threading.get_ident()].remove(self)
        _unhook()
        if kind is None:
            self._end_round()
            self._end_exchange()

    @property
    def can_resume(self) -> bool:
        """Whether the run can resume: in its first strategy, by the strategy itself or by Flower's loop."""
        own = _resumes_itself(self._strategy)
        first = self._strategy is not None and self._starts == 1
        return first and (own or type(self._strategy).start is Strategy.start)

    @property
    def left_behind(self) -> list[str]:
        """What a checkpoint cannot hold of the current strategy."""
        return [] if self._carried is None else self._carried.cannot()

    def state_dict(self) -> dict[str, Any]:
        """Return the rounds done, the global model, the strategy's state and the traffic so far."""
        own = _resumes_itself(self._strategy)
        model = None if own or self.arrays is None else pack_records(RecordDict({"arrays": self.arrays}))
        return {
            "starts": self._starts,
            "round": self._last,
            "before": self._base,
            "model": model,
            "strategy": self._strategy.state_dict() if own else None,
            "attributes": {} if self._carried is None else self._carried.state_dict(),
            "generators": Generators().state_dict(),
            "traffic": self._meter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the app's first strategy from a state when it starts.

        Raises
        ------
        CheckpointError
            If the state belongs to an app's second strategy: the first would have to be repeated.
        """
        if state["starts"] != 1:
            raise CheckpointError(
                f"the run stopped in strategy {state['starts']} of its app; only the first can be resumed"
            )
        self._restored = dict(state)
        self._last = int(state["round"])
        self._meter.load_state_dict(state["traffic"])

    # Exchanges without a strategy

    def _exchange_begins(self) -> None:
        if self._strategy is None and not self._own_rounds:
            self._end_exchange()
            self._exchanging = True

    def _end_exchange(self) -> None:
        # A resumed app repeats the exchanges before its strategy starts; they are recorded already.
        if self._exchanging and self._restored is None:
            self._report("exchange", RoundMetrics(max(0, self._last) + 1))
        self._exchanging = False

    # The app's own loop

    def _rounds_begin(self) -> None:
        """Stop counting exchanges as rounds."""
        if not self._own_rounds:
            self._own_rounds, self._exchanging = True, False
            self._on_start(None)

    @contextmanager
    def _own_round(self, metrics: RoundMetrics) -> Iterator[None]:
        if metrics.number <= self._last:
            raise ValueError(
                f"number must be above {self._last}, the last recorded round, got {metrics.number}"
            )
        self._rounds_begin()
        self._name_round(metrics.number)
        yield
        if metrics.arrays is not None:
            self.arrays = metrics.arrays
        self._report("round", metrics)

    # A strategy of the legacy API

    def _legacy_call(
        self, name: str, method: _Method, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Call a method of a legacy strategy and record its result; its first argument is the round."""
        self.is_legacy = True
        if name == "initialize_parameters":
            self._end_round()
            self._rounds_begin()
            self._base = max(0, self._last)
            return method(*arguments, **options)
        number = int(arguments[1] if len(arguments) > 1 else options["server_round"])
        if name == "configure_fit":
            self._begin_round(number)
        out = method(*arguments, **options)
        if name == "aggregate_fit":
            parameters, metrics = out
            if parameters is not None:
                self.arrays = _legacy_arrays(parameters) or self.arrays
            if self._round is not None:
                self._round.train = _numbers(metrics)
        elif name in ("evaluate", "aggregate_evaluate") and out is not None and out[0] is not None:
            measured = {"loss": float(out[0]), **_numbers(out[1])}
            if self._round is not None:
                setattr(self._round, "central" if name == "evaluate" else "evaluate", measured)
            elif self._last < 0:
                self._report("round", RoundMetrics(0, central=measured))
        return out

    # A strategy

    def _start(self, start: _Start, strategy: Any, bound: inspect.BoundArguments) -> Result:
        """Run a strategy's ``start`` and observe it."""
        self._end_round()
        self._exchanging = self._own_rounds = False
        self._starts += 1
        self._strategy = strategy
        self.started = bound.arguments
        self._carried = None if _resumes_itself(strategy) else Carried(strategy)
        done = self._resume(strategy, bound.arguments)
        rounds = bound.arguments.get("num_rounds")
        self._on_start(None if rounds is None else self._base + done + rounds)
        evaluate_fn = bound.arguments.get("evaluate_fn")
        if evaluate_fn is not None:
            bound.arguments["evaluate_fn"] = self._evaluate_fn(evaluate_fn, done)
        self.arrays = bound.arguments.get("initial_arrays")
        if self._generators is not None:
            # Only now, because the app draws before it starts its strategy.
            generators, self._generators = self._generators, None
            Generators().load_state_dict(generators)
        try:
            with self._listening(strategy) if _reports_rounds(strategy) else self._following(strategy, done):
                result = start(*bound.args, **bound.kwargs)
            self._end_round()
        finally:
            self._strategy, self._round = None, None
        if done:
            _shift_rounds(result, done)
        if not result.arrays and self.arrays is not None:
            result.arrays = self.arrays
        self.arrays, self.result = result.arrays, result
        return result

    def _resume(self, strategy: Any, arguments: dict[str, Any]) -> int:
        """Restore a strategy from its checkpoint; return how many earlier rounds it does not know."""
        if self._restored is None:
            self._base = max(0, self._last)
            return 0
        state, self._restored = self._restored, None
        self._generators = state.get("generators")
        self._base = int(state["before"])
        if _resumes_itself(strategy):
            strategy.load_state_dict(state["strategy"])
            return 0
        name = type(strategy).__name__
        if state["model"] is None or type(strategy).start is not Strategy.start:
            raise CheckpointError(f"{name} cannot be resumed: it has its own loop and no state_dict")
        assert self._carried is not None
        try:
            self._carried.load_state_dict(state.get("attributes", {}))
        except KeyError as error:
            raise CheckpointError(f"{name} cannot be resumed: it has no attribute {error} now") from error
        lost = self._carried.cannot()
        self._resumed = bool(lost) or "attributes" not in state
        done = int(state["round"]) - self._base
        arguments["initial_arrays"] = unpack_records(state["model"])["arrays"]
        arguments["num_rounds"] = max(0, arguments["num_rounds"] - done)
        log(
            WARNING,
            "Resuming after round %d, which Flower's log counts as 0. Restored: the global model, the nodes' "
            "state, the global generators, and of %s: %s.%s",
            done,
            name,
            ", ".join(state.get("attributes", {})) or "nothing, which had not changed",
            f" Not restored: {', '.join(lost)}." if lost else "",
        )
        return done

    @contextmanager
    def _listening(self, strategy: Any) -> Iterator[None]:
        """Use the rounds that a strategy reports itself."""
        before = strategy.on_round_end
        strategy.on_round_end = (*before, self._relay)
        try:
            yield
        finally:
            strategy.on_round_end = before

    def _relay(self, end: Any) -> None:
        if end.round or self._last < 0:
            self._publish(replace(end, round=self._base + end.round))

    @contextmanager
    def _following(self, strategy: Any, done: int) -> Iterator[None]:
        """Wrap a strategy's methods, and add ``done`` to the round numbers that they get."""

        def follow(name: str, seen: Callable[[int, Any], None], *, before: bool = False) -> None:
            method = getattr(strategy, name)

            @functools.wraps(method)
            def followed(server_round: int, *args: Any, **kwargs: Any) -> Any:
                if before:
                    seen(done + server_round, None)
                out = method(done + server_round, *args, **kwargs)
                if not before:
                    seen(done + server_round, out)
                return out

            vars(strategy)[name] = followed

        kept = {name: vars(strategy)[name] for name in _FOLLOWED if name in vars(strategy)}
        follow("configure_train", lambda number, _: self._begin_round(number), before=True)
        follow("aggregate_train", self._trained)
        follow("configure_evaluate", lambda *_: None)
        follow("aggregate_evaluate", self._evaluated)
        try:
            yield
        finally:
            for name in _FOLLOWED:
                del vars(strategy)[name]
            vars(strategy).update(kept)

    def _begin_round(self, number: int) -> None:
        if self._round is None or self._round.number != number:
            self._end_round()
            self._round = RoundMetrics(number)
            self._name_round(self._base + number)

    def _name_round(self, number: int) -> None:
        """Tell the engine the round of messages that name none."""
        if hasattr(self._engine, "round"):
            self._engine.round = number

    def _trained(self, number: int, out: tuple[ArrayRecord | None, MetricRecord | None]) -> None:
        self._begin_round(number)
        assert self._round is not None
        arrays, metrics = out
        if arrays is not None:
            self.arrays = arrays
        self._round.train = dict(metrics or {})

    def _evaluated(self, number: int, metrics: MetricRecord | None) -> None:
        self._begin_round(number)
        assert self._round is not None
        self._round.evaluate = dict(metrics or {})

    def _evaluate_fn(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None], done: int
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if done and server_round == 0:
                return None
            metrics = evaluate_fn(done + server_round, arrays)
            if self._round is not None:
                self._round.central = dict(metrics or {})
            elif server_round == 0 and self._last < 0 and not _reports_rounds(self._strategy):
                self._report("round", RoundMetrics(0, central=dict(metrics or {})))
            return metrics

        return evaluate

    def _end_round(self) -> None:
        if self._round is not None:
            seen, self._round = self._round, None
            self._report("round", replace(seen, number=self._base + seen.number))

    # Reporting

    def _report(self, kind: str, seen: RoundMetrics) -> None:
        now, meter = time.monotonic(), self._meter
        by_type = meter.by_type()
        links = {
            leg: sum((legs[leg] for legs in by_type.values() if leg in legs), Traffic())
            for leg in (HUB_TO_NODE, NODE_TO_HUB)
        }
        total = sum(links.values(), Traffic())
        clock = getattr(self.grid, "now", None)
        end = RoundSeen(
            round=seen.number,
            kind=kind,
            train=seen.train,
            evaluate=seen.evaluate,
            central=seen.central,
            bits=total.nominal_bits,
            payload_bytes=total.payload_bytes,
            by_link=links,
            by_type=by_type,
            sim_seconds=0.0 if clock is None else clock(),
            wall_seconds=now - self._since,
            sent=meter.sent,
            accepted=meter.accepted,
            rejected=dict(meter.rejected),
            resumed=self._resumed,
        )
        self._resumed = False
        self._since = now
        meter.next_round()
        self._publish(end)

    def _publish(self, end: Any) -> None:
        self._last = end.round
        for callback in self._on_round_end:
            callback(end)


def _reports_rounds(strategy: Any) -> bool:
    return isinstance(getattr(strategy, "on_round_end", None), Sequence)


def _resumes_itself(strategy: Any) -> bool:
    """Return whether a strategy's ``start`` continues from a loaded state."""
    return all(hasattr(strategy, name) for name in ("state_dict", "load_state_dict", "completed_rounds"))


def _legacy_arrays(parameters: Any) -> ArrayRecord | None:
    """Return the arrays of a legacy strategy's parameters; None if they are other bytes (XGBoost)."""
    try:
        return ArrayRecord(parameters_to_ndarrays(parameters))
    except (OSError, ValueError):
        return None


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}


def _shift_rounds(result: Result, done: int) -> None:
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
        setattr(result, name, {done + number: metrics for number, metrics in getattr(result, name).items()})


@contextmanager
def record_round(grid: Grid, number: int) -> Iterator[RoundMetrics]:
    """Record a ``with`` block as one round of an app with its own loop.

    Has no effect in runs that are not recorded (Flower's own simulation, devices). A block that raises an
    error is not recorded.

    Parameters
    ----------
    grid : Grid
        The grid of the ServerApp.
    number : int
        Round number, larger than the previous block's; 0 is the state before training.

    Yields
    ------
    RoundMetrics
        To be filled with the round's metrics and model.

    Raises
    ------
    ValueError
        If the round is not larger than the previous one.

    Examples
    --------
    ::

        for number in range(1, 4):
            with record_round(grid, number) as metrics:
                replies = grid.send_and_receive(messages)
                metrics.central["loss"] = loss(replies)
    """
    metrics = RoundMetrics(number)
    watch = _watching.get(grid)
    with nullcontext() if watch is None else watch._own_round(metrics):
        yield metrics


# While a run is observed, a strategy's methods look up its Watch by their grid. Methods of the legacy API get
# no grid: they look it up by the thread that runs the app.

_watching: dict[Grid, Watch] = {}
_in_thread: dict[int, list[Watch]] = {}
_lock = threading.Lock()
_watches = 0
_hooked: dict[tuple[type, str], _Method] = {}
_LEGACY = ("initialize_parameters", "configure_fit", "aggregate_fit", "aggregate_evaluate", "evaluate")


def _hook() -> None:
    global _watches  # noqa: PLW0603
    with _lock:
        _watches += 1
        _wrap(Strategy, "start", _observed)
        for name in _LEGACY:
            _wrap(LegacyStrategy, name, functools.partial(_observed_legacy, name))


def _wrap(base: type, name: str, wrapped: Callable[[_Method], _Method]) -> None:
    for kind in _family(base):
        if name in vars(kind) and (kind, name) not in _hooked:
            _hooked[kind, name] = vars(kind)[name]
            setattr(kind, name, wrapped(_hooked[kind, name]))


def _unhook() -> None:
    global _watches  # noqa: PLW0603
    with _lock:
        _watches -= 1
        if not _watches:
            for (kind, name), method in _hooked.items():
                setattr(kind, name, method)
            _hooked.clear()


def _family(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def _observed_legacy(name: str, method: _Method) -> _Method:
    @functools.wraps(method)
    def observed(*args: Any, **kwargs: Any) -> Any:
        watches = _in_thread.get(threading.get_ident())
        if not watches or watches[-1]._strategy is not None:
            return method(*args, **kwargs)
        return watches[-1]._legacy_call(name, method, args, kwargs)

    return observed


def _observed(start: _Start) -> _Start:
    @functools.wraps(start)
    def observed(strategy: Any, *args: Any, **kwargs: Any) -> Result:
        bound = inspect.signature(start).bind(strategy, *args, **kwargs)
        bound.apply_defaults()
        watch = _watching.get(bound.arguments["grid"]) if "grid" in bound.arguments else None
        # Already observed: a start called by a subclass's start, and a strategy inside another one's round.
        if watch is None or watch._strategy is not None:
            return start(strategy, *args, **kwargs)
        return watch._start(start, strategy, bound)

    return observed
