"""The app's server: model, strategy and metrics."""

from collections.abc import Collection, Sequence
from functools import partial

from torch import nn

from hedgerow.clients import frozen_part, global_task, initial_model
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, Measure, server_app
from hedgerow.sim.runs.settings import as_settings_errors, check_work
from hedgerow.strategies import OwnNodes
from hedgerow.strategies.aggregate.sum_settings import check_noise
from hedgerow.strategies.registry import Registry
from hedgerow.strategies.roster import Roster
from hedgerow.tasks import OWN, CentralMetrics, num_features
from hedgerow.wire.records import to_record
from similarity_free import settings
from similarity_free.client_app import app as client_app

REALISM = (
    "Workers train for real, and uplinks are compressed for real: what is counted is what is sent. "
    "The paper models no time"
)


def experiment(values: settings.Settings) -> Experiment | LearntExperiment:
    """Return the run with these settings."""
    if values.partition == OWN:
        return LearntExperiment(
            values,
            partial(OwnNodes.gather, registry=Registry.named(values.registry)),
            num_features,
            partial(_on_own_data, values),
        )
    with as_settings_errors():
        model, data = global_task(values.run_config)
        frozen = frozen_part(model, data.x[:2])
    measure = CentralMetrics(model, data, values.train_loss_samples)
    return _experiment(values, model, max(data.sizes), measure, frozen, dealt=data.sizes)


def _on_own_data(values: settings.Settings, nodes: OwnNodes) -> Experiment:
    """Return the run of nodes with their own data."""
    with as_settings_errors():
        model = initial_model(values.run_config, nodes.input_shape, nodes.num_classes)
        frozen = frozen_part(model)
    return _experiment(values, model, max(nodes.sizes), nodes.measure, frozen, nodes.roster)


def _experiment(
    values: settings.Settings,
    model: nn.Module,
    most_samples: int,
    measure: Measure,
    frozen: Collection[str],
    roster: Roster | None = None,
    dealt: Sequence[int] | None = None,
) -> Experiment:
    strategy = partial(settings.build_strategy, values, roster=roster, dealt_sizes=dealt, frozen=frozen)
    with as_settings_errors():
        strategy()
        check_noise(values.run_config, model.state_dict())
    for key in ("local-iters", "inner-steps"):
        check_work(f"{key} = {values.of(key)}", values.of(key), min(values.batch_size, most_samples))
    data = "own data" if values.partition == OWN else values.dataset
    return Experiment(
        title=f"{values.algorithm} on {data}, {settings.build_schedule(values)}",
        realism=REALISM,
        strategy=strategy,
        initial_arrays=to_record(model.state_dict()),
        module=model,
        num_rounds=values.num_rounds,
        measure=measure,
    )


app = server_app("similarity_free", settings.read, client_app, experiment)
