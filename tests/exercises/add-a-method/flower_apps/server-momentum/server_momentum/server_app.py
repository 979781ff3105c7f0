"""The app's server: what is trained, by which strategy, and how it is measured."""

from functools import partial

from hedgerow.strategies.server_momentum import ServerMomentum

from hedgerow.clients import global_task
from hedgerow.sim.runs.serverapp import Experiment, server_app
from hedgerow.sim.runs.settings import as_settings_errors
from hedgerow.tasks import CentralMetrics
from hedgerow.wire.records import to_record
from server_momentum import settings
from server_momentum.client_app import app as client_app


def experiment(values: settings.Settings) -> Experiment:
    """Return the run that the settings describe."""
    with as_settings_errors():
        model, data = global_task(values.run_config)
    return Experiment(
        title=f"server_momentum on {values.dataset}, beta {values.beta}",
        realism="Nodes train for real; no time is modelled",
        strategy=partial(
            ServerMomentum,
            values.beta,
            fraction_evaluate=0.0,
            min_train_nodes=values.min_replies or values.num_clients,
            min_available_nodes=values.num_clients,
        ),
        initial_arrays=to_record(model.state_dict()),
        num_rounds=values.num_rounds,
        measure=CentralMetrics(model, data, values.train_loss_samples),
    )


app = server_app("server_momentum", settings.read, client_app, experiment)
