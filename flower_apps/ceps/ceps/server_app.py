"""The app's server: the relay, and the monitor that looks at all models of a simulation."""

from functools import partial

from flwr.app import ArrayRecord
from torch import Tensor

from ceps import settings
from ceps.client_app import app as client_app
from ceps.problems import dimension, network_accuracy
from hedgerow.sim.runs.serverapp import Experiment, Values, server_app
from hedgerow.sim.runs.settings import as_settings_errors
from hedgerow.strategies.gossip.monitor import Monitor

REALISM = (
    "Nodes compute, encode and decode for real; payloads travel through Flower's hub, which only relays. "
    "What is counted on node->node links is what nodes sent each other. The paper models no time"
)


def experiment(values: Values) -> Experiment:
    """Return the run that the settings describe."""
    with as_settings_errors():
        dim = dimension(values)
        settings.build_strategy(values, dim=dim)
    monitor = Monitor(values["sparsity"], tol=values["tolerance"] or None) if values["monitor"] else None

    def measure(_: dict[str, Tensor]) -> dict[str, float]:
        """Return what the monitor saw right after the event, of which it measures the mean of all models."""
        if monitor is None or monitor.after_event is None:
            return {}
        look, models = monitor.after_event
        metrics = {"loss": look.loss, "local-loss": look.local_loss, "consensus": look.consensus}
        accuracy = network_accuracy(values, models.mean(axis=0))
        return metrics if accuracy is None else {**metrics, "accuracy": accuracy}

    return Experiment(
        title=f"{values['method']} on {values['problem']}, {values['num-clients']} nodes",
        realism=REALISM,
        strategy=partial(settings.build_strategy, values, dim=dim, monitor=monitor),
        initial_arrays=ArrayRecord(),
        num_rounds=values["iterations"],
        measure=measure,
    )


app = server_app("ceps", settings.read, client_app, experiment)
