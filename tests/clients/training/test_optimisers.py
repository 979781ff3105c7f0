"""Optimisers of local steps: torch's, with warm-up and micro-batches, in every client that trains."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.clients.contexts import context
from torch import nn

from hedgerow.clients import LocalAdamW, LocalSGD, TrainingConfig, TrainingData, cross_entropy
from hedgerow.clients.training.optimisers import parse_local_optimiser
from hedgerow.clients.training.sgd import training_of

STREAM = np.random.default_rng(3)
X = torch.as_tensor(STREAM.normal(size=(24, 5))).float()
Y = torch.as_tensor(STREAM.integers(0, 3, 24))
BATCHES = [STREAM.permutation(24)[:n] for n in (8, 8, 8, 7, 3, 8, 8, 8, 8, 8)]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


def config(lr: float = 0.05) -> TrainingConfig:
    return {
        "steps": len(BATCHES), "epochs": None, "lr": lr, "batch_size": 8, "batches": BATCHES, "seed": 0,
        "round": 1, "partition_id": 0,
    }  # fmt: skip


def trained(text: str) -> tuple[torch.Tensor, float]:
    """Return the parameters after ten steps, and the reported loss."""
    model, optimiser = network(), parse_local_optimiser(text)
    assert optimiser is not None
    metrics = optimiser.loop(cross_entropy)(model, TrainingData(X, Y), config())
    assert metrics is not None
    return nn.utils.parameters_to_vector(model.parameters()).detach(), metrics["train-loss"]


def by_hand(warm_up: float, weight_decay: float, beta1: float, beta2: float) -> torch.Tensor:
    """Algorithm 2 of the paper in float64, with a linear warm-up."""
    model = network().double()
    w = nn.utils.parameters_to_vector(model.parameters()).detach()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    warm = int(np.ceil(warm_up * len(BATCHES)))
    for t, batch in enumerate(BATCHES, 1):
        lr = 0.05 * min(1.0, t / warm) if warm else 0.05
        nn.utils.vector_to_parameters(w, model.parameters())
        loss = cross_entropy(model(X[batch].double()), Y[batch]).mean()
        g = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        step = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        w = w - lr * step - lr * weight_decay * w
    return w


@pytest.mark.parametrize("warm_up", [0.0, 0.1, 0.35, 1.0])
@pytest.mark.parametrize(("decay", "beta1", "beta2"), [(0.01, 0.9, 0.999), (0.5, 0.0, 0.9)])
def test_adamw_is_the_paper_s_with_a_linear_warm_up(
    warm_up: float, decay: float, beta1: float, beta2: float
) -> None:
    text = f"adamw(warm_up={warm_up}, weight_decay={decay}, beta1={beta1}, beta2={beta2})"
    torch.testing.assert_close(
        trained(text)[0].double(), by_hand(warm_up, decay, beta1, beta2), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulate", [2, 4, 8, 100])
def test_micro_batches_are_one_batch_to_a_millionth(name: str, accumulate: int) -> None:
    # Adam's first steps divide a gradient by itself, so the rounding of one near 0 would be a whole step.
    options = "eps=0.01, " if name == "adamw" else ""
    (whole, loss), (parts, other) = (trained(f"{name}({options}accumulate={k})") for k in (1, accumulate))
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)
    assert loss == pytest.approx(other, abs=1e-6)
    assert not torch.equal(parts, whole)


def test_a_batch_is_never_held_as_a_whole() -> None:
    seen: list[int] = []
    model = network()
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    LocalSGD(accumulate=4).loop(cross_entropy)(model, TrainingData(X, Y), config())
    assert max(seen) == 2
    assert len(seen) == sum(min(4, len(batch)) for batch in BATCHES)


def test_a_round_without_steps_leaves_the_model() -> None:
    model, before = network(), network()
    metrics = LocalAdamW().loop(cross_entropy)(
        model, TrainingData(X, Y), {**config(), "batches": [], "steps": 0}
    )
    assert metrics == {"train-loss": 0.0}
    assert all(map(torch.equal, model.parameters(), before.parameters()))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("adam", "there is no 'adam'; did you mean 'adamw'"),
        ("adamw(beta1=1.0)", r"beta1 must be a number in \[0, 1\), got 1.0"),
        ("adamw(betas=0.9)", "adamw has no 'betas'; it has warm_up, accumulate, weight_decay, beta1"),
        ("sgd(weight_decay=0.1)", "sgd has no 'weight_decay'"),
        ("sgd(accumulate=0)", "accumulate must be an integer >= 1, got 0"),
        ("sgd(warm_up='a')", "warm_up must be a number in"),
        ("adamw(weight-decay=0.1)", "it must be a name with named values"),
        ("sgd(4)", "it must be a name with named values"),
    ],
)
def test_a_wrong_text_is_one_error(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_local_optimiser(text)


def test_an_own_loop_and_a_local_optimiser_exclude_each_other() -> None:
    asked: dict[str, Any] = {"local-optimiser": "adamw"}
    with pytest.raises(ValueError, match="local-optimiser must be empty with your own training loop"):
        training_of(context(0, run_config=asked), None, cross_entropy, lambda *_: None)
    with pytest.raises(ValueError, match="with your own training loop, got 'stack'"):
        training_of(context(0, run_config=asked), "stack")
