"""The app's server: the relay, and the monitor that looks at all models of a simulation."""

from functools import partial

from flwr.app import ArrayRecord
from torch import Tensor

from ceps import settings
from ceps.client_app import app as client_app
from ceps.problems import dimension, network_accuracy
from hedgerow.sim.runs.serverapp import Experiment, Values, server_app
from hedgerow.strategies.gossip.monitor import Monitor

REALISM = (
    "Nodes compute, encode and decode for real; payloads travel through Flower's hub, which only relays. "
    "What is counted on node->node links is what nodes sent each other. The paper models no time"
)


def experiment(values: Values) -> Experiment:
    """Return the run that the settings describe."""
    monitor = Monitor(values["sparsity"], tol=values["tolerance"] or None) if values["monitor"] else None

    def measure(_: dict[str, Tensor]) -> dict[str, float]:
        """Return what the monitor saw last, which is the mean of all nodes' models."""
        if monitor is None or not monitor.history or monitor.models is None:
            return {}
        look = monitor.history[-1]
        metrics = {"loss": look.loss, "local-loss": look.local_loss, "consensus": look.consensus}
        accuracy = network_accuracy(values, monitor.models.mean(axis=0))
        return metrics if accuracy is None else {**metrics, "accuracy": accuracy}

    return Experiment(
        title=f"{values['method']} on {values['problem']}, {values['num-clients']} nodes",
        realism=REALISM,
        strategy=partial(settings.build_strategy, values, dim=dimension(values), monitor=monitor),
        initial_arrays=ArrayRecord(),
        num_rounds=values["iterations"],
        measure=measure,
    )


app = server_app("ceps", settings.read, client_app, experiment)
