"""Metrics of models on labelled data."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hedgerow.global_draws import GlobalDraws, seed_global_draws
from hedgerow.kept_values import values_kept

from .checks import at_least
from .extras import needed
from .federated import FederatedData
from .modes import evaluating
from .split_models import SplitModel, split_loss
from .threads import map_on_threads

# The seed of the training samples whose loss is measured; the same in every run.
_SAMPLE_SEED = 8
# Samples per forward pass: limits memory, and leaves enough passes for all threads.
_BATCH = 250

R = TypeVar("R")


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
    auc : float or None (default: None)
        For two classes, the area under the ROC curve of class 1 against class 0, 0..1; None if there are
        more classes, or all samples are of one.
    """

    loss: float
    accuracy: float
    num_examples: int
    auc: float | None = None


def evaluate(model: nn.Module, x: Tensor, y: Tensor, batch_size: int = _BATCH) -> Evaluation:
    """Return a model's mean cross-entropy and accuracy, in evaluation mode and without gradients.

    The model's modes are restored.

    Parameters
    ----------
    model : Module
        Maps (B, ...) to logits (B, num_classes), on any device.
    x : Tensor, (N, ...)
        Inputs; batches are moved to the model's device.
    y : Tensor of int64, (N,)
        Labels.
    batch_size : int (default: 250)
        Samples per forward pass, >= 1. Affects memory, time and rounding. The number of threads, which share
        the passes on a CPU, does not affect a bit of the result.

    Raises
    ------
    ValueError
        If there are no samples, inputs and labels differ in number, or the batch size is < 1.
    """
    if len(x) != len(y) or not len(x):
        raise ValueError(
            f"x and y must have equal numbers of samples, at least one, got {len(x)} and {len(y)}"
        )
    at_least(1, batch_size=batch_size)
    device = next(model.parameters(), x).device

    def measured(batch: slice) -> tuple[float, int, Tensor]:
        logits, targets = model(x[batch].to(device)), y[batch].to(device)  # (B, num_classes), (B,)
        loss = functional.cross_entropy(logits, targets, reduction="sum").item()
        margins = logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits[:0, 0]
        return loss, int((logits.argmax(dim=1) == targets).sum()), margins

    losses, correct, margins = zip(*_by_batches(measured, model, len(x), batch_size, device), strict=True)
    scores = torch.cat(margins).cpu().double().numpy()
    auc = binary_auc(scores, y.cpu().numpy()) if len(scores) else None
    return Evaluation(sum(losses) / len(x), sum(correct) / len(x), len(x), auc)


def binary_auc(scores: NDArray[np.float64], y: NDArray[Any]) -> float | None:
    """Return the share of pairs of both classes in which class 1 has the larger score; a tie counts half.

    Parameters
    ----------
    scores : ndarray of float64, (N,)
        Larger for class 1; finite.
    y : ndarray of int, (N,)
        Labels, 0 or 1. The result is None if all are equal or a score is not finite.
    """
    positive = y == 1
    pairs = int(positive.sum()) * int((~positive).sum())
    if not pairs or not np.isfinite(scores).all():
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place.reshape(-1)]  # from 1; the mean rank for ties
    ones = int(positive.sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / pairs)


class CentralMetrics:
    """A global model's loss on the training data, and its loss and accuracy on the test data.

    Parameters
    ----------
    model : Module
        The architecture, which is copied.
    data : FederatedData
        On the model's device.
    train_samples : int (default: 0)
        Number of training samples for the loss, the same ones in every run; 0 for all.
    """

    def __init__(self, model: nn.Module, data: FederatedData, train_samples: int = 0) -> None:
        self.model, self.data = deepcopy(model), data
        self.x, self.y = data.x, data.y
        if 0 < train_samples < len(self.y):
            chosen = np.random.default_rng(_SAMPLE_SEED).choice(len(self.y), train_samples, replace=False)
            index = torch.as_tensor(np.sort(chosen), device=self.y.device)
            self.x, self.y = self.x[index], self.y[index]

    @property
    def samples(self) -> dict[str, str]:
        """On what each metric is measured, for a run's record; "*" stands for all others."""
        name, n, of = self.data.dataset.name, len(self.y), len(self.data.y)
        train = f"{n:,} of the {of:,}" if n < of else f"all {of:,}"
        test = f"on the {len(self.data.y_test):,} test samples of {name}"
        return {"loss": f"on {train} training samples of {name}", "*": test}

    def __call__(self, state: Mapping[str, Tensor]) -> dict[str, float]:
        """Return ``loss``, ``test-loss`` and ``accuracy`` of a state dict."""
        test = self.test(state)
        train = evaluate(self.model, self.x, self.y)
        return {"loss": train.loss, "test-loss": test.loss, "accuracy": test.accuracy}

    def test(self, state: Mapping[str, Tensor]) -> Evaluation:
        """Return the evaluation of a state dict on the test data."""
        self.model.load_state_dict(dict(state))
        return evaluate(self.model, self.data.x_test, self.data.y_test)


@dataclass(frozen=True)
class SplitEvaluation:
    """Metrics of a split model on samples with both parts.

    Parameters
    ----------
    loss : float
        Mean cross-entropy, in nats.
    accuracy : float
        Share of samples whose most probable class is the label's, 0..1.
    auc : float
        Area under the ROC curve of one class against the rest, averaged over classes, 0..1. Classes of none
        or all of the samples are excluded; NaN if no class remains.
    auprc : float
        Area under the precision-recall curve as average precision, 0..1: for two classes that of class 1,
        else the mean over classes as for ``auc``. The chance level is a class's share of the samples.
    precision, recall, f1 : float
        The mean over the classes among labels or predictions, 0..1; 0 / 0 counts as 0.
    num_examples : int
        Number of samples, at least 1.
    """

    loss: float
    accuracy: float
    auc: float
    auprc: float
    precision: float
    recall: float
    f1: float
    num_examples: int


def logit_metrics(logits: Tensor, y: Tensor) -> SplitEvaluation:
    """Return the metrics of logits.

    Parameters
    ----------
    logits : Tensor, (N, num_classes) or (N, 1)
        One column is the logit of class 1 against class 0.
    y : Tensor of int64, (N,)
        Labels.

    Raises
    ------
    ValueError
        If there are no samples, logits and labels differ in number, or a logit is not finite.
    """
    sklearn = needed("sklearn.metrics", "sim", "logit_metrics")
    if len(logits) != len(y) or not len(y):
        raise ValueError(
            f"logits and y must have equal numbers of samples, at least one, got {len(logits)} and {len(y)}"
        )
    logits, y = logits.detach().cpu(), y.cpu()
    if not torch.isfinite(logits).all():
        raise ValueError("logits must be finite, got NaN or infinity")
    scores = logits.double()
    if scores.shape[1] == 1:
        scores = torch.cat([torch.zeros_like(scores), scores], 1)
    labels, p = y.numpy(), torch.softmax(scores, 1).numpy()  # (N,), (N, num_classes)
    predicted = p.argmax(axis=1)
    present = [c for c in range(p.shape[1]) if 0 < (labels == c).sum() < len(labels)]
    areas = [sklearn.roc_auc_score(labels == c, p[:, c]) for c in present]
    of_curve = present[1:] if p.shape[1] == 2 else present
    averages = [sklearn.average_precision_score(labels == c, p[:, c]) for c in of_curve]
    precision, recall, f1, _ = sklearn.precision_recall_fscore_support(
        labels, predicted, average="macro", zero_division=0
    )
    return SplitEvaluation(
        float(split_loss(logits.double(), y).numpy().mean()),
        float((predicted == labels).mean()),
        float(np.mean(areas)) if areas else float("nan"),
        float(np.mean(averages)) if averages else float("nan"),
        float(precision),
        float(recall),
        float(f1),
        len(labels),
    )


def normalised_utility(payoffs: NDArray[np.float64], told: NDArray[np.integer[Any]]) -> float:
    """Return the normalized utility of predictions: 0 for class 0 throughout, 1 for the best possible.

    The utility score of the PhysioNet/CinC Challenge 2019, (U - U_none) / (U_best - U_none), each U the sum
    of the samples' payoffs; negative if the predictions are worse than class 0 for all.

    Parameters
    ----------
    payoffs : ndarray of float64, (N, classes)
        The utility of predicting each class for a sample.
    told : ndarray of int, (N,)
        The predicted class of each sample.

    Raises
    ------
    ValueError
        If the two differ in number, or nothing is better than predicting class 0 for all.
    """
    if payoffs.ndim != 2 or told.shape != payoffs.shape[:1]:
        raise ValueError(
            f"payoffs and told must have the shapes (N, classes) and (N,), got {payoffs.shape} and "
            f"{told.shape}"
        )
    silent, best = payoffs[:, 0].sum(), payoffs.max(axis=1).sum()
    if not best > silent:
        raise ValueError("payoffs must pay more than those of class 0 somewhere")
    return float((payoffs[np.arange(len(told)), told].sum() - silent) / (best - silent))


def evaluate_split(
    model: SplitModel, x1: Tensor, x2: Tensor, y: Tensor, batch_size: int = _BATCH
) -> SplitEvaluation:
    """Return a split model's metrics, in evaluation mode and without gradients.

    Parameters
    ----------
    model : SplitModel
        On any device.
    x1, x2 : Tensor, (N, ...) each
        The hospital's and the devices' parts of the samples; batches are moved to the model's device.
    y : Tensor of int64, (N,)
        Labels.
    batch_size : int (default: 250)
        Samples per forward pass, >= 1.

    Raises
    ------
    ValueError
        If there are no samples, parts and labels differ in number, or the batch size is < 1.
    """
    if not len(x1) == len(x2) == len(y) or not len(y):
        raise ValueError(
            f"x1, x2 and y must have equal numbers of samples, at least one, got {len(x1)}, {len(x2)} and "
            f"{len(y)}"
        )
    at_least(1, batch_size=batch_size)
    return logit_metrics(split_logits(model, x1, x2, batch_size), y)


def split_logits(model: SplitModel, x1: Tensor, x2: Tensor, batch_size: int = _BATCH) -> Tensor:
    """Return a split model's logits (N, ...) of samples; parameters as for ``evaluate_split``."""
    device = next(model.parameters()).device

    def logits(batch: slice) -> Tensor:
        out: Tensor = model(x1[batch].to(device), x2[batch].to(device))
        return out

    return torch.cat(_by_batches(logits, model, len(x1), batch_size, device))


def _by_batches(
    work: Callable[[slice], R], model: nn.Module, count: int, batch_size: int, device: torch.device
) -> list[R]:
    """Return the work on each batch, with the model in evaluation mode and without gradients."""

    @torch.no_grad()  # a per-thread setting
    def on_thread(start: int) -> R:
        return work(slice(start, start + batch_size))

    threads = torch.get_num_threads() if device.type == "cpu" else 1
    with evaluating(model):
        if model not in _DRAWS:
            with GlobalDraws.restored() as before, values_kept(model) as values:
                found = map_on_threads(on_thread, range(0, count, batch_size), threads)
                _DRAWS[model] = before.moved or values.moved
            if not _DRAWS[model]:
                return found
        if not _DRAWS[model]:
            return map_on_threads(on_thread, range(0, count, batch_size), threads)
        with GlobalDraws.restored():
            seed_global_draws(0)
            return map_on_threads(on_thread, range(0, count, batch_size), 1)


# Whether a model draws from the global generators in evaluation mode, or changes what it keeps. If so, its
# draws are always the same, and one thread takes the batches in order.
_DRAWS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
