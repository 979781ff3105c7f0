"""The server's half."""

from flwr.app import MetricRecord
from flwr.serverapp import ServerApp

from hedgerow.clients import global_task
from hedgerow.tasks import evaluate
from hedgerow.wire import to_record

from .strategy import HierLocalQSGD

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    model, data = global_task(config)

    def accuracy(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": evaluate(model, data.x_test, data.y_test).accuracy})

    own = {key: config[key] for key in ("tau1", "tau2", "levels", "seed")}
    strategy = HierLocalQSGD(
        num_edges=config["num-edges"], min_available_nodes=config["num-clients"], fraction_evaluate=0.0, **own
    )
    strategy.start(grid, to_record(model.state_dict()), num_rounds=config["rounds"], evaluate_fn=accuracy)
