"""Optimisers of a node's local steps in place of the method's plain SGD: AdamW, warm-up, micro-batches.

Paper: I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019), Algorithm 2, by torch's
``AdamW``. Its moments start at zero in each round, because only the model is kept between rounds.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hedgerow.clients.training.own import TrainingConfig, TrainingData, TrainingLoop
from hedgerow.clients.training.work import Loss
from hedgerow.wire.checks import at_least, in_range, made_of, positive


@dataclass(frozen=True)
class LocalSGD:
    """The method's steps of SGD, w <- w - lr_t g, with warm-up and micro-batches.

    Parameters
    ----------
    warm_up : float (default: 0.0)
        In [0, 1]: over this share of a round's steps, rounded up, lr_t rises linearly to the learning rate of
        the message.
    accumulate : int (default: 1)
        Micro-batches per step, >= 1, or one per sample of a smaller batch. Their gradients are summed, so a
        step is that of the whole batch to 1e-6, unless the model normalizes over its batch.
    """

    warm_up: float = 0.0
    accumulate: int = 1

    def __post_init__(self) -> None:
        in_range("warm_up", self.warm_up, 0.0, 1.0)
        at_least(1, accumulate=self.accumulate)

    def of(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        """Return torch's optimizer of the parameters."""
        return torch.optim.SGD(parameters, lr)

    def train(
        self, loss: Loss, model: nn.Module, data: TrainingData, config: TrainingConfig
    ) -> dict[str, float]:
        """Train a model in place on the method's batches; return the mean of their losses."""
        lr, warm = config["lr"], math.ceil(self.warm_up * config["steps"])
        optimiser = self.of([p for p in model.parameters() if p.requires_grad], lr)
        losses = []
        for step, batch in enumerate(config["batches"], 1):
            for group in optimiser.param_groups:
                group["lr"] = lr * min(1.0, step / warm) if warm else lr
            optimiser.zero_grad()
            total = torch.zeros((), device=data.x.device)
            for part in np.array_split(batch, min(self.accumulate, len(batch))):
                mean = loss(model(data.x[part]), data.y[part]).mean() * (len(part) / len(batch))
                mean.backward()  # type: ignore[no-untyped-call]
                total += mean.detach()
            losses.append(total)
            optimiser.step()
        return {"train-loss": float(torch.stack(losses).mean()) if losses else 0.0}

    def loop(self, loss: Loss) -> TrainingLoop:
        """Return the training loop with a loss per sample."""
        return partial(self.train, loss)


@dataclass(frozen=True)
class LocalAdamW(LocalSGD):
    """AdamW: w <- w - lr_t (m_t / (sqrt(v_t) + eps) + weight_decay w), with corrected moments m_t and v_t.

    Parameters
    ----------
    warm_up, accumulate : float, int
        As in ``LocalSGD``.
    weight_decay : float (default: 0.01)
        In [0, 1].
    beta1, beta2 : float (default: 0.9, 0.999)
        In [0, 1).
    eps : float (default: 1e-8)
        > 0.
    """

    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("weight_decay", self.weight_decay, 0.0, 1.0)
        in_range("beta1", self.beta1, 0.0, 1.0, open_above=True)
        in_range("beta2", self.beta2, 0.0, 1.0, open_above=True)
        positive(eps=self.eps)

    def of(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        """Return torch's optimizer of the parameters."""
        betas = self.beta1, self.beta2
        return torch.optim.AdamW(parameters, lr, betas, self.eps, self.weight_decay)


LOCAL_OPTIMISERS: dict[str, type[LocalSGD]] = {"adamw": LocalAdamW, "sgd": LocalSGD}
_VALID = "empty, or adamw or sgd with its values, such as 'adamw(weight_decay=0.01, warm_up=0.1)'"


def parse_local_optimiser(text: str) -> LocalSGD | None:
    """Return the optimiser of a text such as ``adamw(warm_up=0.1, accumulate=4)``; None for an empty one.

    Raises
    ------
    ValueError
        If there is no such optimiser, or its values are not valid.
    """
    return made_of(text, LOCAL_OPTIMISERS)


# The setting of apps whose nodes train by local SGD.
LOCAL_OPTIMISER_TEXTS = {"local-optimiser": (_VALID, parse_local_optimiser)}
