"""Experiments of apps whose nodes train one torch model, on dealt or on their own data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hedgerow.clients import frozen_part, global_task, initial_model
from hedgerow.clients.training.draws import warn_of_foreign_draws
from hedgerow.sim import flower_identity
from hedgerow.sim.runs.common_settings import RunSettings, TrainingSettings
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, Measure
from hedgerow.sim.runs.settings import SettingsError, as_settings_errors
from hedgerow.strategies import Method, OwnNodes
from hedgerow.strategies.aggregate.flower import FlowerAggregation
from hedgerow.strategies.aggregate.sum_settings import check_noise
from hedgerow.strategies.node_metrics import NodeEvaluation
from hedgerow.strategies.registry import Registry
from hedgerow.tasks import OWN, CentralMetrics, num_features
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import to_record


@dataclass(frozen=True)
class TrainedTask:
    """The model that nodes train, and what the server knows of their data.

    Parameters
    ----------
    model : nn.Module
        The initial model.
    input_shape : tuple of int
        The shape of one sample.
    most_samples : int
        Training samples of the largest node, >= 1.
    measure : Measure
        As in ``Experiment``.
    data : str
        The data's name, for titles.
    options : Mapping[str, Any]
        Options of the strategy: ``roster``, ``dealt_sizes`` and ``frozen``, as in ``FederationOptions``.
    """

    model: nn.Module
    input_shape: tuple[int, ...]
    most_samples: int
    measure: Measure
    data: str
    options: Mapping[str, Any]


def on_own_data(
    values: RunSettings,
    make: Callable[[OwnNodes], Experiment],
    *,
    num_nodes: int | None = None,
    quorum: int | None = None,
) -> LearntExperiment:
    """Return the experiment that ``make`` makes from the reports of nodes with their own data.

    ``num_nodes`` and ``quorum`` are as in ``LearntExperiment``.
    """
    gather = partial(OwnNodes.gather, registry=Registry.named(values.registry))
    return LearntExperiment(values, gather, num_features, make, num_nodes, quorum)


def check_strategy(make: Callable[[], Method[Any]], values: TrainingSettings, model: nn.Module) -> None:
    """Raise SettingsError unless the settings make a strategy that can run on a model."""
    with as_settings_errors():
        strategy = make()
        check_noise(values.run_config, model.state_dict())
        if isinstance(strategy.aggregator, FlowerAggregation):
            with flower_identity(1):
                strategy.aggregator.try_out(values.sum_sizes()[0])
        if values.local_layers:
            try:
                strategy.begin(strategy.federation.vector(to_record(model.state_dict())))
            except ValueError as error:
                raise ValueError(
                    f"local-layers must be arrays that the method sends as they are, got "
                    f"{quoted(values.local_layers)}: {error}"
                ) from error


class AtNodes:
    """The metrics of a model whose nodes have layers of their own: they alone can measure it."""

    in_run = NodeEvaluation

    def __init__(self, dataset: str) -> None:
        where = f"by the nodes, each with its own layers on test samples of {dataset} with its own classes"
        self.samples = {"*": f"{where}; mean weighted by samples"}

    def __call__(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Raise SettingsError: this model lacks the nodes' own layers."""
        raise SettingsError(
            "local-layers must be empty to evaluate a model without its nodes: they have its layers"
        )


def training_experiment(
    values: TrainingSettings,
    make: Callable[[TrainedTask], Experiment],
    *,
    num_nodes: int | None = None,
    quorum: int | None = None,
) -> Experiment | LearntExperiment:
    """Return the experiment that ``make`` makes from the task of the settings.

    ``num_nodes`` and ``quorum`` are as in ``LearntExperiment``. SettingsError if data or model are invalid.
    """

    def of_own_data(nodes: OwnNodes) -> Experiment:
        with as_settings_errors():
            model = initial_model(values.run_config, nodes.input_shape, nodes.num_classes)
            options = {"roster": nodes.roster, "dealt_sizes": None, "frozen": frozen_part(model)}
        device = next(model.parameters()).device
        warn_of_foreign_draws(model, torch.zeros(2, *nodes.input_shape, device=device))
        largest = max(nodes.sizes)
        return make(TrainedTask(model, nodes.input_shape, largest, nodes.measure, "own data", options))

    if values.partition == OWN:
        return on_own_data(values, of_own_data, num_nodes=num_nodes, quorum=quorum)
    with as_settings_errors():
        model, data = global_task(values.run_config)
        frozen = frozen_part(model, data.x[:2])
    options = {"roster": None, "dealt_sizes": data.sizes, "frozen": frozen}
    measure: Measure = CentralMetrics(model, data, values.train_loss_samples)
    if values.local_layers:
        measure = AtNodes(data.dataset.name)
    shape, largest = data.dataset.input_shape, max(data.sizes)
    return make(TrainedTask(model, shape, largest, measure, values.dataset, options))
