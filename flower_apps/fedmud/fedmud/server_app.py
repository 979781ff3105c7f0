"""The app's server: settings, strategy, run folder, and a table at the end."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedmud import settings
from fedmud.client_app import app as client_app
from hedgerow.clients import global_task
from hedgerow.sim.runs.serverapp import run_strategy
from hedgerow.tasks import CentralMetrics
from hedgerow.wire.records import to_record

app = ServerApp()

REALISM = (
    "Clients train for real, and factors, bits and merges travel for real in the downlink mode that is "
    "set: what is counted is what is sent. The paper models no time"
)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the settings of the run config and write a run folder."""
    values = settings.read(context.run_config)
    model, data = global_task(values)
    run_strategy(
        grid,
        context,
        name="fedmud",
        realism=REALISM,
        title=f"{values['method']} on {values['dataset']}, ratio {values['ratio']:.4g}, {values['sync']}",
        values=values,
        build=lambda callbacks: settings.build_strategy(values, model, on_round_end=callbacks),
        client_app=client_app,
        initial_arrays=to_record({key: value.clone() for key, value in model.state_dict().items()}),
        num_rounds=values["num-rounds"],
        train_config={},
        measure=CentralMetrics(model, data, values["train-loss-samples"]),
    )
