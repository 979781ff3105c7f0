"""The CEPS app's directed graphs: which methods take one, and what the others are told."""

from typing import Any

import networkx as nx
import pytest
from tests.flower_apps.cases import CEPS

from ceps import settings
from hedgerow.sim import SettingsError

UNDIRECTED = sorted(set(settings.METHODS) - {"sgp", "sgp-dn"})


def read(**changes: Any) -> dict[str, Any]:
    values = {key.replace("_", "-"): value for key, value in changes.items()}
    return dict(settings.read({**CEPS.defaults, **values}))


@pytest.mark.parametrize("method", UNDIRECTED)
@pytest.mark.parametrize("topology", ["directed-ring", "directed-out(3)", "one-peer-exponential"])
def test_a_method_for_undirected_graphs_refuses_a_directed_one_before_the_run(
    method: str, topology: str
) -> None:
    with pytest.raises(SettingsError) as error:
        read(method=method, topology=topology)
    (said,) = str(error.value).splitlines()[1:]
    assert said.startswith(f"  - topology is '{topology}'")
    assert "valid is" in said
    assert "ring-chords" in said
    assert "directed-exponential" not in said


@pytest.mark.parametrize(
    ("method", "topology", "said"),
    [
        ("sgp", "directed-out(16)", r"directed-out\(k\) with 2 <= k < num_nodes"),
        ("sgp", "directed-moebius", "valid is one of bipartite, .*directed-ring"),
        ("sgp-dn", "one-peer-exponential", "whose graph changes; valid is one of bipartite"),
    ],
)
def test_a_directed_graph_that_is_none_is_refused_before_the_run(
    method: str, topology: str, said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        read(method=method, topology=topology)


@pytest.mark.parametrize(
    ("method", "topology", "directed"),
    [
        ("sgp", "", False),
        ("sgp", "ring", False),
        ("sgp", "directed-ring", True),
        ("sgp", "one-peer-exponential", True),
        ("sgp-dn", "directed-erdos-renyi(0.4)", True),
    ],
)
def test_sgp_takes_directed_graphs_and_undirected_ones_both_ways(
    method: str, topology: str, directed: bool
) -> None:
    strategy = settings.build_strategy(read(method=method, topology=topology), dim=10)
    graph = strategy.method.graph(10)
    assert nx.is_strongly_connected(graph)
    assert all(graph.has_edge(j, i) for i, j in graph.edges) is not directed


def test_an_aggregation_other_than_the_mean_is_not_sgps() -> None:
    with pytest.raises(SettingsError, match="aggregation = 'median'; valid is 'mean' with method = 'sgp'"):
        read(method="sgp", aggregation="median")
