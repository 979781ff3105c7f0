"""Estimators of the constants of HSGD's theory from a short run, with their assumptions.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning": F(theta^0), rho and delta of Theorem 1.
Differs: the paper only says that some steps of pre-training give them; the estimators are ours. They need
gradients and scalars from a node, never its data.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hedgerow.wire.checks import is_real, not_negative, positive, require

__all__ = ["Estimates", "estimate", "gradient_variance", "secant_smoothness"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimates:
    """The constants of the bound, and their assumptions."""

    F0: float  # F of the initial global model over all training samples, finite.
    rho: float  # Lipschitz constant of the gradients, > 0.
    delta: float  # Square root of the bound on a stochastic partial gradient's variance, >= 0.
    final_loss: float = 0.0  # E[F] after T iterations, < F0. Unknown before the run; the paper uses 0.
    # The assumptions, one sentence each, for the user who reads the plan.
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require("F0", self.F0, "a finite number", is_real(self.F0))
        positive(rho=self.rho)
        not_negative(delta=self.delta)
        below = is_real(self.final_loss) and self.final_loss < self.F0
        require("final_loss", self.final_loss, f"a number < F0 = {self.F0!r}", below)

    @property
    def loss_gap(self) -> float:
        """Delta F = F0 - final_loss."""
        return self.F0 - self.final_loss


def secant_smoothness(points: Array, gradients: Array) -> float:
    """Return the largest slope of a gradient between consecutive points: a lower estimate of rho.

    - ``points``: Global models of a short run, (steps + 1, params); consecutive ones must differ.
    - ``gradients``: Each group's full gradient at them, (steps + 1, groups, params).
    """
    if points.ndim != 2 or len(points) < 2:
        raise ValueError(
            f"points must have the shape (steps + 1, params) with steps >= 1, got {points.shape}"
        )
    if gradients.ndim != 3 or gradients.shape[::2] != points.shape or gradients.shape[1] < 1:
        raise ValueError(
            f"gradients must have the shape (steps + 1, groups, params) for points {points.shape}, got "
            f"{gradients.shape}"
        )
    moves = np.linalg.norm(np.diff(points, axis=0), axis=-1)  # (steps,)
    _finite("points", moves)
    if not moves.all():
        raise ValueError("points must change at every step, got two consecutive equal rows")
    slopes = np.linalg.norm(np.diff(gradients, axis=0), axis=-1) / moves[:, None]  # (steps, groups)
    _finite("gradients", slopes)
    return float(slopes.max())


def gradient_variance(draws: Array, gradient: Array) -> float:
    """Return the mean of ||g - gradient||^2 over draws of a stochastic partial gradient, V of one block.

    - ``draws``: (draws, params), over batches for the head and the hospital, over single devices for devices.
    - ``gradient``: (params,), of the *global* objective, so that differences between groups add variance.
    """
    if draws.ndim != 2 or len(draws) < 1 or draws.shape[1:] != gradient.shape:
        raise ValueError(
            f"draws must have the shape (draws, params) for gradient {gradient.shape}, got {draws.shape}"
        )
    squares = ((draws - gradient) ** 2).sum(axis=-1)
    _finite("draws", squares)
    return float(squares.mean())


def estimate(
    F0: float,
    points: Array,
    gradients: Array,
    variances: Array,
    *,
    final_loss: float | None = None,
    aggregate: Literal["max", "mean"] = "max",
) -> Estimates:
    """Return the constants from a short run with P = Q = 1, with their assumptions.

    - ``F0``: F of the initial model over all training samples, > ``final_loss``.
    - ``points``, ``gradients``: As in ``secant_smoothness``.
    - ``variances``: ``gradient_variance`` by step, group and block, (..., 3), >= 0.
    - ``final_loss``: E[F] at the end, if known; None is 0.
    - ``aggregate``: Whether delta^2 is the maximum or the mean over steps and groups of the largest block's
      variance.
    """
    if aggregate not in ("max", "mean"):
        raise ValueError(f"aggregate must be 'max' or 'mean', got {aggregate!r}")
    if variances.ndim < 1 or variances.shape[-1] != 3 or variances.size == 0:
        raise ValueError(
            f"variances must have the shape (..., 3), one a block of the model, got {variances.shape}"
        )
    if not (np.isfinite(variances).all() and (variances >= 0).all()):
        raise ValueError("variances must be finite and >= 0")
    rho = secant_smoothness(points, gradients)
    worst = variances.max(axis=-1)
    delta2 = float(worst.max() if aggregate == "max" else worst.mean())
    assumed = (
        f"rho is the largest of {len(points) - 1} secants of {gradients.shape[1]} groups: a lower estimate",
        f"delta^2 is the {aggregate} over steps and groups, against the global gradient",
        "the groups are iid, as the theorem asks",
        *(("E[F] after the run is 0",) if final_loss is None else ()),
    )
    return Estimates(F0, rho, math.sqrt(delta2), final_loss or 0.0, assumed)


def _finite(key: str, values: Array) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"{key} must have finite entries only")
