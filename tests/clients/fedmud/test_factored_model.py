"""Wrapped models: local SGD goldens (G8) of FedMUD, S. Li et al., and what a wrapper must never change."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.training.cases import IMAGES, torch_seeded
from torch import Tensor, nn

from hedgerow.clients import FactoredModel, LocalWork, Trained, local_sgd, wrap
from hedgerow.clients.training.stack import stackable
from hedgerow.tasks import build_model, count_parameters
from hedgerow.wire import FactoredLayer, Factorisation

UPDATES = ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+f", "mud+bkd+aad")
WEIGHTS = ("lmt", "para")


def third_party() -> nn.Module:
    """Normalisation, groups, a rectangular kernel, biases, a frozen layer: nothing of this suite's."""
    return torch_seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 8, (3, 1), groups=2, padding=(1, 0)),
            nn.GELU(),
            nn.Conv2d(8, 8, 3, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.Flatten(),
            nn.Linear(8 * 7 * 7, 12),
            nn.LayerNorm(12),
            nn.Linear(12, 12).requires_grad_(False),
            nn.Linear(12, 10),
        )
    )


def images(n: int = 6) -> Tensor:
    return torch.randn(n, *IMAGES, generator=torch.Generator().manual_seed(2))


def work(model: nn.Module, steps: int = 3, lr: float = 0.05, start: Any = None) -> LocalWork:
    state = copy.deepcopy(model.state_dict()) if start is None else start
    batches = [np.array([0, 1, 2, 3]), np.array([4, 5]), np.array([1, 5, 2])]
    return LocalWork(state, images(), torch.tensor([0, 1, 2, 3, 4, 5]), batches[:steps], lr)


def train(model: nn.Module, steps: int = 3) -> Trained:
    (trained,) = local_sgd(model, [work(model, steps)], mode="loop")
    return trained


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# Golden G8: local SGD on W = 0, x = (1, 2), y = (1, 0), loss ||.||^2 / 2, eta = 0.1, r = 1.


def one_layer(variant: str, rank: int = 1, m: int = 2, n: int = 2) -> Factorisation:
    layer = FactoredLayer("weight", (m, n), variant, rank=rank)
    return Factorisation(variant, (layer,), 0.1, "flat", False, m * n, 1.0)


def linear(variant: str, frozen: dict[str, Any], **factors: Any) -> FactoredModel:
    plain = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        plain.weight.zero_()
    model = FactoredModel(plain, one_layer(variant)).double()
    with torch.no_grad():
        for tree, values in ((model.factors, factors), (model.frozen, frozen)):
            for name, value in values.items():
                parameter = tree.get_parameter(f"weight:{name}")
                parameter.copy_(torch.tensor(value).reshape(parameter.shape))
    return model


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(-1) / 2


def golden_steps(model: FactoredModel, steps: int) -> Iterator[tuple[float, dict[str, list[float]], Tensor]]:
    """Yield each step's loss before it, and factors and Delta after it."""
    x, y = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[1.0, 0.0]]).double()
    for _ in range(steps):
        one = LocalWork(model.state_dict(), x, y, [np.array([0])], 0.1)
        (trained,) = local_sgd(model, [one], half_square, "loop")
        factors = {
            key[-1]: value.flatten().tolist() for key, value in model.factors_of(trained.state).items()
        }
        yield trained.mean_loss, factors, model.plan.deltas(model.factors_of(), frozen_of(model))["weight"]


def frozen_of(model: FactoredModel) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in model.frozen.named_parameters()}


def test_local_sgd_of_mud_is_the_golden_one() -> None:
    model = linear("mud", {}, U=[0.5, -0.5], V=[0.0, 0.0])
    one, two, three = golden_steps(model, 3)
    assert one[0] == pytest.approx(0.5, rel=1e-12)
    assert one[1]["U"] == [0.5, -0.5]
    assert one[1]["V"] == pytest.approx([0.05, 0.1], rel=1e-12)
    assert two[0] == pytest.approx(0.390625, rel=1e-12)
    assert two[1]["U"] == pytest.approx([0.521875, -0.496875], rel=1e-12)
    assert two[1]["V"] == pytest.approx([0.0875, 0.175], rel=1e-12)
    assert two[2].flatten().tolist() == pytest.approx(
        [0.0456640625, 0.091328125, -0.0434765625, -0.086953125], rel=1e-12
    )
    assert three[0] == pytest.approx(0.32137241363525, rel=1e-12)


def test_local_sgd_of_the_freezing_variant_and_of_aad_are_the_golden_ones() -> None:
    steps = list(golden_steps(linear("mud+f", {"U~": [0.5, -0.5]}, V=[0.0, 0.0]), 3))
    assert [loss for loss, _, _ in steps] == pytest.approx([0.5, 0.390625, 0.3291015625], rel=1e-12)
    for (_, factors, _), v in zip(steps, ([0.05, 0.1], [0.0875, 0.175], [0.115625, 0.23125]), strict=True):
        assert factors["V"] == pytest.approx(v, rel=1e-12)
    model = linear("mud+aad", {"U~": [0.5, -0.5], "V~": [1.0, -1.0]}, U=[0.0, 0.0], V=[0.0, 0.0])
    steps = list(golden_steps(model, 3))
    assert [loss for loss, _, _ in steps] == pytest.approx([0.5, 0.308125, 0.2086515625], rel=1e-12)
    expected = [
        ([-0.1, 0], [0.05, 0.1], [-0.075, 0.15, -0.025, -0.05]),
        ([-0.1775, -0.0125], [0.0825, 0.165], [-0.13625, 0.26, -0.05375, -0.07]),
        ([-0.239125, -0.031875], [0.103625, 0.20725], [-0.1873125, 0.34275, -0.0836875, -0.07175]),
    ]
    for (_, factors, delta), (u, v, d) in zip(steps, expected, strict=True):
        assert factors["U"] == pytest.approx(u, rel=1e-12)
        assert factors["V"] == pytest.approx(v, rel=1e-12)
        assert delta.flatten().tolist() == pytest.approx(d, rel=1e-12)


# What a wrapper computes.


@pytest.mark.parametrize("variant", UPDATES)
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_after_a_reset_the_wrapped_model_is_the_plain_one_bit_for_bit(variant: str, mode: bool) -> None:
    plain = third_party().train(mode)
    wrapped = wrap(plain, variant=variant, ratio=0.3, run_seed=3).train(mode)
    assert torch.equal(wrapped(images()), plain(images()))


@pytest.mark.parametrize("variant", UPDATES + WEIGHTS)
def test_the_dense_state_and_a_reset_from_it_compute_what_the_wrapped_model_does(
    variant: str,
) -> None:
    wrapped = wrap(third_party(), variant=variant, ratio=0.3)
    train(wrapped)
    merged = third_party()
    merged.load_state_dict(wrapped.dense_of())
    assert torch.allclose(merged.eval()(images()), wrapped.eval()(images()), rtol=1e-5, atol=1e-6)
    if variant in UPDATES:
        again = wrap(merged, wrapped.plan, run_seed=9)
        assert torch.equal(again.eval()(images()), merged.eval()(images()))


@pytest.mark.parametrize("variant", UPDATES + WEIGHTS)
def test_what_is_trained_is_what_the_plan_counts(variant: str) -> None:
    model = build_model("cnn4", (1, 16, 16), 10, 0)
    wrapped = wrap(model, variant=variant)
    assert count_parameters(wrapped) == wrapped.plan.count + wrapped.plan.uncompressed
    assert count_parameters(wrapped) == round(wrapped.plan.ratio * count_parameters(model))


@pytest.mark.parametrize("variant", UPDATES)
def test_every_layer_learns_and_bases_and_frozen_factors_stay(variant: str) -> None:
    wrapped = wrap(third_party(), variant=variant, ratio=0.3, init_a=0.5)
    base = {key: value.clone() for key, value in wrapped.dense_of().items()}
    fixed = {name: p.detach().clone() for name, p in wrapped.named_parameters() if not p.requires_grad}
    assert {f"plain.{layer.key}" for layer in wrapped.plan.layers} < fixed.keys()
    wrapped(images()).square().sum().backward()
    assert all(p.grad is None for name, p in wrapped.named_parameters() if name in fixed)
    state = train(wrapped).state
    assert all(torch.equal(state[name], value) for name, value in fixed.items())
    dense = wrapped.dense_of(state)
    assert all(not torch.equal(dense[layer.key], base[layer.key]) for layer in wrapped.plan.layers)


# Degenerations.


def test_aad_with_an_identity_and_a_zero_for_frozen_factors_is_fedavg() -> None:
    plain = torch_seeded(lambda: nn.Linear(3, 4, bias=False))
    wrapped = FactoredModel(plain, one_layer("mud+aad", rank=3, m=4, n=3))
    with torch.no_grad():
        wrapped.frozen.get_parameter("weight:V~").copy_(torch.eye(3))
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    batches = [np.arange(8), np.arange(4)]
    (dense,) = local_sgd(plain, [LocalWork(plain.state_dict(), x, y, batches, 0.5)], mode="loop")
    (factored,) = local_sgd(wrapped, [LocalWork(wrapped.state_dict(), x, y, batches, 0.5)], mode="loop")
    assert torch.allclose(
        wrapped.dense_of(factored.state)["weight"], dense.state["weight"], rtol=0, atol=1e-6
    )


def test_mud_on_a_zero_base_with_both_factors_drawn_is_fedlmt_bit_for_bit() -> None:
    lmt = wrap(third_party(), variant="lmt", ratio=0.3, budget="layer")
    mud = wrap(third_party(), variant="mud", ratio=0.3, budget="layer")
    zero = {layer.key: torch.zeros(layer.shape) for layer in mud.plan.layers}
    start = mud.state_from(lmt.rest_of(), lmt.factors_of(), {}, zero)
    (a,) = local_sgd(mud, [work(mud, start=start)], mode="loop")
    b = train(lmt)
    assert a.mean_loss == b.mean_loss
    assert same(mud.factors_of(a.state), lmt.factors_of(b.state))
    assert same(mud.rest_of(a.state), lmt.rest_of(b.state))


# Its state dict.


@pytest.mark.parametrize("variant", UPDATES + WEIGHTS)
def test_the_parts_of_a_state_make_it_up(variant: str) -> None:
    plain = third_party()
    wrapped = wrap(plain, variant=variant, ratio=0.3, run_seed=4)
    factors, frozen = wrapped.plan.init(4, 0), wrapped.plan.frozen(4, 0)
    state = wrapped.state_from(wrapped.rest_of(), factors, frozen, plain.state_dict())
    own = wrapped.state_dict()
    assert {k: v for k, v in own.items() if k in state}.keys() == own.keys()
    assert same(wrapped.factors_of(), factors)
    assert same({k: v for k, v in state.items() if k in own}, dict(own))


def test_what_is_not_compressed_has_the_plain_models_keys_and_the_plain_model_stays() -> None:
    plain = third_party()
    before = copy.deepcopy(plain.state_dict())
    wrapped = wrap(plain, variant="lmt", ratio=0.3)
    compressed = {layer.key for layer in wrapped.plan.layers}
    assert compressed == {"3.weight", "5.weight", "8.weight"}
    assert wrapped.rest_of().keys() == plain.state_dict().keys() - compressed
    train(wrapped)
    assert same(plain.state_dict(), before)
    assert plain[3].weight.requires_grad


@pytest.mark.parametrize("variant", ["mud+aad", "mud+bkd", "para"])
def test_a_stack_trains_what_the_loop_trains(variant: str) -> None:
    wrapped = wrap(build_model("lenet", IMAGES, 10, 0), variant=variant, ratio=0.3)
    assert stackable(wrapped) is None
    works = [work(wrapped, steps) for steps in (3, 2, 0)]
    loop, stack = (local_sgd(wrapped, works, mode=mode) for mode in ("loop", "stack"))
    for a, b in zip(loop, stack, strict=True):
        assert a.mean_loss == pytest.approx(b.mean_loss, rel=1e-5)
        worst = max(float((a.state[k] - b.state[k]).abs().max()) for k in a.state if a.state[k].numel())
        assert worst < 1e-6


# Evaluation mode remembers the weights.


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FactoredModel, list[int]]]:
    reconstructions: list[int] = []
    deltas = Factorisation.deltas

    def counting(*arguments: Any) -> dict[str, Tensor]:
        reconstructions.append(1)
        return deltas(*arguments)

    monkeypatch.setattr(Factorisation, "deltas", counting)
    model = wrap(build_model("lenet", IMAGES, 10, 0), variant="mud", ratio=0.3).eval()
    with torch.no_grad():
        yield model, reconstructions


def test_evaluation_reconstructs_once_lets_gradients_flow_and_sees_another_precision(
    evaluated: tuple[FactoredModel, list[int]],
) -> None:
    model, reconstructions = evaluated
    outputs = [model(images()) for _ in range(3)]
    assert len(reconstructions) == 1
    assert torch.equal(outputs[0], outputs[2])
    with torch.enable_grad():
        model(images()).sum().backward()
    assert all(p.grad is not None for p in model.factors.parameters())
    assert model.double()(images().double()).dtype == torch.float64


def test_a_change_is_seen(evaluated: tuple[FactoredModel, list[int]]) -> None:
    model, _ = evaluated
    before = model(images())
    for value in model.factors.parameters():
        value.add_(0.1)
    in_place = model(images())
    model.load_state_dict(
        {k: v + 0.1 if k.startswith("factors.") else v for k, v in model.state_dict().items()}
    )
    loaded = model(images())
    assert not torch.equal(before, in_place)
    assert not torch.equal(in_place, loaded)


def test_a_change_of_a_copy_is_seen(evaluated: tuple[FactoredModel, list[int]]) -> None:
    model, _ = evaluated
    for value in model.factors.parameters():
        value.add_(0.1)
    before = model(images())
    twin = copy.deepcopy(model)
    changes = next(twin.factors.parameters())._version, next(model.factors.parameters())._version
    for value in twin.factors.parameters():
        for _ in range(changes[1] - changes[0]):
            value.add_(0.1)
    assert not torch.equal(twin(images()), before)


# Errors.


def test_a_plan_of_another_model_and_a_weight_of_two_layers_are_refused() -> None:
    plan = wrap(build_model("lenet", IMAGES, 10, 0), variant="mud", ratio=0.3).plan
    with pytest.raises(ValueError, match=r"must have the plan's conv2\.weight of shape .*got"):
        FactoredModel(build_model("mlp", IMAGES, 10, 0), plan)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    plan = wrap(model, variant="mud", ratio=1.0, skip_front=1, skip_back=0).plan
    model[2].weight = model[1].weight
    with pytest.raises(ValueError, match=r"the model must have the plan's 1\.weight"):
        FactoredModel(model, plan)
