"""FedMUD's app: defaults that train, one budget for all methods, and what is told of it."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.flower_apps.cases import FEDMUD, losses

from fedmud.settings import METHODS, build_strategy, read
from hedgerow.strategies.fedmud import CompressedLayers
from hedgerow.tasks import build_model
from hedgerow.wire import layers_of

COMPRESSING = [method for method in METHODS if method != "fedavg"]


@lru_cache
def cnn4() -> torch.nn.Module:
    return build_model("cnn4", (1, 28, 28), 10, 0)


def strategy(**changes: Any) -> CompressedLayers[Any]:
    return build_strategy(read({**FEDMUD.defaults, **changes}), cnn4())


# Defaults


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_with_its_own_step_size_and_width(method: str, tmp_path: Path) -> None:
    enough = {"num-rounds": 2, "local-epochs": 3, "batch-size": 64}
    told = losses(FEDMUD.run(tmp_path, method=method, **enough))
    assert len(told) == 3
    assert max(told) < 1.2 * told[0]
    assert told[2] < 0.9 * told[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_no_method_explodes_in_the_default_run(method: str, tmp_path: Path) -> None:
    from hedgerow.sim import plan_run, read_rounds, run_app

    run_app(FEDMUD.loaded, plan_run(FEDMUD.spec, [f"method='{method}' num-rounds=8 output-dir='{tmp_path}'"]))
    told = losses(read_rounds(next(tmp_path.iterdir())))
    # Before running statistics have followed the weights, the loss in evaluation says little.
    assert max(told) < 2 * told[0]
    assert told[-1] < 0.75 * told[0]


def test_the_published_pair_is_the_default_of_the_method_that_it_is_of() -> None:
    own = strategy()
    assert (own.learning_rate, own.compression.init_a) == (0.01, 5.0)
    assert strategy(method="fedavg").learning_rate == 0.03


@pytest.mark.parametrize("method", [m for m in METHODS if m.startswith("fedmud")])
def test_a_larger_step_has_a_smaller_width_of_the_same_gain(method: str) -> None:
    one, other = (strategy(method=method, **{"learning-rate": rate}) for rate in (0.01, 0.04))
    assert one.compression.init_a == pytest.approx(2 * other.compression.init_a, rel=1e-3)


@pytest.mark.parametrize("method", ["fedlmt", "fedpara"])
def test_factored_weights_begin_about_as_large_as_he_draws_them(method: str) -> None:
    own = strategy(method=method, ratio=0.125)
    weights = own.plan.merge({}, own.plan.init(0, 0), {})
    ratios = [
        float(weights[layer.key].square().mean()) / (2 / (layer.size / layer.shape[0]))
        for layer in own.plan.layers
    ]
    assert 0.1 < min(ratios) < 1 < max(ratios) < 10


# The budget


@pytest.mark.parametrize("ratio", [1 / 32, 1 / 16, 1 / 8])
@pytest.mark.parametrize("method", COMPRESSING)
def test_every_method_fits_one_budget_of_the_model_both_ways(method: str, ratio: float) -> None:
    own = strategy(method=method, ratio=ratio)
    most, least = ratio + 0.001, 0.8 * ratio
    assert own.uplink_ratio <= most
    # FedEx-LoRA's residual comes on top of the factors.
    assert (own.downlink_ratio <= most) == (method != "fedex-lora")
    # A sign a weight is all that FedBAT has to send.
    if method != "fedbat" or ratio <= 1 / 32:
        assert min(own.uplink_ratio, own.downlink_ratio) >= least


@pytest.mark.parametrize("method", COMPRESSING)
def test_every_method_fits_one_budget_of_the_layers(method: str) -> None:
    own = strategy(method=method, budget="layer")
    dense = sum(layer.size for layer in layers_of(cnn4())[1:-1])
    # FedEx-LoRA's residual comes on top of the factors.
    for coded in own.coded_bits[: 1 if method == "fedex-lora" else 2]:
        # Sizes are rounded up: by an eighth where blocks are Kronecker products with one frozen factor.
        assert 0.9 * dense <= coded <= 1.13 * dense


def test_a_round_tells_what_the_ratio_came_to(tmp_path: Path) -> None:
    rounds = FEDMUD.run(tmp_path, method="ef21-p", **{"num-rounds": 1})
    told = rounds[-1]["train"]
    assert 0.24 < told["downlink-ratio"] <= told["uplink-ratio"] <= 0.251


# Other matrices, other samples


def test_the_view_of_two_convolutions_trains_another_model(tmp_path: Path) -> None:
    small = {"model": "lenet", "num-rounds": 1, "init-a": 0.3, "learning-rate": 0.05}
    one, other = (
        FEDMUD.run(tmp_path, method="fedlmt", view=view, **small) for view in ("buffer", "convolutions")
    )
    assert one[-1]["payload_bytes"] == other[-1]["payload_bytes"]
    assert losses(one) != losses(other)


def test_the_preset_of_text_runs_with_what_the_package_brings(tmp_path: Path) -> None:
    from hedgerow.sim import plan_run, read_rounds, run_app

    short = f"num-rounds=1 clients-per-round=2 local-epochs=1 output-dir='{tmp_path}'"
    run_app(FEDMUD.loaded, plan_run(FEDMUD.spec, [str(FEDMUD.folder / "text.toml"), short]))
    before, after = losses(read_rounds(next(tmp_path.iterdir())))
    assert after < before
