"""Estimates of L, sigma^2 and a gradient, which planners need, at one node and one point.

Papers: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", assumptions A1 and A2; Y. Sun, J. Shao, Y. Mao, J. H. Wang, J. Zhang,
"Semi-Decentralized Federated Edge Learning for Fast Convergence on Non-IID Data", Assumption 1. The papers
assume bounds over all points. These are estimates at the current model, on samples; they bound nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hedgerow.clients.instructions import only_config, whole
from hedgerow.clients.local_task import LocalTask
from hedgerow.clients.sent_models import sent_state
from hedgerow.clients.training.draws import NodeDraws
from hedgerow.clients.training.work import Loss, cross_entropy
from hedgerow.wire.calls import Call
from hedgerow.wire.checks import at_least
from hedgerow.wire.seeds import Purpose, generator


@dataclass(frozen=True)
class Probe:
    """Estimates at one model, on one node's samples."""

    # Lower estimate of L: the largest absolute eigenvalue of the local loss's Hessian, >= 0.
    curvature: float
    # Estimate of sigma^2: E ||grad F(w; xi) - grad f(w)||^2 over mini-batches xi, >= 0.
    gradient_variance: float
    loss: float  # mean local loss on the samples of the curvature

    def estimates(self) -> dict[str, float]:
        """Return the planners' inputs by metric name."""
        return {"curvature": self.curvature, "gradient-variance": self.gradient_variance}


def probe_stream(seed: int, round_index: int, partition_id: int) -> np.random.Generator:
    """Return the generator of one node's probe in one round."""
    return generator(seed, round=round_index, partition_id=partition_id, purpose=Purpose.PROBE)


def probe_as_told(call: Call, task: LocalTask, round_key: str, loss: Loss = cross_entropy) -> Probe:
    """Load the message's model into the task's model and return the estimates there.

    The message's config has ``batch-size``, ``seed`` and the round, under ``round_key``.
    """
    batch_size = whole(only_config(call), "batch-size", 1)
    task.model.load_state_dict(sent_state(call, task))
    stream = probe_stream(*(told := stream_as_told(call, round_key)))
    with NodeDraws.of(task.model, told):
        return probe(task.model, task.x, task.y, task.part, batch_size=batch_size, stream=stream, loss=loss)


def stream_as_told(call: Call, round_key: str) -> tuple[int, int, int]:
    """Return the message's seed and round, and the node's partition id."""
    config = only_config(call)
    return whole(config, "seed", 0), whole(config, round_key, 0), call.partition_id


def probe(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    part: NDArray[np.int64],
    *,
    batch_size: int,
    stream: np.random.Generator,
    loss: Loss = cross_entropy,
    max_samples: int = 128,
    products: int = 10,
    batches: int = 8,
) -> Probe:
    """Return the estimates at the model's current parameters, in evaluation mode.

    - ``model``: On the device of ``x``; left unchanged.
    - ``x``, ``y``: The data, (samples, ...) and (samples,).
    - ``part``: The node's own samples, as indices into ``x`` and ``y``, at least one.
    - ``batch_size``: Samples per training mini-batch, >= 1; the variance depends on it.
    - ``stream``: Draws the samples, the first direction and the mini-batches.
    - ``max_samples``: Size limit of the fixed batch for curvature and loss, >= 1.
    - ``products``: Hessian-vector products, >= 1.
    - ``batches``: Mini-batches for the variance, >= 2.
    """
    with _evaluation_mode(model):
        fixed = _drawn(stream, part, max_samples)
        largest, value = curvature(model, x[fixed], y[fixed], stream, loss, products)
        drawn = [_drawn(stream, part, batch_size) for _ in range(batches)]
        variance = gradient_variance(model, x, y, drawn, loss)
    return Probe(largest, variance, value)


def curvature(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    stream: np.random.Generator,
    loss: Loss = cross_entropy,
    products: int = 10,
) -> tuple[float, float]:
    """Return the Hessian's largest absolute eigenvalue by power iteration, and the loss, on one batch.

    The estimate ||H v||, ||v|| = 1, never exceeds the eigenvalue and rises with each product. It is 0 for a
    loss whose second derivative is zero.

    - ``x``, ``y``: The batch, (samples, ...) and (samples,).
    - ``products``: Hessian-vector products, >= 1, else ValueError.
    """
    at_least(1, products=products)
    parameters = [p for p in model.parameters() if p.requires_grad]
    mean = loss(model(x), y).mean()
    gradient = torch.autograd.grad(mean, parameters, create_graph=True, materialize_grads=True)
    # A constant gradient has no graph; its rows of H are zero.
    varying = [g for g in gradient if g.requires_grad]
    v = [torch.as_tensor(stream.normal(size=tuple(p.shape))).to(p) for p in parameters]
    largest = 0.0
    for _ in range(products if varying else 0):
        scale = _norm(v)
        v = [part / scale for part in v]
        along = [part for part, g in zip(v, gradient, strict=True) if g.requires_grad]
        v = list(
            torch.autograd.grad(varying, parameters, along, retain_graph=True, materialize_grads=True)
        )  # H v
        if (largest := _norm(v)) == 0:
            break
    return largest, float(mean.detach())


def gradient_variance(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    batches: Sequence[NDArray[np.int64]],
    loss: Loss = cross_entropy,
) -> float:
    """Return the sample variance of mini-batch gradients, sum_j ||g_j - mean(g)||^2 / (batches - 1).

    It is unbiased for independent batches and needs no full gradient.

    - ``x``, ``y``: The data that ``batches`` index, (samples, ...) and (samples,).
    - ``batches``: At least 2 mini-batches, else ValueError.
    """
    if len(batches) < 2:
        raise ValueError(f"batches must be at least 2, got {len(batches)}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    mean = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    squares = 0.0
    for j, batch in enumerate(batches, start=1):
        gradients = torch.autograd.grad(
            loss(model(x[batch]), y[batch]).mean(), parameters, materialize_grads=True
        )
        # Welford's update: equal gradients have a variance of exactly zero.
        apart = [g.double() - m for g, m in zip(gradients, mean, strict=True)]
        mean = [m + a / j for m, a in zip(mean, apart, strict=True)]
        squares += (1 - 1 / j) * _norm(apart) ** 2
    return squares / (len(batches) - 1)


def local_gradient(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    part: NDArray[np.int64],
    loss: Loss = cross_entropy,
    samples_at_once: int = 256,
) -> dict[str, Tensor]:
    """Return grad F_i at the model's current parameters, in evaluation mode, by state dict key.

    Entries that are not trained, such as running statistics, are zero.

    - ``model``: On the device of ``x``; left unchanged.
    - ``x``, ``y``: The data, (samples, ...) and (samples,).
    - ``part``: The node's own samples, as indices into ``x`` and ``y``, at least one.
    - ``samples_at_once``: Samples per pass, >= 1.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = [torch.zeros_like(p, dtype=torch.float64) for p in trained.values()]
    with _evaluation_mode(model):
        for first in range(0, len(part), samples_at_once):
            own = part[first : first + samples_at_once]
            parts = torch.autograd.grad(
                loss(model(x[own]), y[own]).sum(), list(trained.values()), materialize_grads=True
            )
            total = [t + g.double() for t, g in zip(total, parts, strict=True)]
    gradient = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    for (name, p), summed in zip(trained.items(), total, strict=True):
        gradient[name] = (summed / len(part)).to(p.dtype)
    return gradient


def _drawn(stream: np.random.Generator, part: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    return part if len(part) <= most else stream.choice(part, most, replace=False)


def _norm(parts: Sequence[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return float(torch.stack(norms).norm())


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and restore their modes afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
