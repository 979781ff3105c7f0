"""Nodes learn in a stack what they learn one by one, whatever the model; another stack is not used."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.training.cases import ragged_works, torch_seeded
from torch import Tensor, nn

from hedgerow.clients import LocalWork, Trained, local_sgd
from hedgerow.clients.training import dense
from hedgerow.clients.training import stacked_layers as layers
from hedgerow.clients.training.stack import stackable
from hedgerow.clients.training.work import Asked
from hedgerow.global_draws import GlobalDraws

WIDTH = 6


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn_like(x)


class NumpyNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.uniform(0.5, 1.5))  # noqa: NPY002


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) if random.random() < 0.5 else x


class OwnGenerators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torch, self.numpy = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.legacy, self.python = np.random.RandomState(3), random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        more = self.numpy.uniform() + self.legacy.uniform() + self.python.uniform(0, 1)
        return x + more * torch.randn(x.shape, generator=self.torch)


class Counting(nn.Module):
    """Changes a buffer that is in no state dict."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x / self.count


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.sum() > 0 else x


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)


def with_hook(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = nn.Linear(WIDTH, WIDTH)
        if kind == "forward":
            module.register_forward_hook(lambda m, inputs, out: 2 * out)
        elif kind == "forward-kwargs":
            module.register_forward_hook(lambda m, inputs, kwargs, out: 2 * out, with_kwargs=True)
        elif kind == "before":
            module.register_forward_pre_hook(lambda m, inputs: (2 * inputs[0],))
        elif kind == "backward":
            module.register_full_backward_hook(lambda m, inputs, outputs: (2 * inputs[0],))
        elif kind == "backward-before":
            module.register_full_backward_pre_hook(lambda m, outputs: (2 * outputs[0],))
        elif kind == "gradient":
            module.weight.register_hook(lambda gradient: 2 * gradient)
        else:
            module.forward = lambda x: 2 * nn.functional.linear(x, module.weight)  # type: ignore[method-assign]
        return module

    return build


HOOKS = ("forward", "forward-kwargs", "before", "backward", "backward-before", "gradient", "own forward")
DRAWING: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.5),
    "noise": Noise,
    "numpy": NumpyNoise,
    "depth": StochasticDepth,
    "own": OwnGenerators,
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "frozen": frozen,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "flatten": nn.Flatten,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "bare batch norm": lambda: nn.BatchNorm1d(WIDTH, affine=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "scale": Scale,
    "counting": Counting,
    "counted": lambda: Counting(persistent=True),
    "branch": Branch,
    **{f"hook {kind}": with_hook(kind) for kind in HOOKS},
    **DRAWING,
}

Recipe = list[tuple[str, bool, bool]]  # of each layer: its name, whether it is used again later, is nested
recipes = st.lists(
    st.tuples(st.sampled_from(sorted(LAYERS)), st.booleans(), st.booleans()), min_size=1, max_size=4
)


def network(recipe: Recipe, tied: bool) -> nn.Module:
    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    again: list[nn.Module] = []
    for name, reused, nested in recipe:
        layer = LAYERS[name]()
        parts.append(nn.Sequential(layer, nn.ReLU()) if nested else layer)
        again += [parts[-1]] if reused else []
    parts += again
    parts.append(nn.Linear(WIDTH, WIDTH))
    if tied:
        parts[-1].weight = parts[0].weight
    return nn.Sequential(*parts)


def nodes(model: nn.Module, lengths: list[tuple[int, ...]]) -> list[LocalWork]:
    works = ragged_works(model, lengths, (WIDTH,))
    return [
        replace(work, y=work.y % WIDTH, lr=0.1, asked=Asked(np.arange(40), 4, 1, 2, partition_id))
        for partition_id, work in enumerate(works)
    ]


def same_bits(ours: list[Trained], theirs: list[Trained]) -> bool:
    return all(
        torch.equal(a.state[key], b.state[key]) and a.mean_loss == b.mean_loss
        for a, b in zip(ours, theirs, strict=True)
        for key in b.state
    )


def agree(ours: list[Trained], theirs: list[Trained]) -> bool:
    return all(
        torch.allclose(a.state[key], b.state[key], rtol=1e-4, atol=1e-4, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
        for key in b.state
    )


@settings(max_examples=60, deadline=None)
@given(recipe=recipes, tied=st.booleans())
def test_a_random_network_learns_the_same_in_every_mode_and_company(recipe: Recipe, tied: bool) -> None:
    model = torch_seeded(lambda: network(recipe, tied))
    works = nodes(model, [(4, 4), (4, 4), (3, 4), (4,)])
    before = GlobalDraws.now()
    one_by_one = [local_sgd(model, [work], mode="loop")[0] for work in works]
    assert same_bits(local_sgd(model, works, mode="loop"), one_by_one)
    assert same_bits(local_sgd(model, works[::-1], mode="loop")[::-1], one_by_one)
    assert agree(local_sgd(model, works), one_by_one)
    if stackable(model) is None:
        assert agree(local_sgd(model, works, mode="stack"), one_by_one)
    assert not before.moved


@pytest.mark.parametrize("name", DRAWING)
def test_draws_are_of_the_seed_the_round_and_the_node(name: str) -> None:
    model = torch_seeded(lambda: network([(name, False, False)], tied=False))
    (work,) = nodes(model, [(4,) * 16])
    assert work.asked is not None

    def loss(**changes: int) -> float:
        return local_sgd(model, [replace(work, asked=replace(work.asked, **changes))])[0].mean_loss

    found = [loss(), loss(seed=2), loss(round=3), loss(partition_id=1)]
    assert loss() == found[0]
    assert len(set(found)) == 4


# Each a mistake in the arithmetic of a stack.
MISTAKES: dict[str, tuple[str, Callable[..., object]]] = {
    "an activation is left out": ("_relu", lambda parameters, x: x),
    "its gradient is lost": ("_relu", lambda parameters, x: torch.relu(x.detach())),
    "nodes see each other": ("_relu", lambda parameters, x: torch.relu(x) + 0.01 * x.mean(0)),
    "a bias is left out": (
        "_linear",
        lambda prefix: lambda parameters, x: layers.product(parameters[f"{prefix}weight"], x),
    ),
    "it fails": ("_relu", lambda parameters, x: x.view(-1, 7)),
    "a prepared step is too long": ("step", lambda *given: _longer(*STEP(*given))),
    "a prepared step has another loss": ("step", lambda *given: (STEP(*given)[0] + 1, STEP(*given)[1])),
}
STEP = dense.DenseSteps.step


def _longer(losses: Tensor, gradients: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return losses, {name: 1.01 * gradient for name, gradient in gradients.items()}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_stack_is_found_before_it_trains_a_node(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, mistake = MISTAKES[name]
    monkeypatch.setattr(layers if hasattr(layers, place) else dense.DenseSteps, place, mistake)
    # With a last layer that is not dense, the layers are those of ``StackedLayers``.
    last = [nn.Identity()] if hasattr(layers, place) else []
    model = torch_seeded(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), *last)
    )
    nn.init.zeros_(model[2].weight)  # At this start the first layer's gradient is zero.
    works = nodes(model, [(4, 4), (4, 4)])
    caplog.set_level("WARNING", "flwr")
    for _ in range(2):
        assert same_bits(local_sgd(model, works, mode="stack"), local_sgd(model, works, mode="loop"))
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("Nodes with the model Sequential are trained one by one, not as a stack: ")


def test_a_right_stack_is_used_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    activation = nn.ReLU()
    model = torch_seeded(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), activation, nn.Linear(WIDTH, WIDTH), activation, nn.Linear(WIDTH, WIDTH)
        )
    )
    works = nodes(model, [(4, 4), (4,)])
    expected = local_sgd(model, works, mode="loop")
    monkeypatch.setattr("hedgerow.clients.training.stack.train_loop", None)
    assert agree(local_sgd(model, works, mode="stack"), expected)
    assert not caplog.records
