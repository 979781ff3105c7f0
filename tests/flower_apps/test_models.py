"""Networks of a user's own, in all apps that average a torch model."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.flower_apps.cases import FEDMUD, SD_FEEL, SIMILARITY_FREE, AppCase, losses
from torch import Tensor, nn

from hedgerow.sim import SettingsError, read_model

APPS = [SD_FEEL, SIMILARITY_FREE, FEDMUD]
every_app = pytest.mark.parametrize("case", APPS, ids=lambda case: case.name)
START = 2**40
PLANS = {FEDMUD.name: {"ratio": 0.9, "skip-front": 0, "skip-back": 0}}


class Counting(nn.Module):
    """Counts its batches, from a number that float32 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(784, 20), nn.Linear(20, 10)
        self.register_buffer("count", torch.tensor(START))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.last(torch.relu(self.layer(x.flatten(1))))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two layers with one weight, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (
            nn.Linear(784, 20), nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 10),
        )  # fmt: skip
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(torch.relu(self.first(x.flatten(1)))))
        return self.last(torch.relu(self.b(x)))  # type: ignore[no-any-return]


def still(*_: Any) -> nn.Module:
    return Counting().requires_grad_(False)


def counting(*_: Any) -> nn.Module:
    return Counting()


def tied(*_: Any) -> nn.Module:
    return Tied()


@pytest.fixture(autouse=True)
def own_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_networks", sys.modules[__name__])


@every_app
def test_a_counter_counts_on_from_any_number_and_no_update_is_too_large(
    case: AppCase, tmp_path: Path
) -> None:
    rounds = case.run(tmp_path, model="own_networks:counting", **PLANS.get(case.name, {}))
    assert all(not one["rejected"] for one in rounds)
    (folder,) = tmp_path.iterdir()
    assert START < int(read_model(folder)["count"]) < START + 10_000


@every_app
def test_a_weight_of_two_layers_stays_one(case: AppCase, tmp_path: Path) -> None:
    found = losses(case.run(tmp_path, model="own_networks:tied", **PLANS.get(case.name, {})))
    assert found[-1] < found[0]
    (folder,) = tmp_path.iterdir()
    model = read_model(folder)
    assert (model["a.weight"] == model["b.weight"]).all()


@every_app
def test_a_model_with_nothing_to_train_is_refused(case: AppCase, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="model must have a parameter with requires_grad=True, got none"):
        case.run(tmp_path, model="own_networks:still", **PLANS.get(case.name, {}))
