"""The CEPS app's directed graphs: which methods take one, and what the others are told."""

from typing import Any

import networkx as nx
import pytest
from tests.flower_apps.cases import CEPS

from ceps import settings


def read(**changes: Any) -> dict[str, Any]:
    values = {key.replace("_", "-"): value for key, value in changes.items()}
    return dict(settings.read({**CEPS.defaults, **values}))


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
