"""The app's server: what is trained, by which strategy, and how it is measured."""

from functools import partial

from hedgerow.clients import global_task
from hedgerow.sim.runs.serverapp import Experiment, Values, server_app
from hedgerow.sim.runs.settings import as_settings_errors, check_work
from hedgerow.tasks import CentralMetrics
from hedgerow.wire.records import to_record
from similarity_free import settings
from similarity_free.client_app import app as client_app

REALISM = (
    "Workers train for real, and uplinks are compressed for real: what is counted is what is sent. "
    "The paper models no time"
)


def experiment(values: Values) -> Experiment:
    """Return the run that the settings describe."""
    with as_settings_errors():
        model, data = global_task(values)
        settings.build_strategy(values)
    for key in ("local-iters", "inner-steps"):
        check_work(f"{key} = {values[key]}", values[key], min(values["batch-size"], max(data.sizes)))
    return Experiment(
        title=f"{values['algorithm']} on {values['dataset']}, {settings.build_schedule(values)}",
        realism=REALISM,
        strategy=partial(settings.build_strategy, values),
        initial_arrays=to_record(model.state_dict()),
        num_rounds=values["num-rounds"],
        measure=CentralMetrics(model, data, values["train-loss-samples"]),
    )


app = server_app("similarity_free", settings.read, client_app, experiment)
