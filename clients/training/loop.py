"""Local SGD of one node by the model's own forward pass: any model, and the oracle of every faster form."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hedgerow.clients.training.arithmetic import FLOAT32, Arithmetic
from hedgerow.clients.training.threads import train_on_threads
from hedgerow.clients.training.work import Correction, LocalWork, Loss, Trained, cross_entropy

__all__ = ["train_loop", "train_one"]


def train_loop(
    model: nn.Module,
    works: Sequence[LocalWork],
    loss: Loss,
    correction: Correction | None,
    *,
    spread: bool = False,
    arithmetic: Arithmetic = FLOAT32,
) -> list[Trained]:
    """Train node by node, on a CPU as many at once as torch has threads, each on a copy of the model.

    A node's arithmetic is on one thread, which its bits could tell. ``spread`` lets a node that is alone have
    all of them.
    """
    threads = min(torch.get_num_threads(), len(works))
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if not on_cpu or (spread and threads == 1):
        return [train_one(model, work, loss, correction, arithmetic) for work in works]
    if threads > 1 and _draws(model, works):
        threads = 1
    return train_on_threads(
        lambda own, work: train_one(own, work, loss, correction, arithmetic), model, works, threads
    )


def _draws(model: nn.Module, works: Sequence[LocalWork]) -> bool:
    """Return whether a forward pass draws from torch's global generator, which fixes the nodes' order."""
    work = next((work for work in works if work.batches), None)
    if work is None:
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        model.train()
        try:
            model(work.x[: len(work.batches[0])])
        except Exception:  # Training meets it again, where it is that node's answer.
            return True
        return not torch.equal(before, torch.get_rng_state())


def train_one(
    model: nn.Module,
    work: LocalWork,
    loss: Loss = cross_entropy,
    correction: Correction | None = None,
    arithmetic: Arithmetic = FLOAT32,
) -> Trained:
    """Train one node by the model's own forward pass: the oracle of every faster form."""
    model.load_state_dict(dict(work.start))
    model.train()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters: list[Tensor] = list(trainable.values())
    start = {name: p.detach().clone()[None] for name, p in trainable.items()} if correction else {}
    forward = arithmetic.forward(model)
    losses = []
    for index in _on_device(work):
        mean = loss(forward(work.x[index]), work.y[index]).mean()
        losses.append(mean.detach())
        if not parameters:
            continue
        gradients = dict(
            zip(trainable, torch.autograd.grad(mean, parameters, materialize_grads=True), strict=True)
        )
        with torch.no_grad():
            if correction:
                current = {name: p.detach()[None] for name, p in trainable.items()}
                for name, term in correction(current, start).items():
                    gradients[name] = gradients[name] + term[0]
            torch._foreach_add_(parameters, list(gradients.values()), alpha=-work.lr)
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
