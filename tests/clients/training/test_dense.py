"""Prepared steps of dense networks against the same stack by autograd."""

import pytest
import torch
from tests.clients.training.cases import IMAGES, ragged_works, torch_seeded
from torch import nn

from hedgerow.clients.training.dense import DenseSteps
from hedgerow.clients.training.stack import train_stack
from hedgerow.clients.training.stacked_layers import stacked_layers
from hedgerow.tasks import build_model


def _deep() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, 33), nn.ReLU(), nn.Linear(33, 17, bias=False), nn.Linear(17, 9),
        nn.Sequential(nn.ReLU(), nn.ReLU()), nn.Linear(9, 10),
    )  # fmt: skip


DENSE = {
    "logistic": lambda: build_model("logistic", IMAGES, 10, 0),
    "mlp": lambda: build_model("mlp", IMAGES, 10, 0),
    "deep": lambda: torch_seeded(_deep),
}


@pytest.mark.parametrize("steps", [[(10,) * 3] * 5, [(4, 4, 1), (4, 4, 1), (4,), ()], [(1, 2, 1)]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DENSE)
def test_prepared_steps_have_the_bits_of_autograd(name, dtype, steps, monkeypatch):
    model = DENSE[name]().to(dtype)
    works, layers = ragged_works(model, steps), stacked_layers(model, 3)
    assert layers is not None
    assert layers.dense is not None
    prepared = train_stack(model, works, layers=layers)
    layers.dense = None
    monkeypatch.setattr(DenseSteps, "step", None)
    for one, other in zip(prepared, train_stack(model, works, layers=layers), strict=True):
        assert one.metrics == other.metrics
        assert all(torch.equal(one.state[key], value) for key, value in other.state.items())


@pytest.mark.parametrize(
    "last",
    [nn.ReLU(), nn.Tanh(), nn.BatchNorm1d(10), nn.Linear(10, 10).requires_grad_(False)],
    ids=["a ReLU at the end", "another activation", "statistics", "a frozen layer"],
)
def test_other_networks_are_left_to_autograd(last, monkeypatch):
    monkeypatch.setattr(DenseSteps, "step", None)
    model = torch_seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 10), last))
    works = ragged_works(model, [(3, 3), (3,)])
    train_stack(model, works, layers=stacked_layers(model, 3))
