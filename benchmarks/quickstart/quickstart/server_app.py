"""Flower's own FedAvg; it writes down when each round ended."""

import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    run, ends = context.run_config, list[float]()

    def end(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        ends.append(time.perf_counter())
        return MetricRecord()

    torch.manual_seed(0)
    share = float(run["fraction"])
    strategy = FedAvg(
        fraction_train=share, fraction_evaluate=share, min_available_nodes=int(run["num-clients"])
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": float(run["learning-rate"])}),
        num_rounds=int(run["num-rounds"]),
        evaluate_fn=end,
    )
    accuracy = list(result.evaluate_metrics_clientapp.values())[-1]["eval_acc"]
    Path(str(run["result"])).write_text(json.dumps({"ends": ends, "accuracy": accuracy}), encoding="utf-8")
