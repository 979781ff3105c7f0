"""Proximal steps of many nodes at once, by gradient descent on the inner objective.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", the proximal operator of Algorithms 1 and 2 with T = 1:
p = argmin_y F(y; xi) + ||y - x||^2 / (2 gamma). The paper gives only the inner solver's learning rate, 0.1,
which diverges once gamma < 0.05. The default here is eta = gamma / 3, up to a maximum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from logging import WARNING
from math import inf, isfinite
from typing import Literal

import numpy as np
import torch
from flwr.common import log
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.clients.training.sgd import LocalTraining
from hedgerow.clients.training.work import Asked, LocalWork, Trained
from hedgerow.wire.checks import at_least, in_range, positive


@dataclass(frozen=True)
class InnerLR:
    """The inner solver's step size eta, which may depend on the proximal parameter gamma."""

    # ``auto`` is gamma / 3 and at most ``value``; ``fixed`` is ``value`` for any gamma.
    kind: Literal["auto", "fixed"]
    value: float  # A finite number > 0.

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:g}"

    def at(self, gamma: float) -> float:
        """Return eta for a proximal parameter."""
        return min(gamma / 3, self.value) if self.kind == "auto" else self.value


def parse_inner_lr(text: str) -> InnerLR:
    """Return the step size of a setting: ``auto:<max>`` or ``fixed:<value>``, the number finite and > 0."""
    kind, _, number = text.partition(":")
    try:
        value = float(number)
    except ValueError:
        value = inf
    if kind not in ("auto", "fixed") or not 0 < value < inf:
        raise ValueError(
            f"inner-lr must be 'auto:<max>' or 'fixed:<value>' with a finite number > 0, got {text!r}"
        )
    return InnerLR("auto" if kind == "auto" else "fixed", value)


@dataclass(frozen=True)
class ProximalWork:
    """One node's proximal step."""

    start: Mapping[str, Tensor]  # x^k, as a state dict. Not changed.
    # The data indexed by ``batches``, as in ``LocalWork``.
    x: Tensor
    y: Tensor
    # One mini-batch for all inner steps (the paper's proximal operator), or one for each of the ``steps``.
    batches: Sequence[NDArray[np.int64]]
    gamma: float  # The proximal parameter gamma^k, > 0.
    # eta > 0. On a flat loss a step multiplies y - x^k by 1 - eta / gamma: eta > 2 gamma diverges.
    inner_lr: float
    steps: int  # Maximum number of inner steps S, >= 1.
    # Stop once the residual is at most this share of ||grad F(x^k; xi)||; 0 takes all steps. Unused with one
    # batch per step, where the residual is that of a batch, not of F.
    tol: float = 1e-3
    # As in ``LocalWork``. All inner steps make the same draws: they belong to xi, as the batch does.
    asked: Asked | None = None

    def __post_init__(self) -> None:
        positive(gamma=self.gamma, inner_lr=self.inner_lr)
        at_least(1, steps=self.steps)
        in_range("tol", self.tol, 0.0, 1.0, open_above=True)
        if len(self.batches) not in (1, self.steps):
            raise ValueError(f"batches must be 1, or one per step, {self.steps}, got {len(self.batches)}")

    @property
    def shares_a_batch(self) -> bool:
        """Whether all steps use the same mini-batch."""
        return len(self.batches) == 1

    def gradient_step(self, point: Mapping[str, Tensor], step: int) -> LocalWork:
        """Return the work y - eta grad F(y; xi) on the batch of a step, or on the last batch beyond it."""
        batch = self.batches[min(step, len(self.batches) - 1)]
        return LocalWork(point, self.x, self.y, [batch], self.inner_lr, self.asked)


@dataclass(frozen=True)
class Proximal:
    """The approximate proximal point of one node."""

    state: Mapping[str, Tensor]  # p, as a state dict.
    # ||grad F(p; xi) + (p - x^k) / gamma|| / ||grad F(x^k; xi)||, xi the batch of the last step: 0 at the
    # exact proximal point of F(.; xi), 1 at x^k.
    relative_residual: float
    steps_taken: int  # Inner steps up to p, 0 (x^k is the proximal point) to ``steps``.
    mean_loss: float  # Mean mini-batch loss before each step taken; the loss at x^k without steps.

    @property
    def metrics(self) -> Mapping[str, float]:
        """The node's metrics."""
        return {"train-loss": self.mean_loss}


def proximal_steps(
    model: nn.Module, works: Sequence[ProximalWork], how: LocalTraining
) -> list[Proximal | ValueError]:
    """Take every node's proximal step: S inner steps, or fewer if the residual becomes small.

    y_{s+1} = y_s - eta [grad F(y_s; xi) + (y_s - x^k) / gamma], y_0 = x^k, p = y_S.

    Each inner step is one call of ``local_sgd`` over the nodes that have not stopped. The residual at y_s is
    ||y_{s+1} - y_s|| / eta, so reporting it takes one gradient beyond the last step, and one at x^k if
    batches are fresh. Loop and stack agree to float tolerance, except that a residual within rounding of the
    tolerance may stop one of them a step earlier.

    ``model`` is the architecture, on the training device; its parameters are scratch space. The results are
    in the order of ``works``, with a ValueError for a node that ended in values that are not finite.
    """
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    solvers = [_Solver(work, trainable) for work in works]

    for work in works:
        if work.inner_lr > 2 * work.gamma:
            _warn(work.inner_lr, work.gamma)
    firsts = how.sgd(model, [work.gradient_step(work.start, work.steps) for work in works])
    for solver, first in zip(solvers, firsts, strict=True):
        solver.refer_to(first)
    while active := [solver for solver in solvers if solver.outcome is None]:
        steps = how.sgd(model, [solver.work.gradient_step(solver.y, solver.step) for solver in active])
        for solver, trained in zip(active, steps, strict=True):
            solver.advance(trained)
    return [solver.outcome for solver in solvers if solver.outcome is not None]


class _Solver:
    """One node's inner iteration."""

    def __init__(self, work: ProximalWork, trainable: Sequence[str]) -> None:
        self.work = work
        self.trainable = trainable
        self.y: Mapping[str, Tensor] = work.start
        self.step = 0
        self.loss = 0.0
        self.reference = 0.0
        self.outcome: Proximal | ValueError | None = None

    def refer_to(self, first: Trained) -> None:
        """Set the unit of residuals, eta ||grad F(x^k; xi)||; with a shared xi this is also step 0."""
        self.reference = self._distance(first.state)
        if self.work.shares_a_batch:
            self._decide(first.state, first.mean_loss, self.reference)

    def advance(self, trained: Trained) -> None:
        """Add the proximal term to the gradient step from y_s, then stop or continue with y_{s+1}."""
        x, y, after = (self._values(state) for state in (self.work.start, self.y, trained.state))
        pulled = torch._foreach_add(
            after, torch._foreach_sub(y, x), alpha=-self.work.inner_lr / self.work.gamma
        )
        following = {**trained.state, **dict(zip(self.trainable, pulled, strict=True))}
        self._decide(following, trained.mean_loss, self._distance(following))

    def _decide(self, following: Mapping[str, Tensor], loss: float, distance: float) -> None:
        work, s = self.work, self.step
        converged = work.shares_a_batch and distance <= work.tol * self.reference
        if not isfinite(distance):
            self.outcome = _diverged(work, s)
        elif s == work.steps or converged:
            residual = distance / self.reference if self.reference else (inf if distance else 0.0)
            self.outcome = Proximal(self.y, residual, s, self.loss / s if s else loss)
        else:
            self.y, self.step, self.loss = following, s + 1, self.loss + loss

    def _distance(self, state: Mapping[str, Tensor]) -> float:
        """Return the distance from y_s over the trainable parameters."""
        change = torch._foreach_sub(self._values(state), self._values(self.y))
        return float(torch.stack(torch._foreach_norm(change)).double().norm()) if change else 0.0

    def _values(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        return [state[name] for name in self.trainable]


def _diverged(work: ProximalWork, step: int) -> ValueError:
    return ValueError(
        f"inner-lr must be 'auto:<max>' or a smaller 'fixed:<value>', got eta = {work.inner_lr:g} with "
        f"local-step (gamma) {work.gamma:g}: inner step {step + 1} ended in values that are not finite; eta "
        f"> 2 gamma = {2 * work.gamma:g} diverges, and for a loss of smoothness L so does eta > 2 / (1 / "
        "gamma + L)"
    )


@lru_cache(maxsize=1024)
def _warn(eta: float, gamma: float) -> None:
    log(
        WARNING,
        "inner-lr gives eta = %g > 2 gamma = %g: the inner solver moves away from the proximal point by a "
        "factor of %.3g a step where the loss is flat; inner-lr = 'auto:<max>' follows gamma",
        eta,
        2 * gamma,
        eta / gamma - 1,
    )
