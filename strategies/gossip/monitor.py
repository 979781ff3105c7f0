"""Global measures of a decentralised run: the nodes' mean, its objective, and their disagreement.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", section V: the
objective of the tables and the stopping rule, which need the mean of all models.
Differs: the rule applies only after every node has communicated, because it holds trivially at W^0 = 0.
The exchanges that show the models to the monitor do not count as traffic.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from logging import INFO, WARNING
from statistics import median_low
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Steps
from hedgerow.strategies.federation import only_arrays
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts import Part
from hedgerow.strategies.round_end import DivergenceError
from hedgerow.strategies.whoami import RAISED
from hedgerow.wire.checks import int_at_least, positive
from hedgerow.wire.message_types import HELLO, MONITOR, NO_MESSAGE, NO_MONITOR
from hedgerow.wire.records import PayloadError, lazy_array, records_of, view

Vector = NDArray[np.float64]

# Disagreement above which a run has diverged; models of order one stay far below it.
DIVERGED = 1e3


def _mean_of_plausible(objectives: Sequence[float], iteration: int) -> float:
    """Return the mean of the values without those that are no numbers or far beyond the median; nan for none.

    A single node's objective must not end a run as divergence.
    """
    finite = [objective for objective in objectives if math.isfinite(objective)]
    if not finite:
        return math.nan
    most = DIVERGED * max(1.0, median_low(map(abs, finite)))
    kept = [objective for objective in finite if abs(objective) <= most]
    if left_out := len(finite) - len(kept):
        log(WARNING, "Iteration %d: %d objectives far beyond the median are left out.", iteration, left_out)
    return float(np.mean(kept))


@dataclass(frozen=True)
class Sight:
    """A node as seen by a monitor: w_i (n,), f_i(w_i) and f_i of the mean; nan if not reported."""

    model: Vector
    objective: float = math.nan
    mean_objective: float = math.nan


@dataclass(frozen=True)
class Look:
    """All models after some iterations."""

    iteration: int
    # ||W - (mean, ..., mean)||^2 / (s m).
    consensus: float
    # (1/m) sum_i f_i(mean), the objective of the tables; and (1/m) sum_i f_i(w_i), of the nodes' own models.
    # nan if not reported.
    loss: float
    local_loss: float
    # Number of nodes with a plausible model.
    nodes: int

    def metrics(self) -> MetricRecord:
        """Return the known figures, by name."""
        named = {key.replace("_", "-"): value for key, value in asdict(self).items()}
        return MetricRecord({key: value for key, value in named.items() if not math.isnan(value)})


class Monitor:
    """Looks at all models of a simulated run. It does not influence the run, except that it may end it.

    Its traffic is not part of the modeled system, and is not counted.

    Parameters
    ----------
    sparsity : int
        s of the consensus measure, >= 1.
    tol : float or None (default: None)
        The run stops at the first iteration with a consensus measure of at most this, after every node has
        communicated; > 0. None for no early stop. The paper uses 0.005 without noise and 0.0025 / epsilon
        with it.
    measures_loss : bool (default: True)
        Whether nodes also report the objective of the mean, in a second exchange.

    Attributes
    ----------
    history : list[Look]
        Every look so far.
    models : numpy.ndarray or None
        W^k of the last look, (m, n).
    after_event : tuple[Look, numpy.ndarray] or None
        The look right after the last event, and its W^k (m, n), for the record of that round. None before the
        first event, and if no node answered.
    stopped_at : int or None
        The iteration at which the rule held.
    """

    def __init__(self, sparsity: int, *, tol: float | None = None, measures_loss: bool = True) -> None:
        int_at_least(1, sparsity=sparsity)
        if tol is not None:
            positive(tol=tol)
        self.sparsity = sparsity
        self.tol = tol
        self.measures_loss = measures_loss
        self.reset()

    def reset(self) -> None:
        """Forget the run."""
        self.history: list[Look] = []
        self.models: Vector | None = None
        self.after_event: tuple[Look, Vector] | None = None
        self.stopped_at: int | None = None

    @property
    def at_stop(self) -> Look | None:
        """The look at which the rule held, whose figures the paper's tables give; None before it does."""
        return next((look for look in self.history if look.iteration == self.stopped_at), None)

    def believed(self, seen: Mapping[int, Sight]) -> dict[int, Sight]:
        """Return the sights of finite models that are not too far from the median.

        A single node's model must not end a run, nor must replies that were corrupted on their way. If most
        finite models are too far apart, or none is finite, returns all sights: the run has diverged, and
        ``look`` raises the error.
        """
        finite = {i: one for i, one in seen.items() if np.isfinite(one.model).all()}
        if not finite:
            return dict(seen)
        models = self._stack(finite)
        with np.errstate(over="ignore", invalid="ignore"):
            consensus = float(np.sum((models - models.mean(axis=0)) ** 2)) / (self.sparsity * len(models))
            if consensus <= DIVERGED:
                return finite
            far = np.sum((models - np.median(models, axis=0)) ** 2, axis=1) / self.sparsity
        near = {i: finite[i] for i, distance in zip(sorted(finite), far, strict=True) if distance <= DIVERGED}
        return near if 2 * len(near) > len(finite) else dict(seen)

    def mean(self, seen: Mapping[int, Sight]) -> Vector:
        """Return the mean (n,) of the models of the nodes that answered."""
        mean: Vector = self._stack(seen).mean(axis=0)
        return mean

    def look(
        self, iteration: int, seen: Mapping[int, Sight], at_mean: Mapping[int, Sight], *, may_stop: bool
    ) -> Look:
        """Record the nodes' models and their objectives at the mean; apply the stopping rule.

        DivergenceError if a ``believed`` model is not finite, or the consensus measure exceeds 1,000.
        """
        W = self._stack(seen)  # (m, n)
        with np.errstate(over="ignore", invalid="ignore"):  # An overflow is a divergence, see below.
            consensus = float(np.sum((W - W.mean(axis=0)) ** 2)) / (self.sparsity * len(W))
        if not consensus <= DIVERGED:
            raise DivergenceError(
                f"The consensus measure is {consensus:.3g} at iteration {iteration}: the run diverges. "
                "A larger c (or sigma), or a smaller step size, keeps it stable."
            )
        loss = _mean_of_plausible([one.mean_objective for one in at_mean.values()], iteration)
        local_loss = _mean_of_plausible([one.objective for one in seen.values()], iteration)
        self.models = W
        self.history.append(Look(iteration, consensus, loss, local_loss, len(W)))
        if may_stop and self.tol is not None and consensus <= self.tol and self.stopped_at is None:
            self.stopped_at = iteration
        return self.history[-1]

    @staticmethod
    def _stack(seen: Mapping[int, Sight]) -> Vector:
        return np.stack([seen[i].model for i in sorted(seen)])

    def state_dict(self) -> dict[str, Any]:
        """Return history and end, for a checkpoint."""
        return {"history": [asdict(look) for look in self.history], "stopped-at": self.stopped_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; the next look, or event, sets ``models`` again."""
        self.reset()
        self.history = [Look(**look) for look in state["history"]]
        self.stopped_at = state["stopped-at"]


class Looks(Part):
    """The exchanges that show a monitor the models of each iteration once.

    ``refused`` is the number of nodes that refuse the monitor if they are the majority; no node is queried
    again then. ``left_out`` counts models out of bounds since the last report. ``answered`` is True if any
    node may have disclosed its model, that is, did not raise an error.
    """

    name = "looks"

    def __init__(self, monitor: Monitor, dim: int) -> None:
        self.monitor, self.dim = monitor, dim
        self.forget()

    def forget(self) -> None:
        """Reset the state, and the monitor's."""
        self.refused = self.left_out = 0
        self.answered = False
        self._looked = -1
        self.monitor.reset()

    @property
    def stopped(self) -> bool:
        """Whether the stopping rule is met."""
        return self.monitor.stopped_at is not None

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Add to the nodes' settings that there is a monitor."""
        if exchange.kind != HELLO:
            return exchange
        return replace(exchange, config={**exchange.config, "monitor": True})

    def until(
        self,
        last: int | None,
        nodes: Sequence[int],
        run: RoundContext,
        *,
        may_stop: bool,
        ended: int | None = None,
    ) -> Steps[None]:
        """Look at the iterations that were not seen yet, up to ``last``, the next event; None for none.

        ``ended`` is the first iteration after the event of the round's record, if that event has ended.
        """
        if last is None or self.refused:
            return
        if ended is not None:
            self.monitor.after_event = None
        for iteration in range(self._looked + 1, last + 1):
            self._looked = iteration
            seen = yield from self._sights(iteration, nodes, run)
            reasons = [error.reason or "" for error in run.report.errors.values()]
            refusing = sum(NO_MONITOR in reason or NO_MESSAGE in reason for reason in reasons)
            if 2 * refusing > len(nodes):
                self.refused = refusing
                refusals = f"{refusing} of {len(nodes)} nodes refuse the monitor"
                log(WARNING, "%s: it does not look at the models in this run.", refusals)
                return
            if not seen:
                continue
            sights = self.monitor.believed(seen)
            if left_out := sorted(seen.keys() - sights.keys()):
                self.left_out += len(left_out)
                log(WARNING, "Iteration %d: the models of %s are out of bounds.", iteration, left_out)
            at_mean = sights
            if self.monitor.measures_loss:
                mean = ArrayRecord({"mean": lazy_array(self.monitor.mean(sights))})
                at_mean = yield from self._sights(iteration, nodes, run, {"arrays": mean})
                at_mean = {i: one for i, one in at_mean.items() if i in sights}
            look = self.monitor.look(iteration, sights, at_mean, may_stop=may_stop)
            if iteration == ended and self.monitor.models is not None:
                self.monitor.after_event = look, self.monitor.models
            if self.stopped:
                log(INFO, "The stopping rule is met at iteration %d.", iteration)
                return

    def _sights(
        self,
        iteration: int,
        nodes: Sequence[int],
        run: RoundContext,
        records: Mapping[str, ArrayRecord] | None = None,
    ) -> Steps[dict[int, Sight]]:
        """Query the nodes' models, and with the mean in ``records`` their objectives at the mean."""
        ask = Ask(nodes, None, {"iteration": iteration}, records=records or {})
        sights: dict[int, Sight] = {}
        reads = partial(seen, n=self.dim)
        for columns in (yield Exchange(MONITOR, [ask], reads=reads, group="look", booked=False)):
            sights.update(zip(columns.nodes, columns.rows, strict=True))
        # A lost reply may have disclosed the model, too.
        self.answered |= sum(error.code == RAISED for error in run.report.errors.values()) < len(nodes)
        return sights

    def metrics(self, iteration: int) -> MetricRecord | None:
        """Return the metrics of an iteration, with ``left-out`` if it is not 0; None if it was not seen."""
        history = reversed(self.monitor.history)
        found = next((look.metrics() for look in history if look.iteration == iteration), None)
        if found is not None and self.left_out:
            found["left-out"], self.left_out = self.left_out, 0
        return found

    def ended(self, run: RoundContext) -> None:
        """Report the number of refusals."""
        if self.refused:
            run.metrics["monitor-refused"] = self.refused

    def state_dict(self) -> dict[str, Any]:
        """Return the last seen iteration, and the monitor's own state."""
        return {"looked": self._looked, "monitor": self.monitor.state_dict(), "answered": self.answered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._looked, self.answered = int(state["looked"]), bool(state["answered"])
        if state["monitor"] is not None:
            self.monitor.load_state_dict(state["monitor"])


def seen(node: Node, content: RecordDict, n: int) -> Sight:
    """Return a node's model (n,) and objectives; the monitor handles values that are not finite."""
    arrays = only_arrays(content)
    if len(arrays) != 1:
        raise PayloadError("bad arrays", f"{len(arrays)} arrays, expected the model alone")
    model = view(next(iter(arrays.values())))
    if model.shape != (n,):
        raise PayloadError("wrong shape", f"the model has {model.shape}, expected ({n},)")
    metrics = next(iter(records_of(content, MetricRecord).values()), MetricRecord())
    objective, at_mean = (metrics.get(key) for key in ("objective", "mean-objective"))
    return Sight(
        model.astype(np.float64),
        float(objective) if isinstance(objective, int | float) else math.nan,
        float(at_mean) if isinstance(at_mean, int | float) else math.nan,
    )
