"""The arithmetic of HSGD at its nodes, for many nodes at once: encodings, and the steps between exchanges.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, eqs. (5)-(7). A block of parameters is
one flat vector in the order of its module's state dict; a stack has one such row per member. Members are
independent of each other.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hedgerow.tasks.split_models import SplitModel
from hedgerow.tasks.threads import map_on_threads

__all__ = [
    "DeviceStack",
    "HospitalStack",
    "Loss",
    "block_size",
    "device_steps",
    "encodings",
    "hospital_steps",
    "unflatten",
]

# (logits, targets) -> one loss per sample.
Loss = Callable[[Tensor, Tensor], Tensor]
Parameters = dict[str, Tensor]
R = TypeVar("R")

# Largest number of samples per stack, so that it fits a CPU's caches.
_MOST_SAMPLES = 1024


def block_size(module: nn.Module) -> int:
    """Return the length of a module's flat vector."""
    return sum(prod(shape) for shape in _shapes(module).values())


def encodings(encoder: nn.Module, theta: Tensor, x: Tensor, alone: bool = False) -> Tensor:
    """Return each member's zeta of its batch, (members, batch, e).

    - ``x``: Samples, (members, batch, ...).
    - ``alone``: Compute each member separately, on one thread, so that its bits depend on no other member.
    """

    def encode(own: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            parameters = unflatten(encoder, own)
            zeta: Tensor = vmap(lambda own, x: functional_call(encoder, own, (x,)))(parameters, x)
            return zeta

    return torch.cat(_in_pieces(encode, (theta, x), x.shape[1], alone))


class HospitalStack(NamedTuple):
    """Hospitals, or a hospital's pairs, before their steps."""

    head: Tensor  # (members, n_0): theta_0, live.
    hospital: Tensor  # (members, n_1): theta_1, live.
    x1: Tensor  # (members, batch, ...): X_1 of the batch.
    z2: Tensor  # (members, batch, e_2): Z_2, frozen.
    y: Tensor  # (members, batch): Labels.


class DeviceStack(NamedTuple):
    """Devices before their steps."""

    device: Tensor  # (members, n_2): theta_2, live.
    head: Tensor  # (members, n_0): theta_0, frozen.
    z1: Tensor  # (members, 1, e_1): zeta_1 of its sample, frozen.
    x2: Tensor  # (members, 1, ...): X_2 of its sample.
    y: Tensor  # (members, 1): Its label.


def hospital_steps(
    model: SplitModel,
    loss: Loss,
    stack: HospitalStack,
    rates: Sequence[float],
    mu: float = 0.0,
    alone: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return head and encoder after steps (5) and (6), and each member's mean loss at the first step.

    Both gradients of a step are taken at the same point, before either block moves.

    - ``loss``: f, one value per sample.
    - ``rates``: eta of each step, >= 0; at least one.
    - ``mu``: r = mu / 2 ||theta_1||^2, >= 0; the head has none.
    """

    def objective(theta0: Parameters, theta1: Parameters, x1: Tensor, z2: Tensor, y: Tensor) -> Tensor:
        z1 = functional_call(model.hospital, theta1, (x1,))
        return loss(functional_call(model.head, theta0, (z1, z2)), y).mean()

    def steps(*part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        head, hospital, *data = part
        live = [unflatten(model.head, head), unflatten(model.hospital, hospital)]
        live, first = _descend(objective, live, (0.0, mu), tuple(data), rates)
        return _flatten(live[0]), _flatten(live[1]), first

    after = _in_pieces(steps, stack, stack.x1.shape[1], alone)
    head, hospital, first = (torch.cat(parts) for parts in zip(*after, strict=True))
    return head, hospital, first


def device_steps(
    model: SplitModel,
    loss: Loss,
    stack: DeviceStack,
    rates: Sequence[float],
    mu: float = 0.0,
    alone: bool = False,
) -> Tensor:
    """Return theta_2 after steps (7), (members, n_2); parameters as in ``hospital_steps``."""

    def objective(theta2: Parameters, theta0: Parameters, z1: Tensor, x2: Tensor, y: Tensor) -> Tensor:
        z2 = functional_call(model.device, theta2, (x2,))
        return loss(functional_call(model.head, theta0, (z1, z2)), y).mean()

    def steps(device: Tensor, head: Tensor, *data: Tensor) -> Tensor:
        frozen = unflatten(model.head, head), *data
        live, _ = _descend(objective, [unflatten(model.device, device)], (mu,), frozen, rates)
        return _flatten(live[0])

    return torch.cat(_in_pieces(steps, stack, stack.x2.shape[1], alone))


def _descend(
    objective: Callable[..., Tensor],
    live: list[Parameters],
    decays: Sequence[float],
    frozen: tuple[Any, ...],
    rates: Sequence[float],
) -> tuple[list[Parameters], Tensor]:
    """Return all live blocks after gradient steps, and the objectives at the first step.

    One backward pass gives all gradients at one point (Jacobi), before any block moves.
    """
    losses = []
    for rate in rates:
        leaves = [{key: value.detach().requires_grad_() for key, value in theta.items()} for theta in live]
        values = vmap(objective)(*leaves, *frozen)  # (members,)
        losses.append(values.detach())
        flat = [leaf for theta in leaves for leaf in theta.values()]
        gradients = iter(torch.autograd.grad(values.sum(), flat, materialize_grads=True))
        with torch.no_grad():
            live = [
                {key: value - rate * (next(gradients) + decay * value) for key, value in theta.items()}
                for theta, decay in zip(live, decays, strict=True)
            ]
    return live, losses[0]


def _in_pieces(work: Callable[..., R], stack: Sequence[Tensor], batch: int, alone: bool) -> list[R]:
    """Apply ``work`` to each piece of a stack, whose tensors have a row per member."""
    members = len(stack[0])
    if alone:
        # Copies have equal memory alignment, on which the code path of a product depends.
        parts = [[value[i : i + 1].clone() for value in stack] for i in range(members)]
        # On one thread, also because ``functional_call`` lends the module its parameters.
        return map_on_threads(lambda part: work(*part), parts, 1)
    size = max(1, _MOST_SAMPLES // max(1, batch))
    return [work(*(value[i : i + size] for value in stack)) for i in range(0, members, size)]


@lru_cache(maxsize=64)
def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def unflatten(module: nn.Module, theta: Tensor) -> Parameters:
    """Return (members, n) as the module's parameters, each (members, *shape)."""
    shapes = _shapes(module)
    parts = torch.split(theta, [prod(shape) for shape in shapes.values()], dim=1)
    return {
        key: part.reshape(len(theta), *shape)
        for part, (key, shape) in zip(parts, shapes.items(), strict=True)
    }


def _flatten(parameters: Parameters) -> Tensor:
    return torch.cat([value.reshape(len(value), -1) for value in parameters.values()], dim=1)
