"""The theory's numbers against goldens, and the lemmas where they can be measured."""

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.strategies.ceps.algorithm import participants
from hedgerow.strategies.ceps.theory import (
    connection_probability,
    contraction,
    least_c,
    log10_least_c,
    log10_mixing_gap,
    mixing_gap,
    participation_matrix,
    theorem_1,
)


@pytest.mark.parametrize(
    ("num_nodes", "window", "lipschitz", "gap", "c_0"),
    [
        (2, 1, 1, 0.25, 409_600),
        (2, 2, 1, 0.03175416344814578, 25_388_591.83),
        (3, 1, 1, 0.037037037037, 41_990_400),
        (4, 1, 1, 0.00390625, 6_710_886_400),
        (4, 2, 2, 7.629423635302503e-06, 3.5184103653e15),
        (8, 1, 1, 5.960464477539e-08, 1.1529215e20),
    ],
)
def test_golden_mixing_gap_and_least_c(
    num_nodes: int, window: int, lipschitz: float, gap: float, c_0: float
) -> None:
    assert mixing_gap(num_nodes, window) == pytest.approx(gap, rel=1e-9)
    assert least_c(num_nodes, window, lipschitz) == pytest.approx(c_0, rel=1e-7)


def test_at_the_papers_sizes_the_theorem_wants_a_c_beyond_reach() -> None:
    assert log10_mixing_gap(32, 1) == pytest.approx(-48.16, abs=0.01)
    assert log10_least_c(32, 1, 1) == pytest.approx(103.15, abs=0.01)
    assert least_c(128, 2, 1.0) == math.inf
    assert math.isfinite(log10_least_c(128, 2, 1.0))


def test_the_gap_is_continuous_where_it_becomes_tiny() -> None:
    # m = 2: the share is 2^(-2 B), and falls below the switch between two neighbouring windows.
    below, above = (log10_mixing_gap(2, window) for window in (498, 499))
    assert above - below == pytest.approx(-2 * math.log10(2) - math.log10(499 / 498), abs=1e-9)


def test_golden_bound_of_theorem_1() -> None:
    bound = theorem_1(2, 1, 1, gap=1, periods=100, dissimilarity=0.01, interval=10, residual=0.001)
    terms = (bound.optimisation, bound.heterogeneity, bound.projection)
    assert terms == (pytest.approx(65536), pytest.approx(0.04), pytest.approx(0.32))
    assert bound.total == pytest.approx(65536.36, rel=1e-12)


def test_the_projection_term_falls_with_neither_time_nor_c() -> None:
    known = {"gap": 1.0, "dissimilarity": 0.01, "interval": 10, "residual": 0.001}
    near = theorem_1(2, 1, 1, periods=100, **known)  # type: ignore[arg-type]
    far = theorem_1(2, 1, 1, periods=10**12, c=1e9, **known)  # type: ignore[arg-type]
    assert far.projection == near.projection
    assert far.heterogeneity < near.heterogeneity
    assert far.optimisation < near.optimisation


@pytest.mark.parametrize(
    ("window", "participants_", "probability"),
    [(20, 16.5, 0.999054402), (10, 16.5, 0.379377575), (20, 8, 0.002595564)],
)
def test_golden_connection_probabilities(window: int, participants_: float, probability: float) -> None:
    assert connection_probability(32, window, participants_) == pytest.approx(probability, abs=1e-9)


def test_the_probability_runs_from_never_to_always() -> None:
    assert connection_probability(8, 3, 1) == 0.0
    assert connection_probability(8, 3, 8) == 1.0


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 5))
def test_products_of_participation_matrices_contract_at_least_as_fast_as_the_lemma_says(
    seed: int, size: int
) -> None:
    rng = np.random.default_rng(seed)
    d = np.full(size, 1 / size) - np.eye(size)[0]
    for steps in range(1, 12):
        # Everybody uses the next node: the edges of every communication connect all.
        chosen = {i: sorted({i, int(rng.integers(size)), (i + 1) % size}) for i in range(size)}
        d = participation_matrix(chosen, size) @ d
        assert d @ d <= contraction(size, 1, steps)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_participation_matrices_are_column_stochastic_and_doubly_so_in_expectation(share: float) -> None:
    rng = np.random.default_rng(0)
    graph = nx.random_regular_graph(4, 10, seed=1)
    total = np.zeros((10, 10))
    for _ in range(1500):
        chosen = {
            i: [i, *rng.choice(sorted(graph.neighbors(i)), participants(share, 4), replace=False).tolist()]
            for i in graph
        }
        A = participation_matrix(chosen, 10)
        np.testing.assert_allclose(A.sum(axis=0), 1, rtol=1e-12)
        total += A / 1500
    np.testing.assert_allclose(total.sum(axis=1), 1, atol=0.04)


def test_a_node_must_use_its_own_model() -> None:
    with pytest.raises(ValueError, match="chosen of node 1 must be"):
        participation_matrix({0: [0, 1], 1: [0]}, 2)
