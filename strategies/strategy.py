"""What every strategy of the suite does alike: begin or go on, run rounds, evaluate, tell, be checkpointed.

A method adds what its paper adds: who takes part and what they are sent (``configure_train``), what becomes
of the replies (``aggregate_train``), and the state that its next round depends on.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import lru_cache
from inspect import Parameter, signature
from logging import INFO
from typing import Any, Self, get_args, get_type_hints

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from hedgerow.strategies.exchange import ExchangeReport
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.rounds import EvaluateFn, Progress, run_rounds
from hedgerow.strategies.secure_sums import SecureSums
from hedgerow.strategies.sum_noise import SumPrivacyReport
from hedgerow.wire.blas import one_blas_thread
from hedgerow.wire.budget import Budget
from hedgerow.wire.checks import did_you_mean, int_at_least
from hedgerow.wire.clock import Clock
from hedgerow.wire.ledger import Ledger

__all__ = ["FederatedStrategy", "check_options"]


def check_options(cls: type, options: Iterable[str]) -> None:
    """Raise TypeError unless a class takes keyword arguments of these names.

    Those of ``**options: Unpack[…]`` are the keys of its TypedDict.
    """
    if (valid := _options(cls)) is None:
        return
    for name in options:
        if name not in valid:
            meant = did_you_mean(name, valid)
            raise TypeError(
                f"{cls.__name__}() has no parameter {name!r}; valid is {', '.join(sorted(valid))}."
                f"{f' D{meant[1:]}' if meant else ''}"
            )


@lru_cache(maxsize=64)
def _options(cls: Any) -> frozenset[str] | None:
    """Return the names of a class's keyword arguments; None where it takes any."""
    names: set[str] = set()
    for name, parameter in list(signature(cls.__init__).parameters.items())[1:]:
        if parameter.kind is Parameter.VAR_KEYWORD:
            (options,) = get_args(get_type_hints(cls.__init__).get(name)) or (None,)
            if options is None:
                return None
            names |= get_type_hints(options).keys()
        elif parameter.kind is not Parameter.VAR_POSITIONAL:
            names.add(name)
    return frozenset(names)


class FederatedStrategy(Strategy):
    """A Flower ``Strategy`` that holds a ``Federation`` and whose rounds can be repeated, told and resumed.

    Parameters
    ----------
    federation : Federation
        The nodes, the exchange at hand, and what has been spent.

    Notes
    -----
    A method gives ``configure_train``, ``aggregate_train``, ``summary``, ``iterations``, and three parts of
    its state: ``_forget`` sets it as before a run, ``_state`` returns it, ``_restore`` takes it back.
    """

    # The sums of a method whose means can be secure sums; None where they are not.
    sums: SecureSums | None = None
    # What a run may spend; set before ``start``.
    budget: Budget | None = None

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Raise TypeError, before any class on the way can, for an option that the class does not take."""
        check_options(cls, options)
        return super().__new__(cls)

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.settings = federation.settings
        self.on_round_end = self.settings.on_round_end
        self.max_repeats = self.settings.max_repeats
        self._forget()

    # What a method adds.

    @property
    @abstractmethod
    def iterations(self) -> int | None:
        """Local iterations since the start; None where they are not known."""

    @abstractmethod
    def current_arrays(self) -> ArrayRecord | None:
        """Return the global model of the completed rounds; None before the first."""

    @property
    def total_iterations(self) -> int | None:
        """Local iterations at which the run ends, if not before; None where ``num_rounds`` alone says."""
        return None

    @property
    def finished(self) -> bool:
        """Whether the run is at its end before ``num_rounds``."""
        return False

    @property
    def out_of_budget(self) -> bool:
        """Whether the run has spent ``budget``: the round that did so is its last."""
        return self.budget is not None and self.budget.spent(self.progress())

    def check_num_rounds(self, num_rounds: int) -> None:
        """Raise ValueError unless a run may have so many rounds."""
        int_at_least(0, num_rounds=num_rounds)

    @abstractmethod
    def _forget(self) -> None:
        """Set the method's own state as it is before a run."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the method's own state."""

    @abstractmethod
    def _restore(self, state: Mapping[str, Any]) -> None:
        """Take back what ``_state`` returned; ValueError for that of another method."""

    def _set_up(self, arrays: ArrayRecord, grid: Grid) -> ArrayRecord:
        """Prepare a run, or one that goes on; return the model that its first evaluation sees."""
        return arrays

    # What is known of the run.

    @property
    def completed_rounds(self) -> int:
        """Rounds so far."""
        return self.federation.completed

    @property
    def report(self) -> ExchangeReport:
        """What the last training exchange sent, got and lost."""
        return self.federation.report

    @property
    def ledger(self) -> Ledger:
        """Every transfer so far."""
        return self.federation.ledger

    @property
    def clock(self) -> Clock:
        """The simulated clock; it stands still where a paper models no time."""
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
        """Return all that the next round depends on."""
        sums = {} if self.sums is None else self.sums.state_dict()
        return {**self.federation.state_dict(), **self._state(), **sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the next ``start`` goes on after its round."""
        self.federation.load_state_dict(state)
        self._forget()
        self._restore(state)
        if self.sums is not None:
            self.sums.load_state_dict(state)

    def sum_privacy(self) -> SumPrivacyReport | None:
        """Return what sums with noise promise the node of which most was told; None where there are none."""
        return None if self.sums is None else self.sums.privacy_report()

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
            If the number of rounds is out of range, or the arrays are not what the method works on.
        RosterError
            If the nodes do not come, or do not make up the federation.
        TooFewRepliesError
            If a round stays under ``min_train_nodes`` however often it is repeated.
        """
        self.check_num_rounds(num_rounds)
        if not self.federation.begin(timeout):
            self._forget()
        with one_blas_thread():
            arrays = self._set_up(initial_arrays, grid)
            result = run_rounds(
                self, grid, arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
            )
        if (report := self.sum_privacy()) is not None:
            log(INFO, "Privacy: %s", report)
        return result

    def _begin_round(self, server_round: int) -> None:
        """Forget an earlier run, where a caller of its own goes back to round 1."""
        if server_round == 1 and self.completed_rounds:
            self.federation.reset()
            self._forget()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the global model to a share of the nodes."""
        return self.federation.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""
        return self.federation.aggregate_evaluate(replies)
