"""The sums of edge servers, Sun et al., eqs. (3) and (5): exact in their order, whatever is beside them."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.strategies import mixing
from hedgerow.wire import Aggregation
from hedgerow.wire.edge_servers import cluster_means, columns, gossip, robust_step, weighted_sum


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=7), st.integers(0, 4), st.integers(0, 99))
def test_gossip_is_the_mixing_matrixs_power(sizes: list[int], steps: int, seed: int) -> None:
    network = mixing(nx.path_graph(len(sizes)), sizes)
    models = np.random.default_rng(seed).standard_normal((len(sizes), 3))
    mixed = gossip(models, columns(network.matrix), steps)
    power = np.linalg.matrix_power(network.matrix, steps)
    np.testing.assert_allclose(mixed, power.T @ models, atol=1e-9)
    assert mixed.tobytes() == network.gossip(models, steps).tobytes()


def test_a_column_holds_the_senders_of_a_server_ascending_itself_among_them() -> None:
    network = mixing(nx.star_graph(3), [1, 2, 3, 4])
    assert [[j for j, _ in column] for column in columns(network.matrix)] == [
        [0, 1, 2, 3],
        [0, 1],
        [0, 2],
        [0, 3],
    ]
    assert columns(np.zeros((2, 2))) == [[(0, 0.0)], [(1, 0.0)]]


def test_a_weighted_sum_starts_from_nothing_and_takes_negative_weights() -> None:
    out = np.array([7.0, 7.0])
    weighted_sum([(2.0, np.array([1.0, 2.0])), (-1.0, np.float32([3, 3]))], out, np.empty(2))
    assert out.tolist() == [-1.0, 1.0]


def test_a_server_without_replies_keeps_its_model() -> None:
    means = cluster_means([(1, 1.0, np.array([2.0]))], np.array([[5.0], [6.0]]))
    assert means.tolist() == [[5.0], [2.0]]


def test_a_rule_over_servers_keeps_a_model_that_all_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rule of updates that takes half of their mean moves nothing where nothing has moved.
    monkeypatch.setattr(Aggregation, "combined", lambda self, updates, weights: updates.mean(axis=0) / 2)
    agreed = {d: np.full(2, 10.0) for d in range(3)}
    step = robust_step(0, agreed, dict.fromkeys(agreed, 1 / 3), Aggregation("median"))
    np.testing.assert_allclose(step, agreed[0])
