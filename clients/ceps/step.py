"""The iteration of one CEPS node, as functions from state to state.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithm 1, (3)
and (4). Ours: in the mode ``sound`` the noise stays in u, while the paper's is in one model and gone after a
few local steps. A node that received none of its neighbours' models only takes a local step, where (3) would
take a huge step from its own model alone. Ties of the projection go to the smallest index.
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

Vector = NDArray[np.float64]
Noised = Callable[[Vector], Vector]

_NOT_PRIVATE = GradientPrivacy()
_MEAN = Aggregation("mean")


@dataclass(frozen=True)
class Rules:
    """A node's constants."""

    s: int  # Nonzeros of a model, >= 1.
    mu: float  # Proximal weight of the local steps, > 0.
    kappa: int  # Iterations between two communications, >= 1: they are at kappa, 2 kappa, ...
    # sigma_i > 0; with ``fixed_c`` it is c, and sigma_i = c / m_i^k at each communication.
    sigma: float
    neighbours: int  # |N_i| without the node itself, >= 0.
    # Whether c_i is independent of the number of participants, as in the paper's analysis.
    fixed_c: bool = False
    privacy: GradientPrivacy = _NOT_PRIVATE
    neighbourhood: Aggregation = _MEAN  # Combines the node's and the received models.

    def __post_init__(self) -> None:
        at_least(1, s=self.s, kappa=self.kappa)
        positive(mu=self.mu, sigma=self.sigma)

    def c(self, participants: int) -> float:
        """Return c_i = sigma_i m_i^k, the inverse of the step size."""
        return self.sigma if self.fixed_c else self.sigma * participants


@dataclass(frozen=True)
class State:
    """A node at the start of an iteration. The arrays are never changed in place."""

    # (n,): the model and the frozen drift. u reveals as much as a gradient: it must not leave the node.
    w: Vector
    u: Vector
    iteration: int  # k, >= 0.
    participants: int  # m_i of the last communication, the node included.
    gradients: int = 1  # Accesses to the data, which is the number of releases.
    missed: int = 0  # Missed communications.


def initial_state(problem: Problem, rules: Rules, noised: Noised) -> State:
    """Return the state at k = 0, Algorithm 1, initialisation.

    ``noised`` adds noise to a vector (n,); it is applied to u^{-1} in the mode ``sound`` only.
    """
    w = np.zeros(problem.n)
    u = -problem.gradient(w, rules.privacy.clip)
    if rules.privacy.mode == "sound":
        u = noised(u)
    return State(w, u, 0, rules.neighbours + 1)


def communicate(
    state: State, own: int, received: Mapping[int, Vector], problem: Problem, rules: Rules, noised: Noised
) -> State:
    """Return the state after a communication step, (3); ValueError if it is not finite.

    ``received`` are z_j (n,) of the other participants. If there are none, though the node has neighbours,
    this is a local step, counted as missed. ``noised`` adds this communication's noise to a vector (n,): in
    the mode ``sound`` to the gradient, of which nothing else is then used; in ``paper`` to the update. It is
    not called if no data are read.
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
    return State(w, u, state.iteration + 1, participants, state.gradients + 1, state.missed)


def local_step(state: State, rules: Rules) -> State:
    """Return the state after a local step, (4)."""
    c = rules.c(state.participants)
    w = project((state.u + rules.mu * state.w) / (c + rules.mu), rules.s)  # (4)
    return replace(state, w=w, iteration=state.iteration + 1)


def advance(state: State, k: int, rules: Rules) -> State:
    """Return the state at iteration k >= ``state.iteration`` by local steps, bit for bit as ``local_step``.

    Communications in between were local steps, and are counted as missed.
    """
    if k < state.iteration:
        raise ValueError(f"iteration must be at least {state.iteration}, where the node is, got {k}")
    missed = _communications_before(k, rules) - _communications_before(state.iteration, rules)
    w = _local_steps(state, k - state.iteration, rules)
    return replace(state, w=w, iteration=k, missed=state.missed + missed)


def _communications_before(k: int, rules: Rules) -> int:
    return max(k - 1, 0) // rules.kappa


def _local_steps(state: State, steps: int, rules: Rules) -> Vector:
    """Return the model after some local steps (4)."""
    w, u, mu, divisor = state.w, state.u, rules.mu, rules.c(state.participants) + rules.mu
    while steps > 0:
        v = (u + mu * w) / divisor
        kept = largest(np.abs(v), rules.s)
        outside = np.abs(u) / divisor
        outside[kept] = 0.0
        bar, own, values = outside.max(initial=0.0), u[kept], v[kept]
        steps -= 1
        # Off the support w is 0 and stays so: while the support is the same, (4) changes s numbers only,
        # which soon converge.
        while steps > 0:
            moved = (own + mu * values) / divisor
            if not np.abs(moved).min() > bar:
                break
            steps = 0 if np.array_equal(moved, values) else steps - 1
            values = moved
        w = np.zeros_like(u)
        w[kept] = values
    return w
