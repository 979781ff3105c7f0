"""P, Q and eta of HSGD chosen while it runs, from what its own messages show.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": Strategy 2 for P = Q, Strategy 3 for eta.
Differs: the constants are estimated anew in the run, where the paper takes those of a pre-training.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hedgerow.strategies.hsgd.probes import Probing, Seen
from hedgerow.strategies.hsgd.theory import choose_eta, choose_same_interval, eta_max, interval_max
from hedgerow.wire.checks import int_at_least

__all__ = ["Adaptive", "Choice"]


class Choice(NamedTuple):
    """Global and local interval in iterations, and the learning rate."""

    P: int
    Q: int
    eta: float


@dataclass(frozen=True)
class Adaptive:
    """When the constants are estimated, and what is done with them.

    Parameters
    ----------
    iterations : int
        T, how many the run is planned for, >= 1: Strategy 2 needs it.
    replan_every : int (default: 0)
        Rounds after which the constants are estimated again, >= 1; 0 for at the start only.
    eta : {"keep", "strategy3"} (default: "keep")
        The learning rate: as given, within the cap 1 / (8 P rho); or that of Strategy 3, constant.
    eta_power : {3, 2} (default: 3)
        See ``theory.q_star``.
    apply : bool (default: True)
        False: the estimates are told, and P, Q and eta stay.
    probing : Probing (default: Probing())
        How the constants are estimated.

    Raises
    ------
    ValueError
        If a parameter is out of range.
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
            raise ValueError(f"eta is {self.eta!r}; valid is 'keep' or 'strategy3'")
        if self.eta_power not in (2, 3):
            raise ValueError(f"eta_power is {self.eta_power!r}; valid is 3 or 2")

    def due(self, completed: int) -> bool:
        """Return whether the round after so many is preceded by an estimate."""
        return completed == 0 or (self.replan_every > 0 and completed % self.replan_every == 0)

    def choose(self, seen: Seen, *, eta: float, done: int) -> Choice:
        """Return the choice for the rest of the run.

        Parameters
        ----------
        seen : Seen
            The constants at the current model.
        eta : float
            The user's learning rate at this iteration, > 0.
        done : int
            Iterations so far.
        """
        known, left = seen.known, max(1, self.iterations - done)
        eta = min(eta, eta_max(known.rho, 1))
        if known.delta > 0:
            P = choose_same_interval(known, eta=eta, T=left, eta_power=self.eta_power)
        else:
            P = max(1, min(interval_max(known.rho, eta), left))  # Without variance Q* is infinite.
        if self.eta == "strategy3" and seen.gradient2 > 0:
            eta = choose_eta(known, P=P, Q=P, gradient2=seen.gradient2)
        return Choice(P, P, eta)
