"""What ends a round: its record for callbacks, or an error that ends the run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from hedgerow.wire.failures import RunFailedError
from hedgerow.wire.ledger import Traffic

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class TooFewRepliesError(RunFailedError):
    """A round got fewer valid replies than its minimum in every attempt."""


class DivergenceError(RunFailedError):
    """The model or its loss diverges, because of too large step sizes or Byzantine nodes."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run; fields as in ``RoundEnd``."""

    iterations: int | None = 0
    total_iterations: int | None = None
    bits: int = 0
    payload_bytes: int = 0
    by_link: dict[str, Traffic] = field(default_factory=dict)
    sim_seconds: float | None = 0.0


@dataclass(frozen=True)
class RoundEnd:
    """A completed round, as passed to callbacks.

    Parameters
    ----------
    round : int
        The round, from 1; 0 is the state before training.
    train, evaluate, central : dict
        Aggregated client metrics of training and of federated evaluation, and the result of
        ``evaluate_fn``; empty if there is none.
    iterations : int or None
        Local iterations since the start, to compare methods with unequal rounds; ``evaluate`` and
        ``central`` refer to the models after them. None if nodes did not report them.
    total_iterations : int or None
        Iterations at which the run ends at the latest; None if the number of rounds ends it.
    bits : int
        Nominal bits over all links of the modeled system since the start.
    payload_bytes : int
        Serialized bytes over the same links since the start.
    by_link : dict[str, Traffic]
        Messages, nominal bits and payload bytes of each link since the start: the modeled links, which
        ``bits`` and ``payload_bytes`` sum up, and the legs through the hub, which they exclude.
    sim_seconds : float or None
        Simulated seconds since the start; None if nodes did not report their iterations.
    wall_seconds : float
        Real seconds of this round, with evaluation.
    sent, accepted : int
        Training instructions and valid replies of the round's last attempt.
    rejected : dict[str, int]
        Lost training replies by reason, of all attempts.
    """

    round: int
    train: dict[str, Any]
    evaluate: dict[str, Any]
    central: dict[str, Any]
    iterations: int | None
    total_iterations: int | None
    bits: int
    payload_bytes: int
    by_link: dict[str, Traffic]
    sim_seconds: float | None
    wall_seconds: float
    sent: int
    accepted: int
    rejected: dict[str, int]


RoundCallback = Callable[[RoundEnd], None]
