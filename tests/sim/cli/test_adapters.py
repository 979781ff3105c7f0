"""A run's adapter leads from the model with which it began to the one that it trained."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.flower_apps.cases import FEDMUD
from tests.sim.cli.command_line import hedgerow
from tests.sim.runs.test_trained import trained
from torch import nn

from hedgerow.sim import load_model
from hedgerow.sim.cli.adapters import adapter_of
from hedgerow.sim.runs.trained import initial_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(12, 10), nn.Linear(10, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.two(torch.tanh(self.one(x)))))
        return out


def changed(rank: int, **biases: float) -> Net:
    net = Net()
    with torch.no_grad():
        net.one.weight += torch.randn(10, rank) @ torch.randn(rank, 12)
        net.head.weight += torch.randn(3, 8)
        for module, value in biases.items():
            net.get_submodule(module).bias += value
    return net


@pytest.mark.parametrize("rank", [1, 4])
def test_a_change_of_low_rank_is_factors_and_every_other_is_in_full(rank: int) -> None:
    net = changed(rank, one=0.5, norm=1.0)
    adapter = adapter_of(Net(), net)
    ((module, (a, b)),) = adapter.factors.items()
    assert (module, a.shape, b.shape) == ("one", (rank, 12), (10, rank))
    torch.testing.assert_close(b @ a, net.one.weight - Net().one.weight, rtol=0, atol=1e-5)
    assert adapter.whole.keys() == {"head", "norm"}
    assert torch.equal(adapter.biases["one"], net.one.bias)
    assert "two" not in str(adapter)


def test_what_no_adapter_describes_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear weight by a product of low rank"):
        adapter_of(Net(), Net())
    with pytest.raises(ValueError, match="no linear weight by a product of low rank"):
        adapter_of(Net(), changed(9))
    with pytest.raises(
        ValueError, match="--max-rank must be at least 4, the rank of the change of one, got 3"
    ):
        adapter_of(Net(), changed(4), 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(
        FEDMUD,
        tmp_path_factory.mktemp("adapters"),
        **{"method": "lora", "layers": "linear1", "skip-front": 1, "ratio": 0.1, "num-rounds": 2},
    )


def test_a_runs_adapter_is_its_model(run: Path, tmp_path: Path) -> None:
    told = hedgerow("export", run, "--adapter", tmp_path / "adapter")
    assert told.exit_code == 0, told.output
    model, base = load_model(run), initial_model(run)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["linear1"]
    assert config["modules_to_save"] == ["linear2"]
    assert config["lora_alpha"] == config["r"]
    arrays = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a, b = (arrays[f"base_model.model.linear1.lora_{side}.weight"] for side in "AB")
    assert len(a) == config["r"]
    base.get_submodule("linear1").weight.data += b @ a
    torch.testing.assert_close(base.state_dict()["linear1.weight"], model.state_dict()["linear1.weight"])


def test_peft_loads_the_adapter(run: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    assert hedgerow("export", run, "--adapter", tmp_path).exit_code == 0
    x = torch.randn(5, 1, 28, 28)
    loaded = peft.PeftModel.from_pretrained(initial_model(run), tmp_path).eval()
    torch.testing.assert_close(loaded(x), load_model(run)(x), rtol=0, atol=1e-5)


def test_without_the_folder_of_one_run_it_is_refused(tmp_path: Path) -> None:
    told = hedgerow("export", tmp_path, "--adapter", tmp_path / "adapter")
    assert told.exit_code == 2
    assert "--adapter must be used with the folder of one run" in told.output
