"""The algorithm on arrays, against the paper's plain loop."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.oracles.similarity_free import Q2, gradient_operator, identity, proximal_operator, run, top
from tests.strategies.rounds_on_arrays import rounds

from hedgerow.strategies import Ask, Diminishing, SimilarityFree

PROBLEMS = [*Q2, Q2[0]]
SIZES = [10.0, 30.0, 20.0]
SCHEDULE = Diminishing(0.2, 0.6)


@pytest.mark.parametrize("operator", ["gradient", "prox"])
@pytest.mark.parametrize(
    ("compressor", "Q", "memory"),
    [("identity", identity, True), ("topk(1)", top(1), True), ("topk(1)", top(1), False)],
)
@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_rounds_on_arrays_are_the_papers_loop(
    operator: Any, compressor: str, Q: Callable[[Any], Any], memory: bool, weighting: Any
) -> None:
    method = SimilarityFree(
        schedule=SCHEDULE, operator=operator, compressor=compressor, error_feedback=memory, local_iters=3,
        weighting=weighting, min_available_nodes=3, max_weight_ratio=0,
    )  # fmt: skip
    apply = gradient_operator(PROBLEMS, 3) if operator == "gradient" else proximal_operator(PROBLEMS)
    steps = [SCHEDULE(k) for k in range(6)]
    shares = [size / sum(SIZES) for size in SIZES] if weighting == "examples" else None
    oracle = run(apply, np.zeros(2), 3, steps, Q=Q, memory=memory, weights=shares)
    e: Sequence[Any] = [np.zeros(2) for _ in PROBLEMS]

    def work(i: int, ask: Ask, told: dict[str, Any]) -> np.ndarray:
        local = np.asarray(apply(i, ask.model, told["local-step"]))
        return local if compressor == "identity" else Q(local - ask.model + e[i])

    for state, expected in zip(rounds(method, np.zeros(2), SIZES, work, 6), oracle, strict=True):
        np.testing.assert_allclose(state.x, expected.x, atol=1e-15)
        e = expected.memories
