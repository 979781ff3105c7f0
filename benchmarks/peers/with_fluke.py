"""fluke: its FedAVG from its Python API, in memory (its default), evaluation off."""

from importlib.metadata import version

import torch
import torchvision_without_kernels  # noqa: F401 - before fluke, which imports torchvision
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver
from task import BATCH, CLIENTS, COHORT, LR, Rounds, Task, read_task
from torch import nn
from torch_nets import accuracy, build, client_data


class Stopwatch(FederationObserver):
    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def start_round(self, round, global_model):
        self.rounds.start()

    def end_round(self, round):
        self.rounds.end()


def loader(task: Task, client: int) -> FastDataLoader:
    x, y = client_data(task, client)
    return FastDataLoader(x, y, num_labels=10, batch_size=BATCH, shuffle=True)


def main() -> None:
    task, rounds = read_task(), Rounds()
    environment = FlukeENV()
    environment.set_seed(task.seed)
    environment.set_device("cpu")
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [loader(task, client) for client in range(CLIENTS)]
    data = DummyDataContainer(loaders, [None] * CLIENTS, None, num_classes=10)

    class CountedLoss(nn.CrossEntropyLoss):
        def forward(self, outputs, targets):
            rounds.step()
            return super().forward(outputs, targets)

    net = build(task)
    algorithm = FedAVG(
        CLIENTS,
        DataSplitter(data),
        DDict(
            model=net,
            client=DDict(
                batch_size=BATCH,
                local_epochs=1,
                loss=CountedLoss,
                optimizer=DDict(name="SGD", lr=LR),
                scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            ),
            server=DDict(weighted=True),
        ),
    )
    algorithm.set_callbacks([Stopwatch(rounds)])
    algorithm.run(task.rounds, COHORT / CLIENTS)
    rounds.report(
        accuracy(algorithm.server.model, task), f"fluke {version('fluke-fl')}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
