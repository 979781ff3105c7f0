"""The app's server: model, strategy and metrics."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.experiments import TrainedTask, check_strategy, training_experiment
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, Measure, server_app
from hedgerow.sim.runs.settings import as_settings_errors, check_work
from hedgerow.strategies.edges.mixers import consensus_error, robust_mean
from hedgerow.strategies.sd_feel.clusters import ClusteredStrategy
from hedgerow.tasks import CentralMetrics, count_parameters, forward_macs
from hedgerow.wire.records import to_record, to_state_dict
from hedgerow.wire.robust_means import parse_aggregation
from sd_feel import settings
from sd_feel.client_app import app as client_app

REALISM = {
    "emulated": (
        "E1 emulated: clients train for real; edge servers, gossip and the cloud are computed in the "
        "strategy, their traffic is counted, and time is the latency model, not a measurement"
    ),
    "nodes": (
        "E2 relayed: clients train and edge servers average and gossip for real, each on its node; their "
        "messages go through Flower's hub, and time is the latency model, not a measurement"
    ),
    settings.DIRECT: (
        "E3 direct: clients train and this edge server averages for real, on its own SuperLink, and sends "
        "its model to its neighbours over direct links; the model u of this record is this server's, and "
        "simulated seconds are the latency model, not a measurement"
    ),
}

# Of runs with a buffer, which have one server.
BUFFERED = (
    "Clients train for real and are counted as they reply; time is the engine's simulated clock, which only "
    "fault-delay moves, and on devices real time"
)

# A backward pass costs about twice a forward pass; a multiply-accumulate is counted as one operation,
# as in the paper's figure of 138.4 million.
_FORWARD_AND_BACKWARD = 3


class EachServer:
    """The metrics of u, and of the edge servers' own models as they are when u is evaluated.

    Parameters
    ----------
    measure : CentralMetrics
        Measures one model.
    """

    def __init__(self, measure: CentralMetrics) -> None:
        self.measure, self.samples = measure, measure.samples

    def __call__(self, state: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of one model's state dict."""
        return self.measure(state)

    def in_run(self, grid: Grid, strategy: ClusteredStrategy) -> Measure:
        """Return the measure of a run."""

        def measure(state: dict[str, Tensor]) -> Mapping[str, Any]:
            of_u = self.measure(state)
            # Before the first round servers have no models of their own.
            if strategy.state is None:
                return of_u
            found = [self.measure.test(to_state_dict(one)).accuracy for one in strategy.server_models()]
            return {
                **of_u,
                "servers-accuracy": float(np.average(found, weights=strategy.server_weights)),
                "worst-server-accuracy": min(found),
                "best-server-accuracy": max(found),
            }

        return measure


def experiment(values: settings.Settings) -> Experiment | LearntExperiment:
    """Return the run with these settings."""
    return training_experiment(
        values,
        partial(_experiment, values),
        num_nodes=settings.num_nodes(values),
        quorum=settings.quorum(values),
    )


def _experiment(values: settings.Settings, task: TrainedTask) -> Experiment:
    model = task.model
    with as_settings_errors():
        macs = forward_macs(model, task.input_shape)
        strategy = partial(
            settings.build_strategy,
            values,
            num_params=count_parameters(model),
            flops_per_iteration=_FORWARD_AND_BACKWARD * values.batch_size * macs,
            **task.options,
        )
    check_strategy(strategy, values, model)
    steps = values.round_iterations
    check_work(f"tau1 = {values.tau1}", steps, min(values.batch_size, task.most_samples))
    measure = task.measure
    if values.evaluate_servers:
        assert isinstance(measure, CentralMetrics)  # By the rules of the settings.
        measure = EachServer(measure)
    return Experiment(
        title=f"{values.method} on {task.data}, latency preset {values.latency_preset}",
        realism=BUFFERED if values.buffer else REALISM[values.edge_servers],
        strategy=strategy,
        initial_arrays=to_record(model.state_dict()),
        module=model,
        num_rounds=values.iterations // steps,
        train_config={key: values.of(key) for key in ("learning-rate", "batch-size", "seed")},
        measure=measure,
        num_nodes=settings.num_nodes(values),
        together=partial(_together, values) if values.edge_servers == settings.DIRECT else None,
    )


def _together(
    values: settings.Settings, models: NDArray[Any], sizes: Sequence[float]
) -> tuple[NDArray[Any], dict[str, float]]:
    """Return u of the edge servers' models (D, M), as in a run that emulates them."""
    shares = np.array(sizes) / sum(sizes)
    rule = parse_aggregation(values.aggregation)
    return robust_mean(models, shares, rule), {"consensus-error": consensus_error(models, shares)}


app = server_app("sd_feel", settings.read, client_app, experiment)
