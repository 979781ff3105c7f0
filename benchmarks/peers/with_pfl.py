"""Apple's pfl-research: SimulatedBackend, FederatedAveraging, PyTorchModel.

Mode: ``plain``. Started by torchrun it spreads the cohort over processes. In its favour: each user's
tensors are made once and its batches are cached, as pfl does, so that nothing is shuffled; no metrics are
written. Its option ``use_torch_compile`` is left out: pfl 0.6 calls the module's ``loss``, which the
compiled module hands on to the one that is not compiled, so that nothing is compiled.
"""

from importlib.metadata import version

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import BATCH, CLIENTS, COHORT, LR, Rounds, Task, read_task
from torch import nn
from torch_nets import accuracy, build, client_data


class Net(nn.Module):
    """What pfl asks of a module: a loss, and metrics, which it takes in the first round only."""

    def __init__(self, task: Task, rounds: Rounds) -> None:
        super().__init__()
        self.net = build(task)
        self.rounds = rounds

    def forward(self, x):
        return self.net(x)

    def loss(self, x, y):
        self.rounds.step()
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y):
        return {"loss": Weighted(0.0, len(y))}


class Stopwatch(TrainingProcessCallback):
    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def on_train_begin(self, *, model):
        self.rounds.start()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.rounds.end()
        return False, Metrics()


def users(seed: int):
    """Draw cohorts without replacement, one user at a call (pfl's own "random" may repeat a user)."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.choice(CLIENTS, COHORT, replace=False).tolist()


def main() -> None:
    task, rounds = read_task(), Rounds()
    np.random.seed(task.seed)  # noqa: NPY002 - what pfl draws from
    datasets = [PyTorchTensorDataset(client_data(task, client)) for client in range(CLIENTS)]
    draw = users(task.seed)
    training_data = FederatedDataset(datasets.__getitem__, lambda: next(draw))
    net = Net(task, rounds)
    model = PyTorchModel(
        net,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds + 1,
            train_cohort_size=COHORT,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=training_data, val_data=training_data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH
        ),
        callbacks=[Stopwatch(rounds)],
        send_metrics_to_platform=False,
    )
    steps = torch.tensor(rounds.steps)
    rounds.steps = pytorch_ops.distributed.all_reduce([steps])[0].tolist()
    if pytorch_ops.distributed.global_rank == 0:
        rounds.report(accuracy(net, task), f"pfl {version('pfl')}, torch {torch.__version__}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
