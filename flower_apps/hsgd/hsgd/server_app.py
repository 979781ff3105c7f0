"""The app's server: strategy, initial model and metrics."""

from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from hedgerow.sim.runs.serverapp import Experiment, server_app
from hedgerow.sim.runs.settings import as_settings_errors
from hedgerow.strategies import HSGD
from hedgerow.wire.records import to_record, to_state_dict
from hsgd import settings
from hsgd.client_app import app as client_app
from hsgd.evaluation import SplitMetrics
from hsgd.parties import deal, is_own

REALISM = (
    "Hospitals and devices train for real on their own half, and encodings, heads and models travel in "
    "messages through Flower's hub. An edge that is one node hosts its devices, whose links are then booked "
    "as if they were used. Seconds are modelled, from the paper's rates"
)


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
    )


app = server_app("hsgd", settings.read, client_app, experiment)
