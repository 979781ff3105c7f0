"""The app's server: model, strategy and metrics."""

from functools import partial

from fedmud import settings
from fedmud.client_app import app as client_app
from hedgerow.experiments import TrainedTask, check_strategy, training_experiment
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, server_app
from hedgerow.sim.runs.settings import check_work
from hedgerow.wire.records import to_record

REALISM = (
    "Clients train for real, and factors, bits and merges travel for real in the downlink mode that is "
    "set: what is counted is what is sent. The paper models no time"
)


def experiment(values: settings.Settings) -> Experiment | LearntExperiment:
    """Return the run with these settings."""
    return training_experiment(values, partial(_experiment, values))


def _experiment(values: settings.Settings, task: TrainedTask) -> Experiment:
    model = task.model
    strategy = partial(settings.build_strategy, values, model, **task.options)
    check_strategy(strategy, values, model)
    check_work(f"local-epochs = {values.local_epochs}", values.local_epochs, task.most_samples)
    return Experiment(
        title=f"{values.method} on {task.data}, ratio {values.ratio:.4g}, {values.sync}",
        realism=REALISM,
        strategy=strategy,
        initial_arrays=to_record({key: value.clone() for key, value in model.state_dict().items()}),
        module=model,
        num_rounds=values.num_rounds,
        measure=task.measure,
    )


app = server_app("fedmud", settings.read, client_app, experiment)
