"""Estimates of rho, delta and F0 from a short HSGD run, without moving data.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": "a small number of pre-training" steps.
Ours: with P = Q = 1 a group uploads its start minus eta times the gradient of its batch. At every point of a
short central run, a fixed batch of each group gives its gradient; secants of the gradients bound rho from
below, and random batches of the size of A_m give the variance. The model is not changed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.hsgd.estimates import Estimates, estimate, gradient_variance
from hedgerow.strategies.hsgd.groups import Group, draw
from hedgerow.strategies.hsgd.interval import IntervalTerms, Local
from hedgerow.strategies.hsgd.theta import Theta
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.seeds import Purpose

__all__ = ["LostProbeError", "ProbedConstants", "Prober", "Probing"]

Vector = NDArray[np.float64]

# A power of two, so that dividing by it does not round.
_PROBE_ETA = 1.0
# First iteration of probes. Noise is keyed by t and must differ from the noise of training exchanges.
_PROBE_T = 1 << 40
_PROBES_A_ROUND = 1 << 16


class LostProbeError(RuntimeError):
    """A group did not answer, or the short run did not move, so no estimate is possible."""


@dataclass(frozen=True)
class Probing:
    """How the constants are estimated.

    Parameters
    ----------
    steps : int (default: 5)
        S, steps of the short run, >= 1.
    batches : int (default: 4)
        Random batches of each group at each point, >= 1.
    batch : int or None (default: None)
        People in a group's fixed batch, >= 1; None for all.
    aggregate : {"max", "mean"} (default: "max")
        Whether delta^2 is the maximum or the mean of the variances over points and groups.
    final_loss : float or None (default: None)
        E[F] at the end of the run, if known; None is 0.
    """

    steps: int = 5
    batches: int = 4
    batch: int | None = None
    aggregate: Literal["max", "mean"] = "max"
    final_loss: float | None = None

    def __post_init__(self) -> None:
        int_at_least(1, steps=self.steps, batches=self.batches)
        if self.batch is not None:
            int_at_least(1, batch=self.batch)
        if self.aggregate not in ("max", "mean"):
            raise ValueError(f"aggregate must be 'max' or 'mean', got {self.aggregate!r}")
        if self.final_loss is not None:
            in_range("final_loss", self.final_loss, -1e300, 1e300)


@dataclass(frozen=True)
class ProbedConstants:
    """The constants, and ||grad F||^2 at the model where they were estimated."""

    known: Estimates
    gradient2: float

    def metrics(self) -> dict[str, float]:
        """Return the figures as metrics."""
        known = self.known
        return {"rho": known.rho, "delta-g": known.delta, "F0": known.F0, "gradient2": self.gradient2}

    def state_dict(self) -> dict[str, Any]:
        """Return the figures, for a checkpoint."""
        known = asdict(self.known)
        return {"known": {**known, "assumed": list(known["assumed"])}, "gradient2": self.gradient2}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Restore the figures from a checkpoint."""
        known = dict(state["known"])
        return cls(Estimates(**{**known, "assumed": tuple(known["assumed"])}), float(state["gradient2"]))


# Runs an interval with given batches.
Ask = Callable[[IntervalTerms, Sequence[Local]], Steps[list[Local]]]


@dataclass
class Prober:
    """Runs the exchanges of an estimate."""

    groups: Sequence[Group]
    counts: Sequence[int]  # |A_m| of each group.
    ask: Ask  # Runs an interval without compression and pairs.
    terms: IntervalTerms  # t, mu and noise of the current round.
    seed: int  # Of the draws.
    server_round: int

    def __post_init__(self) -> None:
        self._t = self.terms.t
        first = _PROBE_T + self.server_round * _PROBES_A_ROUND
        self.terms = replace(
            self.terms, t=first, steps=1, starts=True, uploads=True, eta0=_PROBE_ETA, eta_period=0
        )
        sizes = np.array([group.size for group in self.groups])
        self._weights = sizes / sizes.sum()

    def estimate(self, probing: Probing, start: Theta, eta: float) -> Steps[ProbedConstants]:
        """Return the estimates of a run of S steps with ``eta`` from ``start``.

        Raises LostProbeError, or ValueError if F0 is not above the final loss.
        """
        batch = probing.batch
        fixed = [
            list(group.ids)
            if batch is None or batch >= group.size
            else draw(group, batch, seed=self.seed, t=self._t, purpose=Purpose.PROBE)
            for group in self.groups
        ]
        theta, losses, points, gradients, variances = start, [], [], [], []
        for k in range(probing.steps + 1):
            groups = yield from self._step(theta, fixed)
            own = np.stack([_gradient(one).whole for one in groups])  # (groups, params)
            whole = self._weights @ own
            losses.append(float(self._weights @ [one.loss for one in groups]))
            points.append(theta.whole.astype(np.float64))
            gradients.append(own)
            numbers = range(k * probing.batches + 1, (k + 1) * probing.batches + 1)
            variances.append((yield from self._variances(theta, own, whole, numbers)))
            steps = zip(theta, theta.split(eta * whole), strict=True)
            theta = Theta(*((block - step).astype(block.dtype) for block, step in steps))
        if any(np.array_equal(one, other) for one, other in pairwise(points)):
            raise LostProbeError("the gradient is zero: the short run does not move")
        known = estimate(
            losses[0], np.stack(points), np.stack(gradients), np.array(variances),
            final_loss=probing.final_loss, aggregate=probing.aggregate,
        )  # fmt: skip
        first = self._weights @ gradients[0]
        return ProbedConstants(
            replace(known, assumed=(*known.assumed, *self._assumed())), float(first @ first)
        )

    def _step(self, theta: Theta, batches: Sequence[Sequence[str]]) -> Steps[list[Local]]:
        """Return each group after one step from a point."""
        groups = [Local(group, theta, tuple(ids)) for group, ids in zip(self.groups, batches, strict=True)]
        self.terms = replace(self.terms, t=self.terms.t + 1)
        groups = yield from self.ask(self.terms, groups)
        if lost := [one.group.number for one in groups if one.model is None]:
            raise LostProbeError(f"groups {lost} did not answer")
        return groups

    def _variances(self, theta: Theta, own: Vector, whole: Vector, numbers: Sequence[int]) -> Steps[Vector]:
        """Return the variance of each block's stochastic gradient, (groups, 3), against the global one."""
        drawn = []
        for number in numbers:
            batches = [
                draw(group, count, seed=self.seed, t=self._t, purpose=Purpose.PROBE, number=number)
                for group, count in zip(self.groups, self.counts, strict=True)
            ]
            drawn.append((yield from self._step(theta, batches)))
        blocks = theta.split(whole)
        table = np.empty((len(self.groups), 3))
        for m in range(len(self.groups)):
            those = [groups[m] for groups in drawn]
            steps = [_gradient(one) for one in those]
            table[m, 0] = gradient_variance(np.stack([step.head for step in steps]), blocks.head)
            table[m, 1] = gradient_variance(np.stack([step.hospital for step in steps]), blocks.hospital)
            table[m, 2] = self._device_variance(m, those, steps, theta.split(own[m]).device, blocks.device)
        return table

    def _device_variance(
        self, m: int, drawn: Sequence[Local], steps: Sequence[Theta], own: Vector, whole: Vector
    ) -> float:
        """Return the variance of single devices' gradients.

        An edge node reports only means over its devices. Their spread about the group's gradient is that of
        sampling without replacement, and gives the variance of single devices.
        """
        group, a = self.groups[m], self.counts[m]
        if not group.hosted:
            sums = [device_variance(one, _PROBE_ETA, whole) for one in drawn]
            return sum(total for total, _ in sums) / max(1, sum(count for _, count in sums))
        offset = float((own - whole) @ (own - whole))
        if a == group.size:
            return offset
        spread = gradient_variance(np.stack([step.device for step in steps]), own)
        return offset + spread * a * (group.size - 1) / (group.size - a)

    def _assumed(self) -> tuple[str, ...]:
        hosted = [group for group in self.groups if group.hosted]
        blind = [m for m, group in enumerate(self.groups) if group.hosted and self.counts[m] == group.size]
        return (
            *(("single devices' variance follows from that of an edge's means",) if hosted else ()),
            *((f"devices of groups {blind} do not vary: all take part in every mean",) if blind else ()),
        )


def device_variance(one: Local, eta: float, gradient: Vector) -> tuple[float, int]:
    """Return the sum over devices of ||g_n - gradient||^2 after one step of ``eta``, and their number."""
    start = one.start.device.astype(np.float64)
    draws = [(start - own) / eta - gradient for own in one.own.values()]
    return float(sum(draw @ draw for draw in draws)), len(draws)


def _gradient(one: Local) -> Theta:
    """Return (start - uploaded) / eta, the stochastic gradient of the batch."""
    assert one.model is not None
    ends = zip(one.start, one.model, strict=True)
    return Theta(*((start.astype(np.float64) - end) / _PROBE_ETA for start, end in ends))
