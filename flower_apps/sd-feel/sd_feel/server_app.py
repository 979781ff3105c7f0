"""The app's server: what is trained, by which strategy, and how it is measured."""

from functools import partial

from hedgerow.clients import global_task
from hedgerow.sim.runs.serverapp import Experiment, Values, server_app
from hedgerow.sim.runs.settings import as_settings_errors, check_work
from hedgerow.tasks import CentralMetrics, count_parameters, forward_macs
from hedgerow.wire.records import to_record
from sd_feel import settings
from sd_feel.client_app import app as client_app

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


def experiment(values: Values) -> Experiment:
    """Return the run that the settings describe."""
    with as_settings_errors():
        model, data = global_task(values)
        macs = forward_macs(model, data.dataset.input_shape)
        strategy = partial(
            settings.build_strategy,
            values,
            num_params=count_parameters(model),
            flops_per_iteration=_FORWARD_AND_BACKWARD * values["batch-size"] * macs,
        )
        strategy()
    steps = settings.local_steps(values)
    check_work(f"tau1 = {values['tau1']}", steps, min(values["batch-size"], max(data.sizes)))
    return Experiment(
        title=f"{values['method']} on {values['dataset']}, seconds of preset {values['latency-preset']}",
        realism=REALISM[values["edge-servers"]],
        strategy=strategy,
        initial_arrays=to_record(model.state_dict()),
        num_rounds=values["iterations"] // steps,
        train_config={key: values[key] for key in ("learning-rate", "batch-size", "seed")},
        measure=CentralMetrics(model, data, values["train-loss-samples"]),
        num_nodes=settings.num_nodes(values),
    )


app = server_app("sd_feel", settings.read, client_app, experiment)
