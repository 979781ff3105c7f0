"""The algorithm on arrays, against the paper's plain loop."""

from typing import Any

import numpy as np
import pytest
from tests.oracles import sd_feel as oracle
from tests.strategies.rounds_on_arrays import rounds

from hedgerow.strategies import Ask, HierFAvg, SDFeel

SIZES = [10.0, 30.0, 20.0, 10.0, 5.0, 15.0]
CLUSTERS = [0, 0, 1, 1, 2, 2]
PATH = [(0, 1), (1, 2)]
CENTRES = np.random.default_rng(2).normal(size=(6, 3))
ETA, TAU1, TAU2 = 0.2, 2, 3


def gradient(i: int, k: int, w: np.ndarray) -> np.ndarray:
    return np.asarray((0.5 + 0.1 * i) * (w - CENTRES[i]))


def work(i: int, ask: Ask, told: dict[str, Any]) -> np.ndarray:
    w = ask.model
    for k in range(told["first-step"], told["first-step"] + told["local-steps"]):
        w = w - ETA * gradient(i, k, w)
    return w


@pytest.mark.parametrize("inter", ["gossip", "exact"])
@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("alpha", [1, 3])
def test_rounds_on_arrays_are_algorithm_1(inter: str, participation: float, alpha: int) -> None:
    options: dict[str, Any] = {
        "num_servers": 3, "clusters": CLUSTERS, "tau1": TAU1, "tau2": TAU2, "participation": participation,
        "max_weight_ratio": 0, "seed": 5,
    }  # fmt: skip
    method = SDFeel(topology=PATH, alpha=alpha, **options) if inter == "gossip" else HierFAvg(**options)
    states = list(rounds(method, np.zeros(3), SIZES, work, 2 * TAU2))
    expected = oracle.run(
        np.zeros(3), gradient, sizes=SIZES, clusters=[[0, 1], [2, 3], [4, 5]], edges=PATH, tau1=TAU1,
        tau2=TAU2, alpha=alpha, eta=ETA, K=2 * TAU1 * TAU2, inter=inter,
        active=lambda r: [i in method.participants(r) for i in range(6)],
    )  # fmt: skip
    for number, state in enumerate(states, 1):
        np.testing.assert_allclose(state.servers, expected.states[number * TAU1].servers, atol=1e-14)
