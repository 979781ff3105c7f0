"""P, Q and eta of HSGD, chosen during the run from estimates.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": Strategy 2 for P = Q, Strategy 3 for eta.
Differs: the constants are estimated during the run; the paper estimates them once, in a pre-training.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, Literal, NamedTuple

from flwr.common import log

from hedgerow.strategies.exchange import Steps
from hedgerow.strategies.hsgd.probes import LostProbeError, ProbedConstants, Probing
from hedgerow.strategies.hsgd.theory import (
    choose_eta,
    choose_same_interval,
    eta_max,
    halved_eta,
    interval_max,
)
from hedgerow.strategies.parts import Part
from hedgerow.strategies.run import Run
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.printable import shown

__all__ = ["Adaptive", "IntervalChoice", "Pace", "Pacer"]


class IntervalChoice(NamedTuple):
    """Global and local interval in iterations, and the learning rate."""

    P: int
    Q: int
    eta: float


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

    def choose(self, seen: ProbedConstants, *, eta: float, done: int) -> IntervalChoice:
        """Return the choice for the rest of the run.

        Parameters
        ----------
        seen : ProbedConstants
            The constants at the current model.
        eta : float
            The user's learning rate at the current iteration, > 0.
        done : int
            Iterations so far.
        """
        known, left = seen.known, max(1, self.iterations - done)
        eta = min(eta, eta_max(known.rho, 1))
        if known.delta > 0:
            P = choose_same_interval(known, eta=eta, T=left, eta_power=self.eta_power)
        else:
            P = max(1, min(interval_max(known.rho, eta), left))  # With zero variance, Q* is infinite.
        if self.eta == "strategy3" and seen.gradient2 > 0:
            eta = choose_eta(known, P=P, Q=P, gradient2=seen.gradient2)
        return IntervalChoice(P, P, eta)


class Pace(NamedTuple):
    """Intervals and learning rate in use: eta0 is halved every ``period`` iterations; 0 for never."""

    P: int
    Q: int
    eta0: float
    period: int

    def eta(self, t: int) -> float:
        """Return the learning rate of iteration t."""
        return halved_eta(t, eta0=self.eta0, period=self.period) if self.period else self.eta0


class Pacer(Part):
    """Chooses P, Q and eta again when due.

    - ``adaptive``: When and how; None for never.
    - ``estimate``: Estimates the constants at a learning rate. If it fails, nothing changes.
    """

    name = "pace"

    def __init__(
        self,
        asked: Pace,
        adaptive: Adaptive | None,
        iterations: Callable[[], int],
        estimate: Callable[[Adaptive, float, Run], Steps[ProbedConstants]],
    ) -> None:
        self._asked, self._adaptive, self._iterations, self._estimate = asked, adaptive, iterations, estimate
        self.forget()

    def forget(self) -> None:
        """Return to the initial choice."""
        self.pace = self._asked
        self.seen: ProbedConstants | None = None
        self._planned = 0

    def opened(self, run: Run) -> Steps[None]:
        """If due, estimate the constants and choose."""
        adaptive, server_round, t = self._adaptive, run.round, self._iterations()
        if adaptive is None or not adaptive.due(server_round - 1) or self._planned == server_round:
            return
        asked = self._asked
        try:
            self.seen = seen = yield from self._estimate(adaptive, asked.eta(t), run)
        except (LostProbeError, ValueError) as error:
            log(
                WARNING, "No estimate before round %d, P, Q and eta stay: %s", server_round, shown(error, 300)
            )
            return
        self._planned = server_round
        log(INFO, "Estimates: rho = %g, delta = %g, F0 = %g", seen.known.rho, seen.known.delta, seen.known.F0)
        if adaptive.apply:
            P, Q, eta = adaptive.choose(seen, eta=asked.eta(t), done=t)
            halved = asked.period if adaptive.eta == "keep" else 0
            self.pace = Pace(P, Q, math.ldexp(eta, t // halved) if halved else eta, halved)
            log(INFO, "Chosen: P = Q = %d, eta = %g", P, eta)

    def ended(self, run: Run) -> None:
        """Report the estimates made before this round."""
        if self.seen is not None and self._planned == run.round:
            run.metrics |= self.seen.metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and the estimates, for a checkpoint."""
        return {"pace": list(self.pace), "seen": None if self.seen is None else self.seen.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        P, Q, eta0, period = state["pace"]
        self.pace = Pace(int(P), int(Q), float(eta0), int(period))
        self.seen = None if state["seen"] is None else ProbedConstants.restored(state["seen"])
