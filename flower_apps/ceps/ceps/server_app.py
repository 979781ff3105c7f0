"""The app's server: the relay, and the monitor of all models of a simulation."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor, nn

from ceps import settings
from ceps.client_app import app as client_app
from ceps.problems import (
    change_of,
    dimension,
    model_metrics,
    named_model,
    network_accuracy,
    network_of,
    own_dimension,
)
from hedgerow.experiments import on_own_data
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, server_app
from hedgerow.sim.runs.settings import as_settings_errors
from hedgerow.strategies import OwnNodes
from hedgerow.strategies.gossip.monitor import Monitor
from hedgerow.strategies.roster import Roster
from hedgerow.tasks import OWN, build_model
from hedgerow.wire.records import to_record

AMONG_SITES = (
    "One site of several: its nodes compute, encode and decode for real; payloads travel through its "
    "SuperLink, and to other sites from ServerApp to ServerApp. What is recorded is this site's. The paper "
    "models no time"
)
REALISM = (
    "Nodes compute, encode and decode for real; payloads travel through Flower's hub, which only relays. "
    "What is counted on node->node links is what nodes sent each other. The paper models no time"
)


def experiment(values: settings.Settings) -> Experiment | LearntExperiment:
    """Return the run with these settings."""
    if values.partition == OWN:
        return on_own_data(values, partial(_on_own_data, values))
    with as_settings_errors():
        dim = dimension(values.run_config)

    def measure(w: NDArray[np.float64]) -> Mapping[str, Any]:
        accuracy = network_accuracy(values.run_config, w)
        return {} if accuracy is None else {"accuracy": accuracy}

    network = network_of(values.run_config)
    return _experiment(values, dim, measure, network, partial(model_metrics, values.run_config))


def _on_own_data(values: settings.Settings, nodes: OwnNodes) -> Experiment:
    """Return the run of nodes with their own data."""
    with as_settings_errors():
        dim = own_dimension(values.run_config, nodes.input_shape, nodes.num_classes)
    network = None
    if values.problem == "network":
        network = build_model(values.model, nodes.input_shape, nodes.num_classes, values.seed)

    def measure(w: NDArray[np.float64]) -> Mapping[str, Any]:
        found = {} if values.privacy == "sound" else nodes.evaluate(to_record({"w": w}))
        # This app's ``loss`` is the objective of all nodes, with the regulariser.
        return {"test-loss" if key == "loss" else key: value for key, value in found.items()}

    def predict(arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, Any]:
        return measure(change_of(network, arrays))

    return _experiment(values, dim, measure, network, predict, nodes.roster)


def _experiment(
    values: settings.Settings,
    dim: int,
    measure_mean: Callable[[NDArray[np.float64]], Mapping[str, Any]],
    network: nn.Module | None,
    predict: Callable[[Mapping[str, NDArray[Any]]], Mapping[str, Any]],
    roster: Roster | None = None,
) -> Experiment:
    with as_settings_errors():
        settings.build_strategy(values, dim=dim)
    monitor = Monitor(values.sparsity, tol=values.tolerance or None) if values.monitor else None

    def measure(_: dict[str, Tensor]) -> dict[str, Any]:
        """Return the monitor's measures right after the event, those of the mean, and those at the stop.

        The stop lies between two events; the record of the last round has its measures as ``stop-loss``,
        ``stop-local-loss``, ``stop-consensus`` and ``stop-iteration``.
        """
        if monitor is None or monitor.after_event is None:
            return {}
        look, models = monitor.after_event
        metrics = {"loss": look.loss, "local-loss": look.local_loss, "consensus": look.consensus}
        stop = {} if monitor.at_stop is None else monitor.at_stop.metrics()
        at_stop = {f"stop-{name}": value for name, value in stop.items() if name != "nodes"}
        return {**metrics, **measure_mean(models.mean(axis=0)), **at_stop}

    def node_models() -> dict[str, dict[str, NDArray[Any]]]:
        """Return the models right after the last event, which only a monitor sees."""
        if monitor is None or monitor.after_event is None:
            return {}
        _, models = monitor.after_event
        return {f"partition-{i}": named_model(network, w) for i, w in enumerate(models)}

    own = values.partition == OWN
    data = "own data, " if own else ""
    of_looks = {
        "loss": "mean of the nodes' objectives on their training samples, at the mean of their models",
        "local-loss": "mean of the nodes' objectives on their training samples, each at its own model",
        "consensus": "distances of the nodes' models, on no samples",
    }
    samples = {
        **of_looks,
        **{f"stop-{name}": where for name, where in of_looks.items()},
        "stop-iteration": "the iteration at which the stopping rule held, on no samples",
        **({} if own or network is None else {"accuracy": f"on the test samples of {values.dataset}"}),
    }
    return Experiment(
        title=f"{values.method} on {values.problem}, {data}{values.num_clients} nodes",
        realism=AMONG_SITES if values.peers else REALISM,
        strategy=partial(settings.build_strategy, values, dim=dim, monitor=monitor, roster=roster),
        initial_arrays=ArrayRecord(),
        node_models=node_models,
        module=network,
        predict=predict,
        num_rounds=values.iterations,
        measure=measure,
        samples=samples,
    )


app = server_app("ceps", settings.read, client_app, experiment)
