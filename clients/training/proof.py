"""Whether a faster form of a model computes what the model's own forward pass does, by one step of two nodes.

A stack is a second implementation of a user's model. What could make it wrong is not listed anywhere: the
result is compared, on the first use of a model with a batch shape.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from math import isfinite, sqrt
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from flwr.common import log
from torch import Tensor, nn

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic
from hedgerow.clients.training.loop import train_one
from hedgerow.clients.training.work import LocalWork, Loss, Trained
from hedgerow.global_draws import GlobalDraws
from hedgerow.kept_values import KeptValues
from hedgerow.tasks.threads import map_on_threads
from hedgerow.wire.seeds import Purpose, torch_generator

T = TypeVar("T")
U = TypeVar("U")
State = Mapping[str, Tensor]
# Trains nodes as a stack; the model is scratch space.
Form = Callable[[nn.Module, Sequence[LocalWork]], Sequence[Trained]]

# A ReLU or a maximum within rounding of a tie may go either way at one pair of points, hardly at two.
_TRIES = 2

_PROVEN: WeakKeyDictionary[nn.Module, dict[object, bool]] = WeakKeyDictionary()


def proves_itself(
    model: nn.Module, stack: Form, work: LocalWork, loss: Loss, arithmetic: Arithmetic = FLOAT32
) -> bool:
    """Return whether a stack learns what the loop does from each batch shape of a node.

    A verdict is kept with the model, for each batch shape; the first refusal of a model is logged. What the
    model's own forward pass raises is raised.
    """
    verdicts = _PROVEN.setdefault(model, {})
    x, y = work.x, work.y
    about = arithmetic, loss, x.shape[1:], x.dtype, y.shape[1:], y.dtype, x.device
    proven = True
    for length, batch in {len(batch): batch for batch in work.batches}.items():
        shape = (length, about)
        if shape not in verdicts:
            reason = _difference(model, stack, replace(work, batches=[batch]), loss, arithmetic)
            if reason is not None and all(verdicts.values()):
                log(
                    WARNING,
                    "Nodes with the model %s are trained one by one, not as a stack: %s.",
                    type(model).__name__,
                    reason,
                )
            verdicts[shape] = reason is None
        proven = proven and verdicts[shape]
    return proven


def _difference(
    model: nn.Module, stack: Form, work: LocalWork, loss: Loss, arithmetic: Arithmetic
) -> str | None:
    """Return how one step in the stack differs from one in the loop, or None."""
    eps = torch.finfo(torch.bfloat16).eps if arithmetic.rounds else 0.0

    def compared(seed: int) -> str | None:
        starts = [generic(model, work.start, seed + row) for row in range(2)]
        works = [replace(work, start=start, lr=1.0, asked=None) for start in starts]
        changes: list[bool] = []

        def alone() -> list[Trained]:
            trained = []
            for one in works:
                values.restore()
                trained.append(train_one(model, one, loss, arithmetic))
            changes.append(values.moved)
            values.restore()
            return trained

        found = both(alone, lambda: stack(copy.deepcopy(model), works))  # as on a thread
        if any(changes):
            return "its forward pass changes what it keeps outside of its state dict"
        if isinstance(found, str):
            return found
        pairs = zip(*found, starts, strict=True)
        differences = (_first_difference(a, b, start, eps) for a, b, start in pairs)
        return next((one for one in differences if one is not None), None)

    reason, kept, values = None, copy.deepcopy(model.state_dict()), KeptValues(model)
    try:
        for attempt in range(_TRIES):
            (reason,) = map_on_threads(compared, [2 * attempt], 1)
            if reason is None:
                break
    finally:
        model.load_state_dict(kept)
        values.restore()
    return reason


def both(plain: Callable[[], T], stacked: Callable[[], U]) -> tuple[T, U] | str:
    """Return what a model computes plainly and as a stack, or why a stack must not take its place.

    What ``plain`` raises is raised.
    """
    with GlobalDraws.restored() as before:
        one = plain()
        if before.moved:
            return "its forward pass draws random numbers"
        try:
            other = stacked()
        except Exception as error:
            return f"its stack raises {type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
        return "its stack draws random numbers" if before.moved else (one, other)


def generic(model: nn.Module, start: State, seed: int) -> dict[str, Tensor]:
    """Return a point near a start at which nothing is zero or equal by chance: trained values with noise."""
    stream = torch_generator(seed, purpose=Purpose.PROBE)
    point = dict(start)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = start[name]
            noise = torch.randn(value.shape, generator=stream).to(value)
            point[name] = value + noise * (0.1 * value.abs().mean() + 0.01)
    return point


def _first_difference(alone: Trained, together: Trained, start: State, eps: float) -> str | None:
    changes = {key: _change(value, start[key]) for key, value in alone.state.items()}
    overall = max((_largest(change) for change in changes.values()), default=0.0)
    for key, value in alone.state.items():
        bound = 0.0  # of integers
        if value.dtype.is_floating_point:
            own = torch.finfo(value.dtype).eps
            step = _largest(changes[key]) + 0.01 * overall
            bound = sqrt(max(own, eps)) * step + 4 * own * _largest(start[key])
        if (apart := difference(value, together.state[key])) > bound:
            return f"{key!r} differs by {apart:.2g} after a step of {_largest(changes[key]):.2g}"
    bound = sqrt(max(torch.finfo(torch.float32).eps, eps)) * max(1.0, abs(alone.mean_loss))
    if not abs(alone.mean_loss - together.mean_loss) <= bound and isfinite(alone.mean_loss):
        return f"the loss is {together.mean_loss:.6g} in place of {alone.mean_loss:.6g}"
    return None


def _change(value: Tensor, start: Tensor) -> Tensor:
    return value.double() - start.to(value.device).double()


def _largest(value: Tensor) -> float:
    finite = value.double().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; infinity if shapes, or the places of NaN or infinity, differ."""
    one, other = one.double(), other.double().to(one.device)
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    return _largest(one - other)
