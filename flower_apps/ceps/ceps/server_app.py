"""The app's server: settings, the relay, a run folder, and a table at the end."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from ceps import settings
from ceps.client_app import app as client_app
from ceps.problems import dimension, network_accuracy
from hedgerow.sim.runs.serverapp import run_strategy
from hedgerow.strategies.gossip.monitor import Monitor

app = ServerApp()

REALISM = (
    "Nodes compute, encode and decode for real; payloads travel through Flower's hub, which only relays. "
    "What is counted on node->node links is what nodes sent each other. The paper models no time"
)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run with the settings of the run config and write a run folder."""
    values = settings.read(context.run_config)
    monitor = Monitor(values["sparsity"], tol=values["tolerance"] or None) if values["monitor"] else None

    def measure(_: dict[str, Tensor]) -> dict[str, float]:
        """Return what the monitor saw last, which is the mean of all nodes' models."""
        if monitor is None or not monitor.history or monitor.models is None:
            return {}
        look = monitor.history[-1]
        metrics = {"loss": look.loss, "local-loss": look.local_loss, "consensus": look.consensus}
        accuracy = network_accuracy(values, monitor.models.mean(axis=0))
        return metrics if accuracy is None else {**metrics, "accuracy": accuracy}

    run_strategy(
        grid,
        context,
        name="ceps",
        realism=REALISM,
        title=f"{values['method']} on {values['problem']}, {values['num-clients']} nodes",
        values=values,
        build=lambda callbacks: settings.build_strategy(
            values, dim=dimension(values), monitor=monitor, on_round_end=callbacks
        ),
        client_app=client_app,
        initial_arrays=ArrayRecord(),
        num_rounds=values["iterations"],
        train_config={},
        measure=measure,
    )
