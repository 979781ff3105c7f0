"""The CEPS app's own settings: one site of several, and directed graphs."""

from pathlib import Path

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


def test_the_last_record_has_the_look_at_which_the_stopping_rule_held(tmp_path: Path) -> None:
    """It lies between two events: right after one, the models are farther apart than the rule admits."""
    tolerance = 0.005
    *before, last = (
        record["central"]
        for record in CEPS.run(tmp_path, tolerance=tolerance, iterations=100, privacy="paper", epsilon=0.3)
    )
    assert last["stop-consensus"] <= tolerance < last["consensus"]
    assert last["stop-loss"] < last["loss"]
    assert all("stop-loss" not in record for record in before)


def test_a_run_that_does_not_stop_has_no_such_look(tmp_path: Path) -> None:
    assert not any("stop-loss" in record["central"] for record in CEPS.run(tmp_path))
