"""The base of all strategies: begin or resume a run, run rounds, evaluate, report, save and restore state.

A method adds its participants and their messages (``configure_train``), the aggregation of their replies
(``aggregate_train``), and the state between rounds.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, wraps
from inspect import Parameter, signature
from logging import INFO
from typing import Any, Required, Self, get_args, get_origin, get_type_hints

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from hedgerow.strategies.aggregate.secure_sums import SecureSums
from hedgerow.strategies.aggregate.sum_noise import SumPrivacyReport
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import ExchangeReport
from hedgerow.strategies.parts.privacy import PrivacyReport
from hedgerow.strategies.rounds import EvaluateFn, Progress, run_rounds
from hedgerow.strategies.wrappers import Handed, is_flowers, outer_strategies
from hedgerow.wire.blas import one_blas_thread
from hedgerow.wire.budget import Budget
from hedgerow.wire.checks import did_you_mean, int_at_least
from hedgerow.wire.clock import Clock
from hedgerow.wire.ledger import Ledger


def check_options(cls: type, options: Iterable[str], positional: int = 0) -> None:
    """Raise TypeError unless a class takes keyword arguments of these names, and needs no others.

    ``positional`` is the number of arguments without a name. ``Unpack[…]`` of a class's ``**options`` counts.
    """
    valid, needed = _options(cls)
    if valid is None:
        return
    for name in options:
        if name not in valid:
            meant = did_you_mean(name, valid)
            raise TypeError(
                f"{cls.__name__}() has no parameter {name!r}; its parameters are "
                f"{', '.join(sorted(valid))}.{f' D{meant[1:]}' if meant else ''}"
            )
    if missing := [name for name in needed[positional:] if name not in options]:
        given = ", ".join(sorted(options)) or "none"
        raise TypeError(f"{cls.__name__}() must be given {' and '.join(missing)}, got {given}")


@lru_cache(maxsize=64)
def _options(cls: Any) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Return the names of a class's arguments, None if it takes any, and in order of those it must have."""
    names: set[str] = set()
    needed: list[str] = []
    for name, parameter in list(signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind is Parameter.VAR_KEYWORD:
            (options,) = get_args(get_type_hints(cls.__init__).get(name)) or (None,)
            if options is None:
                return None, ()
            hints = get_type_hints(options, include_extras=True)
            names |= hints.keys()
            needed += [key for key, hint in hints.items() if get_origin(hint) is Required]
        elif parameter.kind is not Parameter.VAR_POSITIONAL:
            names.add(name)
            if parameter.default is Parameter.empty:
                needed.append(name)
    return frozenset(names), tuple(needed)


def _compared(configure_train: Callable[..., Any]) -> Callable[..., Any]:
    """Compare the arrays of a round with those that the previous round returned."""

    @wraps(configure_train)
    def compared(
        self: "FederatedStrategy", server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Any:
        self._continue_from(server_round, arrays)
        return configure_train(self, server_round, arrays, config, grid)

    return compared


def _kept(aggregate_train: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the returned arrays for the comparison in the next round."""

    @wraps(aggregate_train)
    def kept(self: "FederatedStrategy", server_round: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = aggregate_train(self, server_round, replies)
        if arrays is not None:
            self._handed = Handed(arrays)
        return arrays, metrics

    return kept


class FederatedStrategy(Strategy):
    """A Flower ``Strategy`` with a ``Federation``, whose rounds can be repeated, reported and resumed.

    Parameters
    ----------
    federation : Federation
        The nodes, the current exchange, traffic and simulated time.

    Notes
    -----
    A method implements ``configure_train``, ``aggregate_train``, ``summary`` and ``iterations``, and resets,
    returns and restores its own state in ``_forget``, ``_state`` and ``_restore``.

    A method's state may hold more than the arrays that Flower's loop passes from round to round. So that a
    wrapper's change, such as the noise of differential privacy, is never lost, each ``configure_train``
    compares its arrays with those that the last ``aggregate_train`` returned. If bits differ, the method
    continues from the new arrays (``adopt``), or raises ValueError, which is the default. Every subclass's
    methods are wrapped with this comparison.
    """

    # The secure sums of a method; None without them.
    sums: SecureSums | None = None
    # The run's budget; set before ``start``.
    budget: Budget | None = None
    # Whether the run has lost replies, or failed: nodes may have sent less than they were asked for.
    lost_replies: bool = False
    # The arrays that the next round's are compared with; None before a run's first round.
    _handed: Handed | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the methods of a round with the comparison of arrays, see the class."""
        super().__init_subclass__(**options)
        for name, rule in (("configure_train", _compared), ("aggregate_train", _kept)):
            if name in vars(cls):
                setattr(cls, name, rule(vars(cls)[name]))

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Raise TypeError for an option that the class does not take, before any base class does."""
        check_options(cls, options, len(arguments))
        return super().__new__(cls)

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.settings = federation.settings
        self.on_round_end = self.settings.on_round_end
        self.max_repeats = self.settings.max_repeats
        self._forget()

    # Implemented by a method.

    @property
    @abstractmethod
    def iterations(self) -> int | None:
        """Local iterations since the start; None if unknown."""

    @abstractmethod
    def current_arrays(self) -> ArrayRecord | None:
        """Return the global model of the completed rounds; None before the first."""

    @property
    def total_iterations(self) -> int | None:
        """Local iterations at which the run ends at the latest; None if only ``num_rounds`` ends it."""
        return None

    @property
    def finished(self) -> bool:
        """Whether the run ends before ``num_rounds``."""
        return False

    @property
    def out_of_budget(self) -> bool:
        """Whether the run has spent ``budget``; the round that did so is its last."""
        return self.budget is not None and self.budget.spent(self.progress())

    def check_num_rounds(self, num_rounds: int) -> None:
        """Raise ValueError unless this number of rounds is allowed."""
        int_at_least(0, num_rounds=num_rounds)

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

    @abstractmethod
    def _forget(self) -> None:
        """Reset the method's own state."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the method's own state."""

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``_state`` returned; ValueError for another method's state."""

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Prepare a new or resumed run; return the model of its first evaluation."""
        return arrays

    def log_keys(self) -> None:
        """Log the keys in records, the last lines of a summary."""
        log(INFO, "\t└──> Keys in records:")
        log(INFO, "\t\t├── Weighted by: '%s'", self.settings.weighted_by_key)
        log(INFO, "\t\t├── ArrayRecord key: '%s'", self.settings.arrayrecord_key)
        log(INFO, "\t\t└── ConfigRecord key: '%s'", self.settings.configrecord_key)

    # Progress of the run.

    @property
    def completed_rounds(self) -> int:
        """Number of completed rounds."""
        return self.federation.completed

    @property
    def report(self) -> ExchangeReport:
        """Message counts of the last training exchange."""
        return self.federation.whole_report

    @property
    def ledger(self) -> Ledger:
        """Every transfer so far."""
        return self.federation.ledger

    @property
    def clock(self) -> Clock:
        """The simulated clock; it does not advance if the paper models no time."""
        return self.federation.clock

    def progress(self) -> Progress:
        """Return iterations, traffic and simulated seconds since the start."""
        total = self.ledger.total()
        return Progress(
            iterations=self.iterations,
            total_iterations=self.total_iterations,
            bits=total.nominal_bits,
            payload_bytes=total.payload_bytes,
            by_link=self.ledger.by_link(),
            sim_seconds=self.clock.seconds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next round depends on: of federation, sums, method and parts."""
        sums = {} if self.sums is None else self.sums.state_dict()
        return {"federation": self.federation.state_dict(), "sums": sums, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the next ``start`` resumes after its round."""
        if "federation" not in state:
            raise ValueError(f"state is none of {type(self).__name__}: it was written by an earlier version")
        self.federation.load_state_dict(state["federation"])
        self._handed = None
        self._forget()
        self._restore(state)
        if self.sums is not None:
            self.sums.load_state_dict(state["sums"])

    def sum_privacy(self) -> SumPrivacyReport | None:
        """Return the privacy guarantee of noisy sums for the most exposed node; None without such sums."""
        return None if self.sums is None else self.sums.privacy_report()

    def disclosed(self) -> PrivacyReport | None:
        """Return the report of what nodes may have sent so far; None without noise."""
        return self.sum_privacy()

    @property
    def privacy_record(self) -> dict[str, Any] | None:
        """The last run's report for its record, None without noise.

        ``at-most`` is whether the run failed or lost replies: what nodes have not sent is counted then too.
        """
        if (report := self.disclosed()) is None:
            return None
        return {**report.metrics(), "at-most": self.lost_replies, "report": self._told(report)}

    def _told(self, report: PrivacyReport) -> str:
        return f"at most {report}" if self.lost_replies and report.guaranteed else str(report)

    # Flower's interface.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the strategy; parameters as in Flower's ``Strategy.start``.

        ``timeout`` is the deadline of an exchange in seconds.

        Raises
        ------
        ValueError
            If the number of rounds or the arrays are not valid.
        RosterError
            If too few nodes come online or have a place.
        TooFewRepliesError
            If a round stays below ``min_train_nodes`` after all repeats.
        """
        self.check_num_rounds(num_rounds)
        self._handed = None
        if not self.federation.begin(timeout):
            self._forget()
            self.lost_replies = False
        try:
            with one_blas_thread():
                arrays = self._set_up(initial_arrays, grid)
                return run_rounds(
                    self, grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
                )
        except BaseException:
            self.lost_replies = True
            raise
        finally:
            if (report := self.disclosed()) is not None:
                log(INFO, "Privacy: %s", self._told(report))

    def _continue_from(self, server_round: int, arrays: ArrayRecord) -> None:
        """Adopt a round's arrays if they are not those that the previous round returned.

        A caller who starts again at round 1 begins a new run.
        """
        if server_round == 1 and self.completed_rounds:
            self.federation.reset()
            self._forget()
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
            if type(self).start is not FederatedStrategy.start:
                raise ValueError(
                    f"strategy of {name} must have no start of its own, got {own}: its rounds need what its "
                    f"start does, and {name} runs another"
                )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the global model to a share of the nodes."""
        return self.federation.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        return self.federation.aggregate_evaluate(replies)
