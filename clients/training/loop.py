"""Local SGD of one node by the model's own forward pass: for any model, and the oracle of faster forms."""

import copy
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic
from hedgerow.clients.training.work import LocalWork, Loss, Trained, cross_entropy
from hedgerow.tasks.threads import map_on_threads

__all__ = ["train_loop", "train_on_threads", "train_one"]

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
    a single node all threads.
    """
    threads = min(torch.get_num_threads(), len(works))
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if not on_cpu or (spread and threads == 1):
        return [train_one(model, work, loss, arithmetic) for work in works]
    if threads > 1 and _draws(model, works):
        threads = 1
    return train_on_threads(lambda own, work: train_one(own, work, loss, arithmetic), model, works, threads)


def _draws(model: nn.Module, works: Sequence[LocalWork]) -> bool:
    """Return whether a forward pass draws from torch's global generator, so that nodes must keep an order."""
    work = next((work for work in works if work.batches), None)
    if work is None:
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        model.train()
        try:
            model(work.x[: len(work.batches[0])])
        except Exception:  # training raises it again, as that node's answer
            return True
        return not torch.equal(before, torch.get_rng_state())


def train_one(
    model: nn.Module,
    work: LocalWork,
    loss: Loss = cross_entropy,
    arithmetic: Arithmetic = FLOAT32,
) -> Trained:
    """Train one node by the model's own forward pass."""
    model.load_state_dict(dict(work.start))
    model.train()
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    forward = arithmetic.forward(model)
    losses = []
    for index in _on_device(work):
        mean = loss(forward(work.x[index]), work.y[index]).mean()
        losses.append(mean.detach())
        if not parameters:
            continue
        gradients = torch.autograd.grad(mean, parameters, materialize_grads=True)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-work.lr)
    state = {
        key: value.detach().clone(memory_format=torch.contiguous_format)
        for key, value in model.state_dict().items()
    }
    return Trained(state, float(torch.stack(losses).mean()) if losses else 0.0)


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
