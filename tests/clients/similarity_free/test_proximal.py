"""The inner solver of FedProx, Beikmohammadi et al., Algorithm 1 with the proximal operator: goldens (Q2) and
what a proximal point is."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.similarity_free.quadratic_cases import Q2_X, Q2_Y, Point, half_square, point, samples
from tests.oracles.similarity_free import Q2, Quadratic, inner_iterates
from torch import Tensor, nn

from hedgerow.clients import TrainingMode, parse_inner_lr
from hedgerow.clients.similarity_free.proximal import Proximal, ProximalWork, proximal_steps
from hedgerow.clients.training.sgd import LocalTraining

ONE, TWO = np.array([0]), np.array([1])


def work(batch: Any = TWO, **changes: Any) -> ProximalWork:
    """Worker 2 of Q2 at x = 0, gamma = 0.1."""
    start = changes.pop("start", point(0, 0))
    values = {"gamma": 0.1, "inner_lr": 0.1 / 3, "steps": 30, "tol": 0.0, **changes}
    return ProximalWork(start, Q2_X, Q2_Y, [batch], **values)


def solve(works: Sequence[ProximalWork], mode: TrainingMode = "auto", model: nn.Module | None = None) -> Any:
    return proximal_steps(model or Point(), works, LocalTraining(mode, half_square))


def solved(one: ProximalWork) -> Proximal:
    (only,) = solve([one])
    assert isinstance(only, Proximal), only
    return only


def values(outcome: Proximal) -> Any:
    return outcome.state["w"].numpy()


# The inner iteration


@pytest.mark.parametrize(
    ("eta", "golden"),
    [
        (0.1, [(-0.2, 0.2), (-0.16, 0.18), (-0.168, 0.182), (-0.1664, 0.1818)]),
        (0.05, [(-0.1, 0.1), (-0.14, 0.145), (-0.156, 0.16525), (-0.1624, 0.1743625)]),
    ],
)
def test_the_inner_iterates_are_golden(eta: float, golden: list[tuple[float, float]]) -> None:
    iterates = [values(solved(work(inner_lr=eta, steps=s))) for s in (1, 2, 3, 4)]
    np.testing.assert_allclose(iterates, golden, atol=1e-12)


def test_fresh_batches_take_one_batch_a_step() -> None:
    one = replace(work(inner_lr=0.05, steps=3), batches=[ONE, TWO, ONE])
    y = np.zeros(2)
    for i in (0, 1, 0):
        y = y - 0.05 * (Q2[i].gradient(y) + y / 0.1)
    np.testing.assert_allclose(values(solved(one)), y, atol=1e-12)


@pytest.mark.parametrize(
    "one",
    [
        *(work(steps=steps) for steps in (1, 2, 7, 30)),
        # Fresh batches never stop early, and the residual is of the last one.
        replace(work(steps=3, tol=0.9), batches=[ONE, ONE, TWO]),
        replace(work(steps=40, tol=0.9), batches=[TWO] * 40),
    ],
)
def test_the_reported_residual_is_of_the_point_that_is_given_back_after_all_steps(one: ProximalWork) -> None:
    outcome = solved(one)
    p = values(outcome)
    residual = np.linalg.norm(Q2[1].gradient(p) + p / 0.1) / np.linalg.norm(Q2[1].gradient(np.zeros(2)))
    assert outcome.relative_residual == pytest.approx(residual, rel=1e-9, abs=1e-14)
    assert outcome.steps_taken == one.steps


def test_the_loss_is_the_mean_over_the_steps_before_each() -> None:
    before = [np.zeros(2), *inner_iterates(Q2[1], np.zeros(2), 0.1, 0.05, 2)]
    outcome = solved(work(inner_lr=0.05, steps=3))
    assert outcome.mean_loss == pytest.approx(np.mean([Q2[1].value(y) for y in before]), rel=1e-12)


# Stopping


def test_it_stops_at_the_first_point_within_the_tolerance() -> None:
    residuals = [solved(work(steps=s)).relative_residual for s in range(1, 31)]
    first = next(s for s, r in enumerate(residuals, start=1) if r <= 1e-3)
    outcome = solved(work(tol=1e-3))
    assert outcome.steps_taken == first < 30
    assert outcome.relative_residual == pytest.approx(residuals[first - 1], rel=1e-9)


def test_a_start_that_is_the_proximal_point_already_is_given_back() -> None:
    outcome = solved(work(start=point(-1, 2)))
    np.testing.assert_array_equal(values(outcome), (-1, 2))
    assert (outcome.steps_taken, outcome.relative_residual, outcome.mean_loss) == (0, 0.0, 0.0)


def test_each_node_stops_by_itself() -> None:
    works = [work(tol=1e-1), work(ONE, tol=1e-6), work(steps=3), work(start=point(-1, 2))]
    together = solve(works)
    for outcome, one in zip(together, works, strict=True):
        alone = solved(one)
        assert outcome.steps_taken == alone.steps_taken
        np.testing.assert_allclose(values(outcome), values(alone), atol=1e-14)
    assert len({outcome.steps_taken for outcome in together}) == 4


# What a proximal point is

DIAGONAL = st.lists(st.floats(0.0, 4.0), min_size=2, max_size=2)
PLACE = st.lists(st.floats(-3.0, 3.0), min_size=2, max_size=2)


def prox(problem: Quadratic, x: Sequence[float], gamma: float) -> Any:
    """The solver's point, with a step that suits a curvature up to 4."""
    data, targets = samples([problem])
    one = ProximalWork(point(*x), data, targets, [ONE], gamma, 1 / (1 / gamma + 4), steps=300, tol=0.0)
    return values(solved(one))


@settings(deadline=None, max_examples=15)
@given(h=DIAGONAL, c=PLACE, x=PLACE, other=PLACE, gamma=st.floats(0.05, 1.0))
def test_on_a_quadratic_it_is_the_resolvent_which_is_non_expansive(
    h: list[float], c: list[float], x: list[float], other: list[float], gamma: float
) -> None:
    problem = Quadratic(np.diag(h), np.array(c))
    p = prox(problem, x, gamma)
    np.testing.assert_allclose(p, problem.prox(np.array(x), gamma), atol=1e-9)
    np.testing.assert_allclose(p, np.array(x) - gamma * problem.gradient(p), atol=1e-9)
    assert problem.value(p) + np.sum((p - x) ** 2) / (2 * gamma) <= problem.value(np.array(x)) + 1e-9
    apart = np.linalg.norm(p - prox(problem, other, gamma))
    assert apart <= np.linalg.norm(np.subtract(x, other)) + 1e-9


# Divergence


@pytest.mark.parametrize(("gamma", "factor"), [(0.1 / 1.6, -0.6), (0.05, -1.0), (0.1 / 2.654, -1.654)])
def test_where_the_loss_is_flat_a_step_multiplies_the_distance_by_one_minus_eta_over_gamma(
    gamma: float, factor: float
) -> None:
    data, targets = samples([Quadratic(np.zeros((2, 2)), np.zeros(2))])
    model = Point()
    # No gradient moves a start off itself: fresh batches whose first step does.
    push = samples([Quadratic(np.eye(2), np.array([1.0, -1.0]))])[0]
    batches = [ONE, *[TWO] * 5]
    one = ProximalWork(
        point(0, 0), torch.cat([push, data]), targets.repeat(2), batches, gamma, 0.1, steps=6, tol=0.0
    )
    (outcome,) = solve([one], model=model)
    np.testing.assert_allclose(values(outcome), 0.1 * factor**5 * np.array([1, -1]), rtol=1e-9)


def test_an_iteration_that_overflows_is_an_error_and_one_that_moves_away_tells_by_its_residual() -> None:
    good, away, bad = solve([work(steps=300), work(gamma=0.01, steps=10), work(steps=300, gamma=1e-3)])
    assert isinstance(good, Proximal)
    assert isinstance(away, Proximal)
    assert 1 < away.relative_residual < inf
    assert isinstance(bad, ValueError)
    assert "got eta = 0.0333333 with local-step (gamma) 0.001" in str(bad)
    assert "eta > 2 gamma = 0.002 diverges" in str(bad)


def test_a_step_of_more_than_two_gamma_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    solve([work(steps=1, gamma=0.0123, inner_lr=0.0246), work(steps=1, gamma=0.0123)])
    (message,) = [record.getMessage() for record in caplog.records]
    assert "eta = 0.0333333 > 2 gamma = 0.0246" in message


# Many nodes


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def network_works(model: nn.Module, dtype: torch.dtype, *, fresh: bool) -> list[ProximalWork]:
    stream = np.random.default_rng(0)
    x = torch.as_tensor(stream.normal(size=(30, 4))).to(dtype)
    y = torch.as_tensor(stream.integers(0, 3, 30))
    works = []
    for node, steps in enumerate((5, 8, 3, 8)):
        start = {
            k: v + torch.as_tensor(stream.normal(0, 0.1, v.shape)).to(dtype)
            for k, v in model.state_dict().items()
        }
        batches = [stream.integers(0, 30, 4 + node) for _ in range(steps if fresh else 1)]
        gamma = 0.2 * (1 + node)
        works.append(ProximalWork(start, x, y, batches, gamma, gamma / 3, steps, tol=0.0))
    return works


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_stack_equals_the_loop(dtype: torch.dtype, tolerance: float, fresh: bool) -> None:
    model = network().to(dtype)
    works = network_works(model, dtype, fresh=fresh)
    stack, loop = (proximal_steps(model, works, LocalTraining(mode)) for mode in ("stack", "loop"))
    failures = []
    for node, (a, b) in enumerate(zip(stack, loop, strict=True)):
        assert isinstance(a, Proximal)
        assert isinstance(b, Proximal)
        assert a.steps_taken == b.steps_taken == works[node].steps
        for key in b.state:
            error = float((a.state[key] - b.state[key]).norm() / b.state[key].norm())
            if not error <= tolerance:
                failures.append(f"node {node} {key}: {error:.1e}")
        for name in ("mean_loss", "relative_residual"):
            if getattr(a, name) != pytest.approx(getattr(b, name), rel=100 * tolerance):
                failures.append(f"node {node} {name}: {getattr(a, name)}, loop {getattr(b, name)}")
    assert not failures, "\n".join(failures)


def test_frozen_parameters_stay_and_do_not_enter_the_residual() -> None:
    model = network()
    model.get_parameter("0.weight").requires_grad_(False)
    works = network_works(model, torch.float32, fresh=False)
    (outcome,) = proximal_steps(model, works[:1], LocalTraining())
    assert isinstance(outcome, Proximal)
    assert torch.equal(outcome.state["0.weight"], works[0].start["0.weight"])
    assert 0 < outcome.relative_residual < 1


def test_running_statistics_are_carried_along() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    start = {key: value.clone() for key, value in model.state_dict().items()}
    x: Tensor = torch.linspace(-1, 1, 40).view(10, 4)
    one = ProximalWork(start, x, torch.arange(10) % 3, [np.arange(10)], 0.3, 0.1, steps=4, tol=0.0)
    (outcome,) = proximal_steps(model, [one], LocalTraining())
    assert isinstance(outcome, Proximal)
    assert list(outcome.state) == list(start)
    assert outcome.state["1.num_batches_tracked"] == 4
    assert not torch.equal(outcome.state["1.running_mean"], start["1.running_mean"])


# Settings


@pytest.mark.parametrize(
    ("text", "gamma", "eta"),
    [("auto:0.1", 0.06, 0.02), ("auto:0.1", 0.6, 0.1), ("fixed:0.1", 0.001, 0.1), ("fixed:1e-05", 5.0, 1e-5)],
)
def test_auto_is_a_third_of_gamma_below_its_maximum_and_fixed_is_fixed(
    text: str, gamma: float, eta: float
) -> None:
    assert parse_inner_lr(text).at(gamma) == pytest.approx(eta)
    assert str(parse_inner_lr(text)) == text
