"""HSGD's intervals and learning rate while it runs: as asked for, or chosen from estimates.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Strategies 2 and 3.
"""

import math
from collections.abc import Callable, Mapping
from logging import INFO, WARNING
from typing import Any, NamedTuple

from flwr.common import log

from hedgerow.strategies.hsgd.adaptive import Adaptive
from hedgerow.strategies.hsgd.probes import LostProbeError, Seen
from hedgerow.strategies.hsgd.theory import halved_eta
from hedgerow.wire.printable import shown

__all__ = ["Pace", "Pacer"]


class Pace(NamedTuple):
    """Intervals and learning rate in use: eta of iteration t is eta0, halved every ``period`` > 0."""

    P: int
    Q: int
    eta0: float
    period: int

    def eta(self, t: int) -> float:
        """Return the learning rate of iteration t."""
        return halved_eta(t, eta0=self.eta0, period=self.period) if self.period else self.eta0


class Pacer:
    """Chooses P, Q and eta anew where that is due.

    Parameters
    ----------
    asked : Pace
        As the user has it.
    adaptive : Adaptive or None
        When, and by what rule; None for never.
    """

    def __init__(self, asked: Pace, adaptive: Adaptive | None) -> None:
        self.pace = asked
        self.seen: Seen | None = None
        self._asked = asked
        self._adaptive = adaptive
        self._planned = 0

    def replan(self, server_round: int, t: int, estimate: Callable[[Adaptive, float], Seen]) -> None:
        """Estimate the constants at iteration t where that is due, and choose by them.

        ``estimate`` is given the learning rate of t. It may fail, and then nothing changes.
        """
        adaptive = self._adaptive
        if adaptive is None or not adaptive.due(server_round - 1) or self._planned == server_round:
            return
        asked = self._asked
        try:
            self.seen = seen = estimate(adaptive, asked.eta(t))
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

    def metrics(self, server_round: int) -> dict[str, float]:
        """Return the estimates, of the round before which they were made."""
        return self.seen.metrics() if self.seen is not None and self._planned == server_round else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was chosen and why, for a checkpoint."""
        return {"pace": list(self.pace), "seen": None if self.seen is None else self.seen.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        P, Q, eta0, period = state["pace"]
        self.pace = Pace(int(P), int(Q), float(eta0), int(period))
        self.seen = None if state["seen"] is None else Seen.restored(state["seen"])
