"""The app's server: what is trained, by which strategy, and how it is measured."""

from functools import partial

from fedmud import settings
from fedmud.client_app import app as client_app
from hedgerow.clients import global_task
from hedgerow.sim.runs.serverapp import Experiment, Values, server_app
from hedgerow.sim.runs.settings import as_settings_errors, check_work
from hedgerow.tasks import CentralMetrics
from hedgerow.wire.records import to_record

REALISM = (
    "Clients train for real, and factors, bits and merges travel for real in the downlink mode that is "
    "set: what is counted is what is sent. The paper models no time"
)


def experiment(values: Values) -> Experiment:
    """Return the run that the settings describe."""
    with as_settings_errors():
        model, data = global_task(values)
        settings.build_strategy(values, model)
    check_work(f"local-epochs = {values['local-epochs']}", values["local-epochs"], max(data.sizes))
    method, ratio = values["method"], values["ratio"]
    return Experiment(
        title=f"{method} on {values['dataset']}, ratio {ratio:.4g}, {values['sync']}",
        realism=REALISM,
        strategy=partial(settings.build_strategy, values, model),
        initial_arrays=to_record({key: value.clone() for key, value in model.state_dict().items()}),
        num_rounds=values["num-rounds"],
        measure=CentralMetrics(model, data, values["train-loss-samples"]),
    )


app = server_app("fedmud", settings.read, client_app, experiment)
