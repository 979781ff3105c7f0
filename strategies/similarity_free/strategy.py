"""FedAvg, FedProx and their error-feedback forms under a step-size schedule: one family, three switches.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", the server's lines of Algorithms 1 to 4.
Differs: what becomes of a round in which a worker is missing, which the paper leaves out. The divisor stays
n and the missing worker counts as one that did not move, which keeps the virtual iterate exact; by default
such a round is repeated instead, and then the run stops.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, Literal, Self, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from hedgerow.strategies.exchange import Node, Reply
from hedgerow.strategies.federation import Federation, FederationOptions, only_arrays
from hedgerow.strategies.robust import parse_aggregation
from hedgerow.strategies.schedules import Schedule
from hedgerow.strategies.secure_sums import SecureSum, SecureSums, parse_secure_sum
from hedgerow.strategies.strategy import FederatedStrategy
from hedgerow.wire.checks import in_range, int_at_least, one_of
from hedgerow.wire.compress import (
    Compressor,
    Identity,
    RandK,
    compressed_part,
    dense_part,
    in_round,
    parse_compressor,
    record_payload,
    summed_arrays,
    unpack_update,
)
from hedgerow.wire.masked_sums import MASKED_SUM
from hedgerow.wire.records import PayloadError, only_record, payload_bytes, to_record

__all__ = ["InnerSolver", "SimilarityFree"]

UP, DOWN = "worker->server", "server->worker"
# The server's one sum.
_ALL = 0

# Metrics of single workers whose mean says nothing.
_TOTALS = ("memory-lost", "payload-bits")
_LARGEST = ("curvature", "prox-residual")


@dataclass(frozen=True)
class InnerSolver:
    """How a worker approximates its proximal point, by gradient steps on the inner problem.

    Parameters
    ----------
    lr : str (default: "auto:0.1")
        ``auto:<max>``, a third of the proximal parameter but no more than the maximum, or
        ``fixed:<value>``, which diverges where it exceeds twice the proximal parameter.
    steps : int (default: 30)
        Inner steps at most, >= 1.
    tol : float (default: 1e-3)
        Stop at this residual relative to the first gradient, in [0, 1).
    batch : {"fixed", "fresh"} (default: "fixed")
        One mini-batch a round, as the theory has it, or one an inner step.
    """

    lr: str = "auto:0.1"
    steps: int = 30
    tol: float = 1e-3
    batch: Literal["fixed", "fresh"] = "fixed"

    def __post_init__(self) -> None:
        int_at_least(1, steps=self.steps)
        in_range("tol", self.tol, 0.0, 1.0, open_above=True)
        one_of("batch", self.batch, ("fixed", "fresh"))

    def instructions(self) -> dict[str, str | int | float]:
        """Return the solver as keys of a message's config."""
        return {
            "inner-lr": self.lr,
            "inner-steps": self.steps,
            "inner-tol": self.tol,
            "inner-batch": self.batch,
        }


class SimilarityFree(FederatedStrategy):
    """Federated learning whose step sizes need no bound on how much the workers' data differ.

    Round k (from 0) sends x^k and gamma^k to every worker, which applies its operator and replies with

    - no compressor: its model x_i^k; then x^{k+1} = (1/n) sum_i x_i^k (Algorithms 1 and 3);
    - a compressor Q and error feedback: q_i^k = Q(x_i^k - x^k + e_i^k), and keeps what was not sent;
      then x^{k+1} = x^k + (1/n) sum_i q_i^k (Algorithms 2 and 4);
    - a compressor without error feedback: the same with e_i = 0, which is FedPAQ.

    **The ClientApp must be** ``hedgerow.clients.similarity_free_client()``.

    Parameters
    ----------
    schedule : Schedule
        gamma_k for k = 0, 1, …, see ``hedgerow.strategies.schedules``.
    operator : {"gradient", "prox"} (default: "gradient")
        ``local_iters`` steps of SGD (FedAvg), or one proximal step (FedProx).
    compressor : str or Compressor (default: "identity")
        ``identity``, ``topk(0.01)``, ``randk(0.1)``, ``sign`` or ``ternary``, see ``hedgerow.wire.compress``.
    error_feedback : bool (default: True)
        Whether a worker keeps what its compressor cut off. Without a compressor it keeps nothing.
    schedule_drives : {"local", "round"} (default: "local")
        Whether gamma_k is the step of a local iteration, as in the paper's experiments, or that of a whole
        round, as in its theory: then a local step of the gradient operator is gamma_k / ``local_iters``.
    local_iters : int (default: 30)
        Local iterations T of the gradient operator, >= 1.
    batch_size : int (default: 64)
        Samples of a mini-batch, >= 1.
    inner : InnerSolver (default: InnerSolver())
        How workers approximate a proximal point.
    weighting : {"uniform", "examples"} (default: "uniform")
        Every worker 1/n, as in the paper, or its share of all examples.
    aggregation : str (default: "mean")
        What the server takes of the workers' updates, decoded where they are compressed: the mean, as in the
        paper, or a rule that some lying nodes cannot ruin, see ``parse_aggregation``. Under a rule a worker
        that did not answer does not count, and error feedback keeps no virtual iterate exact. Of a round of
        too few replies for the rule their median is taken.
    secure_sum : bool or SecureSum (default: False)
        Whether the server sees the sum of the workers' updates alone (``SecureSum`` for other settings than
        the defaults), as in SD-FEEL. Of the compressors ``identity`` and ``randk`` go with it: masks are on
        every entry that is sent, so that all workers must send the same ones. With ``SecureSum(noise=...)``
        all workers weigh the same.
    probe_rounds : int (default: 0)
        In the first so many rounds workers also estimate curvature and gradient variance, for the planner.
    **options
        See ``FederationOptions``. ``min_available_nodes`` is the number of workers n (default 2). A round
        goes on without workers whose replies are missing; ``min_train_nodes`` = n repeats it instead.

    Raises
    ------
    ValueError
        If a parameter is out of range, naming it, its value and what is valid.
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
        aggregation: str = "mean",
        secure_sum: bool | SecureSum = False,
        probe_rounds: int = 0,
        **options: Unpack[FederationOptions],
    ) -> None:
        int_at_least(1, local_iters=local_iters, batch_size=batch_size)
        int_at_least(0, probe_rounds=probe_rounds)
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
        self.aggregation = parse_aggregation(aggregation)
        federation = Federation(**options)
        workers = federation.places or federation.quorum
        if (least := self.aggregation.least) > workers:
            raise ValueError(
                f"aggregation is {aggregation!r}; valid is one of at most {workers} updates, the workers', "
                f"and it needs {least}"
            )
        self.sums = self._sums(parse_secure_sum(secure_sum), federation, workers)
        super().__init__(federation)

    def _sums(self, settings: SecureSum | None, federation: Federation, workers: int) -> SecureSums | None:
        """Return the sums of a run; ValueError where what workers send cannot be in one."""
        if settings is None:
            return None
        if not self.aggregation.is_mean:
            raise ValueError(
                f"aggregation is '{self.aggregation}'; valid with secure_sum is 'mean': a sum gives no other"
            )
        if not isinstance(self.compressor, Identity | RandK):
            raise ValueError(
                f"compressor is '{self.compressor}'; valid with secure_sum is 'identity' or 'randk(0.1)': "
                "masks are on every entry, so that where each worker chooses its own, or sends signs, "
                "nothing is saved"
            )
        if self.probe_rounds:
            raise ValueError(
                f"probe_rounds is {self.probe_rounds}; valid with secure_sum is 0: they are each worker's"
            )
        if workers < settings.min_nodes:
            raise ValueError(f"secure_sum needs {settings.min_nodes} workers; there are {workers}")
        by = None if self.weighting == "examples" else ""
        return SecureSums(settings, federation, down_link=DOWN, up_link=UP, weighted_by=by)

    @classmethod
    def named(cls, algorithm: str, **parameters: Any) -> Self:
        """Return one of the paper's algorithms: ``fedavg``, ``fedprox``, ``ef-fedavg`` or ``ef-fedprox``.

        Parameters are those of the class. The first two send whole models: they take no ``compressor``.
        The last two take ``topk(0.01)`` unless given another.
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

    # State.

    @property
    def num_workers(self) -> int:
        """Workers n."""
        return self.federation.num_clients

    @property
    def iterations(self) -> int:
        """Local iterations since the start."""
        return self.completed_rounds * self.local_iters

    def local_step(self, k: int) -> float:
        """Return what multiplies a gradient in round k (from 0), or that round's proximal parameter."""
        gamma = self.schedule(k)
        return gamma / self.local_iters if self.schedule_drives == "round" else gamma

    def current_arrays(self) -> ArrayRecord | None:
        """Return x^k; None before the first round."""
        return None if self._x is None else self.federation.known_layout().unflatten(self._x)

    def _forget(self) -> None:
        self._x: NDArray[Any] | None = None
        self._acknowledged: dict[int, int] = {}
        # The workers of the round at hand, and how they compress.
        self._sent_to: list[int] = []
        self._codec = self.compressor
        if self.sums is not None:
            self.sums.forget()

    def adopt(self, arrays: ArrayRecord) -> None:
        """Go on from x^k = these arrays; what workers' compressors cut off before is still to come."""
        if self._x is not None:  # Else the round begins with its arrays.
            self._x = self.federation.known_layout().flatten(arrays, self._x.dtype)

    def unwrapped(self) -> str | None:
        """Return that replies are compressed, where they are."""
        compressor = f"compressor is '{self.compressor}'; valid is 'identity': what is compressed is no model"
        return compressor if self.compressed else None

    def _state(self) -> dict[str, Any]:
        acknowledged = {str(worker): k for worker, k in sorted(self._acknowledged.items())}
        return {"x": self._model(), "acknowledged": acknowledged}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._x = np.array(state["x"])
        self._acknowledged = {int(worker): int(k) for worker, k in state["acknowledged"].items()}

    # Flower's interface.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send x^k and gamma^k to every worker; one shared record of arrays, a config each."""
        self._begin_round(server_round)
        if self._x is None:
            self._x = self.federation.vector(arrays)
        model = self.federation.known_layout().unflatten(self._x)
        nodes, offline = self.federation.online(grid)
        self._sent_to = [node.partition_id for node in nodes]
        self._codec = in_round(self.compressor, server_round - 1)
        told = {**config, **self._instructions(server_round)}
        names = self.settings.arrayrecord_key, self.settings.configrecord_key
        shared: dict[str, ArrayRecord | ConfigRecord] = {names[0]: model}
        if self.sums is not None:
            nodes = self.sums.members(server_round, grid, {_ALL: nodes} if nodes else {})
            if nodes:
                common = RecordDict({names[0]: model, names[1]: ConfigRecord({**told})})
                start = to_record(summed_arrays(self._codec, record_payload(model)))
                shared[MASKED_SUM] = self.sums.plan_for(_ALL, common, start)
        contents = []
        for node in nodes:
            acknowledged = self._acknowledged.get(node.partition_id, -1)
            own = ConfigRecord({**told, "acknowledged": acknowledged})
            contents.append((node, RecordDict({**shared, names[1]: own})))
        bits, size = self.federation.model_bits, sum(map(payload_bytes, shared.values()))
        for node, content in contents:
            whole = payload_bytes(content)
            self.federation.book_down(server_round, DOWN, 0, node.partition_id, bits, (size, whole))
        messages = self.federation.instruct(server_round, contents, self._checked, offline=offline)
        if self.sums is not None:
            self.sums.note_left_out()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Move x^k by the mean of the workers' moves.

        Nothing changes, and None is returned, if fewer than ``min_train_nodes`` replies are valid: the
        workers' updates are then not acknowledged, and come back with the next ones.
        """
        if self.sums is not None:
            return self._summed(self.sums, server_round, replies)
        x = self._model()
        total = np.zeros(x.shape, np.float64)
        updates: list[NDArray[np.float64]] = []
        arrived: dict[int, float] = {}
        contents: list[RecordDict] = []
        for reply in self.federation.accept(replies):
            worker, uplink = reply.node.partition_id, reply.value
            weight = arrived[worker] = self._weight(worker, uplink.weight)
            if self.aggregation.is_mean:
                total += weight * uplink.vector.astype(np.float64)
            else:
                updates.append(uplink.vector - (0.0 if self.compressed else x.astype(np.float64)))
            arrays = only_arrays(reply.content)
            self.federation.book_up(server_round, UP, worker, 0, uplink.bits, arrays, reply)
            contents.append(reply.metrics)
        if not self.federation.enough():
            return None, None
        if self.aggregation.is_mean or not updates:
            self._x = self._moved(x, total, arrived)
        else:
            move = self.federation.combined(
                self.aggregation, np.stack(updates).astype(np.float64), np.array([*arrived.values()])
            )
            self._x = (x + move).astype(x.dtype)
        self._acknowledged |= dict.fromkeys(arrived, server_round - 1)
        self.federation.completed = server_round
        return self.current_arrays(), self._train_metrics(contents)

    def _summed(
        self, sums: SecureSums, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Move x^k by the mean of the workers' moves, of which the sum alone is known."""
        x = self._model()
        update = sums.unmask(server_round, self._booked(sums, server_round, replies)).get(_ALL)
        if update is not None:
            change = self._change(update.mean)
            try:
                self.federation.check_update(x + change, x)
            except PayloadError as error:
                sums.lose(update, error.reason)
                update = None
        if not sums.enough():
            return None, None
        metrics = MetricRecord()
        if update is not None:
            lost = [i for i in self._sent_to if i not in update.survivors]
            typical = update.weight / len(update.survivors)
            stayed = sum(self._weight(i, self.federation.sizes.get(i, typical)) for i in lost)
            self._x = (x + change * (update.weight / (update.weight + stayed))).astype(x.dtype)
            self._acknowledged |= dict.fromkeys(update.survivors, server_round - 1)
            metrics = self._train_metrics([update.metrics])
        metrics.update(sums.metrics())
        self.federation.completed = server_round
        return self.current_arrays(), metrics

    def _booked(self, sums: SecureSums, server_round: int, replies: Iterable[Message]) -> Iterator[Reply]:
        """Yield the valid replies, booking them."""
        bits = self._codec.bits(self.federation.num_parameters)
        for reply in self.federation.accept(replies):
            worker, arrays = reply.node.partition_id, only_arrays(reply.content)
            self.federation.book_up(server_round, UP, worker, 0, bits, arrays, reply)
            sums.book_shares(server_round, reply)
            yield reply

    def _change(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the change of the model (M,) that a sum's numbers stand for."""
        if not self.compressed:
            return numbers
        layout = self.federation.known_layout()
        part, rest = compressed_part(layout), dense_part(layout)
        change, kept = np.zeros(self._model().size), numbers.size - rest.size
        values = {"values": numbers[:kept].astype(np.float32)}
        update = self._codec.decode(values, part.size)
        for key, where in part.slices.items():
            change[layout.slices[key]] = update[where]
        for key, where in rest.slices.items():
            change[layout.slices[key]] = numbers[kept:][where]
        return change

    def summary(self) -> None:
        """Log the settings."""
        memory = "error feedback" if self.error_feedback and self.compressed else "no error feedback"
        log(INFO, "\t├──> Workers: %d, weights: %s", self.num_workers, self.weighting)
        log(INFO, "\t├──> Aggregation: %s", self.aggregation)
        if self.sums is not None:
            log(INFO, "\t├──> Secure sums: %s", self.sums.settings)
        log(INFO, "\t├──> Operator: %s | local iterations: %d", self.operator, self.local_iters)
        log(INFO, "\t├──> Step size: %s, drives the %s step", self.schedule, self.schedule_drives)
        log(INFO, "\t├──> Uplink: %s, %s", self.compressor, memory)
        self.federation.log_keys()

    # Mechanics.

    @property
    def compressed(self) -> bool:
        """Whether workers send compressed changes instead of models."""
        return not isinstance(self.compressor, Identity)

    def _model(self) -> NDArray[Any]:
        if self._x is None:
            raise RuntimeError("No model yet: configure_train or start comes first.")
        return self._x

    def _instructions(self, server_round: int) -> dict[str, str | int | float | bool]:
        k = server_round - 1
        instructions: dict[str, str | int | float | bool] = {
            "server-round": server_round,
            "round-index": k,
            "operator": self.operator,
            "local-step": self.local_step(k),
            "local-iters": self.local_iters,
            "batch-size": self.batch_size,
            "seed": self.settings.seed,
            "compressor": str(in_round(self.compressor, k)),
            "error-feedback": self.error_feedback,
            "probe": k < self.probe_rounds,
        }
        if self.operator == "prox":
            instructions |= self.inner.instructions()
        return instructions

    def _checked(self, node: Node, content: RecordDict) -> Any:
        """Read a worker's model, or its compressed change, or its masked one."""
        if self.sums is not None:
            return self.sums.checked(node, content)
        x, layout = self._model(), self.federation.known_layout()
        arrays = only_arrays(content)
        weight = self.federation.checked_weight(content)
        if not self.compressed:
            model = layout.flatten(arrays, x.dtype)
            self.federation.check_update(model, x)
            return _Uplink(weight, model, self.federation.model_bits)
        update, dense = unpack_update(self._codec, layout, arrays)
        part = compressed_part(layout)
        change = np.zeros_like(x)
        for key, where in part.slices.items():
            change[layout.slices[key]] = update[where]
        for key, values in dense.items():
            change[layout.slices[key]] = values.ravel() - x[layout.slices[key]]
        self.federation.bound().check(change, x)
        payload = {key: values for key, values in record_payload(arrays).items() if key not in dense}
        return _Uplink(weight, change, self._codec.bits(part.size, payload))

    def _weight(self, worker: int, told: float) -> float:
        if self.weighting != "examples" or (self.sums is not None and not self.sums.weighted_by):
            return 1.0
        self.federation.sizes.setdefault(worker, told)
        return self.federation.weight_of(worker)

    def _moved(self, x: NDArray[Any], total: NDArray[np.float64], arrived: dict[int, float]) -> NDArray[Any]:
        """Return x^{k+1} of the weighted sum of what arrived; a lost worker counts as one that stayed."""
        weight_here = sum(arrived.values())
        typical = weight_here / len(arrived) if arrived else 1.0
        missing = [i for i in self._sent_to if i not in arrived]
        weight_missing = sum(self._weight(i, self.federation.sizes.get(i, typical)) for i in missing)
        weight = weight_here + weight_missing
        if self.compressed:
            return (x + total / weight).astype(x.dtype)
        return ((total + weight_missing * x if missing else total) / weight).astype(x.dtype)

    def _train_metrics(self, contents: list[RecordDict]) -> MetricRecord:
        """Aggregate as asked for; sums and maxima where a mean says nothing."""
        metrics = self.federation.train_metrics(contents)
        if self.settings.train_metrics_aggr_fn is None:
            for keys, combine in ((_TOTALS, sum), (_LARGEST, max)):
                for key in keys:
                    if key in metrics:
                        metrics[key] = combine([_metric(content, key) for content in contents])
        if lost := metrics.get("memory-lost"):
            log(WARNING, "%.0f workers had lost their error memory: what it held is gone.", lost)
        return metrics


@dataclass(frozen=True)
class _Uplink:
    """What a worker's reply holds: its weight, its model or change (M,), and the paper's bits of it."""

    weight: float
    vector: NDArray[Any]
    bits: int


def _metric(content: RecordDict, key: str) -> float:
    metrics = only_record(content, MetricRecord, "bad metrics")
    return float(metrics[key])  # type: ignore[arg-type]
