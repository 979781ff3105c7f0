"""The app's server: settings, strategy, run folder, and a table at the end."""

from collections.abc import Callable
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from torch import nn

from hedgerow.clients import resolve_device
from hedgerow.sim.engine import InProcessGrid
from hedgerow.sim.live import LiveProgress
from hedgerow.sim.recording import RunRecorder, new_run_folder, round_table
from hedgerow.tasks import FederatedData, build_model, count_parameters, evaluate, federated, forward_macs
from hedgerow.wire.records import to_record, to_state_dict
from hedgerow.wire.seeds import Purpose, generator
from sd_feel import settings
from sd_feel.client_app import app as client_app

app = ServerApp()

REALISM = (
    "E1 emulated: clients train for real; edge servers, gossip and the cloud are computed in the strategy, "
    "their traffic is counted, and time is the latency model, not a measurement"
)

# A backward pass costs about twice a forward pass; a multiply-accumulate is counted as one operation,
# as in the paper's figure of 138.4 million.
_FORWARD_AND_BACKWARD = 3


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the settings of the run config and write a run folder."""
    values = settings.read(context.run_config)
    device = resolve_device(values["device"])
    data = federated(
        values["dataset"],
        values["partition"],
        values["num-clients"],
        values["seed"],
        values["data-dir"] or None,
    ).to(device)
    shape, classes = data.dataset.input_shape, data.dataset.num_classes
    model = build_model(values["model"], shape, classes, values["seed"]).to(device)
    recorder = RunRecorder(
        Path(values["resume"]) if values["resume"] else new_run_folder(values["output-dir"], "sd_feel"),
        {"app": "sd_feel", "realism": REALISM, "run": {**context.run_config, **values}},
        checkpoint_every=values["checkpoint-every"],
    )
    log(INFO, "Run folder: %s", recorder.folder)

    num_rounds = values["iterations"] // settings.local_steps(values)
    live = LiveProgress(num_rounds, values["quiet"])
    strategy = settings.build_strategy(
        values,
        num_params=count_parameters(model),
        flops_per_iteration=_FORWARD_AND_BACKWARD * values["batch-size"] * forward_macs(model, shape),
        on_round_end=[recorder.on_round_end, live],
    )
    if values["engine"] == "inprocess":
        grid = InProcessGrid.inside(grid, client_app, context)
    recorder.keep_state(strategy=strategy, engine=grid)
    if values["resume"]:
        recorder.resume()
    with recorder.guard(), live:
        result = strategy.start(
            grid=grid,
            initial_arrays=to_record(model.state_dict()),
            num_rounds=num_rounds,
            timeout=values["round-timeout"],
            train_config=ConfigRecord({key: values[key] for key in ("learning-rate", "batch-size", "seed")}),
            evaluate_fn=evaluation(
                model,
                data,
                every=values["evaluate-every"],
                last=num_rounds,
                train_samples=values["train-loss-samples"],
            ),
        )
    recorder.finish(
        final_summary(recorder.rounds), {key: array.numpy() for key, array in result.arrays.items()}
    )
    title = (
        f"{values['method']} on {values['dataset']} (simulated seconds: preset {values['latency-preset']})"
    )
    print(round_table(recorder.rounds, title))
    print(f"Run folder: {recorder.folder}", flush=True)


def evaluation(
    model: nn.Module, data: FederatedData, *, every: int, last: int, train_samples: int = 0
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return the central evaluation of u: F(u) on the training data, loss and accuracy on the test data.

    It evaluates before the first round, every ``every`` rounds and after the last. F(u) is taken over
    ``train_samples`` training samples, the same ones each time and in every run; 0 for all.
    """
    scratch = model
    x, y = data.x, data.y
    if 0 < train_samples < len(y):
        chosen = generator(0, purpose=Purpose.EVALUATION).choice(len(y), train_samples, replace=False)
        index = torch.as_tensor(np.sort(chosen), device=y.device)
        x, y = x[index], y[index]

    def evaluate_u(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every and server_round != last:
            return None
        scratch.load_state_dict(to_state_dict(arrays, data.x.device))
        train = evaluate(scratch, x, y)
        test = evaluate(scratch, data.x_test, data.y_test)
        return MetricRecord({"loss": train.loss, "test-loss": test.loss, "accuracy": test.accuracy})

    return evaluate_u


def final_summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the run came to: its last round, and all replies that were lost, by reason."""
    lost: dict[str, int] = {}
    for record in rounds:
        for reason, count in record["rejected"].items():
            lost[reason] = lost.get(reason, 0) + count
    wall = sum(record["wall_seconds"] for record in rounds)
    return {"status": "completed", "last": rounds[-1], "lost-replies": lost, "wall-seconds": wall}
