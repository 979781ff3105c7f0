"""Hedgerow: the SD-FEEL app's client and its FEEL baseline (FedAvg over a drawn cohort), in process.

Modes: ``auto``, ``loop`` and ``stack`` (the run-config key ``training-mode``). A client's four batches of a
round are drawn independently of each other, not as one shuffled epoch: the same number of steps and samples.
"""

import logging

import numpy as np
import torch
from flwr.app import ConfigRecord
from task import BATCH, CLIENTS, COHORT, LR, Rounds, read_task

from hedgerow.clients import sd_feel_client
from hedgerow.clients.local_training import LocalTraining
from hedgerow.sim.engine._compat import flower_identity
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.strategies import Feel
from hedgerow.tasks import build_model, evaluate, federated
from hedgerow.wire.records import to_record


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    task, rounds = read_task(), Rounds()
    data = federated("mnist-5k", "iid", CLIENTS, 0)
    assert np.array_equal(data.x.numpy(), task.x)
    assert np.array_equal(np.stack(data.parts), task.parts)

    train = LocalTraining.sgd

    def counted(self, model, works):
        rounds.step(sum(len(work.batches) for work in works))
        return train(self, model, works)

    LocalTraining.sgd = counted

    model = build_model(task.model, (1, 28, 28), 10, 0)
    assert all(np.array_equal(value, task.weights[key]) for key, value in model.state_dict().items())
    run_config = {
        "dataset": "mnist-5k",
        "partition": "iid",
        "num-clients": CLIENTS,
        "model": task.model,
        "seed": 0,
        "training-mode": task.mode,
    }
    strategy = Feel(
        clients_per_round=COHORT,
        tau1=task.parts.shape[1] // BATCH,
        seed=task.seed,
        fraction_evaluate=0.0,
        min_available_nodes=CLIENTS,
        on_round_end=[lambda end: rounds.end() if end.round else rounds.start()],
    )
    grid = InProcessGrid(sd_feel_client(), CLIENTS, run_config=run_config)
    rounds.start()
    with flower_identity(grid.run.run_id):
        result = strategy.start(
            grid=grid,
            initial_arrays=to_record(model.state_dict()),
            num_rounds=task.rounds,
            train_config=ConfigRecord({"learning-rate": LR, "batch-size": BATCH, "seed": task.seed}),
        )
    model.load_state_dict({key: torch.from_numpy(array.numpy()) for key, array in result.arrays.items()})
    accuracy = evaluate(model, data.x_test, data.y_test).accuracy
    rounds.report(accuracy, f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
