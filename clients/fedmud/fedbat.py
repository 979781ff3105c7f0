"""FedBAT at a node: the second half of local training learns the best one-bit code of the update.

Paper: S. Li et al., "FedBAT: Communication-Efficient Federated Learning via Learnable Binarization", 2024:
the update M of frozen weights w is trained first as it is, then through the stochastic binariser S(M, alpha)
with a learnt step size alpha per layer. As in the experiments of S. Li et al. (FedMUD), the server's own
update is also sent as one bit per weight. Ours: draws come from a stream of the node's own; with fewer signs
than weights, M is 0 for the other weights from the end of the warm-up on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic
from hedgerow.clients.training.loop import train_one
from hedgerow.clients.training.work import LocalWork, Loss, State, Trained, cross_entropy

# phi_0, and the bounds of alpha.
_COEFFICIENT = 6.0
_LEAST, _MOST = 5e-4, 5e-2


@dataclass(frozen=True)
class BinarisedWork:
    """One node's local training."""

    # Start, data, batches and step size. The first half of the batches, rounded down, is warm-up, as in the
    # authors' code; with one batch there is none, so that M starts at 0 and alpha at its lower bound.
    sgd: LocalWork
    base: Mapping[str, Tensor]  # w, the weights with a binarised update; ``sgd.start`` holds the same.
    stream: torch.Generator  # Of the binariser, on the CPU.
    # The indices of each layer's weights with a sign; None, or no entry, for all.
    kept: Mapping[str, NDArray[np.int64] | None] = field(default_factory=dict)


def train_binarised(
    model: nn.Module, work: BinarisedWork, loss: Loss = cross_entropy, arithmetic: Arithmetic = FLOAT32
) -> Trained:
    """Train one node.

    ``model`` is the architecture, on the training device; scratch space. Forward passes through the binariser
    are not compiled, whatever ``arithmetic`` says. The resulting state holds the model without the base's
    keys and, for each of these, ``"<key>:bits"``, uint8 (ceil(n / 8),) of its n signs, a set bit for +alpha,
    and ``"<key>:alpha"``, float32 (1,).
    """
    sgd = work.sgd
    warm_up = len(sgd.batches) // 2
    warming = replace(sgd, batches=sgd.batches[:warm_up])
    first = train_one(model, warming, loss, arithmetic=arithmetic)
    base = {key: value.to(first.state[key]) for key, value in work.base.items()}
    kept = {key: _mask(work.kept.get(key), value) for key, value in base.items()}
    update = {key: (first.state[key] - value) * kept[key] for key, value in base.items()}  # M
    start = {key: M.abs().sum() / kept[key].sum() for key, M in update.items()}  # alpha_0
    theta = {key: torch.zeros_like(alpha) for key, alpha in start.items()}
    dense = [p for name, p in model.named_parameters() if p.requires_grad and name not in base]
    leaves = [*(value.requires_grad_() for part in (update, theta) for value in part.values()), *dense]

    def binarised() -> State:
        return {
            key: binarise(M, step_size(start[key], theta[key]), _draw(M, work.stream)) * kept[key]
            for key, M in update.items()
        }

    losses = [first.mean_loss * warm_up]
    for batch in sgd.batches[warm_up:]:
        index = torch.as_tensor(batch).to(sgd.x.device)
        weights = {key: base[key] + S.to(base[key]) for key, S in binarised().items()}  # w + S(M, alpha)
        with arithmetic.autocast(sgd.x.device):
            outputs = functional_call(model, weights, (sgd.x[index],))
        mean = loss(arithmetic.exact(outputs), sgd.y[index]).mean()
        gradients = torch.autograd.grad(mean, leaves, materialize_grads=True)
        with torch.no_grad():
            torch._foreach_add_(leaves, list(gradients), alpha=-sgd.lr)
        losses.append(float(mean.detach()))
    state = {key: value.detach().clone() for key, value in model.state_dict().items() if key not in base}
    with torch.no_grad():
        for key, S in binarised().items():
            up = S[kept[key] > 0].cpu().numpy() > 0
            state[f"{key}:bits"] = torch.from_numpy(np.packbits(up))
            state[f"{key}:alpha"] = step_size(start[key], theta[key]).detach().reshape(1).float()
    return Trained(state, {"train-loss": math.fsum(losses) / max(1, len(sgd.batches))})


def step_size(start: Tensor, theta: Tensor) -> Tensor:
    """Return alpha = clip(alpha_0 e^(6 theta), 5e-4, 5e-2)."""
    return (start * torch.exp(_COEFFICIENT * theta)).clamp(_LEAST, _MOST)


def binarise(x: Tensor, alpha: Tensor, uniform: Tensor) -> Tensor:
    """Return S(x, alpha): +alpha with probability clip((x / alpha + 1) / 2, 0, 1), else -alpha.

    ``alpha`` is a scalar > 0, and ``uniform`` holds draws from [0, 1) of the shape of x. The mean is x within
    [-alpha, alpha]. The gradient of x is passed on there and is zero beyond; that of alpha is
    2 b - (x / alpha + 1) there, with b 1 for +alpha and 0 for -alpha, and the sign of x beyond.
    """
    return cast(Tensor, _Binarise.apply(x, alpha, uniform))  # type: ignore[no-untyped-call]


class _Binarise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor, uniform: Tensor) -> Tensor:
        scaled = x / alpha
        b = torch.floor((scaled + 1) / 2 + uniform).clamp(0, 1)
        ctx.save_for_backward(scaled, b)
        return (2 * b - 1) * alpha

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        scaled, b = ctx.saved_tensors
        within = scaled.abs() <= 1
        slope = torch.where(within, 2 * b - (scaled + 1), scaled.sign())
        return gradient * within, (gradient * slope).sum(), None


def _mask(kept: NDArray[np.int64] | None, like: Tensor) -> Tensor:
    """Return a mask of the weights with a sign, of a weight's shape."""
    if kept is None:
        return torch.ones_like(like)
    mask = torch.zeros(like.numel(), dtype=like.dtype)
    mask[torch.from_numpy(kept)] = 1
    return mask.reshape(like.shape).to(like.device)


def _draw(like: Tensor, stream: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=stream).to(like.device)
