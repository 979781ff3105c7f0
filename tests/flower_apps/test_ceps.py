"""The CEPS app's own settings: one site of several, and directed graphs."""

import networkx as nx
import pytest
from tests.flower_apps.cases import CEPS
from tests.flower_apps.test_settings import SITE

from ceps import settings


def test_a_site_is_built_of_its_own_nodes_alone() -> None:
    values = settings.read({**CEPS.defaults, **SITE, "site": 1, "stop-after": "iterations=9"})
    strategy = settings.build_strategy(values, dim=60)
    assert strategy.site is not None
    assert strategy.site.nodes(7) == [3, 4]
    assert strategy.settings.min_available_nodes == 2
    assert strategy.method.num_nodes == 7


def test_sites_on_several_machines_need_certificates() -> None:
    values = settings.read({**CEPS.defaults, **SITE, "peers": "10.0.0.1:1,10.0.0.2:1"})
    with pytest.raises(ValueError, match="certificate"):
        settings.build_strategy(values, dim=60)


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
    values = settings.read({**CEPS.defaults, "method": method, "topology": topology})
    strategy = settings.build_strategy(values, dim=10)
    graph = strategy.method.graph(10)
    assert nx.is_strongly_connected(graph)
    assert all(graph.has_edge(j, i) for i, j in graph.edges) is not directed
