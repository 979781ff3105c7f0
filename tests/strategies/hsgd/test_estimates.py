import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.strategies.hsgd.theory import estimate, gradient_variance, secant_smoothness

# The scalar split regression of the golden trajectories: y_hat = a u x_1 + b v x_2, theta = (a, b, u, v).
GROUPS = (np.array([[1, 1, 1], [2, 0.5, 2], [-1, 2, 0]]), np.array([[0.5, -1, -1]]))
WEIGHTS = (0.75, 0.25)
POINTS = np.array([[1.0, 0.5, 0.2, 0.4], [1.01675, 0.5185, 0.28375, 0.423125]])


def sample_gradients(theta: np.ndarray, group: np.ndarray) -> np.ndarray:
    a, b, u, v = theta
    x1, x2, y = group.T
    error = a * u * x1 + b * v * x2 - y
    return np.stack([error * u * x1, error * v * x2, error * a * x1, error * b * x2], axis=1)  # (patients, 4)


def gradient(theta: np.ndarray, group: np.ndarray) -> np.ndarray:
    return sample_gradients(theta, group).mean(axis=0)


GRADIENTS = np.array([[gradient(theta, group) for group in GROUPS] for theta in POINTS])  # (2, groups, 4)
GLOBAL = np.einsum("m,smp->sp", WEIGHTS, GRADIENTS)
BLOCKS = (slice(0, 2), slice(2, 3), slice(3, 4))


@pytest.mark.parametrize(
    ("gradients", "rho"),
    [
        (GRADIENTS[:, :1], 1.8678620774),
        (GRADIENTS[:, 1:], 0.6961390117),
        (GLOBAL[:, None], 1.4170803622),
        (GRADIENTS, 1.8678620774),
    ],
)
def test_the_secants_are_golden(gradients: np.ndarray, rho: float) -> None:
    assert secant_smoothness(POINTS, gradients) == pytest.approx(rho, abs=1e-9)


@pytest.mark.parametrize(
    ("group", "variances"),
    [(0, (0.1136145833, 1.7130729167, 0.0704557292)), (1, (0.0969312500, 1.6576562500, 0.0478515625))],
)
def test_the_variances_of_single_patients_are_golden(group: int, variances: tuple[float, ...]) -> None:
    draws = sample_gradients(POINTS[0], GROUPS[group])
    found = [gradient_variance(draws[:, block], GLOBAL[0, block]) for block in BLOCKS]
    assert found == pytest.approx(variances, abs=1e-9)


VARIANCES = np.array([[[0.1, 1.7, 0.2], [0.3, 0.2, 0.1]], [[0.5, 0.2, 0.4], [0.9, 0.1, 0.3]]])


@pytest.mark.parametrize(("aggregate", "delta2"), [("max", 1.7), ("mean", (1.7 + 0.3 + 0.5 + 0.9) / 4)])
def test_delta_is_of_the_largest_blocks(aggregate: Any, delta2: float) -> None:
    found = estimate(0.4325, POINTS, GRADIENTS, VARIANCES, aggregate=aggregate)
    assert found.delta**2 == pytest.approx(delta2, rel=1e-12)
    assert found.rho == secant_smoothness(POINTS, GRADIENTS)
    assert found.loss_gap == 0.4325


def test_the_final_loss_is_0_unless_it_is_known() -> None:
    assert estimate(0.4325, POINTS, GRADIENTS, VARIANCES).loss_gap == 0.4325
    known = estimate(0.4325, POINTS, GRADIENTS, VARIANCES, final_loss=0.1)
    assert known.loss_gap == pytest.approx(0.3325)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_a_secant_never_exceeds_the_curvature_of_a_quadratic(seed: int, steps: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    hessians = rng.normal(size=(groups, 5, 5))
    hessians = hessians @ hessians.swapaxes(-1, -2)
    points = rng.normal(size=(steps + 1, 5))
    gradients = np.einsum("gij,sj->sgi", hessians, points)
    assert 0 < secant_smoothness(points, gradients) <= np.linalg.eigvalsh(hessians).max() * (1 + 1e-9)


STILL = np.zeros((2, 4))


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda: secant_smoothness(STILL, GRADIENTS), "points"),
        (lambda: secant_smoothness(POINTS, GRADIENTS * math.nan), "gradients"),
        (lambda: secant_smoothness(POINTS * math.inf, GRADIENTS), "points"),
        (lambda: gradient_variance(np.full((3, 2), math.inf), np.zeros(2)), "draws"),
        (lambda: estimate(0.0, POINTS, GRADIENTS, VARIANCES), "final_loss"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_out_of_range_is_named(call: Any, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} must (be|have|change) "):
        call()
