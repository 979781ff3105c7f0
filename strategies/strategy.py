"""The base of all strategies: begin or resume a run, run rounds, evaluate, report, save and restore state.

A method adds its participants and their messages (``configure_train``), the aggregation of their replies
(``aggregate_train``), and the state between rounds.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from logging import INFO
from typing import Any, Self

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from hedgerow.strategies.aggregate.secure_sums import SecureSums
from hedgerow.strategies.aggregate.sum_noise import SumPrivacyReport
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import ExchangeReport
from hedgerow.strategies.options import check_options
from hedgerow.strategies.parts.privacy import PrivacyReport
from hedgerow.strategies.round_end import EvaluateFn, Progress
from hedgerow.strategies.rounds import run_rounds
from hedgerow.strategies.wrappers import WrappedStrategy
from hedgerow.wire.budget import Budget
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.clock import Clock
from hedgerow.wire.ledger import Ledger
from hedgerow.wire.process import one_blas_thread


class FederatedStrategy(WrappedStrategy):
    """A Flower ``Strategy`` with a ``Federation``, whose rounds can be repeated, reported and resumed.

    Parameters
    ----------
    federation : Federation
        The nodes, the current exchange, traffic and simulated time.

    Notes
    -----
    A method implements ``configure_train``, ``aggregate_train``, ``summary`` and ``iterations``, and resets,
    returns and restores its own state in ``_forget``, ``_state`` and ``_restore``.
    """

    # The secure sums of a method; None without them.
    sums: SecureSums | None = None
    # The run's budget; set before ``start``.
    budget: Budget | None = None
    # After so many rounds no node may be at work, because a checkpoint asks each for its state, and Flower's
    # simulation would overwrite what a message at the same time changes; 0 for never.
    idle_every: int = 0
    # Whether the run has lost replies, or failed: nodes may have sent less than they were asked for.
    lost_replies: bool = False

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
    def own_start(self) -> bool:
        """Whether the class has a ``start`` of its own."""
        return type(self).start is not FederatedStrategy.start

    def _restart(self) -> None:
        """Begin a new run."""
        self.federation.reset()
        self._forget()

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

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the global model to a share of the nodes."""
        return self.federation.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        return self.federation.aggregate_evaluate(replies)
