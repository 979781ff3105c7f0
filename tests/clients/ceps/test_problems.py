"""Objectives: gradients against finite differences, clipping, and the constants of curvature."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from torch import nn

from hedgerow.clients import LinearRegression, LogisticRegression, Problem, TorchProblem

Array = npt.NDArray[np.float64]

RECORDS, N = 12, 6


def records(seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((RECORDS, N)), rng.standard_normal(RECORDS)


def linear(seed: int = 0) -> LinearRegression:
    return LinearRegression(*records(seed))


def logistic(seed: int = 0) -> LogisticRegression:
    A, b = records(seed)
    return LogisticRegression(A, (b > 0).astype(float), 0.1)


def network(seed: int = 0) -> TorchProblem:
    A, b = records(seed)
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(N, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return TorchProblem(model, torch.from_numpy(A), torch.from_numpy((b > 0).astype(np.int64)))


MAKERS: dict[str, Callable[[int], Problem]] = {
    "linear": linear,
    "linear-sparse": lambda seed: LinearRegression(csr_matrix(records(seed)[0]), records(seed)[1]),
    "logistic": logistic,
    "logistic-sparse": lambda seed: LogisticRegression(
        csr_matrix(records(seed)[0]), (records(seed)[1] > 0).astype(float), 0.1
    ),
    "network": network,
}
each = pytest.mark.parametrize("name", MAKERS)


def point(problem: Problem, seed: int = 5) -> Array:
    return np.random.default_rng(seed).standard_normal(problem.n)


@each
def test_the_gradient_is_that_of_finite_differences_and_no_records_share_exceeds_a_bound(name: str) -> None:
    problem = MAKERS[name](0)
    w, h = point(problem), 1e-5
    found = problem.gradient(w)
    steps = h * np.eye(problem.n)
    expected = [(problem.value(w + e) - problem.value(w - e)) / (2 * h) for e in steps]
    np.testing.assert_allclose(found, expected, atol=1e-8)
    np.testing.assert_allclose(problem.gradient(w, 1e6), found, atol=1e-14)
    regulariser = problem.lam * w if isinstance(problem, LogisticRegression) else 0.0
    for clip in (0.01, 0.3):
        assert np.linalg.norm(problem.gradient(w, clip) - regulariser) <= clip * (1 + 1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), clip=st.floats(0.05, 5), name=st.sampled_from(sorted(MAKERS)))
def test_one_other_record_moves_the_clipped_gradient_by_two_clips_over_the_records(
    seed: int, clip: float, name: str
) -> None:
    one, other = MAKERS[name](0), MAKERS[name](0)
    stranger = np.random.default_rng(seed).standard_normal(N) * 10
    if isinstance(other, TorchProblem):
        other._x = other._x.clone()
        other._x[3] = torch.from_numpy(stranger)
    else:
        A, b = records(0)
        A[3] = stranger
        labels = (b > 0).astype(float)
        other = LinearRegression(A, b) if "linear" in name else LogisticRegression(A, labels, 0.1)
    w = point(one, seed)
    moved = np.linalg.norm(one.gradient(w, clip) - other.gradient(w, clip))
    assert moved <= 2 * clip / RECORDS * (1 + 1e-9)


def test_clipping_is_record_by_record_and_of_no_regulariser() -> None:
    A, b = records()
    w = point(linear())
    parts = A * (A @ w - b)[:, None]
    expected = np.mean([g * min(1, 0.7 / np.linalg.norm(g)) for g in parts], axis=0)
    np.testing.assert_allclose(linear().gradient(w, 0.7), expected, atol=1e-14)
    assert np.linalg.norm(logistic().gradient(w, 1e-9) - 0.1 * w) < 1e-8


def test_a_networks_chunks_of_records_change_nothing_and_its_own_parameters_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = network()
    before, whole = problem._own.clone(), problem.gradient(point(problem), 0.2)
    monkeypatch.setattr("hedgerow.clients.ceps.problems._CHUNK", 5 * problem.n)
    np.testing.assert_allclose(problem.gradient(point(problem), 0.2), whole, atol=1e-14)
    assert torch.equal(torch.cat([p.flatten() for p in problem._model.parameters()]), before)


@pytest.mark.parametrize("shape", [(1, 5), (2, 9), (40, 13), (13, 40)])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_largest_eigenvalue_is_that_of_the_dense_matrix(shape: tuple[int, int], sparse: bool) -> None:
    A = np.random.default_rng(1).standard_normal(shape)
    expected = np.linalg.eigvalsh(A.T @ A)[-1]
    problem = LinearRegression(csr_matrix(A) if sparse else A, np.zeros(shape[0]))
    assert problem.largest_eigenvalue == pytest.approx(expected, rel=1e-10)
    assert problem.curvature == pytest.approx(expected / shape[0], rel=1e-10)
    assert LinearRegression(np.zeros(shape), np.zeros(shape[0])).largest_eigenvalue == 0


@pytest.mark.parametrize("name", ["linear", "logistic", "logistic-sparse"])
def test_the_gradient_is_lipschitz_with_the_curvature(name: str) -> None:
    problem = MAKERS[name](0)
    for seed in range(20):
        a, b = point(problem, seed), point(problem, seed + 100)
        moved = np.linalg.norm(problem.gradient(a) - problem.gradient(b))
        assert moved <= problem.curvature * np.linalg.norm(a - b) * (1 + 1e-12)


def test_a_networks_curvature_is_its_hessians_largest_eigenvalue() -> None:
    A, b = records()
    model = nn.Linear(N, 1, bias=False).double()
    problem = TorchProblem(
        model, torch.from_numpy(A), torch.from_numpy(b), lambda out, y: (out[:, 0] - y).square() / 2
    )
    assert problem.curvature == pytest.approx(linear().curvature, rel=1e-3)
    assert problem.largest_eigenvalue == pytest.approx(linear().largest_eigenvalue, rel=1e-3)
    np.testing.assert_allclose(problem.gradient(np.ones(N)), linear().gradient(np.ones(N)), atol=1e-12)


def test_logistic_values_are_finite_far_away() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(logistic().value(np.full(N, 1e4)))
        assert np.isfinite(logistic().gradient(np.full(N, -1e4))).all()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LinearRegression(np.ones(3), np.ones(3)), r"A must have the shape .*got \(3,\)"),
        (lambda: LinearRegression(np.ones((3, 2)), np.ones(2)), r"b must have the shape \(3,\), got \(2,\)"),
        (
            lambda: LinearRegression(np.full((3, 2), np.nan), np.ones(3)),
            "A and b must have finite entries only",
        ),
        (
            lambda: TorchProblem(nn.Linear(2, 2), torch.ones(3, 2), torch.ones(2)),
            "x and y must have equal numbers of records, .*got 3 and 2",
        ),
        (lambda: TorchProblem(nn.ReLU(), torch.ones(2, 2), torch.ones(2)), "must have trainable parameters"),
    ],
)
def test_bad_data_are_refused_by_name(make: Callable[[], Problem], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()
