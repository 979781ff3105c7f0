"""The app's server: model, strategy and metrics."""

from functools import partial

from hedgerow.experiments import TrainedTask, check_strategy, training_experiment
from hedgerow.sim.runs.serverapp import Experiment, LearntExperiment, server_app
from hedgerow.sim.runs.settings import check_work
from hedgerow.wire.records import to_record
from scaffold import settings
from scaffold.client_app import app as client_app


def experiment(values: settings.Settings) -> Experiment | LearntExperiment:
    """Return the run with these settings."""
    return training_experiment(values, partial(_experiment, values))


def _experiment(values: settings.Settings, task: TrainedTask) -> Experiment:
    strategy = partial(settings.build_strategy, values, **task.options)
    check_strategy(strategy, values, task.model)
    steps, samples = values.local_steps, min(values.batch_size, task.most_samples)
    check_work(f"local-steps = {steps}", steps, samples)
    return Experiment(
        title=f"scaffold on {task.data}, eta_g = {values.global_rate:g}",
        realism="Nodes train for real; no time is modelled",
        strategy=strategy,
        initial_arrays=to_record(task.model.state_dict()),
        module=task.model,
        num_rounds=values.num_rounds,
        measure=task.measure,
    )


app = server_app("scaffold", settings.read, client_app, experiment)
