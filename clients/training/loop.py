"""Local SGD of one node by the model's own forward pass: for any model, and the oracle of faster forms."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic
from hedgerow.clients.training.draws import NodeDraws
from hedgerow.clients.training.work import LocalWork, Loss, Trained, cross_entropy
from hedgerow.global_draws import GlobalDraws
from hedgerow.tasks.threads import map_on_threads

T = TypeVar("T")
R = TypeVar("R")


def train_loop(
    model: nn.Module,
    works: Sequence[LocalWork],
    loss: Loss,
    *,
    spread: bool = False,
    arithmetic: Arithmetic = FLOAT32,
) -> list[Trained]:
    """Train node by node; on a CPU one node per torch thread at a time, each on a copy of the model.

    Each node computes on one thread, because the number of threads can change its last bits. ``spread`` gives
    a single node all threads. What the forward pass draws depends only on the work's stream: from the global
    generators, which are restored, and from generators that modules keep as attributes.
    """
    threads = min(torch.get_num_threads(), len(works))
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    with NodeDraws.of(model) as draws:

        def train(own: nn.Module, work: LocalWork) -> Trained:
            draws.reset(own)
            return train_one(own, work, loss, arithmetic)

        def seeded(own: nn.Module, work: LocalWork) -> Trained:
            draws.begin(own, work.stream)
            return train_one(own, work, loss, arithmetic)

        if on_cpu and threads > 1 and not draws.own and _copies(model, works, train, draws):
            trained = train_on_threads(train, model, works, threads)
            if not draws.before.moved:
                return trained
            # Threads share the global generators: take the nodes one by one, now and in later calls.
            _COPIES[model] = False
            draws.before.restore()
        if not on_cpu or (spread and threads == 1):
            return [seeded(model, work) for work in works]
        return train_on_threads(seeded, model, works, 1)


# Whether a model's copies may be trained on several threads.
_COPIES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _copies(
    model: nn.Module,
    works: Sequence[LocalWork],
    train: Callable[[nn.Module, LocalWork], Trained],
    draws: NodeDraws,
) -> bool:
    """Return whether a copy of the model learns the same, by one step that changes only its state dict."""
    if model not in _COPIES:
        work = next((work for work in works if work.batches), works[0])
        step = replace(work, batches=work.batches[:1])

        def compared(_: int) -> bool:
            try:
                own = copy.deepcopy(model)
            except Exception:  # a model need not have copies
                return False
            one = train(model, step)
            if draws.changed:  # Copies may share what changes.
                return False
            other = train(own, step)
            pairs = ((value, other.state[key]) for key, value in one.state.items())
            return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)

        with GlobalDraws.restored():
            (_COPIES[model],) = map_on_threads(compared, [0], 1)
        draws.reset(model)
    return _COPIES[model]


def train_one(
    model: nn.Module,
    work: LocalWork,
    loss: Loss = cross_entropy,
    arithmetic: Arithmetic = FLOAT32,
) -> Trained:
    """Train one node by the model's own forward pass."""
    model.load_state_dict(dict(work.start))
    model.train()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters: list[Tensor] = list(named.values())
    # On the parameters' device, in their order.
    corrections = [work.correction[name].to(p) for name, p in named.items()] if work.correction else []
    forward = arithmetic.forward(model)
    losses = []
    for index in _on_device(work):
        mean = loss(forward(work.x[index]), work.y[index]).mean()
        losses.append(mean.detach())
        if not parameters:
            continue
        gradients = torch.autograd.grad(mean, parameters, materialize_grads=True)
        with torch.no_grad():
            if corrections:
                gradients = torch._foreach_add(gradients, corrections)
            torch._foreach_add_(parameters, gradients, alpha=-work.lr)
    state = {
        key: value.detach().clone(memory_format=torch.contiguous_format)
        for key, value in model.state_dict().items()
    }
    return Trained(state, {"train-loss": float(torch.stack(losses).mean()) if losses else 0.0})


def _on_device(work: LocalWork) -> Sequence[Tensor]:
    """Return the steps' indices, moved in one transfer."""
    if not work.batches:
        return ()
    flat = torch.as_tensor(np.concatenate(work.batches)).to(work.x.device)
    return torch.split(flat, [len(batch) for batch in work.batches])


def train_on_threads(
    function: Callable[[nn.Module, T], R], model: nn.Module, items: Sequence[T], threads: int
) -> list[R]:
    """Return ``[function(model, item) for item in items]``, computed with one model per thread."""
    idle: SimpleQueue[nn.Module] = SimpleQueue()
    for scratch in [model, *(copy.deepcopy(model) for _ in range(threads - 1))]:
        idle.put(scratch)

    def run(item: T) -> R:
        scratch = idle.get()
        try:
            return function(scratch, item)
        finally:
            idle.put(scratch)

    return map_on_threads(run, items, threads)
