"""One node of CEPS: state in, state out.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1, (3)
and (4). Ours: in the mode ``sound`` the noise stays in u, where the paper's is in one model and gone after a
few local steps; a node that wanted neighbours and got none keeps still, where (3) would take a huge step from
itself alone; and ties of the projection go to the smallest index.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hedgerow.clients.ceps.neighbourhood import combined
from hedgerow.clients.gossip import Problem
from hedgerow.clients.gradient_noise import GradientPrivacy
from hedgerow.wire.checks import at_least, positive
from hedgerow.wire.robust_means import Aggregation
from hedgerow.wire.thresholding import largest, project

__all__ = ["NodeState", "Rules", "advance", "communicate", "initial_state", "local_step"]

Vector = NDArray[np.float64]
Noised = Callable[[Vector], Vector]

_PRIVATE_IN_NOTHING = GradientPrivacy()
_MEAN = Aggregation("mean")


@dataclass(frozen=True)
class Rules:
    """A node's constants."""

    s: int  # Nonzeros of a model, >= 1.
    mu: float  # Proximal weight of the local steps, > 0.
    kappa: int  # Iterations between two communications, >= 1: they are at kappa, 2 kappa, ...
    # sigma_i > 0; with ``fixed_c`` it is c, from which sigma_i = c / m_i^k follows at each communication.
    sigma: float
    neighbours: int  # |N_i| without the node itself, >= 0.
    # Whether c_i stays the same whatever the number of participants, as the paper's analysis has it.
    fixed_c: bool = False
    privacy: GradientPrivacy = _PRIVATE_IN_NOTHING  # What happens to gradients.
    neighbourhood: Aggregation = _MEAN  # What is taken of the own and the neighbours' models.

    def __post_init__(self) -> None:
        at_least(1, s=self.s, kappa=self.kappa)
        positive(mu=self.mu, sigma=self.sigma)

    def c(self, participants: int) -> float:
        """Return c_i = sigma_i m_i^k, the inverse of the step size."""
        return self.sigma if self.fixed_c else self.sigma * participants


@dataclass(frozen=True)
class NodeState:
    """A node at the start of an iteration. The arrays are never changed in place."""

    # (n,): The model and the frozen drift. u tells as much as a gradient does: it must not leave the node.
    w: Vector
    u: Vector
    iteration: int  # k, >= 0.
    participants: int  # m_i of the last communication, with the node itself.
    gradients: int = 1  # How often the data were read, which is the number of releases.
    missed: int = 0  # Communications that did not take place.


def initial_state(problem: Problem, rules: Rules, noised: Noised) -> NodeState:
    """Return the state at k = 0, Algorithm 1, initialisation.

    - ``noised``: Returns a vector (n,) with noise, which only the mode ``sound`` puts on u^{-1}.
    """
    w = np.zeros(problem.n)
    u = -problem.gradient(w, rules.privacy.clip)
    if rules.privacy.mode == "sound":
        u = noised(u)
    return NodeState(w, u, 0, rules.neighbours + 1)


def communicate(
    state: NodeState,
    own: int,
    received: Mapping[int, Vector],
    problem: Problem,
    rules: Rules,
    noised: Noised,
) -> NodeState:
    """Return the state after a communication step, (3).

    - ``received``: z_j (n,) of the participants other than i. None of them is one's own; if there are none,
      though the node has neighbours, this is a local step, counted as missed.
    - ``noised``: Returns a vector (n,) with the noise of this communication: of the gradient, of which
      nothing else is then used, in the mode ``sound``; of the update in ``paper``. Not called where no data
      are read.

    Raises
    ------
    ValueError
        If the update is not finite.
    """
    if not received and rules.neighbours:
        return replace(local_step(state, rules), missed=state.missed + 1)
    participants = 1 + len(received)
    c = rules.c(participants)
    mean = combined(rules.neighbourhood, own, state.w, received)
    gradient = problem.gradient(mean, rules.privacy.clip)
    u = c * mean + (noised(-gradient) if rules.privacy.mode == "sound" else -gradient)  # (3)
    noisy = noised(u) if rules.privacy.mode == "paper" else u
    if not np.isfinite(noisy).all():
        raise ValueError(f"sigma must be larger: with c = {c:g} the update is not finite")
    w = project(noisy / c, rules.s)  # (3)
    return NodeState(w, u, state.iteration + 1, participants, state.gradients + 1, state.missed)


def local_step(state: NodeState, rules: Rules) -> NodeState:
    """Return the state after a local step, (4)."""
    c = rules.c(state.participants)
    w = project((state.u + rules.mu * state.w) / (c + rules.mu), rules.s)  # (4)
    return replace(state, w=w, iteration=state.iteration + 1)


def advance(state: NodeState, k: int, rules: Rules) -> NodeState:
    """Return the state at iteration k: local steps only, bit for bit those of ``local_step``.

    A communication that lies between is lost: it was a local step, and is counted as missed.

    Raises
    ------
    ValueError
        If k is past.
    """
    if k < state.iteration:
        raise ValueError(f"iteration must be at least {state.iteration}, where the node is, got {k}")
    missed = _communications_before(k, rules) - _communications_before(state.iteration, rules)
    w = _local_steps(state, k - state.iteration, rules)
    return replace(state, w=w, iteration=k, missed=state.missed + missed)


def _communications_before(k: int, rules: Rules) -> int:
    return max(k - 1, 0) // rules.kappa


def _local_steps(state: NodeState, steps: int, rules: Rules) -> Vector:
    """Return the model after so many local steps (4)."""
    w, u, mu, divisor = state.w, state.u, rules.mu, rules.c(state.participants) + rules.mu
    while steps > 0:
        v = (u + mu * w) / divisor
        kept = largest(np.abs(v), rules.s)
        outside = np.abs(u) / divisor
        outside[kept] = 0.0
        bar, own, values = outside.max(initial=0.0), u[kept], v[kept]
        steps -= 1
        # Off the support w is 0 and nothing moves: as long as the support holds, (4) is about s numbers,
        # and these soon stand still.
        while steps > 0:
            moved = (own + mu * values) / divisor
            if not np.abs(moved).min() > bar:
                break
            steps = 0 if np.array_equal(moved, values) else steps - 1
            values = moved
        w = np.zeros_like(u)
        w[kept] = values
    return w
