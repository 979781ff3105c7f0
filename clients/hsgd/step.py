"""The data and the arithmetic of HSGD at its nodes, for many nodes at once: encodings, and the steps.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1, eqs. (5)-(7). A block of parameters is
one flat vector in the order of its module's state dict; a stack has one such row per member. Members are
independent of each other.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from logging import WARNING
from math import prod
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from flwr.common import log
from torch import Tensor, nn
from torch.func import functional_call, vmap

from hedgerow.clients.training.proof import both, difference
from hedgerow.tasks.split_models import SplitModel, split_loss
from hedgerow.tasks.threads import map_on_threads
from hedgerow.wire.checks import at_least, one_of
from hedgerow.wire.parties import ROLES
from hedgerow.wire.seeds import Purpose, torch_generator

# (logits, targets) -> one loss per sample.
Loss = Callable[[Tensor, Tensor], Tensor]
Parameters = dict[str, Tensor]
R = TypeVar("R")

# Largest number of samples per stack, so that it fits a CPU's caches.
_MOST_SAMPLES = 1024


@dataclass(frozen=True, eq=False)
class Party:
    """One node's data: its part of its people's features, their labels, and the model's architecture.

    Parameters
    ----------
    role : {"hospital", "device", "edge"}
        A device has exactly one person; an edge hosts the devices of a whole group.
    group : int
        m, >= 0.
    ids : sequence of str
        The people, each once, in the order of the rows of ``x``.
    x : Tensor, (n, ...)
        X_1 at a hospital, else X_2, with the model's dtype and on its device.
    y : Tensor, (n,)
        Labels.
    model : SplitModel
        The architecture; parameters come by message, and the object's own are not changed. Parties that share
        the object are computed together.
    loss : Loss (default: split_loss)
        f of (logits, labels), one value per sample.
    """

    role: str
    group: int
    ids: Sequence[str]
    x: Tensor
    y: Tensor
    model: SplitModel
    loss: Loss = split_loss

    def __post_init__(self) -> None:
        one_of("role", self.role, ROLES)
        at_least(0, group=self.group)
        if not len(self.ids) == len(self.x) == len(self.y) or not len(self.ids):
            raise ValueError(
                f"ids, x and y must have equal numbers of rows, at least one, got {len(self.ids)}, "
                f"{len(self.x)} and {len(self.y)}"
            )
        if self.role == "device" and len(self.ids) != 1:
            raise ValueError(f"a device must have one person, got {len(self.ids)}")
        if len(self.places) < len(self.ids):
            raise ValueError(f"ids must have each id once, got {len(self.ids) - len(self.places)} twice")
        if self.x.dtype != (dtype := next(self.model.parameters()).dtype):
            raise ValueError(f"x must be of the model's type {dtype}, got {self.x.dtype}")

    @cached_property
    def places(self) -> Mapping[str, int]:
        """The row of each id."""
        return {str(name): row for row, name in enumerate(self.ids)}

    @property
    def encoding(self) -> int:
        """The length of this party's encodings, e_1 or e_2."""
        return self.model.hospital_encoding if self.role == "hospital" else self.model.device_encoding

    @cached_property
    def shapes(self) -> dict[str, tuple[int]]:
        """The shapes of the blocks of the model that this party starts an interval from."""
        model = self.model
        if self.role == "hospital":
            return {"head": (block_size(model.head),), "hospital": (block_size(model.hospital),)}
        return {"device": (block_size(model.device),)}

    @cached_property
    def dtype(self) -> Any:
        """The model's NumPy dtype."""
        return torch.empty(0, dtype=self.x.dtype).numpy().dtype

    def rows(self, ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return x and y of these people; ValueError if the party does not have one of them."""
        if lacking := [name for name in ids if name not in self.places]:
            raise ValueError(
                f"ids must be among the {len(self.ids)} people of this {self.role} of group {self.group}, "
                f"got {lacking[:3]} in the message's config, {len(lacking)} in all"
            )
        places = [self.places[name] for name in ids]
        return self.x[places], self.y[places]


def block_size(module: nn.Module) -> int:
    """Return the length of a module's flat vector."""
    return sum(prod(shape) for shape in _shapes(module).values())


def encodings(
    encoder: nn.Module, theta: Tensor, x: Tensor, alone: bool = False, plain: bool = False
) -> Tensor:
    """Return each member's zeta of its batch, (members, batch, e).

    - ``x``: Samples, (members, batch, ...).
    - ``alone``: Compute each member separately, on one thread, so that its bits depend on no other member.
    - ``plain``: Call the model member by member, without ``vmap``; see ``can_vmap``.
    """

    def encode(own: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            parameters = unflatten(encoder, own)
            return _over_members(lambda own, x: functional_call(encoder, own, (x,)), plain)(parameters, x)

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
    plain: bool = False,
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
        live, first = _descend(_over_members(objective, plain), live, (0.0, mu), tuple(data), rates)
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
    plain: bool = False,
) -> Tensor:
    """Return theta_2 after steps (7), (members, n_2); parameters as in ``hospital_steps``."""

    def objective(theta2: Parameters, theta0: Parameters, z1: Tensor, x2: Tensor, y: Tensor) -> Tensor:
        z2 = functional_call(model.device, theta2, (x2,))
        return loss(functional_call(model.head, theta0, (z1, z2)), y).mean()

    def steps(device: Tensor, head: Tensor, *data: Tensor) -> Tensor:
        frozen = unflatten(model.head, head), *data
        live = [unflatten(model.device, device)]
        live, _ = _descend(_over_members(objective, plain), live, (mu,), frozen, rates)
        return _flatten(live[0])

    return torch.cat(_in_pieces(steps, stack, stack.x2.shape[1], alone))


def _descend(
    objectives: Callable[..., Tensor],
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
        values = objectives(*leaves, *frozen)  # (members,)
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


def _over_members(function: Callable[..., Tensor], plain: bool) -> Callable[..., Tensor]:
    """Return the function over stacks of members: by ``vmap``, or as a loop over them."""
    if not plain:
        return vmap(function)

    def each(*stacks: Parameters | Tensor) -> Tensor:
        # The last stack holds data, one row per member.
        return torch.stack([function(*(_member(s, i) for s in stacks)) for i in range(len(stacks[-1]))])

    return each


def _member(stack: Parameters | Tensor, i: int) -> Parameters | Tensor:
    return {key: value[i] for key, value in stack.items()} if isinstance(stack, dict) else stack[i]


_VMAPPED: WeakKeyDictionary[SplitModel, dict[Hashable, bool]] = WeakKeyDictionary()


def can_vmap(model: SplitModel, hospital: bool, loss: Loss, x: Tensor, y: Tensor) -> bool:
    """Return whether ``vmap`` over members computes what the model does for each, in an encoding and a step.

    It does not where a forward pass draws random numbers or depends on values otherwise than by tensors. The
    verdict is kept with the model; the first refusal is logged.

    - ``hospital``: Whether the node has X_1 and runs the hospital's encoder, or X_2 and the device's.
    - ``x``, ``y``: The node's samples and labels, at least one.
    """
    verdicts = _VMAPPED.setdefault(model, {})
    key = hospital, loss, x.shape[1:], x.dtype
    if key not in verdicts:
        batch = 2 if hospital else 1
        x, y = (torch.stack([part[:batch]] * 2) for part in (x, y))
        (reason,) = map_on_threads(lambda _: _unlike_plain(model, hospital, loss, x, y), [0], 1)
        verdicts[key] = reason is None
        if reason is not None:
            log(
                WARNING,
                "Nodes with the model %s are computed one by one, not as a stack: %s.",
                type(model).__name__,
                reason,
            )
    return verdicts[key]


def _unlike_plain(model: SplitModel, hospital: bool, loss: Loss, x: Tensor, y: Tensor) -> str | None:
    """Return how two members in a stack differ from the same computed one by one, or None."""
    encoder = model.hospital if hospital else model.device
    stream = torch_generator(0, purpose=Purpose.PROBE)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=stream).to(x)

    theta, head = (_generic(block, drawn) for block in (encoder, model.head))
    z = drawn(*x.shape[:2], model.device_encoding if hospital else model.hospital_encoding)

    def computed(plain: bool) -> list[Tensor]:
        zeta = encodings(encoder, theta, x, plain=plain)
        if hospital:
            after = hospital_steps(model, loss, HospitalStack(head, theta, x, z, y), (1.0,), plain=plain)
            return [zeta, after[0] - head, after[1] - theta, after[2]]
        return [
            zeta,
            device_steps(model, loss, DeviceStack(theta, head, z, x, y), (1.0,), plain=plain) - theta,
        ]

    found = both(lambda: computed(True), lambda: computed(False))
    if isinstance(found, str):
        return found
    unit = torch.finfo(x.dtype).eps ** 0.5
    for one, other in zip(*found, strict=True):
        if (apart := difference(one, other)) > unit * max(1.0, float(one.abs().max())):
            return f"a value differs by {apart:.2g}"
    return None


def _generic(block: nn.Module, drawn: Callable[..., Tensor]) -> Tensor:
    """Return two points near a block's parameters, (2, n), at which nothing is zero or equal by chance."""
    own = torch.cat([value.flatten() for value in block.state_dict().values()])
    return own + drawn(2, len(own)) * (0.1 * own.abs().mean() + 0.01)


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
