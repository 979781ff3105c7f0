"""The app's server: settings, strategy, run folder, and a table at the end."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from hedgerow.clients import global_task
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs.serverapp import run_strategy
from hedgerow.tasks import CentralMetrics, count_parameters, forward_macs
from hedgerow.wire.records import to_record
from sd_feel import settings
from sd_feel.client_app import app as client_app

app = ServerApp()

REALISM = {
    "emulated": (
        "E1 emulated: clients train for real; edge servers, gossip and the cloud are computed in the "
        "strategy, their traffic is counted, and time is the latency model, not a measurement"
    ),
    "nodes": (
        "E2 relayed: clients train and edge servers average and gossip for real, each on its node; what they "
        "tell each other goes through Flower's hub, and time is the latency model, not a measurement"
    ),
}

# A backward pass costs about twice a forward pass; a multiply-accumulate is counted as one operation,
# as in the paper's figure of 138.4 million.
_FORWARD_AND_BACKWARD = 3


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the settings of the run config and write a run folder."""
    values = settings.read(context.run_config)
    if values["engine"] == "inprocess":
        # Edge servers that are nodes make more nodes than num-clients says.
        grid = InProcessGrid.inside(grid, client_app, context, num_nodes=settings.num_nodes(values))
    model, data = global_task(values)
    macs = forward_macs(model, data.dataset.input_shape)
    run_strategy(
        grid,
        context,
        name="sd_feel",
        realism=REALISM[values["edge-servers"]],
        title=f"{values['method']} on {values['dataset']}, seconds of preset {values['latency-preset']}",
        values=values,
        build=lambda callbacks: settings.build_strategy(
            values,
            num_params=count_parameters(model),
            flops_per_iteration=_FORWARD_AND_BACKWARD * values["batch-size"] * macs,
            on_round_end=callbacks,
        ),
        client_app=client_app,
        initial_arrays=to_record(model.state_dict()),
        num_rounds=values["iterations"] // settings.local_steps(values),
        train_config={key: values[key] for key in ("learning-rate", "batch-size", "seed")},
        measure=CentralMetrics(model, data, values["train-loss-samples"]),
    )
