"""Settings of the apps that do not go together, each named with what is valid.

What a single setting may be is in tests/contracts/test_refusals.py.
"""

import re
from typing import Any

import pytest
from tests.flower_apps.cases import CASES, CEPS, FEDMUD, SD_FEEL, SIMILARITY_FREE, AppCase

from hedgerow.sim import SettingsError, plan_run
from hedgerow.sim.runs.common_settings import role_of

every_app = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
every_suite_app = pytest.mark.parametrize(
    "case", [case for case in CASES if case.registered.suite], ids=lambda case: case.name
)
PEERS = "127.0.0.1:9500, 127.0.0.1:9501,127.0.0.1:9502"
# An edge server that is an orchestrator of its own, one of several sites, sums.
DIRECT = {"edge-servers": "direct", "num-servers": 3, "num-clients": 7, "topology": "path", "peers": PEERS}
SITE = {"peers": PEERS, "num-clients": 7, "topology": "ring", "monitor": False}
SUMS = {"secure-sum": True}
ADAMW = {"local-optimiser": "adamw"}
PROX = "flwr:FedProx(proximal_mu=2.0)"
SMALL_SUMS = {**SUMS, "num-servers": 10, "aggregation": "median", "edge-servers": "nodes"}

# fmt: off
APART: list[tuple[AppCase, dict[str, Any], str]] = [
    (SD_FEEL, {"method": "feel", "iterations": 301}, "iterations must be a multiple of 5 (tau1), got 301"),
    (SD_FEEL, {"method": "feel", "clients-per-round": 21}, "must be at most num-clients = 20, got 21"),
    (SD_FEEL, {**DIRECT, "peers": ""}, "peers must be host:port of each of the 3 edge servers"),
    (SD_FEEL, {**DIRECT, "edge": 3}, "edge must be 0 to 2, as num-servers = 3, got 3"),
    (SD_FEEL, {**DIRECT, "peer-ca": "a"}, "a file if any of peer-ca, peer-certificate and peer-key is"),
    (SD_FEEL, {**DIRECT, "partition": "own"}, "must be one of a data set with edge-servers = 'direct'"),
    (SD_FEEL, {**DIRECT, "method": "hierfavg"}, "edge-servers must be 'emulated' but for method = 'sd-feel'"),
    (SD_FEEL, {**DIRECT, "clusters": "group"}, "min-available-nodes must be > 0 with clusters = 'group'"),
    (SD_FEEL, {**DIRECT, "min-available-nodes": 4}, "must be at most 3, the clients of edge server 0, got 4"),
    (SD_FEEL, {**DIRECT, "edge-servers": "nodes"}, "peers must be '' where edge-servers is not 'direct'"),
    (SD_FEEL, {**DIRECT, "stop-after": "bits=1"}, "stop-after must be iterations=N or sim-seconds=S"),
    (SD_FEEL, {**DIRECT, "stragglers": "lasting(0.1,2)"}, "must be '' but for edge-servers = 'emulated'"),
    (SD_FEEL, {**DIRECT, "evaluate-servers": True}, "must be False but for edge-servers = 'emulated'"),
    (SD_FEEL, {"method": "feel", "evaluate-servers": True}, "but for method = 'sd-feel' or 'hierfavg'"),
    (SD_FEEL, {"partition": "own", "evaluate-servers": True}, "on the server's test data"),
    (SD_FEEL, {"method": "flwr:Krum", "buffer": 21}, "buffer must be at most 20, the nodes of a round"),
    (FEDMUD, {"aggregation": "median", "buffer": 5}, "buffer must be at most 4, the nodes of a round"),
    (SD_FEEL, {**SUMS, "local-layers": "*bias"}, "secure-sum must be False with local-layers"),
    (SD_FEEL, SMALL_SUMS, "aggregation must be 'mean' with secure-sum"),
    (SD_FEEL, SMALL_SUMS, "edge-servers must be 'emulated' or 'direct' with secure-sum"),
    (SD_FEEL, SMALL_SUMS, "sum-min-nodes must be at most 2, the nodes of"),
    (SD_FEEL, {**SUMS, "num-clients": 1021}, "must be False: a sum has at most 255 nodes, not 256"),
    (SD_FEEL, {**SUMS, "upload-clip": 1.0}, "upload-noise-multiplier must be > 0 with upload-clip = 1.0"),
    (SD_FEEL, {"upload-clip": 1.0, "upload-noise-multiplier": 2.0}, "must be 0 without secure-sum"),
    (SIMILARITY_FREE, {**SUMS, "compressor": "sign"}, "compressor must be 'identity' or 'randk(0.1)' with"),
    (SIMILARITY_FREE, {**SUMS, "compressor": "randk(0.1)", "probe-rounds": 2}, "probe-rounds must be 0 with"),
    (SIMILARITY_FREE, {**SUMS, "algorithm": "fedavg", "aggregation": "median"}, "must be 'mean' with secure"),
    (SIMILARITY_FREE, {**SUMS, "algorithm": "fedavg", "num-clients": 2}, "sum-min-nodes must be at"),
    (FEDMUD, {**SUMS, "method": "fedhm"}, "False with method = 'fedhm' (the mean"),
    (FEDMUD, {**SUMS, "method": "fedbat"}, "False with method = 'fedbat' (nodes"),
    (FEDMUD, {**SUMS, "measure-bias": True}, "measure-bias must be False with secure-sum"),
    (FEDMUD, {**SUMS, "clients-per-round": 2}, "sum-min-nodes must be at most 2"),
    (SD_FEEL, {**ADAMW, "training-mode": "stack"}, "training-mode must be 'auto' or 'loop' with local-opt"),
    (SD_FEEL, {**ADAMW, "precision": "bf16"}, "precision must be 'float32' with local-optimiser, got 'bf16'"),
    (SD_FEEL, {**ADAMW, "compile": True}, "compile must be False with local-optimiser"),
    (FEDMUD, {**ADAMW, "augmentation": "flips"}, "augmentation must be 'none' with local-optimiser"),
    (FEDMUD, {**ADAMW, "method": "fedbat"}, "local-optimiser must be empty with method = 'fedbat', which"),
    (SIMILARITY_FREE, {**ADAMW, "algorithm": "fedprox"}, "must be empty with algorithm = 'fedprox', whose"),
    (SIMILARITY_FREE, {**ADAMW, "algorithm": "ef-fedprox"}, "must be empty with algorithm = 'ef-fedprox'"),
    (SIMILARITY_FREE, {**ADAMW, "algorithm": PROX}, "must be empty with algorithm = 'flwr:FedProx"),
    (CEPS, {**SITE, "peers": "", "site": 1}, "site must be 0 where peers is empty, got 1"),
    (CEPS, {**SITE, "num-clients": 2, "topology": ""}, "peers must have at most 2 sites, a node for each"),
    (CEPS, {**SITE, "monitor": True}, "monitor must be False with peers, got True"),
    (CEPS, {**SITE, "partition": "own", "problem": "logistic"}, "must be one of a data set with peers"),
    (CEPS, {**SITE, "stop-after": "bits=1"}, "stop-after must be iterations=N with peers, got 'bits=1'"),
    (CEPS, {**SITE, "min-available-nodes": 4}, "must be at most 3, the nodes of site 0, got 4"),
    (CEPS, {**SITE, "peer-key": "a"}, "a file if any of peer-ca, peer-certificate and peer-key is"),
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


@every_app
def test_a_setting_has_the_role_that_its_name_has_everywhere(case: AppCase) -> None:
    assert {key: role_of(key) for key in case.settings.SETTINGS} == {
        key: one.role for key, one in case.settings.SETTINGS.items()
    }


@every_suite_app
def test_ten_settings_matter_first_the_method_before_all(case: AppCase) -> None:
    first = [key for key, one in case.settings.SETTINGS.items() if one.first]
    assert len(first) == 10
    assert first[0] == case.registered.method
    assert {"seed", "num-clients", "dataset"} <= {*first}


# What newcomers and other libraries call a key, and what it is in each app.
WORDS = {
    "rounds": {"iterations", "num-rounds"},
    "num-server-rounds": {"iterations", "num-rounds"},
    "iterations": {"iterations", "num-rounds"},
    "epochs": {"local-epochs", "local-iters", "local-steps", "iterations"},
    "lr": {"learning-rate", "fixed-c"},
    "clients": {"num-clients"},
    "data": {"dataset"},
}


@every_suite_app
@pytest.mark.parametrize("word", WORDS)
def test_what_newcomers_call_a_key_is_answered_with_the_key(case: AppCase, word: str) -> None:
    if word in case.settings.SETTINGS:
        return
    for refused in (
        lambda: plan_run(case.spec, [f"{word}=1"]),
        lambda: case.settings.read({**case.defaults, word: 1}),
    ):
        with pytest.raises(SettingsError) as error:
            refused()
        (meant,) = re.findall(r"did you mean '([a-z-]+)'\?", str(error.value))
        assert meant in WORDS[word]


@pytest.mark.parametrize("case", [SD_FEEL, SIMILARITY_FREE, FEDMUD], ids=lambda case: case.name)
def test_a_batch_is_a_batch_size(case: AppCase) -> None:
    with pytest.raises(SettingsError, match="did you mean 'batch-size'"):
        plan_run(case.spec, ["batch=1"])


@pytest.mark.parametrize(
    ("overrides", "nodes", "words"),
    [
        ("num-clients=9", 9, "num-clients must be 5 with 9 nodes, got 9"),
        ("", 4, "num_nodes must be above num-servers=4, which are nodes too, got 4"),
    ],
)
def test_a_federation_too_small_for_its_edge_servers_is_refused(
    overrides: str, nodes: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        plan_run(SD_FEEL.spec, [f"edge-servers=nodes {overrides}"], num_nodes=nodes)


@pytest.mark.parametrize(
    ("app", "key"), [("sd-feel", "method"), ("similarity-free", "algorithm"), ("fedmud", "method")]
)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("flwr:FedYogi(et=1.0)", "did you mean 'eta'?"),
        ("flwr:", "must be a name with named values"),
        ("fedavgg", "did you mean 'fedavg'?"),
    ],
)
def test_a_wrong_strategy_of_flowers_is_refused_by_the_setting(
    app: str, key: str, text: str, why: str
) -> None:
    (case,) = (one for one in CASES if one.registered.app == app)
    with pytest.raises(SettingsError, match=re.escape(why)) as caught:
        case.settings.read({**case.defaults, key: text})
    assert f"{key} must be one of " in str(caught.value)


@pytest.mark.parametrize("app", ["sd-feel", "similarity-free", "fedmud"])
@pytest.mark.parametrize(
    "other", [{"aggregation": "median"}, {"server-step": "momentum"}, {"secure-sum": True}]
)
def test_what_one_of_flowers_strategies_decides_is_set_nowhere_else(app: str, other: dict[str, Any]) -> None:
    (case,) = (one for one in CASES if one.registered.app == app)
    flower = case.named("flwr:FedMedian")
    case.settings.read({**case.defaults, **flower})
    with pytest.raises(SettingsError, match=next(iter(other))):
        case.settings.read({**case.defaults, **flower, **other})
