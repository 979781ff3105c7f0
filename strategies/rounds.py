"""The loop over rounds: Flower's ``Strategy.start`` with deadlines, repeats, records and resumption.

Signature, phases (train, federated evaluation, central evaluation) and ``Result`` are Flower's. In addition,
replies are consumed as they arrive, a round with too few replies is repeated before the run stops with an
error, and callbacks see every completed round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from statistics import median_low
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import TOO_LARGE, ExchangeReport, collect
from hedgerow.strategies.round_end import (
    DivergenceError,
    EvaluateFn,
    Progress,
    RoundCallback,
    RoundEnd,
    TooFewRepliesError,
)
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import view


class Driven(Protocol):
    """What the loop needs of a strategy, see ``FederatedStrategy``."""

    federation: Federation
    max_repeats: int
    on_round_end: Sequence[RoundCallback]
    lost_replies: bool

    @property
    def completed_rounds(self) -> int:
        """Number of completed rounds."""

    @property
    def finished(self) -> bool:
        """Whether the run ends before ``num_rounds``."""

    @property
    def out_of_budget(self) -> bool:
        """Whether the run has spent its budget."""

    @property
    def report(self) -> ExchangeReport:
        """Message counts of the last training exchange."""

    @property
    def sums(self) -> object | None:
        """The secure sums of a method; None without them."""

    def summary(self) -> None:
        """Log the settings."""

    def current_arrays(self) -> ArrayRecord | None:
        """Return the global model of the completed rounds."""

    def progress(self) -> Progress:
        """Return iterations, traffic and simulated seconds since the start."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a round's training messages."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Finish a round."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a round's messages of federated evaluation."""

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' metrics."""


def run_rounds(
    strategy: Driven,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
    evaluate_fn: EvaluateFn | None,
) -> Result:
    """Run the remaining rounds; parameters and result as in Flower's ``Strategy.start``.

    ``strategy.finished`` and ``strategy.budget`` end the run before ``num_rounds``. TooFewRepliesError if a
    round stays below its minimum ``1 + strategy.max_repeats`` times. DivergenceError if the model is not
    finite after a round, if its loss exceeds ``max_loss_ratio`` times that of the start, or if most updates
    of a round exceed ``max_update_norm_ratio``; callbacks do not see that round, so the last state that they
    have saved precedes it.
    """
    log(INFO, "Starting %s strategy:", type(strategy).__name__)
    strategy.summary()
    result = Result()
    first = strategy.completed_rounds + 1
    arrays = initial_arrays if first == 1 else strategy.current_arrays() or initial_arrays
    result.arrays = arrays
    train_config = ConfigRecord() if train_config is None else train_config
    evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
    if first == 1:
        started = time.monotonic()
        central = _evaluate_centrally(evaluate_fn, 0, arrays, result)
        _check_loss(strategy, 0, central)
        _report(strategy, 0, started, central=central)

    for current in range(first, num_rounds + 1):
        if strategy.finished or strategy.out_of_budget:
            break
        started = time.monotonic()
        log(INFO, "[ROUND %d/%d]", current, num_rounds)
        lost = Counter[str]()
        trained = _train(strategy, grid, current, arrays, train_config, timeout, lost)
        if trained is None:
            break
        arrays, train = trained
        result.arrays = arrays
        if train is not None:
            result.train_metrics_clientapp[current] = train
        messages = list(strategy.configure_evaluate(current, arrays, evaluate_config, grid))
        evaluate = strategy.aggregate_evaluate(current, collect(grid, messages, timeout) if messages else [])
        if evaluate is not None:
            result.evaluate_metrics_clientapp[current] = evaluate
        central = _evaluate_centrally(evaluate_fn, current, arrays, result)
        _check_loss(strategy, current, central)
        _report(strategy, current, started, lost, train=train, evaluate=evaluate, central=central)
    return result


def _train(
    strategy: Driven,
    grid: Grid,
    current: int,
    arrays: ArrayRecord,
    config: ConfigRecord,
    timeout: float,
    lost: Counter[str],
) -> tuple[ArrayRecord, MetricRecord | None] | None:
    """Return the round's arrays and metrics; None if the strategy has finished in the round.

    Adds the replies lost by attempts before the last one to ``lost``.
    """
    for attempt in range(1 + strategy.max_repeats):
        if attempt:
            log(WARNING, "Round %d had too few valid replies; repeated (%d).", current, attempt)
        done = _at_once(strategy, current, arrays, config, grid)
        if isinstance(done, list):
            if strategy.finished:
                return None
            done = strategy.aggregate_train(current, collect(grid, done, timeout))
        new, metrics = done
        if new is not None:
            _check_finite(current, new, strategy)
            return new, metrics
        lost += strategy.report.rejected
    report = strategy.report
    if 2 * report.rejected[TOO_LARGE] > report.sent:
        most = strategy.federation.settings.max_update_norm_ratio
        raise DivergenceError(
            f"Round {current}: {report.rejected[TOO_LARGE]} of {report.sent} updates are too large for "
            f"max_update_norm_ratio = {most:g}: the run diverges. "
            "A smaller step size keeps it stable; max_update_norm_ratio = 0 takes all that is finite."
        )
    reasons = ", ".join(f"{n} x {reason}" for reason, n in sorted(report.rejected.items()))
    raise TooFewRepliesError(
        f"Round {current}: {report.accepted} valid replies of {report.sent} after "
        f"{1 + strategy.max_repeats} tries ({reasons or 'nothing was lost'})."
    )


def _at_once(
    strategy: Driven, current: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
) -> tuple[ArrayRecord | None, MetricRecord | None] | list[Message]:
    """Make a round without messages; return its messages if it needs them, as with a wrapper."""
    # Looked up on the type: a wrapper forwards attributes, but its strategy must not bypass it.
    if (at_once := getattr(type(strategy), "train_at_once", None)) is not None:
        made: tuple[ArrayRecord | None, MetricRecord | None] | list[Message]
        made = at_once(strategy, current, arrays, config, grid)
        return made
    return list(strategy.configure_train(current, arrays, config, grid))


def _check_finite(current: int, arrays: ArrayRecord, strategy: Any) -> None:
    """Raise DivergenceError unless all of a model is finite, but for its frozen arrays."""
    home = strategy.federation.frozen if hasattr(strategy, "federation") else ()
    for key, array in arrays.items():
        if key not in home and not np.isfinite(view(array)).all():
            raise DivergenceError(
                f"Round {current}: the global model is not finite, in {quoted(key)}: the run diverges. "
                "A smaller step size keeps it stable; against Byzantine nodes, bounds and robust means do."
            )


def _check_loss(strategy: Driven, current: int, central: Mapping[str, Any] | None) -> None:
    """Raise DivergenceError if the server's evaluation loss, or a median of the nodes' losses, diverges."""
    metrics = central or {}
    # If nodes evaluate, one of them can set the mean to any value; so take the median.
    by_node = metrics.get("node-loss")
    loss = median_low(by_node) if isinstance(by_node, list) and by_node else metrics.get("loss")
    federation = strategy.federation
    # A secure sum has no median, and one member can set its mean to any value.
    trained = federation.evaluation.trained_loss if strategy.sums is None else None
    bound = federation.limits.losses
    for kind, value in (
        ("central", loss),
        ("federated", federation.evaluation.evaluated_loss),
        ("training", trained),
    ):
        if (problem := bound.problem(kind, value)) is not None:
            raise DivergenceError(
                f"Round {current}: {problem}: the run diverges. A smaller step size keeps it stable; "
                "max_loss_ratio = 0 lets it continue."
            )


def _evaluate_centrally(
    evaluate_fn: EvaluateFn | None, current: int, arrays: ArrayRecord, result: Result
) -> MetricRecord | None:
    metrics = evaluate_fn(current, arrays) if evaluate_fn is not None else None
    if metrics is not None:
        log(INFO, "\t└──> Global evaluation: %s", metrics)
        result.evaluate_metrics_serverapp[current] = metrics
    return metrics


def _report(
    strategy: Driven,
    current: int,
    started: float,
    lost: Mapping[str, int] | None = None,
    *,
    train: MetricRecord | None = None,
    evaluate: MetricRecord | None = None,
    central: MetricRecord | None = None,
) -> None:
    report = strategy.report
    strategy.lost_replies |= bool(report.rejected or lost)
    end = RoundEnd(
        round=current,
        train=dict(train or {}),
        evaluate=dict(evaluate or {}),
        central=dict(central or {}),
        **vars(strategy.progress()),
        wall_seconds=time.monotonic() - started,
        sent=report.sent,
        accepted=report.accepted,
        rejected=dict(Counter(lost or {}) + report.rejected),
    )
    for callback in strategy.on_round_end:
        callback(end)
