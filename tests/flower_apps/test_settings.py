"""Settings of the apps that do not go together, each named with what is valid.

What a single setting may be is in tests/contracts/test_refusals.py.
"""

from typing import Any

import pytest
from tests.flower_apps.cases import CEPS, FEDMUD, SD_FEEL, SIMILARITY_FREE, AppCase

from hedgerow.sim import SettingsError, plan_run

PEERS = "127.0.0.1:9500, 127.0.0.1:9501,127.0.0.1:9502"
# An edge server that is an orchestrator of its own, one of several sites, sums.
DIRECT = {"edge-servers": "direct", "num-servers": 3, "num-clients": 7, "topology": "path", "peers": PEERS}
SITE = {"peers": PEERS, "num-clients": 7, "topology": "ring", "monitor": False}
SUMS = {"secure-sum": True}
SMALL_SUMS = {**SUMS, "num-servers": 10, "aggregation": "median", "edge-servers": "nodes"}

# fmt: off
APART: list[tuple[AppCase, dict[str, Any], str]] = [
    (SD_FEEL, {"method": "feel", "iterations": 301}, "iterations = 301; valid is a multiple of 5 (tau1)"),
    (SD_FEEL, {"method": "feel", "clients-per-round": 21}, "valid is 1 to num-clients = 20"),
    (SD_FEEL, {**DIRECT, "peers": ""}, "peers = ''; valid is host:port of each of the 3 edge servers"),
    (SD_FEEL, {**DIRECT, "edge": 3}, "edge = 3; valid is 0 to 2, as num-servers = 3"),
    (SD_FEEL, {**DIRECT, "peer-ca": "a"}, "valid is all of peer-ca, peer-certificate and peer-key"),
    (SD_FEEL, {**DIRECT, "partition": "own"}, "partition = 'own'; valid is one of a data set"),
    (SD_FEEL, {**DIRECT, "method": "hierfavg"}, "valid is 'emulated' with method = 'hierfavg'"),
    (SD_FEEL, {**DIRECT, "clusters": "group"}, "min-available-nodes = 0; valid with clusters = 'group'"),
    (SD_FEEL, {**DIRECT, "min-available-nodes": 4}, "valid is at most 3, the clients of edge"),
    (SD_FEEL, {**DIRECT, "edge-servers": "nodes"}, "valid is '' where edge-servers is not 'direct'"),
    (SD_FEEL, {**DIRECT, "stop-after": "bits=1"}, "is iterations=N or sim-seconds=S"),
    (SD_FEEL, {**DIRECT, "stragglers": "lasting(0.1,2)"}, "valid is '' but for method = 'sd-feel' with"),
    (SD_FEEL, SMALL_SUMS, "aggregation must be 'mean' with secure-sum, got 'median'"),
    (SD_FEEL, SMALL_SUMS, "edge-servers = 'nodes'; valid with secure-sum is 'emulated'"),
    (SD_FEEL, SMALL_SUMS, "sum-min-nodes must be at most 2, the nodes in the smallest sum of a round, got 3"),
    (SD_FEEL, {**SUMS, "num-clients": 1021}, "must have at most 255 nodes in a sum, got 256"),
    (SD_FEEL, {**SUMS, "upload-clip": 1.0}, "must both be > 0 or both 0, got 1.0 and 0.0"),
    (SD_FEEL, {"upload-clip": 1.0, "upload-noise-multiplier": 2.0},
        "upload-clip must be 0 without secure-sum, got 1.0"),
    (SIMILARITY_FREE, {**SUMS, "compressor": "sign"}, "compressor = 'sign'; valid with secure-sum is"),
    (SIMILARITY_FREE, {**SUMS, "compressor": "randk(0.1)", "probe-rounds": 2}, "probe-rounds = 2; valid"),
    (SIMILARITY_FREE, {**SUMS, "algorithm": "fedavg", "aggregation": "median"},
        "aggregation must be 'mean' with secure-sum, got 'median'"),
    (SIMILARITY_FREE, {**SUMS, "algorithm": "fedavg", "num-clients": 2}, "sum-min-nodes must be at most "),
    (FEDMUD, {**SUMS, "method": "fedhm"}, "valid with method = 'fedhm' is False: the mean"),
    (FEDMUD, {**SUMS, "method": "fedbat"}, "valid with method = 'fedbat' is False: nodes"),
    (FEDMUD, {**SUMS, "measure-bias": True}, "measure-bias = True; valid with secure-sum is False"),
    (FEDMUD, {**SUMS, "clients-per-round": 2}, "sum-min-nodes must be at most 2, "),
    (CEPS, {**SITE, "peers": "", "site": 1}, "site = 1; valid is 0 where peers is empty"),
    (CEPS, {**SITE, "num-clients": 2, "topology": ""}, "peers must have at most 2 sites, a node for each, "),
    (CEPS, {**SITE, "monitor": True}, "monitor = true; valid with peers is false"),
    (CEPS, {**SITE, "partition": "own", "problem": "logistic"}, "valid with peers is one of a data set"),
    (CEPS, {**SITE, "stop-after": "bits=1"}, "stop-after = 'bits=1'; valid with peers is iterations=N"),
    (CEPS, {**SITE, "min-available-nodes": 4}, "valid is at most 3, the nodes of site 0"),
    (CEPS, {**SITE, "peer-key": "a"}, "valid is all of peer-ca, peer-certificate and peer-key, or none"),
]
# fmt: on


def problems(case: AppCase, **changes: Any) -> list[str]:
    with pytest.raises(SettingsError) as error:
        case.settings.read({**case.defaults, **changes})
    first, *rest = str(error.value).splitlines()
    assert first == "Bad settings:"
    return [line.removeprefix("  - ") for line in rest]


@pytest.mark.parametrize(("case", "values", "words"), APART, ids=[words for _, _, words in APART])
def test_what_does_not_go_together_is_named(case: AppCase, values: dict[str, Any], words: str) -> None:
    told = problems(case, **values)
    assert any(words in problem for problem in told), told


@pytest.mark.parametrize(
    ("case", "values"),
    [
        (SD_FEEL, {"method": "feel", "iterations": 305}),
        *((SD_FEEL, {"method": method, "topology": "moebius"}) for method in ("hierfavg", "feel", "fedavg")),
        *(
            (SD_FEEL, {"method": method, "num-clients": 3, "num-servers": 4, "clients-per-round": 2})
            for method in ("feel", "fedavg")
        ),
        (SIMILARITY_FREE, {"algorithm": "fedavg", **SUMS}),
    ],
)
def test_a_setting_that_a_method_does_not_use_does_not_matter(case: AppCase, values: dict[str, Any]) -> None:
    case.settings.read({**case.defaults, **values})


@pytest.mark.parametrize(
    ("overrides", "nodes", "words"),
    [
        ("num-clients=9", 9, "num-clients=9: 9 nodes were asked for"),
        ("", 4, "num_nodes: 4 is not above num-servers=4, which are nodes too"),
    ],
)
def test_a_federation_too_small_for_its_edge_servers_is_refused(
    overrides: str, nodes: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        plan_run(SD_FEEL.spec, [f"edge-servers=nodes {overrides}"], num_nodes=nodes)
