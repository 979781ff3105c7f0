"""The two nets for the libraries that train torch modules, with the task's weights."""

import torch
from task import Task
from torch import Tensor, nn


def build(task: Task) -> nn.Sequential:
    """Return the task's net; names of parameters are those of ``task.weights``."""
    net = nn.Sequential()
    if task.model == "lenet":
        net.add_module("conv1", nn.Conv2d(1, 10, 5))
        net.add_module("pool1", nn.MaxPool2d(2))
        net.add_module("relu1", nn.ReLU())
        net.add_module("conv2", nn.Conv2d(10, 20, 5))
        net.add_module("pool2", nn.MaxPool2d(2))
        net.add_module("relu2", nn.ReLU())
        net.add_module("flatten", nn.Flatten())
        net.add_module("linear1", nn.Linear(320, 50))
        net.add_module("relu3", nn.ReLU())
        net.add_module("linear2", nn.Linear(50, 10))
    else:
        net.add_module("flatten", nn.Flatten())
        net.add_module("linear", nn.Linear(784, 10))
    net.load_state_dict({key: torch.from_numpy(value) for key, value in task.weights.items()})
    return net


def client_data(task: Task, client: int) -> tuple[Tensor, Tensor]:
    """Return one client's samples and labels."""
    part = task.parts[client]
    return torch.from_numpy(task.x[part]), torch.from_numpy(task.y[part])


@torch.no_grad()
def accuracy(net: nn.Module, task: Task) -> float:
    """Return the share of test samples that the net gets right."""
    net.eval()
    right = net(torch.from_numpy(task.x_test)).argmax(1) == torch.from_numpy(task.y_test)
    return right.double().mean().item()
