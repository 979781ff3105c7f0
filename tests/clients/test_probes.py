"""Estimates of L and sigma^2, held against Hessians and variances that are known."""

from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.clients.similarity_free.quadratic_cases import Point, half_square, samples
from tests.oracles.similarity_free import Quadratic
from torch import Tensor, nn

from hedgerow.clients.probes import curvature, gradient_variance, local_gradient, probe, probe_stream


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square() / 2


def classifier() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)).double()


STREAM = np.random.default_rng(0)
X, Y = torch.as_tensor(STREAM.normal(size=(40, 3))), torch.as_tensor(STREAM.integers(0, 3, 40))


def largest(model: nn.Module, x: Tensor, y: Tensor, loss: Any, products: int) -> float:
    return curvature(model, x, y, probe_stream(0, 0, 0), loss, products)[0]


# Curvature


@settings(deadline=None, max_examples=20)
@given(h=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=5))
@example(h=[1.0, 2.0])
def test_the_curvature_of_a_quadratic_is_its_largest_eigenvalue(h: list[float]) -> None:
    x, y = samples([Quadratic(np.diag(h), np.ones(len(h)))])
    estimate = largest(Point(len(h)), x, y, half_square, 200)
    assert estimate == pytest.approx(max(h), rel=1e-12 if h == [1.0, 2.0] else 1e-2, abs=1e-12)
    assert estimate <= max(h) * (1 + 1e-12)


def test_the_curvature_of_least_squares_is_that_of_its_gram_matrix() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    expected = np.linalg.eigvalsh(X.numpy().T @ X.numpy() / len(X)).max()
    assert largest(model, X, Y, squared_error, 200) == pytest.approx(expected, rel=1e-9)


def test_the_curvature_of_a_concave_loss_is_an_absolute_value() -> None:
    x, y = samples([Quadratic(np.diag([1.0, 3.0]), np.ones(2))])
    assert largest(Point(), x, y, lambda a, b: -half_square(a, b), 60) == pytest.approx(3.0, rel=1e-9)


def test_the_curvature_of_a_network_is_that_of_its_hessian() -> None:
    model = classifier().eval()
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, [s.numel() for s in shapes])
        state = {n: part.view(s) for n, part, s in zip(names, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, state, (X,)), Y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    hessian = torch.autograd.functional.hessian(loss, flat)
    expected = float(torch.linalg.eigvalsh(hessian).abs().max())
    estimate, value = curvature(model, X, Y, probe_stream(0, 0, 0), products=300)
    assert estimate == pytest.approx(expected, rel=1e-6)
    assert value == pytest.approx(float(loss(flat)), rel=1e-12)


def test_more_products_never_lower_the_estimate() -> None:
    estimates = [
        largest(classifier().eval(), X, Y, nn.CrossEntropyLoss(reduction="none"), n) for n in range(1, 9)
    ]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(estimates))


def test_neither_linear_losses_nor_frozen_parameters_have_curvature() -> None:
    model = nn.Linear(3, 1).double()
    assert largest(model, X, Y, lambda outputs, targets: outputs[:, 0], 5) == 0.0
    model.weight.requires_grad_(False)
    assert largest(model, X, Y, squared_error, 5) == pytest.approx(1.0)


# Variance


def test_the_variance_of_draws_is_an_unbiased_estimate_of_the_spread_of_gradients() -> None:
    # grad F(w; c) = w - c.
    def variance(centres: Sequence[tuple[float, float]], draws: Iterable[int]) -> float:
        x, y = samples([Quadratic(np.eye(2), np.array(c)) for c in centres])
        return gradient_variance(Point(), x, y, [np.array([i]) for i in draws], half_square)

    centres = [(1.0, 0.0), (-1.0, 0.0), (0.0, 2.0), (0.0, -2.0)]
    assert variance(centres, range(4)) == pytest.approx((1 + 1 + 4 + 4) / 3, rel=1e-12)
    # All nine pairs of independent draws are equally likely.
    exact = np.square(np.array(centres[:3]) - np.mean(centres[:3], axis=0)).sum(1).mean()
    estimates = [variance(centres[:3], pair) for pair in product(range(3), repeat=2)]
    assert np.mean(estimates) == pytest.approx(exact, rel=1e-12)


def test_batches_without_replacement_vary_as_the_finite_population_says() -> None:
    model, part = classifier().eval(), np.arange(12)
    spread = gradient_variance(model, X, Y, [np.array([i]) for i in part])  # S^2, divisor n - 1
    pairs = [np.array(pair) for pair in combinations(part, 2)]
    every = gradient_variance(model, X, Y, pairs) * (len(pairs) - 1) / len(pairs)
    assert every == pytest.approx(spread / 2 * (1 - 2 / 12), rel=1e-9)
    drawn = probe(model, X, Y, part, batch_size=2, stream=probe_stream(1, 0, 0), batches=4000)
    assert drawn.gradient_variance == pytest.approx(every, rel=0.05)
    whole = probe(model, X, Y, part, batch_size=12, stream=probe_stream(0, 0, 0))
    assert whole.gradient_variance == 0.0


# Both


def test_a_probe_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    model[0].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    probe(model, X, Y, np.arange(20), batch_size=5, stream=probe_stream(0, 0, 0))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, False, True]
    assert all(p.grad is None for p in model.parameters())


def test_one_seed_gives_the_same_bits_and_no_global_generator_is_drawn() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, two, other = (
        probe(classifier(), X, Y, np.arange(30), batch_size=5, stream=probe_stream(seed, 2, 3))
        for seed in (4, 4, 5)
    )
    assert one == two != other
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_is_that_of_at_most_max_samples_of_the_nodes_own() -> None:
    model, part = classifier().eval(), np.array([3, 7, 8, 20])
    poisoned = torch.full_like(X, torch.nan)
    poisoned[part] = X[part]
    one, two, few = (
        probe(model, x, Y, part, batch_size=2, stream=probe_stream(0, 0, 0), products=3, max_samples=n)
        for x, n in ((X, 9), (poisoned, 9), (X, 2))
    )
    assert one == two
    assert one.loss == pytest.approx(nn.functional.cross_entropy(model(X[part]), Y[part]).item())
    assert few.loss != one.loss


@pytest.mark.parametrize(("bad", "valid"), [({"products": 0}, ">= 1"), ({"batches": 1}, "at least 2")])
def test_too_few_products_or_batches_are_named(bad: dict[str, int], valid: str) -> None:
    with pytest.raises(ValueError, match=valid):
        probe(classifier(), X, Y, np.arange(9), batch_size=3, stream=probe_stream(0, 0, 0), **bad)


# The gradient


def test_the_gradient_of_all_samples_does_not_depend_on_how_many_pass_at_once() -> None:
    model, part = classifier(), np.arange(4, 37)
    one, many = (local_gradient(model, X, Y, part, samples_at_once=n) for n in (7, 100))
    model.eval()
    expected = torch.autograd.grad(
        nn.functional.cross_entropy(model(X[part]), Y[part]), [*model.parameters()]
    )
    for (name, _), whole in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(one[name], whole)
        torch.testing.assert_close(many[name], whole)


def test_what_does_not_train_has_a_gradient_of_zeros() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)).double().train()
    model[1].bias.requires_grad_(False)
    found = local_gradient(model, X, Y, np.arange(9))
    assert found.keys() == model.state_dict().keys()
    still = ("0.running_mean", "0.running_var", "0.num_batches_tracked", "1.bias")
    assert all(not found[key].any() for key in still)
    assert found["1.weight"].any()
    assert model[0].training
    assert int(model.state_dict()["0.num_batches_tracked"]) == 0
