"""Smooth objectives f_i of one node: linear and logistic regression, and any PyTorch model.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Section V, Examples 1
and 2. Ours: gradients clipped record by record, which the paper's Assumption 5 presupposes; and neural
networks, with their parameters flattened to a vector.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from math import inf, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.clients.training.draws import NodeDraws
from hedgerow.clients.training.work import Loss, cross_entropy
from hedgerow.global_draws import GlobalDraws
from hedgerow.wire.checks import not_negative
from hedgerow.wire.extras import needed

Vector = NDArray[np.float64]

# Maximum number of floats in the per-record gradients of a TorchProblem.
_CHUNK = 1 << 24
# A number with a square of 0 in float64 is smaller.
_UNDERFLOW = 2.0**-537


class _LinearModel:
    """An objective of A w, A (records, n) being the records' matrix, dense or sparse."""

    def __init__(self, A: Any, targets: Vector, name: str) -> None:
        self._sparse = hasattr(A, "tocsr")
        self._A: Any = A.tocsr() if self._sparse else np.ascontiguousarray(A, np.float64)
        self._targets = np.asarray(targets, np.float64)
        if self._A.ndim != 2 or not min(self._A.shape):
            raise ValueError(f"A must have the shape (records, n), both >= 1, got {self._A.shape}")
        if self._targets.shape != self._A.shape[:1]:
            raise ValueError(f"{name} must have the shape ({self._A.shape[0]},), got {self._targets.shape}")
        values = self._A.data if self._sparse else self._A
        if not (np.isfinite(values).all() and np.isfinite(self._targets).all()):
            raise ValueError(f"A and {name} must have finite entries only")
        self.num_examples, self.n = (int(size) for size in self._A.shape)

    @cached_property
    def largest_eigenvalue(self) -> float:
        """lambda_max(A^T A); no n x n matrix is made."""
        # Imported late: a device starts a process per message, and most messages do not need it.
        svds = needed("scipy.sparse.linalg", "math").svds

        smaller = min(self._A.shape)
        if not self._row_norms.any():
            return 0.0
        if smaller < 3:  # Too small for Lanczos.
            return float(np.linalg.norm(self._A.toarray() if self._sparse else self._A, 2)) ** 2
        start = np.random.default_rng(0).standard_normal(smaller)
        return float(svds(self._A, k=1, v0=start, return_singular_vectors=False)[0]) ** 2

    def _products(self, w: Vector) -> Vector:
        return np.asarray(self._A @ w)

    def _mean_gradient(self, residuals: Vector, clip: float) -> Vector:
        """Return the mean of a_t r_t, each clipped to the norm ``clip``."""
        if clip < inf:
            # Underflowing squares and overflowing products must not make a record's share larger.
            norms = (self._row_norms + _UNDERFLOW * sqrt(self.n)) * np.abs(residuals)
            share = residuals * np.minimum(1.0, clip / np.maximum(norms, clip))
            residuals = np.where(np.isfinite(norms), share, 0.0)
        return np.asarray(self._A.T @ residuals) / len(residuals)

    @cached_property
    def _row_norms(self) -> Vector:
        squares = self._A.multiply(self._A).sum(1) if self._sparse else np.square(self._A).sum(1)
        return np.sqrt(np.asarray(squares, np.float64).ravel())


class LinearRegression(_LinearModel):
    """f(w) = ||A w - b||^2 / (2 m), Example 1.

    Parameters
    ----------
    A : ndarray or scipy.sparse matrix (m, n)
        The records, finite.
    b : ndarray (m,)
        The targets, finite.
    """

    def __init__(self, A: Any, b: Vector) -> None:
        super().__init__(A, b, "b")

    @property
    def curvature(self) -> float:
        """lambda_max(A^T A) / m."""
        return self.largest_eigenvalue / self.num_examples

    def value(self, w: Vector) -> float:
        """Return f(w)."""
        residuals = self._products(w) - self._targets
        return float(residuals @ residuals) / (2 * self.num_examples)

    def gradient(self, w: Vector, clip: float = inf) -> Vector:
        """Return A^T (A w - b) / m, each record's part clipped to the norm ``clip``."""
        return self._mean_gradient(self._products(w) - self._targets, clip)


class LogisticRegression(_LinearModel):
    """f(w) = mean(ln(1 + exp(a_t w)) - y_t a_t w) + lam ||w||^2 / 2, Example 2.

    Parameters
    ----------
    A, y : ndarray or scipy.sparse matrix (m, n), ndarray (m,)
        The records, finite, and their labels, 0 or 1.
    lam : float (default: 0.001)
        Weight of the regularizer, >= 0.
    """

    def __init__(self, A: Any, y: Vector, lam: float = 0.001) -> None:
        super().__init__(A, y, "y")
        if strange := set(np.unique(self._targets)) - {0.0, 1.0}:
            raise ValueError(f"y must have the labels 0 and 1, got {strange.pop()!r}")
        not_negative(lam=lam)
        self.lam = lam

    @property
    def curvature(self) -> float:
        """lambda_max(A^T A) / (4 m) + lam, which bounds the Hessian."""
        return self.largest_eigenvalue / (4 * self.num_examples) + self.lam

    def value(self, w: Vector) -> float:
        """Return f(w)."""
        products = self._products(w)
        losses = np.logaddexp(0.0, products) - self._targets * products
        return float(losses.mean()) + self.lam / 2 * float(w @ w)

    def gradient(self, w: Vector, clip: float = inf) -> Vector:
        """Return A^T (sigmoid(A w) - y) / m + lam w, each record's part clipped to the norm ``clip``."""
        # The sigmoid as a tanh: exp would overflow.
        sigmoid = (1.0 + np.tanh(self._products(w) / 2)) / 2
        return self._mean_gradient(sigmoid - self._targets, clip) + self.lam * w


class TorchProblem:
    """The mean loss of a PyTorch model over its flattened trainable parameters, in their order.

    Parameters
    ----------
    model : nn.Module
        Used in evaluation mode, with its buffers; its own parameters do not change. What it draws then is the
        same in every call, so that the objective is a function.
    x, y : Tensor (records, ...), (records,)
        The data, on the model's device, at least one record.
    loss : Loss (default: cross_entropy)
        ``(predictions, targets) -> losses``, one per record.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, loss: Loss = cross_entropy) -> None:
        if not len(x) or len(x) != len(y):
            raise ValueError(
                f"x and y must have equal numbers of records, at least one, got {len(x)} and {len(y)}"
            )
        self._model, self._x, self._y, self._loss = model.eval(), x, y, loss
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("the model must have trainable parameters")
        self._shapes = {name: p.shape for name, p in trained.items()}
        self._own = torch.cat([p.flatten() for p in trained.values()])
        self.num_examples, self.n = len(x), self._own.numel()

    @property
    def largest_eigenvalue(self) -> float:
        """The curvature times the number of records, as A^T A in a linear model."""
        return self.curvature * self.num_examples

    @cached_property
    def curvature(self) -> float:
        """The largest modulus of the Hessian's eigenvalues at the model's own parameters, an estimate."""
        v = torch.from_numpy(np.random.default_rng(0).standard_normal(self.n)).to(self._own)
        modulus = 0.0
        for _ in range(30):
            # The derivative of the gradient along v.
            direction = (v / v.norm(),)
            with self._fixed():
                product: Tensor = torch.func.jvp(torch.func.grad(self._mean_loss), (self._own,), direction)[1]
            v, modulus = product, float(product.norm())
            if modulus == 0:
                break
        return modulus

    def value(self, w: Vector) -> float:
        """Return the mean loss."""
        with torch.no_grad(), self._fixed():
            return float(self._mean_loss(self._parameters(w)))

    def gradient(self, w: Vector, clip: float = inf) -> Vector:
        """Return the gradient, each record's clipped to the norm ``clip``."""
        with self._fixed():
            return self._gradient(self._parameters(w), clip)

    def _gradient(self, parameters: Tensor, clip: float) -> Vector:
        if clip == inf:
            return _numpy(torch.func.grad(self._mean_loss)(parameters))
        total = torch.zeros_like(parameters, dtype=torch.float64)
        of_records = torch.func.vmap(
            torch.func.grad(self._record_loss), in_dims=(None, 0, 0), randomness="different"
        )
        rows = max(1, _CHUNK // self.n)
        for x, y in zip(torch.split(self._x, rows), torch.split(self._y, rows), strict=True):
            # In float64: rounding must stay far below one record's share.
            gradients = of_records(parameters, x, y).double()  # (records, n)
            gradients[~gradients.isfinite().all(dim=1)] = 0.0
            total += (clip / gradients.norm(dim=1).clamp(min=clip)) @ gradients
        return _numpy(total) / self.num_examples

    def _fixed(self) -> AbstractContextManager[object]:
        return NodeDraws.of(self._model, (0, 0, 0)) if self._draws else nullcontext()

    @cached_property
    def _draws(self) -> bool:
        draws = NodeDraws(self._model)
        with GlobalDraws.restored(), torch.no_grad():
            self._mean_loss(self._own)
            found = draws.before.moved or draws.own or draws.changed
        draws.reset(self._model)
        return found

    def _parameters(self, w: Vector) -> Tensor:
        return torch.from_numpy(np.array(w, np.float64)).to(self._own)

    def _mean_loss(self, parameters: Tensor) -> Tensor:
        return self._losses(parameters, self._x, self._y).mean()

    def _record_loss(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self._losses(parameters, x[None], y[None])[0]

    def _losses(self, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = torch.split(parameters, [shape.numel() for shape in self._shapes.values()])
        named = {
            name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
        return self._loss(torch.func.functional_call(self._model, named, (x,)), y)


def _numpy(tensor: Tensor) -> Vector:
    return tensor.detach().cpu().double().numpy()
