import math
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.strategies import (
    DIRECTED_TOPOLOGIES,
    TOPOLOGIES,
    Mixing,
    as_digraph,
    as_graph,
    laplacian,
    metropolis,
    mixing,
    push_weights,
)
from hedgerow.strategies.topology import graph, one_peer_exponential, senders, validate_topology

THIRD = 0.333333
FIXED = ["bipartite", "complete", "line", "partial", "path", "ring", "ring-chords", "star", "torus"]
RANDOM = ["erdos-renyi(0.5)", "geometric(0.6)", "regular(3)"]

# Second eigenvalue modulus at equal sizes, by graph and number of servers.
ZETA = {
    "ring": {3: 0, 4: THIRD, 5: 0.447214, 6: 0.6, 8: 0.744521, 10: 0.825665, 20: 0.952226},
    "path": {3: 0.5, 4: 0.707107, 5: 0.809017, 6: 0.866025, 8: 0.923880, 10: 0.951057, 20: 0.987688},
    "star": {3: 0.5, 4: 0.6, 5: 0.666667, 6: 0.714286, 8: 0.777778, 10: 0.818182, 20: 0.904762},
    "complete": dict.fromkeys((3, 4, 5, 6, 8, 10, 20), 0),
    "bipartite": dict.fromkeys((4, 6, 8, 10, 20), THIRD),
    "ring-chords": {4: 0, 6: THIRD, 8: 0.460496, 10: 0.625583, 20: 0.878434},
    "fig2a": {6: 0.6},
    "fig2b": {6: THIRD},
    "fig2c": {6: 0},
}
ZETA_TABLE = [(name, D, zeta) for name, row in ZETA.items() for D, zeta in row.items()]


@st.composite
def networks(draw: st.DrawFn, least: int = 1) -> Mixing:
    """Mixing on a random connected graph (a random tree and some more edges) with random sizes."""
    D = draw(st.integers(least, 9))
    tree = [(draw(st.integers(0, d - 1)), d) for d in range(1, D)]
    pairs = [(i, j) for i in range(D) for j in range(i + 1, D) if (i, j) not in tree]
    more = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    sizes = draw(st.lists(st.integers(1, 1000), min_size=D, max_size=D))
    return mixing(as_graph([*tree, *more], D), sizes)


def models_of(network: Mixing, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(network.sizes), 3))


def exact(rows: list[list[int]], denominator: int) -> np.ndarray:
    return np.array([[float(Fraction(entry, denominator)) for entry in row] for row in rows])


def moduli(matrix: np.ndarray) -> np.ndarray:
    return np.sort(np.abs(np.linalg.eigvals(matrix)))[::-1]


# Graphs


@pytest.mark.parametrize("name", FIXED + RANDOM)
def test_every_topology_is_a_connected_simple_graph_on_integer_nodes(name: str) -> None:
    built = graph(name, 10)
    assert list(built) == list(range(10))
    assert nx.is_connected(built)
    assert nx.number_of_selfloops(built) == 0
    assert not built.is_directed()
    assert not built.is_multigraph()


def test_every_spelling_is_a_topology_that_can_be_built() -> None:
    example = {"(p)": "(0.9)", "(r)": "(0.9)", "(k)": "(2)", "(R,C)": "(2,3)"}
    for spelling in TOPOLOGIES:
        name, _, ending = spelling.partition("(")
        assert len(graph(name + example.get("(" + ending, ""), 6)) == 6


@pytest.mark.parametrize("name", ["ring", "path", "star", "complete", "torus"])
@pytest.mark.parametrize("D", [1, 2])
def test_the_smallest_graphs_have_no_loops_or_double_edges(name: str, D: int) -> None:
    assert sorted(graph(name, D).edges) == [(0, 1)][: D - 1]


@pytest.mark.parametrize(
    ("name", "D", "same_as"),
    [
        ("fig2a", 6, "ring"),
        ("fig2b", 6, "ring-chords"),
        ("fig2b", 6, "bipartite"),
        ("fig2c", 6, "complete"),
        ("partial", 10, "bipartite"),
        ("line", 7, "path"),
        ("ring-chords", 4, "complete"),
        ("torus(1,7)", 7, "ring"),
        ("torus", 7, "ring"),
        ("torus", 10, "torus(2,5)"),
        ("torus(2, 5)", 10, "torus(2,5)"),
        ("regular(5)", 6, "complete"),
        ("erdos-renyi(1)", 5, "complete"),
        ("geometric(1.5)", 5, "complete"),
    ],
)
def test_two_names_of_one_graph_have_the_same_edges(name: str, D: int, same_as: str) -> None:
    assert nx.utils.graphs_equal(graph(name, D), graph(same_as, D))


def test_a_large_torus_joins_every_node_to_four_others() -> None:
    built = graph("torus", 12)  # 3 x 4
    assert set(dict(built.degree).values()) == {4}
    assert set(built[0]) == {1, 3, 4, 8}


def test_the_partially_connected_figure_is_a_ring_with_its_long_diagonals() -> None:
    expected = [(0, 1), (0, 3), (0, 5), (1, 2), (1, 4), (2, 3), (2, 5), (3, 4), (4, 5)]
    assert sorted(tuple(sorted(edge)) for edge in graph("fig2b", 6).edges) == expected


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_graph_depends_on_its_seed_alone(name: str) -> None:
    draws = [sorted(graph(name, 12, seed).edges) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_a_graph_that_is_never_connected_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"denser graph, got 'erdos-renyi\(0.001\)' on 30 nodes: none of 1000"
    ):
        graph("erdos-renyi(0.001)", 30)


def test_an_edge_list_and_a_graph_of_ones_own_are_taken() -> None:
    edges = [(1, 0), (1, 2), (3, 2)]
    own = nx.Graph(edges)
    assert nx.utils.graphs_equal(as_graph(edges, 4), graph("path", 4))
    assert nx.utils.graphs_equal(as_graph(own, 4), graph("path", 4))
    assert list(as_graph(own, 4)) == [0, 1, 2, 3]


def test_a_single_server_needs_no_edge() -> None:
    assert list(as_graph([], 1)) == [0]


@pytest.mark.parametrize(
    ("topology", "match"),
    [
        ([(0, 1)], r"must be connected, got the parts \[\[0, 1\], \[2\]\]"),
        ([(0, 1), (1, 2), (1, 0)], r"each edge once, got \(0, 1\) more than once"),
        ([(0, 1), (1, 2), (2, 2)], r"must not have self loops, got \(2, 2\)"),
        ([(0, 1), (1, 3)], r"edges between the nodes 0 to 2, got \(1, 3\)"),
        ([(0, 1), (1, 2, 0)], r"edges between the nodes 0 to 2, got \(1, 2, 0\)"),
        ([(0, 1), 2], r"edges between the nodes 0 to 2, got 2"),
        (nx.DiGraph([(0, 1), (1, 2)]), "must be an undirected simple graph, got a DiGraph"),
        (nx.MultiGraph([(0, 1), (1, 2)]), "simple graph, got a MultiGraph"),
        (nx.Graph([(0, 1), (1, "a")]), r"the nodes 0 to 2, got \[0, 1, 'a'\]"),
        (nx.Graph([(0, 1)]), r"the nodes 0 to 2, got \[0, 1\]"),
        (nx.Graph([(0, 1), (1, 2), (2, 2)]), "self loop"),
    ],
)
def test_a_graph_that_cannot_carry_gossip_is_refused(topology: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        as_graph(topology, 3)


def test_the_laplacian_is_degree_minus_adjacency() -> None:
    expected = [[1, -1, 0], [-1, 2, -1], [0, -1, 1]]
    np.testing.assert_array_equal(laplacian(graph("path", 3)), expected)


# Spectra


@pytest.mark.parametrize(("name", "D", "zeta"), ZETA_TABLE)
def test_zeta_has_the_tabulated_value(name: str, D: int, zeta: float) -> None:
    assert mixing(graph(name, D), np.ones(D)).zeta == pytest.approx(zeta, abs=5.1e-7)


def test_fig_2_values_single_out_ring_and_clique_among_all_graphs_on_six_nodes() -> None:
    atlas = [g for g in nx.graph_atlas_g() if len(g) == 6 and nx.is_connected(g)]
    assert len(atlas) == 112
    zetas = np.array([mixing(g, np.ones(6)).zeta for g in atlas])
    found = {
        zeta: [atlas[i] for i in np.flatnonzero(np.abs(zetas - zeta) < 1e-9)] for zeta in (0.6, 1 / 3, 0.0)
    }
    assert [nx.is_isomorphic(g, graph("fig2a", 6)) for g in found[0.6]] == [True]
    assert [nx.is_isomorphic(g, graph("fig2c", 6)) for g in found[0.0]] == [True]
    assert sorted(g.number_of_edges() for g in found[1 / 3]) == [9, 10, 11, 11, 12, 12, 13]
    assert [g for g in found[1 / 3] if nx.is_isomorphic(g, graph("fig2b", 6))]


@pytest.mark.parametrize(
    ("name", "D", "self_weight", "edge_weight"),
    [
        ("fig2a", 6, 1 / 5, 2 / 5),
        ("fig2b", 6, 1 / 3, 2 / 9),
        ("fig2c", 6, 1 / 6, 1 / 6),
        ("ring", 10, 0.0871677257, 0.4564161372),
        ("bipartite", 10, 1 / 3, 2 / 15),
    ],
)
def test_a_regular_graph_of_equal_clusters_has_one_self_weight_and_one_edge_weight(
    name: str, D: int, self_weight: float, edge_weight: float
) -> None:
    g = graph(name, D)
    expected = self_weight * np.eye(D) + edge_weight * nx.to_numpy_array(g, nodelist=range(D))
    np.testing.assert_allclose(mixing(g, np.ones(D)).matrix, expected, atol=1e-10)


@pytest.fixture(scope="module")
def paper_splits() -> list[np.ndarray]:
    """Cluster sizes of CIFAR-10 dealt by Dir(0.5) to 50 clients, five to a server; 500 draws."""
    rng = np.random.default_rng(np.random.SeedSequence([0]))
    shares = rng.dirichlet(np.full(50, 0.5), size=(500, 10))  # (draws, classes, clients)
    return list(5000 * shares.sum(axis=1).reshape(500, 10, 5).sum(axis=2))


@pytest.mark.parametrize(
    ("name", "mean", "low", "high"),
    [("ring", 0.849, 0.835, 0.868), ("bipartite", 0.460, 0.402, 0.527), ("complete", 0.272, 0.163, 0.390)],
)
def test_unequal_clusters_of_the_papers_split_have_the_tabulated_zeta(
    paper_splits: list[np.ndarray], name: str, mean: float, low: float, high: float
) -> None:
    zetas = [mixing(graph(name, 10), sizes).zeta for sizes in paper_splits]
    assert np.mean(zetas) == pytest.approx(mean, abs=0.01)
    np.testing.assert_allclose(np.quantile(zetas, [0.05, 0.95]), [low, high], atol=0.02)


@pytest.mark.parametrize("name", ["ring", "complete"])
def test_trap_3_the_papers_split_almost_always_has_a_negative_self_weight(
    paper_splits: list[np.ndarray], name: str
) -> None:
    negative = [np.diag(mixing(graph(name, 10), sizes).matrix).min() < 0 for sizes in paper_splits]
    assert np.mean(negative) > 0.97


# Golden matrices G1 to G6

G1 = ("ring", [40, 30, 20, 10], [[65, 20, 0, 60], [15, 55, 30, 0], [0, 20, 35, 60], [15, 0, 30, -25]], 95)
G2 = ("path", [50, 30, 20], [[29, 20, 0], [12, 1, 30], [0, 20, 11]], 41)
G3 = ("complete", [50, 30, 20], [[19, 10, 15], [6, 11, 15], [6, 10, 1]], 31)
G4 = ("path", [70, 30], [[7, 7], [3, 3]], 10)
G5 = (
    "star",
    [1] * 6,
    [[-3, 2, 2, 2, 2, 2], *([2, *(5 if i == j else 0 for j in range(5))] for i in range(5))],
    7,
)
G6 = ("ring", [1] * 6, [[[2, 1, 0, 0, 0, 1][(j - i) % 6] for j in range(6)] for i in range(6)], 5)


@pytest.mark.parametrize(
    ("golden", "zeta"),
    [(G1, 11 / 19), (G2, 0.534919809743), (G3, 0.251943537932), (G4, 0.0), (G5, 5 / 7)],
    ids=["G1", "G2", "G3", "G4", "G5"],
)
def test_the_mixing_matrix_is_the_golden_one(golden: tuple, zeta: float) -> None:
    name, sizes, rows, denominator = golden
    network = mixing(graph(name, len(sizes)), sizes)
    np.testing.assert_allclose(network.matrix, exact(rows, denominator), atol=1e-14)
    assert network.zeta == pytest.approx(zeta, abs=5e-13)


GOSSIP = [
    (
        "G1",
        G1[:2],
        [1, 2, 3, 4],
        [
            [1.631578947368, 2, 3, 1.473684210526],
            [1.664819944598, 2.132963988920, 2.202216066482, 2.537396121884],
            [1.8765126112, 2.0489867328, 2.2861933226, 1.7746027118],
        ],
    ),
    (
        "G2",
        G2[:2],
        [1, 2, 4],
        [
            [1.292682926829, 2.487804878049, 2.536585365854],
            [1.642474717430, 1.928613920286, 2.500892325996],
            [1.726222776802, 2.068194019239, 2.082152029135],
        ],
    ),
    (
        "G6",
        G6[:2],
        [0, 1, 2, 3, 4, 5],
        [[2.4, 1, 2, 3, 4, 2.6], [1.92, 1.96, 2, 3, 3.04, 3.08], [2.4, 1.96, 2.384, 2.616, 3.04, 2.6]],
    ),
]
STEPS = [
    pytest.param(*network, start, alpha, after[alpha - 1], id=f"{name}-step{alpha}")
    for name, network, start, after in GOSSIP
    for alpha in (1, 2, 3)
]


@pytest.mark.parametrize(("name", "sizes", "start", "alpha", "expected"), STEPS)
def test_gossip_gives_the_golden_models(
    name: str, sizes: list[int], start: list[float], alpha: int, expected: list[float]
) -> None:
    network = mixing(graph(name, len(sizes)), sizes)
    np.testing.assert_allclose(network.gossip(np.array(start, float), alpha), expected, atol=5.1e-11)


def test_a_complete_graph_can_take_the_exact_mean_instead() -> None:
    network = mixing(graph("complete", 3), [50, 30, 20], exact_if_complete=True)
    assert network.zeta == 0.0
    np.testing.assert_allclose(network.gossip(np.array([1.0, 2.0, 4.0]), 1), [1.9, 1.9, 1.9])


def test_the_exact_mean_is_not_taken_on_an_incomplete_graph() -> None:
    exactly = mixing(graph("path", 3), [50, 30, 20], exact_if_complete=True)
    np.testing.assert_array_equal(exactly.matrix, mixing(graph("path", 3), [50, 30, 20]).matrix)


def test_a_single_server_keeps_its_model() -> None:
    network = mixing(graph("ring", 1), [7])
    assert network.matrix.tolist() == [[1.0]]
    assert network.zeta == 0.0
    assert network.gossip(np.array([[3.0, 4.0]]), 5).tolist() == [[3.0, 4.0]]


# Properties T1 to T4, T6, T7, T11, T13


@settings(deadline=None)
@given(networks())
def test_columns_sum_to_one_and_the_cluster_weights_are_a_fixed_point(network: Mixing) -> None:
    np.testing.assert_allclose(network.matrix.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(network.matrix @ network.weights, network.weights, atol=1e-12)


@settings(deadline=None)
@given(networks())
def test_weights_stand_on_edges_only_and_are_not_negative_there(network: Mixing) -> None:
    off_diagonal = network.matrix - np.diag(np.diag(network.matrix))
    edges = nx.to_numpy_array(network.graph, nodelist=range(len(network.sizes))) > 0
    assert np.all(off_diagonal[edges] > 0)
    assert np.all(off_diagonal[~edges] == 0)


@settings(deadline=None)
@given(networks(), st.integers(0, 5))
def test_gossip_preserves_the_weighted_mean(network: Mixing, alpha: int) -> None:
    models = models_of(network)
    mixed = network.gossip(models, alpha)
    np.testing.assert_allclose(network.weights @ mixed, network.weights @ models, atol=1e-11)


@settings(deadline=None)
@given(networks(least=2))
def test_zeta_is_the_second_largest_modulus_and_below_one(network: Mixing) -> None:
    first, second = moduli(network.matrix)[:2]
    assert first == pytest.approx(1, abs=1e-8)
    assert second == pytest.approx(network.zeta, abs=1e-7)
    assert 0 <= network.zeta < 1


@settings(deadline=None)
@given(networks(least=2), st.floats(0.5, 1.5))
def test_no_other_scale_mixes_faster(network: Mixing, factor: float) -> None:
    identity = np.eye(len(network.sizes))
    other = identity + factor * (network.matrix - identity)
    assert moduli(other)[1] >= network.zeta - 1e-7


@settings(deadline=None)
@given(networks(), st.integers(0, 6))
def test_alpha_steps_are_the_matrix_to_the_power_alpha(network: Mixing, alpha: int) -> None:
    models = models_of(network)
    power = np.linalg.matrix_power(network.matrix, alpha)
    np.testing.assert_allclose(network.gossip(models, alpha), power.T @ models, atol=1e-10)


@settings(deadline=None)
@given(networks())
def test_each_step_contracts_the_weighted_deviation_by_zeta(network: Mixing) -> None:
    def deviation(models: np.ndarray) -> float:
        squares = np.sum((models - network.weights @ models) ** 2, axis=1)
        return math.sqrt(network.weights @ squares)

    models = models_of(network)
    assert deviation(network.gossip(models, 1)) <= network.zeta * deviation(models) + 1e-10


@settings(deadline=None)
@given(networks(least=2), st.data())
def test_losing_an_edge_at_both_ends_keeps_consensus_and_mean(network: Mixing, data: st.DataObject) -> None:
    i, j = data.draw(st.sampled_from(sorted(network.graph.edges)))
    rest = network.without_edge(i, j)
    assert rest.matrix[i, j] == rest.matrix[j, i] == 0
    assert not rest.graph.has_edge(i, j)
    np.testing.assert_allclose(rest.matrix.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(rest.matrix @ rest.weights, rest.weights, atol=1e-12)
    assert rest.zeta == pytest.approx(moduli(rest.matrix)[1], abs=1e-7)


def test_a_mixing_is_never_changed() -> None:
    network = mixing(graph("ring", 4), [40, 30, 20, 10])
    before = network.matrix.copy()
    network.without_edge(0, 1)
    np.testing.assert_array_equal(network.matrix, before)
    assert network.graph.has_edge(0, 1)
    with pytest.raises(ValueError, match=r"edge must be one of \[\(0, 1\).*got \(0, 2\)"):
        network.without_edge(0, 2)
    with pytest.raises(ValueError, match="read-only"):
        network.matrix[0, 0] = 0.5


# Directed graphs

DIRECTED = ["directed-ring", "directed-exponential", "directed-out(3)", "directed-erdos-renyi(0.3)"]


@pytest.mark.parametrize("name", DIRECTED)
@pytest.mark.parametrize("D", [10, 16])
def test_in_every_directed_topology_each_node_reaches_each_other(name: str, D: int) -> None:
    built = as_digraph(name, D)
    assert built.is_directed()
    assert not built.is_multigraph()
    assert list(built) == list(range(D))
    assert nx.is_strongly_connected(built)
    assert nx.number_of_selfloops(built) == 0


def test_every_directed_spelling_can_be_built_and_is_no_undirected_one() -> None:
    for spelling in DIRECTED_TOPOLOGIES:
        name, _, ending = spelling.partition("(")
        name += {"k)": "(2)", "p)": "(0.9)", "": ""}[ending]
        assert len(as_digraph(name, 6)) == 6
        for refuse in (as_graph, validate_topology):
            with pytest.raises(
                ValueError, match=r"must be an undirected graph, one of bipar.*a directed one"
            ):
                refuse(name, 6)


@pytest.mark.parametrize("D", [1, 2])
@pytest.mark.parametrize("name", ["directed-ring", "directed-exponential", "one-peer"])
def test_the_smallest_directed_graphs_have_no_loops(name: str, D: int) -> None:
    built = one_peer_exponential(D, 3) if name == "one-peer" else as_digraph(name, D)
    assert sorted(built.edges) == [(0, 1), (1, 0)][: 2 * (D - 1)]


def test_the_exponential_graph_leads_to_nodes_at_powers_of_two() -> None:
    built = as_digraph("directed-exponential", 6)
    assert sorted(built.successors(4)) == [0, 2, 5]
    assert senders(built, 4) == [0, 2, 3]
    assert senders(graph("ring", 6), 4) == [3, 5]


@pytest.mark.parametrize("name", ["directed-out(3)", "directed-erdos-renyi(0.3)"])
def test_a_random_directed_graph_depends_on_its_seed_alone_and_is_unbalanced(name: str) -> None:
    draws = [sorted(as_digraph(name, 12, seed).edges) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    built = as_digraph(name, 12)
    assert [built.in_degree(i) for i in range(12)] != [built.out_degree(i) for i in range(12)]
    if name == "directed-out(3)":
        assert {degree for _, degree in built.out_degree} == {3}


def test_an_undirected_graphs_edges_lead_both_ways() -> None:
    for topology in ("path", [(0, 1), (1, 2)], nx.path_graph(3)):
        assert sorted(as_digraph(topology, 3).edges) == [(0, 1), (1, 0), (1, 2), (2, 1)]


@pytest.mark.parametrize(
    ("topology", "match"),
    [
        (nx.DiGraph([(0, 1), (1, 2)]), r"must be strongly connected, got the parts \[\[0\], \[1\], \[2\]\]"),
        (nx.DiGraph([(0, 1), (1, 2), (2, 0), (1, 1)]), r"must not have self loops, got \(1, 1\)"),
        (nx.DiGraph([(0, 1), (1, 0)]), r"the nodes 0 to 2, got \[0, 1\]"),
        (nx.MultiDiGraph([(0, 1), (1, 2), (2, 0)]), "simple graph, got a MultiDiGraph"),
        ("directed-out(1)", r"must be directed-out\(k\) with 2 <= k < num_nodes"),
        ("directed-out(3)", r"must be directed-out\(k\) with 2 <= k < num_nodes"),
        ("directed-ring(2)", "must be 'directed-ring', which takes no parameters"),
        ("one-peer-exponential", "must be one of bipartite.*directed-ring.*whose graph changes"),
        ("directed-erdos-renyi(0)", r"must be directed-erdos-renyi\(p\) with 0 < p <= 1"),
    ],
)
def test_a_directed_graph_that_cannot_be_pushed_on_is_refused(topology: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        as_digraph(topology, 3)  # type: ignore[arg-type]


def test_a_directed_graph_that_is_never_strongly_connected_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a denser graph.*none of 1000 draws is strongly connected"):
        as_digraph("directed-erdos-renyi(0.01)", 12)


def test_push_weights_deal_all_that_a_node_has_in_equal_parts() -> None:
    built = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    np.testing.assert_array_equal(push_weights(built), exact([[2, 0, 3], [2, 3, 0], [2, 3, 3]], 6))
    for name in DIRECTED:
        np.testing.assert_allclose(push_weights(as_digraph(name, 10)).sum(axis=0), 1, atol=1e-15)


@pytest.mark.parametrize("D", [2, 8, 16])
def test_as_many_one_peer_communications_as_there_are_hops_average_powers_of_two_exactly(D: int) -> None:
    product = np.eye(D)
    for a in range(D.bit_length() - 1):
        built = one_peer_exponential(D, a)
        assert {degree for _, degree in [*built.in_degree, *built.out_degree]} == {1}
        product = push_weights(built) @ product
    np.testing.assert_array_equal(product, np.full((D, D), 1 / D))


def test_one_peer_graphs_of_any_size_lead_everywhere_together() -> None:
    for D in (3, 6, 11):
        hops = (D - 1).bit_length()
        union = nx.compose_all([one_peer_exponential(D, a) for a in range(hops)])
        assert nx.utils.graphs_equal(union, as_digraph("directed-exponential", D))
        assert nx.utils.graphs_equal(one_peer_exponential(D, hops), one_peer_exponential(D, 0))


# Metropolis weights


@settings(deadline=None)
@given(networks())
def test_metropolis_rows_and_columns_sum_to_one(network: Mixing) -> None:
    matrix = metropolis(network.graph).matrix
    np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert np.all(matrix >= 0)


# Gossip on real arrays


def test_gossip_of_a_view_gives_the_same_bits_and_leaves_the_models() -> None:
    network = mixing(graph("ring", 4), [40, 30, 20, 10])
    models = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    before = models.copy()
    expected = network.gossip(models, 3)
    view = np.asfortranarray(models)
    np.testing.assert_array_equal(network.gossip(view, 3), expected)
    still = network.gossip(models, 0)
    np.testing.assert_array_equal(still, before)
    assert not np.shares_memory(still, models)
    np.testing.assert_array_equal(models, before)


def test_a_coordinate_is_mixed_the_same_wherever_it_stands() -> None:
    network = mixing(graph("ring", 4), [40, 30, 20, 10])
    models = np.random.default_rng(0).normal(size=(4, 40_001))  # more than two chunks
    whole = network.gossip(models, 2)
    for column in (0, 16_383, 16_384, 40_000):
        np.testing.assert_array_equal(whole[:, column], network.gossip(models[:, column], 2))


def test_sums_run_in_double_precision_and_round_once() -> None:
    network = mixing(graph("ring", 10), np.arange(1, 11))
    models = np.random.default_rng(0).normal(size=(10, 50)).astype(np.float32)
    exactly = network.gossip(models.astype(np.float64), 30)
    result = network.gossip(models, 30)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, exactly.astype(np.float32))


@pytest.mark.parametrize("shape", [(4,), (4, 0), (4, 2, 3)])
def test_gossip_takes_models_of_any_shape(shape: tuple[int, ...]) -> None:
    network = mixing(graph("ring", 4), [40, 30, 20, 10])
    models = np.random.default_rng(0).normal(size=shape)
    expected = np.tensordot((network.matrix @ network.matrix).T, models, axes=1)
    np.testing.assert_allclose(network.gossip(models, 2), expected, atol=1e-14)


@pytest.mark.parametrize("models", [np.zeros((3, 2)), np.zeros((4, 2), dtype=np.int64), np.zeros(())])
def test_models_that_do_not_fit_the_servers_are_refused(models: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"models must be floating-point of shape \(4, ...\), got "):
        mixing(graph("ring", 4), np.ones(4)).gossip(models, 1)


@pytest.mark.parametrize("rule", [lambda g: mixing(g, np.ones(3)), metropolis])
def test_a_disconnected_graph_cannot_mix(rule: object) -> None:
    g = nx.Graph([(0, 1)])
    g.add_node(2)
    with pytest.raises(ValueError, match="must be connected"):
        rule(g)  # type: ignore[operator]
