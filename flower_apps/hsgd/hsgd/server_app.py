"""The app's server: strategy, initial model and metrics."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor

from hedgerow.sim.runs.serverapp import Experiment, server_app
from hedgerow.sim.runs.settings import as_settings_errors
from hedgerow.strategies import HSGD, DivergenceError
from hedgerow.tasks import logit_metrics, normalised_utility, split_logits, weighted_loss
from hedgerow.wire.records import to_record, to_state_dict
from hsgd import settings
from hsgd.client_app import app as client_app
from hsgd.parties import AllParties, deal, is_own

State = Mapping[str, Tensor]
# Seed of the draw of training samples for the loss, the same in every run.
_SAMPLE_SEED = 8

REALISM = (
    "Hospitals and devices train for real on their own half, and encodings, heads and models travel in "
    "messages through Flower's hub. An edge that is one node hosts its devices, whose links are then booked "
    "as if they were used. Seconds are modelled, from the paper's rates"
)


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


def experiment(values: settings.Settings) -> Experiment:
    """Return the run that the settings describe."""
    if is_own(values.run_config):
        return _on_own_data(values)
    with as_settings_errors():
        parties = deal(values.run_config)
        settings.check_size(values, parties)
        settings.build_strategy(values)
    metrics = SplitMetrics(parties, values.train_loss_samples)
    built: list[HSGD] = []

    def strategy(**callbacks: Any) -> HSGD:
        built.append(settings.build_strategy(values, **callbacks))
        return built[0]

    def measure(state: dict[str, Tensor]) -> dict[str, float]:
        """Return the global model's metrics, or without aggregation the mean over the groups' models."""
        (hsgd,) = built
        if hsgd.aggregate:
            return metrics(state)
        return metrics.mean([to_state_dict(model) for model in hsgd.models()])

    return Experiment(
        title=f"{values.method} on {values.dataset}, {values.num_groups} groups",
        realism=REALISM,
        strategy=strategy,
        initial_arrays=to_record({key: value.clone() for key, value in parties.model.state_dict().items()}),
        num_rounds=settings.num_rounds(values),
        measure=measure,
        samples=metrics.samples,
        module=parties.model,
        predict=lambda arrays: metrics({key: torch.from_numpy(value) for key, value in arrays.items()}),
    )


def _on_own_data(values: settings.Settings) -> Experiment:
    """Return a run whose model is built and measured from the parties' reports."""
    with as_settings_errors():
        settings.build_strategy(values)
    return Experiment(
        title=f"{values.method} on the parties' own data",
        realism=REALISM,
        strategy=lambda **callbacks: settings.build_strategy(values, **callbacks),
        initial_arrays=ArrayRecord(),
        num_rounds=settings.num_rounds(values),
        measure=lambda state: {},
        samples={"*": "on the people whom the hospitals hold out"},
    )


app = server_app("hsgd", settings.read, client_app, experiment)
