"""Model, data, and loops of training and evaluation, as any PyTorch user writes them."""

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A convolutional network of 61,706 parameters for images of 32 x 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, 10)."""
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


@cache
def images(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 4,000 images of digits, padded to 32 x 32, and their classes."""
    with np.load(path) as file:
        x, y = torch.from_numpy(file["images"][:4000]), torch.from_numpy(file["labels"][:4000])
    return nn.functional.pad(x.view(-1, 1, 28, 28) / 255.0, (2, 2, 2, 2)), y.long()


def loader(path: str, node: int, nodes: int, batch_size: int) -> DataLoader:
    """Return every ``nodes``-th image, in a new order for each epoch."""
    x, y = images(path)
    return DataLoader(TensorDataset(x[node::nodes], y[node::nodes]), batch_size=batch_size, shuffle=True)


def train(net: nn.Module, batches: DataLoader, lr: float) -> float:
    """Train one epoch; return the mean loss of its batches."""
    criterion, total = nn.CrossEntropyLoss(), 0.0
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(batches)


def test(net: nn.Module, batches: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy."""
    criterion, loss, correct, count = nn.CrossEntropyLoss(reduction="sum"), 0.0, 0, 0
    net.eval()
    with torch.no_grad():
        for x, y in batches:
            outputs = net(x)
            loss += criterion(outputs, y).item()
            correct += (outputs.argmax(1) == y).sum().item()
            count += len(y)
    return loss / count, correct / count
