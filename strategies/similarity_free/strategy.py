"""The settings of FedAvg, FedProx and their error-feedback forms, and their valid combinations.

The paper's algorithms are in ``algorithm.py``.
"""

from collections.abc import Callable, Mapping
from logging import INFO, WARNING
from typing import Any, Literal, Self, Unpack

from flwr.app import MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.aggregate import Aggregator, Choice, WeightedMean
from hedgerow.strategies.aggregate.secure_sums import SecureSum, SecureSums, parse_secure_sum
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.options import FederationOptions
from hedgerow.strategies.parts import ErrorFeedback, Followed
from hedgerow.strategies.schedules import Schedule
from hedgerow.strategies.similarity_free.algorithm import DOWN, UP, Algorithm, InnerSolver
from hedgerow.wire.checks import int_at_least, one_of
from hedgerow.wire.compress import Compressor, Identity, RandK, parse_compressor
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import only_record
from hedgerow.wire.robust_means import Aggregation

# Metrics that are summed, and metrics that are maximised over workers; their means are meaningless.
_TOTALS = ("memory-lost", "payload-bits")
_LARGEST = ("curvature", "prox-residual")
# The config keys that a ClientApp must follow.
_INSTRUCTIONS = ("operator", "local-step", "local-iters")


class SimilarityFree(Algorithm):
    """Federated learning with step sizes that need no bound on the dissimilarity of the workers' data.

    Round k (from 0) sends x^k and gamma^k to every worker, which applies its operator and replies with

    - no compressor: its model x_i^k; then x^{k+1} = (1/n) sum_i x_i^k (Algorithms 1 and 3);
    - a compressor Q and error feedback: q_i^k = Q(x_i^k - x^k + e_i^k), keeping the rest as its error memory;
      then x^{k+1} = x^k + (1/n) sum_i q_i^k (Algorithms 2 and 4);
    - a compressor without error feedback: the same with e_i = 0, which is FedPAQ.

    **The ClientApp must be** ``hedgerow.clients.similarity_free_client()``, or one that follows ``operator``,
    ``local-step`` and ``local-iters`` in a message's config and reports the step it took as the metric
    ``local-step``. A reply with neither this metric nor ``drift-norm`` is refused; if all are refused, the
    run ends in its first round.

    Parameters
    ----------
    schedule : Schedule
        gamma_k for k = 0, 1, …, see ``hedgerow.strategies.schedules``.
    operator : {"gradient", "prox"} (default: "gradient")
        ``local_iters`` steps of SGD (FedAvg), or one proximal step (FedProx).
    compressor : str or Compressor (default: "identity")
        ``identity``, ``topk(0.01)``, ``randk(0.1)``, ``sign`` or ``ternary``, see ``hedgerow.wire.compress``.
    error_feedback : bool (default: True)
        Keep what the compressor cuts off in an error memory; no effect without a compressor.
    schedule_drives : {"local", "round"} (default: "local")
        Whether gamma_k is the step of a local iteration, as in the paper's experiments, or of a whole round,
        as in its theory: a local step of the gradient operator is then gamma_k / ``local_iters``.
    local_iters : int (default: 30)
        Local iterations T of the gradient operator, >= 1.
    batch_size : int (default: 64)
        Samples per mini-batch, >= 1.
    inner : InnerSolver (default: InnerSolver())
        How workers approximate a proximal point.
    weighting : {"uniform", "examples"} (default: "uniform")
        A weight of 1/n for each worker, as in the paper, or its share of all examples.
    aggregation : str, Aggregation or Aggregator (default: "mean")
        How the server combines the workers' decoded updates: the mean, as in the paper, a Byzantine-robust
        rule, see ``parse_aggregation``, or your own aggregator. A rule ignores missing workers, so error
        feedback then keeps no virtual iterate exact. With too few replies for the rule the median is used.
    secure_sum : bool or SecureSum (default: False)
        Whether the server sees only the sum of the workers' updates, as in SD-FEEL; a ``SecureSum`` changes
        the default settings. Only the compressors ``identity`` and ``randk`` are allowed: every sent entry is
        masked, so all workers must send the same entries. With ``SecureSum(noise=...)`` all workers have the
        same weight.
    probe_rounds : int (default: 0)
        The number of first rounds in which workers also estimate curvature and gradient variance, for the
        planner.
    **options
        See ``FederationOptions``. ``min_available_nodes`` is the number of workers n (default 2). A round
        continues without missing replies; ``min_train_nodes`` = n repeats it instead.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        operator: Literal["gradient", "prox"] = "gradient",
        compressor: str | Compressor = "identity",
        error_feedback: bool = True,
        schedule_drives: Literal["local", "round"] = "local",
        local_iters: int = 30,
        batch_size: int = 64,
        inner: InnerSolver | None = None,
        weighting: Literal["uniform", "examples"] = "uniform",
        aggregation: str | Aggregation | Aggregator = "mean",
        secure_sum: bool | SecureSum = False,
        probe_rounds: int = 0,
        **options: Unpack[FederationOptions],
    ) -> None:
        int_at_least(1, local_iters=local_iters, batch_size=batch_size)
        int_at_least(0, probe_rounds=probe_rounds)
        if not isinstance(schedule, Schedule):
            raise ValueError(
                "schedule must be a Schedule of hedgerow.strategies, such as Diminishing(0.1, 0.6), got "
                f"{quoted(schedule)}"
            )
        one_of("operator", operator, ("gradient", "prox"))
        one_of("schedule_drives", schedule_drives, ("local", "round"))
        one_of("weighting", weighting, ("uniform", "examples"))
        self.schedule = schedule
        self.operator = operator
        self.compressor = parse_compressor(compressor) if isinstance(compressor, str) else compressor
        self.error_feedback = error_feedback
        self.schedule_drives = schedule_drives
        self.local_iters = local_iters if operator == "gradient" else 1
        self.batch_size = batch_size
        self.inner = inner or InnerSolver()
        self.weighting = weighting
        self.probe_rounds = probe_rounds
        self.aggregation = Choice.of(aggregation)
        federation = Federation(**options)
        workers = federation.members.places or federation.members.quorum
        self.aggregation.check(workers, "the workers'")
        self.sums = self._sums(secure_sum, federation, workers)
        uplink = ErrorFeedback(self.compressor, error_feedback)
        followed = Followed(("drift-norm", "local-step"), _INSTRUCTIONS, "similarity_free_client()")
        mean = WeightedMean(by_examples=weighting == "examples")
        aggregator = self.sums or self.aggregation.aggregator(mean)
        super().__init__(federation, aggregator=aggregator, parts=[uplink, followed], mean=mean)

    def _sums(self, asked: bool | SecureSum, federation: Federation, workers: int) -> SecureSums | None:
        """Return the run's secure sums; ValueError if the workers' messages cannot be summed."""
        settings = parse_secure_sum(asked, self.aggregation, probe_rounds=self.probe_rounds)
        if settings is None:
            return None
        if not isinstance(self.compressor, Identity | RandK):
            raise ValueError(
                f"compressor must be 'identity' or 'randk(0.1)' with secure_sum, got '{self.compressor}': "
                "every entry is masked, so choosing entries per worker or sending signs saves nothing"
            )
        if self.error_feedback and self.compressed:
            raise ValueError(
                "secure_sum must be False with error_feedback: members of a sum must keep the same state, "
                "and each worker keeps an error memory of its own"
            )
        if workers < settings.min_nodes:
            raise ValueError(f"secure_sum needs {settings.min_nodes} workers; there are {workers}")
        by = None if self.weighting == "examples" else ""
        return SecureSums(settings, federation, down_link=DOWN, up_link=UP, weighted_by=by)

    @classmethod
    def named(cls, algorithm: str = "", **parameters: Any) -> Self:
        """Return one of the paper's algorithms: ``fedavg``, ``fedprox``, ``ef-fedavg`` or ``ef-fedprox``.

        Parameters are those of the class. The first two send whole models and take no ``compressor``; the
        last two default to ``topk(0.01)``.
        """
        one_of("algorithm", algorithm, ("fedavg", "fedprox", "ef-fedavg", "ef-fedprox"))
        parameters["operator"] = "prox" if algorithm.endswith("fedprox") else "gradient"
        if algorithm.startswith("ef-"):
            parameters.setdefault("compressor", "topk(0.01)")
        elif "compressor" in parameters:
            raise ValueError(
                f"compressor is {parameters['compressor']!r}; {algorithm} takes none, ef-{algorithm} does"
            )
        return cls(**parameters)

    @property
    def num_workers(self) -> int:
        """The number of workers n."""
        return self.federation.num_clients

    @property
    def iterations(self) -> int:
        """Local iterations since the start."""
        return self.completed_rounds * self.local_iters

    def unwrapped(self) -> str | None:
        """Return why wrappers are refused: compressed replies."""
        compressor = f"compressor must be 'identity', got '{self.compressor}': a compressed reply is no model"
        return compressor if self.compressed else None

    def summary(self) -> None:
        """Log the settings."""
        memory = "error feedback" if self.error_feedback and self.compressed else "no error feedback"
        log(INFO, "\t├──> Workers: %d, weights: %s", self.num_workers, self.weighting)
        log(INFO, "\t├──> Aggregation: %s", self.aggregation)
        if self.sums is not None:
            log(INFO, "\t├──> Secure sums: %s", self.sums.settings)
        log(INFO, "\t├──> Operator: %s | local iterations: %d", self.operator, self.local_iters)
        log(INFO, "\t├──> Step size: %s, drives the %s step", self.schedule, self.schedule_drives)
        log(INFO, "\t├──> ErrorFeedback: %s, %s", self.compressor, memory)
        self.log_keys()

    @property
    def compressed(self) -> bool:
        """Whether workers send compressed changes instead of models."""
        return not isinstance(self.compressor, Identity)

    def train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Aggregate the metrics, with sums and maxima for those with a meaningless mean."""
        metrics = super().train_metrics(contents)
        if self.settings.train_metrics_aggr_fn is not None:
            return metrics
        return _combined(metrics, lambda key: [_metric(content, key) for content in contents])

    def table_metrics(self, table: Mapping[str, NDArray[Any]]) -> MetricRecord:
        """Do the same for metrics in columns."""
        return _combined(super().table_metrics(table), lambda key: table[key].tolist())


def _combined(metrics: MetricRecord, values: Callable[[str], list[float]]) -> MetricRecord:
    """Replace meaningless means by the sums and maxima of the workers' values."""
    for keys, combine in ((_TOTALS, sum), (_LARGEST, max)):
        for key in keys:
            if key in metrics:
                metrics[key] = combine(values(key))
    if lost := metrics.get("memory-lost"):
        log(WARNING, "%.0f workers had lost their error memory: what it held is gone.", lost)
    return metrics


def _metric(content: RecordDict, key: str) -> float:
    metrics = only_record(content, MetricRecord, "bad metrics")
    return float(metrics[key])  # type: ignore[arg-type]
