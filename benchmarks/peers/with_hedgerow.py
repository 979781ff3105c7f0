"""Hedgerow: the SD-FEEL app's client and its FEEL baseline (FedAvg over a drawn cohort), in process.

Modes: ``auto``, ``loop`` and ``stack`` (the run-config key ``training-mode``), and ``workers``: ``auto`` in
two worker processes, to which the engine deals the nodes. A client's four batches of a round are drawn
independently of each other, not as one shuffled epoch: the same number of steps and samples.
"""

import logging
import multiprocessing

import numpy as np
import torch
from flwr.app import ConfigRecord
from task import BATCH, CLIENTS, COHORT, LR, Rounds, read_task

from hedgerow.clients import sd_feel_client
from hedgerow.clients.training.sgd import LocalTraining
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

    # Workers are forked from here: they count in the same memory.
    steps = multiprocessing.get_context("fork").Value("q", 0)
    train = LocalTraining.sgd

    def counted(self, model, works):
        with steps:
            steps.value += sum(len(work.batches) for work in works)
        return train(self, model, works)

    LocalTraining.sgd = counted

    def end_round() -> None:
        with steps:
            rounds.step(steps.value)
            steps.value = 0
        rounds.end()

    model = build_model(task.model, (1, 28, 28), 10, 0)
    assert all(np.array_equal(value, task.weights[key]) for key, value in model.state_dict().items())
    run_config = {
        "dataset": "mnist-5k",
        "partition": "iid",
        "num-clients": CLIENTS,
        "model": task.model,
        "seed": 0,
        "training-mode": "auto" if task.mode == "workers" else task.mode,
    }
    strategy = Feel(
        clients_per_round=COHORT,
        tau1=task.parts.shape[1] // BATCH,
        seed=task.seed,
        fraction_evaluate=0.0,
        min_available_nodes=CLIENTS,
        on_round_end=[lambda end: end_round() if end.round else rounds.start()],
    )
    workers = 2 if task.mode == "workers" else 1
    grid = InProcessGrid(sd_feel_client(), CLIENTS, run_config=run_config, workers=workers)
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
