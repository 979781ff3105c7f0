"""P, Q and eta of HSGD, chosen during the run from estimates that move no data.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": Strategy 2 for P = Q, Strategy 3 for eta, and "a
small number of pre-training" steps.
Differs: the constants are estimated during the run; the paper estimates them once, in a pre-training. With
P = Q = 1 a group uploads its start minus eta times the gradient of its batch. At every point of a short
central run, a fixed batch of each group gives its gradient; secants of the gradients bound rho from below,
and random batches of the size of A_m give the variance. The model is not changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from logging import INFO, WARNING
from typing import Any, Literal

import numpy as np
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.hsgd.algorithm import Algorithm, local_interval
from hedgerow.strategies.hsgd.exchange import Group, Local, Theta, batch_size, draw
from hedgerow.strategies.hsgd.means import Means
from hedgerow.strategies.hsgd.theory import (
    Estimates,
    Pace,
    choose_eta,
    choose_same_interval,
    estimate,
    eta_max,
    gradient_variance,
    interval_max,
)
from hedgerow.strategies.parts import Part
from hedgerow.wire.checks import in_range, int_at_least
from hedgerow.wire.printable import shown
from hedgerow.wire.seeds import Purpose

Vector = NDArray[np.float64]

# A power of two, so that dividing by it does not round.
_PROBE_ETA = 1.0
# First iteration of probes. Noise is keyed by t and must differ from the noise of training exchanges.
_PROBE_T = 1 << 40
_PROBES_A_ROUND = 1 << 16


class LostProbeError(RuntimeError):
    """A group did not answer, so no estimate is possible."""


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


class Prober:
    """Estimates the constants of a method from exact steps and plain means, before a round.

    ValueError if no group is online.
    """

    def __init__(self, method: Algorithm, run: RoundContext) -> None:
        if not method.groups:
            raise ValueError("no group is online")
        self._method, self._run, self._groups = method, run, method.groups
        # |A_m| of each group.
        self._counts = [batch_size(method.participation, group.size) for group in self._groups]
        self._t = method.iterations
        interval = method.interval(self._t, run, starts=True, uploads=True, plain=True)
        first = _PROBE_T + run.round * _PROBES_A_ROUND
        self._interval = replace(interval, t=first, steps=1, eta0=_PROBE_ETA, eta_period=0)
        sizes = np.array([group.size for group in self._groups])
        self._weights = sizes / sizes.sum()

    def estimate(self, probing: Probing, start: Theta, eta: float) -> Steps[Estimates]:
        """Return the estimates of a run of S steps with ``eta`` from ``start``.

        Raises LostProbeError; or ValueError if the model does not move, or F0 is not above the final loss.
        """
        fixed = [
            list(group.ids)
            if probing.batch is None or probing.batch >= group.size
            else self._drawn(group, probing.batch)
            for group in self._groups
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
        known = estimate(
            losses[0], np.stack(points), np.stack(gradients), np.array(variances),
            final_loss=probing.final_loss, aggregate=probing.aggregate,
        )  # fmt: skip
        first = self._weights @ gradients[0]
        return replace(known, gradient2=float(first @ first))

    def _drawn(self, group: Group, count: int, number: int = 0) -> list[str]:
        seed = self._method.settings.seed
        return draw(group, count, seed=seed, t=self._t, purpose=Purpose.PROBE, number=number)

    def _step(self, theta: Theta, batches: Sequence[Sequence[str]]) -> Steps[list[Local]]:
        """Return each group after one step from a point."""
        groups = [Local(group, theta, tuple(ids)) for group, ids in zip(self._groups, batches, strict=True)]
        self._interval = replace(self._interval, t=self._interval.t + 1)
        groups = yield from local_interval(self._interval, groups, Means(), self._run)
        self._method.advance(1, 1)
        if lost := [one.group.number for one in groups if one.model is None]:
            raise LostProbeError(f"groups {lost} did not answer")
        return groups

    def _variances(self, theta: Theta, own: Vector, whole: Vector, numbers: Sequence[int]) -> Steps[Vector]:
        """Return the variance of each block's stochastic gradient, (groups, 3), against the global one."""
        drawn = []
        for number in numbers:
            pairs = zip(self._groups, self._counts, strict=True)
            batches = [self._drawn(group, count, number) for group, count in pairs]
            drawn.append((yield from self._step(theta, batches)))
        blocks = theta.split(whole)
        table = np.empty((len(self._groups), 3))
        for m in range(len(self._groups)):
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
        group, a = self._groups[m], self._counts[m]
        if not group.hosted:
            sums = [device_variance(one, _PROBE_ETA, whole) for one in drawn]
            return sum(total for total, _ in sums) / max(1, sum(count for _, count in sums))
        offset = float((own - whole) @ (own - whole))
        if a == group.size:
            return offset
        spread = gradient_variance(np.stack([step.device for step in steps]), own)
        return offset + spread * a * (group.size - 1) / (group.size - a)


def device_variance(one: Local, eta: float, gradient: Vector) -> tuple[float, int]:
    """Return the sum over devices of ||g_n - gradient||^2 after one step of ``eta``, and their number."""
    start = one.start.device.astype(np.float64)
    draws = [(start - own) / eta - gradient for own in one.device_models.values()]
    return float(sum(draw @ draw for draw in draws)), len(draws)


def _gradient(one: Local) -> Theta:
    """Return (start - uploaded) / eta, the stochastic gradient of the batch."""
    assert one.model is not None
    ends = zip(one.start, one.model, strict=True)
    return Theta(*((start.astype(np.float64) - end) / _PROBE_ETA for start, end in ends))


@dataclass(frozen=True)
class Adaptive:
    """When to estimate the constants, and how to use them.

    Parameters
    ----------
    iterations : int
        T, the planned iterations of the run, >= 1; Strategy 2 needs it.
    replan_every : int (default: 0)
        Rounds between estimates, >= 1; 0 for only at the start.
    eta : {"keep", "strategy3"} (default: "keep")
        The learning rate: as given, within the cap 1 / (8 P rho), or the constant one of Strategy 3.
    eta_power : {3, 2} (default: 3)
        Power of eta in Q*: 3 is the root of (20), 2 is as printed in the paper.
    apply : bool (default: True)
        False: report the estimates, but keep P, Q and eta.
    probing : Probing (default: Probing())
        How to estimate the constants.
    """

    iterations: int
    replan_every: int = 0
    eta: Literal["keep", "strategy3"] = "keep"
    eta_power: Literal[2, 3] = 3
    apply: bool = True
    probing: Probing = field(default_factory=Probing)

    def __post_init__(self) -> None:
        int_at_least(1, iterations=self.iterations)
        int_at_least(0, replan_every=self.replan_every)
        if self.eta not in ("keep", "strategy3"):
            raise ValueError(f"eta must be 'keep' or 'strategy3', got {self.eta!r}")
        if self.eta_power not in (2, 3):
            raise ValueError(f"eta_power must be 3 or 2, got {self.eta_power!r}")

    def due(self, completed: int) -> bool:
        """Return whether an estimate is due after ``completed`` rounds."""
        return completed == 0 or (self.replan_every > 0 and completed % self.replan_every == 0)

    def choose(self, seen: Estimates, asked: Pace, t: int) -> Pace:
        """Return the choice for the rest of the run, from iteration ``t`` on.

        - ``seen``: The constants at the current model.
        - ``asked``: The user's intervals and learning rate, > 0.
        """
        left, eta = max(1, self.iterations - t), min(asked.eta(t), eta_max(seen.rho, 1))
        if seen.delta > 0:
            P = choose_same_interval(seen, eta=eta, T=left, eta_power=self.eta_power)
        else:
            P = max(1, min(interval_max(seen.rho, eta), left))  # With zero variance, Q* is infinite.
        if self.eta == "strategy3" and seen.gradient2 > 0:
            eta = choose_eta(seen, P=P, Q=P, gradient2=seen.gradient2)
        halved = asked.period if self.eta == "keep" else 0
        return Pace(P, P, math.ldexp(eta, t // halved) if halved else eta, halved)


class Pacer(Part):
    """Chooses P, Q and eta again when due.

    - ``asked``: The user's intervals and learning rate.
    - ``adaptive``: When and how; None for never. If an estimate fails, nothing changes.
    - ``method``: Whose constants are estimated.
    """

    name = "pace"

    def __init__(self, asked: Pace, adaptive: Adaptive | None, method: Algorithm) -> None:
        self._asked, self._adaptive, self._method = asked, adaptive, method
        self.forget()

    def forget(self) -> None:
        """Return to the initial choice."""
        self.pace = self._asked
        self.seen: Estimates | None = None
        self._planned = 0

    def opened(self, run: RoundContext) -> Steps[None]:
        """If due, estimate the constants and choose."""
        adaptive, state, t = self._adaptive, self._method.state, self._method.iterations
        if adaptive is None or not adaptive.due(run.round - 1) or self._planned == run.round:
            return
        assert state is not None
        try:
            prober = Prober(self._method, run)
            self.seen = seen = yield from prober.estimate(adaptive.probing, state.theta, self._asked.eta(t))
        except (LostProbeError, ValueError) as error:
            log(WARNING, "No estimate before round %d, P, Q and eta stay: %s", run.round, shown(error, 300))
            return
        self._planned = run.round
        log(INFO, "Estimates: rho = %g, delta = %g, F0 = %g", seen.rho, seen.delta, seen.F0)
        if adaptive.apply:
            self.pace = adaptive.choose(seen, self._asked, t)
            log(INFO, "Chosen: P = Q = %d, eta = %g", self.pace.P, self.pace.eta(t))

    def ended(self, run: RoundContext) -> None:
        """Report the estimates made before this round."""
        if self.seen is not None and self._planned == run.round:
            known = self.seen
            run.metrics |= {"rho": known.rho, "delta-g": known.delta, "F0": known.F0}
            run.metrics["gradient2"] = known.gradient2

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and the estimates, for a checkpoint."""
        return {"pace": list(self.pace), "seen": None if self.seen is None else asdict(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        P, Q, eta0, period = state["pace"]
        self.pace = Pace(int(P), int(Q), float(eta0), int(period))
        self.seen = None if state["seen"] is None else Estimates(**state["seen"])
