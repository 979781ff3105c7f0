"""MATCHA's matchings, probabilities and weights."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.strategies import laplacian
from hedgerow.strategies.ceps.matcha import Activation, matchings
from hedgerow.strategies.topology import graph


@st.composite
def graphs(draw: st.DrawFn, connected: bool = False) -> nx.Graph:
    size = draw(st.integers(2, 12))
    pairs = [(i, j) for i in range(size) for j in range(i)]
    result = nx.path_graph(size) if connected else nx.empty_graph(size)
    result.add_edges_from(draw(st.sets(st.sampled_from(pairs))))
    return result


@settings(deadline=None, max_examples=150)
@given(base=graphs())
def test_matchings_are_disjoint_cover_all_edges_and_keep_vizings_bound(base: nx.Graph) -> None:
    found = matchings(base)
    edges = [edge for matching in found for edge in matching]
    assert sorted(edges) == sorted((min(e), max(e)) for e in base.edges)
    for matching in found:
        ends = [node for edge in matching for node in edge]
        assert len(ends) == len(set(ends))
    assert len(found) <= 1 + max(degree for _, degree in base.degree)


@pytest.mark.parametrize("name", ["complete", "regular(5)", "erdos-renyi(0.4)", "torus", "star", "ring"])
def test_matchings_of_larger_graphs_keep_vizings_bound(name: str) -> None:
    base = graph(name, 24, seed=3)
    found = matchings(base)
    assert sum(map(len, found)) == base.number_of_edges()
    assert len(found) <= 1 + max(degree for _, degree in base.degree)


def test_two_nodes_with_the_whole_budget_average() -> None:
    activation = Activation(nx.path_graph(2), 1.0)
    assert activation.probabilities.tolist() == [1.0]
    assert activation.alpha == pytest.approx(0.5, abs=1e-6)
    np.testing.assert_allclose(activation.matrix(activation.graph), 0.5, atol=1e-6)
    assert activation.second_moment(activation.alpha) == pytest.approx(0.0, abs=1e-9)


def test_two_nodes_that_seldom_talk_still_average_when_they_do() -> None:
    # ||I - 2 a L p + a^2 (p^2 L^2 + 2 p (1 - p) L)|| has its minimum at a = 1/2 whatever p is: L^2 = 2 L.
    assert Activation(nx.path_graph(2), 0.3).alpha == pytest.approx(0.5, abs=1e-6)


def test_a_bridge_is_used_more_often_than_what_hangs_on_it() -> None:
    barbell = nx.barbell_graph(4, 0)
    activation = Activation(barbell, 0.4)
    (bridge,) = (j for j, matching in enumerate(activation.matchings) if (3, 4) in matching)
    others = np.delete(activation.probabilities, bridge)
    assert activation.probabilities[bridge] > others.max()


@settings(deadline=None, max_examples=8)
@given(base=graphs(connected=True), budget=st.floats(0.1, 1.0))
def test_probabilities_keep_the_budget_and_connect_at_least_as_well_as_equal_ones(
    base: nx.Graph, budget: float
) -> None:
    activation = Activation(base, budget)
    p, L = activation.probabilities, activation.laplacians
    assert np.all((p >= 0) & (p <= 1))
    assert p.sum() <= budget * len(p) + 1e-9
    equal = np.linalg.eigvalsh(np.tensordot(np.full(len(p), budget), L, axes=1))[1]
    assert np.linalg.eigvalsh(np.tensordot(p, L, axes=1))[1] >= equal - 1e-12
    assert activation.second_moment(activation.alpha) < 1


@settings(deadline=None, max_examples=8)
@given(base=graphs(connected=True), k=st.integers(0, 1000))
def test_every_matrix_is_doubly_stochastic_symmetric_and_on_active_edges(base: nx.Graph, k: int) -> None:
    activation = Activation(base, 0.5)
    active = activation.active(3, k)
    W = activation.matrix(active)
    np.testing.assert_allclose(W.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_array_equal(W, W.T)
    assert {(i, j) for i, j in zip(*np.nonzero(np.triu(W, 1)), strict=True)} == {
        (min(e), max(e)) for e in active.edges
    }
    assert set(active.edges) <= set(base.edges)


def test_alpha_is_the_best_there_is() -> None:
    activation = Activation(graph("regular(3)", 8, seed=1), 0.5)
    best = activation.second_moment(activation.alpha)
    assert all(best <= activation.second_moment(alpha) + 1e-12 for alpha in np.linspace(0, 1.5, 301))


def test_the_second_moment_is_that_of_the_draws() -> None:
    activation = Activation(nx.cycle_graph(5), 0.5)
    total = np.zeros((5, 5))
    draws = 4000
    for k in range(draws):
        W = activation.matrix(activation.active(0, k))
        total += W.T @ W / draws
    measured = np.linalg.norm(total - 1 / 5, 2)
    assert measured == pytest.approx(activation.second_moment(activation.alpha), rel=0.03)


def test_matchings_are_active_as_often_as_their_probability_says() -> None:
    activation = Activation(nx.cycle_graph(5), 0.5)
    draws = 3000
    sent = sum(2 * activation.active(1, k).number_of_edges() for k in range(draws)) / draws
    assert sent == pytest.approx(activation.messages, rel=0.03)


def test_the_draw_of_an_iteration_depends_on_seed_and_iteration_alone() -> None:
    first, second = (Activation(nx.cycle_graph(8), 0.5) for _ in range(2))
    draws = [set(first.active(5, k).edges) for k in range(30)]
    assert draws == [set(second.active(5, k).edges) for k in reversed(range(30))][::-1]
    assert draws != [set(first.active(6, k).edges) for k in range(30)]


def test_the_laplacians_of_the_matchings_add_up_to_the_graphs() -> None:
    activation = Activation(graph("regular(4)", 10, seed=2))
    np.testing.assert_array_equal(activation.laplacians.sum(axis=0), laplacian(activation.graph))
