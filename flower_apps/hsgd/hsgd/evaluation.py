"""Metrics of a global model on the test data and the training data."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from hedgerow.strategies import DivergenceError
from hedgerow.tasks import logit_metrics, normalised_utility, split_logits, weighted_loss
from hsgd.parties import AllParties

__all__ = ["SplitMetrics"]

State = Mapping[str, Tensor]
# Seed of the draw of training samples for the loss, the same in every run.
_SAMPLE_SEED = 8


class SplitMetrics:
    """Metrics of split models.

    The training loss is over ``train_samples`` of the hospitals' people, the same in every run; 0 for all.
    """

    def __init__(self, parties: AllParties, train_samples: int = 0) -> None:
        data, rows = parties.data, parties.people
        people = len(rows)
        if 0 < train_samples < len(rows):
            rows = np.random.default_rng(_SAMPLE_SEED).choice(rows, train_samples, replace=False)
        self._model = deepcopy(parties.model)
        self._loss, self._payoffs = weighted_loss(parties.class_weights), data.payoffs_test
        self._train = _tensors(data.hospital_train[rows], data.device_train[rows], data.y_train[rows])
        self._test = _tensors(data.hospital_test, data.device_test, data.y_test)
        train = f"{len(rows):,} of the {people:,}" if len(rows) < people else f"all {people:,}"
        # On what each metric is measured, see ``Experiment``.
        self.samples = {
            "loss": f"on {train} people of the hospitals",
            "*": f"on the {len(data.y_test):,} people of the test set of {data.name}",
        }

    def __call__(self, state: State) -> dict[str, float]:
        """Return ``loss`` on training data, and on the test set ``test-loss``, ``accuracy``, ``auc``, …

        ``loss`` has the class weights of training, ``test-loss`` none. If the data have payoffs of decisions,
        ``utility`` is that of the most probable class (``normalised_utility``). DivergenceError if the
        weights are finite, but so large that logits are not.
        """
        self._model.load_state_dict(dict(state))
        x1, x2, y = self._test
        logits = split_logits(self._model, x1, x2)
        if not torch.isfinite(logits).all():
            raise DivergenceError(
                "The test people's logits are not finite: the run diverges. "
                "A smaller learning-rate keeps it stable."
            )
        test = asdict(logit_metrics(logits, y))
        del test["num_examples"]
        if self._payoffs is not None:
            one = logits.shape[1] == 1
            predicted = (logits[:, 0] > 0).long() if one else logits.argmax(dim=1)
            test["utility"] = normalised_utility(self._payoffs, predicted.cpu().numpy())
        x1, x2, y = self._train
        loss = float(self._loss(split_logits(self._model, x1, x2).double(), y).numpy().mean())
        return {"loss": loss, "test-loss": test.pop("loss"), **test}

    def mean(self, states: Sequence[State]) -> dict[str, float]:
        """Return the mean of each metric over groups with their own models."""
        each = [self(state) for state in states]
        return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


def _tensors(x1: np.ndarray, x2: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(x1), torch.from_numpy(x2), torch.from_numpy(y)
