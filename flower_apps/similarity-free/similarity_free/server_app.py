"""The app's server: model, strategy and metrics."""

from functools import partial

from hedgerow.experiments import TrainedTask, check_strategy, training_experiment
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, server_app
from hedgerow.sim.runs.settings import check_work
from hedgerow.wire.records import to_record
from similarity_free import settings
from similarity_free.client_app import app as client_app

REALISM = (
    "Workers train for real, and uplinks are compressed for real: what is counted is what is sent. "
    "The paper models no time"
)


def experiment(values: settings.Settings) -> Experiment | LearntExperiment:
    """Return the run with these settings."""
    return training_experiment(values, partial(_experiment, values))


def _experiment(values: settings.Settings, task: TrainedTask) -> Experiment:
    model = task.model
    strategy = partial(settings.build_strategy, values, **task.options)
    check_strategy(strategy, values, model)
    for key in ("local-iters", "inner-steps"):
        check_work(f"{key} = {values.of(key)}", values.of(key), min(values.batch_size, task.most_samples))
    return Experiment(
        title=f"{values.algorithm} on {task.data}, {settings.build_schedule(values)}",
        realism=REALISM,
        strategy=strategy,
        initial_arrays=to_record(model.state_dict()),
        module=model,
        num_rounds=values.num_rounds,
        measure=task.measure,
    )


app = server_app("similarity_free", settings.read, client_app, experiment)
