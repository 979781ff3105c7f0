"""What a model is worth on labelled data."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from .modes import evaluating

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """A model's performance on a set.

    Parameters
    ----------
    loss : float
        Mean cross-entropy, in nats.
    accuracy : float
        Share of samples whose largest logit is the label's, 0..1.
    num_examples : int
        Number of samples, at least 1.
    """

    loss: float
    accuracy: float
    num_examples: int


def evaluate(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 1_000) -> Evaluation:
    """Return a model's mean cross-entropy and accuracy, in evaluation mode and without gradients.

    The model's parameters and modes are afterwards as they were.

    Parameters
    ----------
    model : Module
        Maps (B, ...) to logits (B, num_classes), on any device.
    x : Tensor, (N, ...)
        Inputs; batches are moved to the model's device where they lie elsewhere.
    y : Tensor of int64, (N,)
        Labels.
    batch_size : int (default: 1,000)
        Samples a forward pass, >= 1. Changes memory and time, not the result beyond rounding.

    Raises
    ------
    ValueError
        No samples, inputs and labels that differ in number, or a batch size under 1.
    """
    if len(x) != len(y) or not len(x):
        raise ValueError(f"x and y have {len(x)} and {len(y)} samples, must be as many, and at least one")
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}, must be >= 1")
    device = next(model.parameters(), x).device
    loss, correct = 0.0, 0
    with evaluating(model):
        for start in range(0, len(x), batch_size):
            batch = slice(start, start + batch_size)
            logits, targets = model(x[batch].to(device)), y[batch].to(device)  # (B, num_classes), (B,)
            loss += functional.cross_entropy(logits, targets, reduction="sum").item()
            correct += int((logits.argmax(dim=1) == targets).sum())
    return Evaluation(loss / len(x), correct / len(x), len(x))
