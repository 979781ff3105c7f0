"""The CEPS app as one site of several: settings that must fit together."""

from typing import Any

import pytest
from tests.flower_apps.cases import CEPS
from tests.flower_apps.test_apps import problems

from ceps import settings

SITES: dict[str, Any] = {
    "peers": "127.0.0.1:9500, 127.0.0.1:9501,127.0.0.1:9502",
    "num-clients": 7,
    "topology": "ring",
    "monitor": False,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": "", "site": 1}, "site = 1; valid is 0 where peers is empty"),
        ({"peers": "", "peer-ca": "a"}, "peer-ca = 'a'; valid is '' where peers is empty"),
        ({"site": 3}, "site is 3; valid is 0 to 2"),
        ({"num-clients": 2, "topology": ""}, "peers has 3 sites; valid is at most 2"),
        ({"monitor": True}, "monitor = true; valid with peers is false"),
        ({"stragglers": True}, "stragglers = true; valid with peers is false"),
        (
            {"partition": "own", "problem": "logistic"},
            "partition = 'own'; valid with peers is one of a data set",
        ),
        ({"stop-after": "bits=1"}, "stop-after = 'bits=1'; valid with peers is iterations=N"),
        ({"min-available-nodes": 4}, "min-available-nodes = 4; valid is at most 3, the nodes of site 0"),
        (
            {"peer-key": "a"},
            "peer-key is set; valid is all of peer-ca, peer-certificate and peer-key, or none",
        ),
    ],
)
def test_what_does_not_make_a_site_is_named(changes: dict[str, Any], words: str) -> None:
    told = problems(CEPS, **{**SITES, **changes})
    assert any(words in problem for problem in told), told


def test_a_site_is_built_of_its_own_nodes_alone() -> None:
    values = settings.read({**CEPS.defaults, **SITES, "site": 1, "stop-after": "iterations=9"})
    strategy = settings.build_strategy(values, dim=60)
    assert strategy.site is not None
    assert strategy.site.nodes(7) == [3, 4]
    assert strategy.settings.min_available_nodes == 2
    assert strategy.method.num_nodes == 7


def test_sites_on_several_machines_need_certificates() -> None:
    values = settings.read({**CEPS.defaults, **SITES, "peers": "10.0.0.1:1,10.0.0.2:1"})
    with pytest.raises(ValueError, match="certificate"):
        settings.build_strategy(values, dim=60)
