"""Lemma 2 (13) and Theorem 1 (15) against runs of the strategy on noisy quadratics."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.strategies.quadratic import Quadratics, run

from hedgerow.strategies import SDFeel, as_graph, mixing
from hedgerow.strategies.sd_feel.theory import ProblemConstants, bound, bound_constants, eta_max

SIZES = (4, 1, 3, 2, 6, 8)
CENTERS = (0.0, 1.0, 4.0, 2.0, 8.0, 9.0)
CURVATURES = (1.0, 0.8, 0.9, 1.0, 0.85, 0.95)
CLUSTERS = (0, 0, 1, 1, 2, 2)
PATH = [(0, 1), (1, 2)]
NOISE = 0.5
ITERATIONS = 240
# Runs whose mean stands for the expectation; their first noise differs.
RUNS = 3


@dataclass
class Noisy(Quadratics):
    """Quadratics with noisy gradients, which keep the models that each client sees."""

    run: int = 0
    models: dict[int, list[float]] = field(default_factory=dict)

    def gradient(self, client: int, k: int, w: Any) -> Any:
        models = self.models.setdefault(client, [])
        rng = np.random.default_rng([self.run, client, len(models)])
        models.append(float(w[0]))
        return super().gradient(client, k, w) + rng.normal(0, NOISE, 1)


@pytest.mark.parametrize(("tau1", "tau2", "alpha"), [(1, 1, 1), (3, 1, 2), (2, 2, 1)])
def test_runs_stay_below_the_bounds(tau1: int, tau2: int, alpha: int) -> None:
    m = np.array(SIZES) / sum(SIZES)
    a, c = np.array(CURVATURES)[:, None], np.array(CENTERS)[:, None]  # (clients, 1)
    clusters = np.bincount(CLUSTERS, SIZES)
    constants = bound_constants(tau1, tau2, alpha, mixing(as_graph(PATH, 3), clusters).zeta)
    smoothness = max(CURVATURES)
    eta = 0.5 * eta_max(smoothness, constants.V3)
    models = []
    for seed in range(RUNS):
        problem = Noisy(SIZES, CENTERS, CURVATURES, eta=eta, run=seed)
        strategy = SDFeel(
            num_servers=3,
            topology=PATH,
            clusters=CLUSTERS,
            tau1=tau1,
            tau2=tau2,
            alpha=alpha,
            fraction_evaluate=0.0,
        )
        run(strategy, problem, ITERATIONS // tau1)
        models.append([problem.models[client] for client in range(len(SIZES))])
    w = np.array(models)  # (runs, clients, iterations)
    u = np.einsum("i,rik->rk", m, w)[:, None]  # (runs, 1, iterations)
    steps = np.einsum("i,rik->rk", m, a * (w - c)) ** 2  # whose mean is J_k
    spread = np.einsum("i,rik->rk", m, (w - u) ** 2)  # whose mean is E_k
    # The gradient of F at u, and how far the clients' gradients there are from it.
    gradient = np.einsum("i,rik->rk", m, a * (u - c))[:, None]
    kappa2 = float(np.einsum("i,rik->rk", m, (a * (u - c) - gradient) ** 2).max())
    best = m @ (a * c) / (m @ a)
    delta = float((m @ (a * (c**2 - (best - c) ** 2))).item()) / 2  # F(0) less F at its best
    known = ProblemConstants(delta, smoothness, NOISE**2, kappa2, float(m @ m))

    denominator = 1 - 16 * (eta * smoothness) ** 2 * constants.V3
    V1, V2 = constants.V1_prime / denominator, constants.V3 / denominator
    lemma = 8 * eta**2 * V2 * (steps.mean() + kappa2) + 2 * eta**2 * V1 * NOISE**2
    theorem = bound(known, constants, eta=eta, K=w.shape[-1])
    assert spread.mean() <= lemma
    assert (gradient**2).mean() <= theorem
