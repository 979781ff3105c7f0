"""Global measures of a decentralised run: the nodes' mean, its objective, and their disagreement.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", section V: the
objective of the tables and the stopping rule, which need the mean of all models.
Differs: the rule applies only after every node has communicated, because it holds trivially at W^0 = 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from hedgerow.strategies.round_end import DivergenceError
from hedgerow.wire.checks import int_at_least, positive

Vector = NDArray[np.float64]

# Disagreement above which a run has diverged; models of order one stay far below it.
DIVERGED = 1e3


def _finite_mean(objectives: Sequence[float]) -> float:
    """Return the mean of the finite values; nan if there are none."""
    finite = [objective for objective in objectives if math.isfinite(objective)]
    return float(np.mean(finite)) if finite else math.nan


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

    Its traffic is not part of the modelled system, and is not counted.

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
        loss = _finite_mean([one.mean_objective for one in at_mean.values()])
        local_loss = _finite_mean([one.objective for one in seen.values()])
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
