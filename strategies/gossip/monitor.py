"""What no node of a decentralised run can see: the nodes' mean, its objective, and how far they disagree.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", section V: the
objective of the tables and the stopping rule, which need the mean of all models.
Differs: the rule counts only once every node has communicated, for it holds trivially at W^0 = 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from hedgerow.strategies.rounds import DivergenceError
from hedgerow.wire.checks import int_at_least, positive

__all__ = ["DivergenceError", "Look", "Monitor", "Sight"]

Vector = NDArray[np.float64]

# The nodes' disagreement past which a run has diverged: models of order one never come near it.
DIVERGED = 1e3


def _mean_told(objectives: Sequence[float]) -> float:
    """Return the mean of what is finite; nan of nothing."""
    told = [objective for objective in objectives if math.isfinite(objective)]
    return float(np.mean(told)) if told else math.nan


@dataclass(frozen=True)
class Sight:
    """What a monitor sees of one node: w_i (n,), f_i(w_i) and f_i of the mean, nan where it was not told."""

    model: Vector
    objective: float = math.nan
    mean_objective: float = math.nan


@dataclass(frozen=True)
class Look:
    """All models after some iterations."""

    iteration: int
    # ||W - (mean, ..., mean)||^2 / (s m).
    consensus: float
    # (1/m) sum_i f_i(mean), the objective of the tables; and (1/m) sum_i f_i(w_i), of what a node really
    # has. nan where the nodes did not tell.
    loss: float
    local_loss: float
    # Nodes that answered, and whose models are believed.
    nodes: int

    def metrics(self) -> MetricRecord:
        """Return the figures that are there, by name."""
        named = {key.replace("_", "-"): value for key, value in asdict(self).items()}
        return MetricRecord({key: value for key, value in named.items() if not math.isnan(value)})


class Monitor:
    """Looks at all models of a simulated run. Nothing that it sees goes back into the run, but its end.

    Its traffic is no part of the modelled system, and not counted.

    Parameters
    ----------
    sparsity : int
        s of the consensus measure, >= 1.
    tol : float or None (default: None)
        The run stops at the first iteration whose consensus measure is at most this, every node having
        communicated; > 0. None: it never stops early. The paper takes 0.005 without noise and 0.0025 /
        epsilon with it.
    measures_loss : bool (default: True)
        Whether nodes are also asked for the objective of the mean, which takes a second exchange.

    Attributes
    ----------
    history : list[Look]
        Every look so far.
    models : numpy.ndarray or None
        W^k of the last look, (m, n).
    after_event : tuple[Look, numpy.ndarray] or None
        The look right after the last event, and W^k (m, n) then: what the record of that round is of. None
        before the first event, and where no node answered.
    stopped_at : int or None
        The iteration at which the rule held.

    Raises
    ------
    ValueError
        If a parameter is out of range.
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
        """Return the sights of models that are finite, and no further from the median than models may be.

        What one node shows must not end a run. Where most are as far apart, all that are finite are returned:
        the run has diverged, and ``look`` says so. So it does where no model is finite.
        """
        finite = {i: one for i, one in seen.items() if np.isfinite(one.model).all()}
        if not finite:
            return dict(seen)
        models = self._stack(finite)
        with np.errstate(over="ignore", invalid="ignore"):
            consensus = float(np.sum((models - models.mean(axis=0)) ** 2)) / (self.sparsity * len(models))
            if consensus <= DIVERGED and len(finite) * 2 > len(seen):
                return finite
            far = np.sum((models - np.median(models, axis=0)) ** 2, axis=1) / self.sparsity
        near = {i: finite[i] for i, distance in zip(sorted(finite), far, strict=True) if distance <= DIVERGED}
        return near if 2 * len(near) > len(seen) else dict(seen)

    def mean(self, seen: Mapping[int, Sight]) -> Vector:
        """Return the mean (n,) of the models of the nodes that answered."""
        mean: Vector = self._stack(seen).mean(axis=0)
        return mean

    def look(
        self, iteration: int, seen: Mapping[int, Sight], told: Mapping[int, Sight], *, may_stop: bool
    ) -> Look:
        """Take in what was seen of each node, and what it told of the mean; apply the stopping rule.

        Raises
        ------
        DivergenceError
            If a model is not finite, or the consensus measure exceeds 1,000, of what is ``believed``.
        """
        W = self._stack(seen)  # (m, n)
        with np.errstate(over="ignore", invalid="ignore"):  # What overflows has diverged, as is said below.
            consensus = float(np.sum((W - W.mean(axis=0)) ** 2)) / (self.sparsity * len(W))
        if not consensus <= DIVERGED:
            raise DivergenceError(
                f"The consensus measure is {consensus:.3g} at iteration {iteration}: the run diverges. "
                "A larger c (or sigma), or a smaller step size, keeps it stable."
            )
        loss = _mean_told([one.mean_objective for one in told.values()])
        local_loss = _mean_told([one.objective for one in seen.values()])
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
        """Restore a checkpoint; models are there again after the next look, or event."""
        self.reset()
        self.history = [Look(**look) for look in state["history"]]
        self.stopped_at = state["stopped-at"]
