"""The app's server: settings, strategy, run folder, and a table at the end."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from hedgerow.clients import global_task
from hedgerow.sim.runs.serverapp import run_strategy
from hedgerow.tasks import CentralMetrics
from hedgerow.wire.records import to_record
from similarity_free import settings
from similarity_free.client_app import app as client_app

app = ServerApp()

REALISM = (
    "Workers train for real, and uplinks are compressed for real: what is counted is what is sent. "
    "The paper models no time"
)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the settings of the run config and write a run folder."""
    values = settings.read(context.run_config)
    model, data = global_task(values)
    run_strategy(
        grid,
        context,
        name="similarity_free",
        realism=REALISM,
        title=f"{values['algorithm']} on {values['dataset']}, {settings.build_schedule(values)}",
        values=values,
        build=lambda callbacks: settings.build_strategy(values, on_round_end=callbacks),
        client_app=client_app,
        initial_arrays=to_record(model.state_dict()),
        num_rounds=values["num-rounds"],
        train_config={},
        measure=CentralMetrics(model, data, values["train-loss-samples"]),
    )
