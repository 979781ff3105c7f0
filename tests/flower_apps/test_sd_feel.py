"""The SD-FEEL app: settings that must fit together, and what the paper's formulas say of its runs."""

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from tests.flower_apps.cases import SD_FEEL, Run, losses
from tests.flower_apps.test_apps import problems
from tests.flower_apps.test_engines import Job, assert_same_run, finish, kill_in_a_run, start

from hedgerow.sim import InProcessGrid, flower_identity, plan_run, read_config, read_rounds, run_app
from hedgerow.sim.engine._compat import read_toml
from hedgerow.strategies import (
    AsynchronousSDFeel,
    EdgeMonitor,
    EdgeServerSDFeel,
    FedAvg,
    Feel,
    HierFAvg,
    Node,
    SDFeel,
    Stragglers,
)
from hedgerow.strategies.sd_feel import PRESETS, latency, preset, traffic
from sd_feel import settings

DEFAULTS, SMALL, METHODS = SD_FEEL.defaults, SD_FEEL.small, SD_FEEL.methods
LOGISTIC_PARAMETERS = 7_850
LOGISTIC_MACS = 7_840


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return partial(SD_FEEL.run, tmp_path)


# Settings


def test_the_papers_settings_are_the_papers() -> None:
    paper = settings.read({**DEFAULTS, **read_toml(SD_FEEL.folder / "paper.toml")})
    assert (paper["num-clients"], paper["num-servers"], paper["topology"]) == (50, 10, "ring")
    assert (paper["learning-rate"], paper["batch-size"], paper["partition"]) == (0.01, 10, "dirichlet(0.5)")


def test_settings_that_do_not_fit_together_are_in_one_error() -> None:
    first, second, third = problems(
        SD_FEEL, **{"num-servers": 21, "iterations": 301, "topology": "regular(50)"}
    )
    assert first == "num-servers = 21; valid is 1 to num-clients = 20"
    assert second == "iterations = 301; valid is a multiple of 10 (tau1 tau2)"
    assert third.startswith("topology is 'regular(50)' on 21 nodes; valid is ")


def test_secure_sums_need_clusters_that_hide_their_clients_and_the_mean() -> None:
    second, first, third = problems(
        SD_FEEL, **{"secure-sum": True, "num-servers": 10, "aggregation": "median", "edge-servers": "nodes"}
    )
    assert first == "aggregation = 'median'; valid with secure-sum is 'mean': a sum gives no other"
    assert second == "edge-servers = 'nodes'; valid with secure-sum is 'emulated'"
    assert third == ("sum-min-nodes = 3; valid is at most 2, the nodes that the smallest sum has in a round")


def test_a_secure_sum_has_so_many_members_at_most() -> None:
    (problem,) = problems(SD_FEEL, **{"secure-sum": True, "num-clients": 1021})
    assert problem == "secure-sum = True; valid with at most 255 nodes in a sum, not 256"


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_secure_sums_is_the_plain_one_within_the_rounding(method: str, run: Run) -> None:
    small = {"method": method, "num-servers": 2, "training-mode": "loop"}
    plain, summed = (run(**small, **{"secure-sum": on}) for on in (False, True))
    for one, other in zip(plain, summed, strict=True):
        assert other["central"] == pytest.approx(one["central"], abs=2e-3)
        assert other["accepted"] == one["accepted"]
    assert losses(plain) != losses(summed)
    assert summed[-1]["train"]["train-loss"] == pytest.approx(plain[-1]["train"]["train-loss"], abs=1e-4)


def test_feel_schedules_no_more_clients_than_there_are() -> None:
    (problem,) = problems(SD_FEEL, **{"method": "feel", "clients-per-round": 21})
    assert problem == "clients-per-round = 21; valid is 1 to num-clients = 20"


def test_the_rounds_of_feel_are_tau1_iterations() -> None:
    assert settings.read({**DEFAULTS, "method": "feel", "iterations": 305})["iterations"] == 305
    (problem,) = problems(SD_FEEL, method="feel", iterations=301)
    assert problem == "iterations = 301; valid is a multiple of 5 (tau1)"


@pytest.mark.parametrize("method", ["feel", "fedavg"])
def test_methods_without_edge_servers_do_not_ask_for_their_number(method: str) -> None:
    settings.read({**DEFAULTS, "method": method, "num-clients": 3, "num-servers": 4, "clients-per-round": 2})


@pytest.mark.parametrize("method", ["hierfavg", "feel", "fedavg"])
def test_methods_without_gossip_do_not_ask_for_a_topology(method: str) -> None:
    settings.read({**DEFAULTS, "method": method, "topology": "moebius"})


@pytest.mark.parametrize("method", ["hierfavg", "feel", "fedavg"])
def test_methods_without_gossip_have_no_edge_servers_that_are_nodes(method: str) -> None:
    (problem,) = problems(SD_FEEL, method=method, **{"edge-servers": "nodes"})
    assert problem.startswith(f"edge-servers = 'nodes'; valid is 'emulated' with method = {method!r}")


def test_edge_servers_that_are_nodes_make_the_federation_larger() -> None:
    nodes = "edge-servers=nodes num-servers=3"
    assert plan_run(SD_FEEL.spec, [nodes]).num_nodes == 23
    assert plan_run(SD_FEEL.spec, [nodes, "num-clients=6"]).num_nodes == 9
    plan = plan_run(SD_FEEL.spec, [nodes], num_nodes=9)
    assert (plan.num_nodes, plan.run_config["num-clients"]) == (9, 6)
    assert settings.num_nodes(settings.read(plan.run_config)) == 9
    assert plan_run(SD_FEEL.spec, ["num-servers=3 num-clients=6"]).num_nodes == 6


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


# Edge servers that are orchestrators of their own

DIRECT: dict[str, Any] = {
    "edge-servers": "direct",
    "num-servers": 3,
    "num-clients": 7,
    "topology": "path",
    "peers": "127.0.0.1:9500, 127.0.0.1:9501,127.0.0.1:9502",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": ""}, "peers = ''; valid is host:port of each of the 3 edge servers"),
        ({"peers": "127.0.0.1:9500"}, "valid is host:port of each of the 3"),
        ({"edge": 3}, "edge = 3; valid is 0 to 2, as num-servers = 3"),
        ({"peer-ca": "ca.crt"}, "peer-ca is set; valid is all of peer-ca, peer-certificate and peer-key"),
        ({"partition": "own"}, "partition = 'own'; valid is one of a data set"),
        ({"method": "hierfavg"}, "edge-servers = 'direct'; valid is 'emulated' with method = 'hierfavg'"),
        ({"clusters": "group"}, "min-available-nodes = 0; valid with clusters = 'group'"),
        ({"clusters": "group", "adopt": True}, "adopt = true; valid with clusters = 'group' is false"),
        ({"edge-servers": "emulated", "peers": "", "adopt": True}, "adopt = True; valid is False where"),
        ({"min-available-nodes": 4}, "min-available-nodes = 4; valid is at most 3, the clients of edge"),
        ({"edge": 2, "aggregation": "krum(1)"}, "edge server 2 has 2"),
        ({"edge-servers": "nodes"}, "valid is '' where edge-servers is not 'direct'"),
        (
            {"edge-servers": "monitor"},
            "monitor = ''; valid with edge-servers = 'monitor' is where it listens",
        ),
        ({"stop-after": "bits=1"}, "valid with edge-servers = 'direct' is iterations=N or sim-seconds=S"),
        (
            {"mobility": 0.5},
            "mobility = 0.5; valid is 0.0 but for method = 'sd-feel' with edge-servers = 'emul",
        ),
        ({"stragglers": "lasting(1,2)"}, "stragglers = 'lasting(1,2)'; valid is ''"),
        ({"probe-rounds": 2}, "probe-rounds = 2; valid is 0 but for method = 'sd-feel' with edge-servers"),
    ],
)
def test_what_does_not_make_an_edge_server_of_its_own_is_named(changes: dict[str, Any], words: str) -> None:
    told = problems(SD_FEEL, **{**DIRECT, **changes})
    assert any(words in problem for problem in told), told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "alpha = 2; valid with edge-rounds = 'asynchronous' is 1"),
        ({"mobility": 0.5}, "mobility = 0.5; valid with edge-rounds = 'asynchronous' is 0.0"),
        ({"secure-sum": True}, "secure-sum = True; valid with edge-rounds = 'asynchronous' is False"),
        ({"probe-rounds": 1}, "probe-rounds = 1; valid with edge-rounds = 'asynchronous' is 0"),
        ({"method": "hierfavg"}, "edge-rounds = 'asynchronous'; valid is 'synchronous' but for method"),
        ({"edge-servers": "nodes"}, "with edge-servers = 'emulated' or 'direct' or 'monitor'"),
    ],
)
def test_what_does_not_go_without_lock_step_is_named(changes: dict[str, Any], words: str) -> None:
    told = problems(SD_FEEL, **{"edge-rounds": "asynchronous", **changes})
    assert any(words in problem for problem in told), told


def test_the_settings_of_time_reach_the_strategy() -> None:
    slow = {"stragglers": "transient(0.1,8)", "mobility": 0.25}
    one = strategy_of(**slow)
    assert (one.stragglers, one.mobility) == (Stragglers(False, 0.1, 8.0), 0.25)
    other = strategy_of(**{"edge-rounds": "asynchronous", "alpha": 1, "max-staleness": 7})
    assert isinstance(other, AsynchronousSDFeel)
    assert (other.max_staleness, other.stragglers) == (7, None)
    direct = {**DIRECT, "edge-rounds": "asynchronous", "alpha": 1, "monitor": "127.0.0.1:9509"}
    server = strategy_of(**direct, edge=1, **{"evaluate-every": 3})
    assert (server.max_staleness, server.monitor, server.monitor_every) == (2, "127.0.0.1:9509", 3)
    observer = strategy_of(**{**direct, "edge-servers": "monitor", "evaluate-every": 3})
    assert isinstance(observer, EdgeMonitor)
    # Servers take reports and models for those of their own run.
    assert observer._run == server._settings_digest()
    assert strategy_of(**DIRECT, edge=1)._settings_digest() != server._settings_digest()


@pytest.mark.parametrize("changes", [{"edge-rounds": "asynchronous", "alpha": 1}, {"mobility": 0.3}])
def test_asynchronous_and_moving_runs_learn_and_repeat(run: Run, changes: dict[str, Any]) -> None:
    slow = {**changes, "stragglers": "transient(0.2,5)"}
    first, second = run(**slow), run(**slow)
    assert first[-1]["central"]["loss"] < first[0]["central"]["loss"]
    assert [record["central"] for record in first] == [record["central"] for record in second]
    assert first[-1]["sim_seconds"] == second[-1]["sim_seconds"]


def test_an_edge_server_of_its_own_waits_for_its_own_clients_and_takes_no_others() -> None:
    values = settings.read({**DEFAULTS, **DIRECT, "edge": 1})
    # Of 7 clients of 3 servers: 0, 1 and 2; 3 and 4; 5 and 6.
    assert settings.quorum(values) == 2
    strategy = strategy_of(**DIRECT, edge=1)
    assert isinstance(strategy, EdgeServerSDFeel)
    admitted = [i for i in range(8) if strategy.federation.admits(Node(i, 100 + i)) is None]
    assert admitted == [3, 4]
    assert strategy.federation.admits(Node(0, 100)) == "another server's"
    assert sorted(strategy.graph.neighbors(1)) == [0, 2]
    group = {"clusters": "group", "min-available-nodes": 5}
    assert settings.quorum(settings.read({**DEFAULTS, **DIRECT, **group})) == 5
    # Whoever dials this server's SuperLink.
    assert strategy_of(**DIRECT, **group).federation.admits is None


def test_addresses_beyond_this_machine_need_certificates() -> None:
    far = "10.0.0.1:1,10.0.0.2:1,10.0.0.3:1"
    with pytest.raises(ValueError, match="give each peer a certificate"):
        strategy_of(**{**DIRECT, "peers": far})
    files = {"peer-ca": "/a/ca.crt", "peer-certificate": "/a/peer.pem", "peer-key": "/a/peer.key"}
    assert strategy_of(**{**DIRECT, "peers": far, **files}).peers[2] == "10.0.0.3:1"


# Strategies


def strategy_of(**changes: Any) -> Any:
    values = settings.read({**DEFAULTS, **changes})
    return settings.build_strategy(values, num_params=10, flops_per_iteration=100.0)


@pytest.mark.parametrize(
    ("method", "kind"), [*zip(METHODS, (SDFeel, HierFAvg, Feel, FedAvg), strict=True)], ids=METHODS
)
def test_each_method_builds_its_strategy(method: str, kind: type) -> None:
    strategy = strategy_of(method=method)
    assert type(strategy) is kind
    assert strategy.num_clients == 20


def test_the_settings_reach_the_strategy() -> None:
    changes = {"topology": "complete", "exact-if-complete": True, "participation": 0.25, "seed": 9}
    strategy = strategy_of(**changes, **{"min-replies": 3})
    assert (strategy.num_servers, strategy.local_steps, strategy.tau2, strategy.alpha) == (4, 5, 2, 2)
    assert strategy.exact_if_complete
    assert strategy.graph.number_of_edges() == 6
    assert strategy.participation == 0.25
    assert strategy.settings.seed == 9
    assert strategy.settings.min_train_nodes == 3
    assert strategy_of(method="feel", **{"clients-per-round": 7}).clients_per_round == 7
    assert strategy.edges is None
    assert strategy_of(**{"edge-servers": "nodes"}).edges is not None


def test_a_round_of_fedavg_is_a_block_of_sd_feel() -> None:
    assert strategy_of(method="fedavg").local_steps == 10


@pytest.mark.parametrize("name", PRESETS)
def test_the_clock_is_that_of_the_preset(name: str) -> None:
    expected = preset(name, num_params=10, flops_per_iteration=100.0)
    assert strategy_of(**{"latency-preset": name}).system == expected


@pytest.mark.parametrize("method", METHODS)
def test_training_learns(run: Run, method: str) -> None:
    first, *_, last = run(method=method, **{"learning-rate": 0.05, "iterations": 40})
    assert last["central"]["accuracy"] > 0.6 > first["central"]["accuracy"]
    assert last["central"]["loss"] < first["central"]["loss"] / 2


def test_fedavg_is_hierfavg_with_an_exchange_after_every_round(run: Run) -> None:
    hierarchical = losses(run(method="hierfavg", tau2=1))
    assert losses(run(method="fedavg", tau2=1)) == pytest.approx(hierarchical, rel=1e-5)


def test_one_sd_feel_server_is_fedavg(run: Run) -> None:
    one_server = losses(run(method="sd-feel", tau2=1, **{"num-servers": 1}))
    assert losses(run(method="fedavg", tau2=1)) == pytest.approx(one_server, rel=1e-5)


@pytest.mark.parametrize("latency_preset", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_simulated_seconds_are_the_papers_latency(run: Run, method: str, latency_preset: str) -> None:
    # Forward and backward of a batch of ten: three times the multiply-accumulates of a forward pass.
    flops = 3 * 10 * LOGISTIC_MACS
    system = preset(latency_preset, num_params=LOGISTIC_PARAMETERS, flops_per_iteration=flops)
    expected = latency(method, system, K=8, tau1=2, tau2=2, alpha=DEFAULTS["alpha"])
    rounds = run(method=method, **{"latency-preset": latency_preset})
    assert rounds[0]["sim_seconds"] == 0
    assert rounds[-1]["sim_seconds"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_bits_are_the_closed_form_of_the_traffic(run: Run, method: str) -> None:
    models = traffic(
        method,
        K=8,
        tau1=2,
        tau2=2,
        alpha=DEFAULTS["alpha"],
        num_clients=SMALL["clients-per-round"] if method == "feel" else SMALL["num-clients"],
        num_servers=SMALL["num-servers"],
        num_edges=3,
    )
    rounds = run(method=method)
    assert rounds[0]["bits"] == 0
    assert rounds[-1]["bits"] == 32 * LOGISTIC_PARAMETERS * sum(models.values())


def test_payloads_are_the_models_bytes_and_their_headers(run: Run) -> None:
    links = run(alpha=2)[-1]["by_link"]

    def header(link: str, width: float) -> float:
        """Return the mean of what a message holds beside its values, of so many bytes each."""
        return links[link]["payload_bytes"] / links[link]["messages"] - width * LOGISTIC_PARAMETERS

    # Two arrays a model, with a .npy header and a key each.
    assert 2 * 100 < header("client->edge", 4) == header("edge->client", 4) < 2 * 160
    # One vector, which the second of two gossip steps sends in float64.
    assert 100 < header("edge->edge", (4 + 8) / 2) < 160


def test_a_budget_ends_the_run_with_the_round_that_spends_it(run: Run) -> None:
    whole = run()
    stopped = run(**{"stop-after": f"sim-seconds={whole[2]['sim_seconds']}", "evaluate-every": 100})
    assert [record["round"] for record in stopped] == [0, 1, 2]
    assert stopped[1]["central"] == {}
    assert stopped[2]["central"] == whole[2]["central"] != {}


def test_fewer_participants_send_fewer_bits_in_the_same_time(run: Run) -> None:
    every, some = run()[-1], run(participation=0.5)[-1]
    assert some["bits"] < every["bits"]
    assert some["sim_seconds"] == every["sim_seconds"]


def test_lost_replies_are_counted_by_reason(run: Run) -> None:
    rounds = run(iterations=16, **{"fault-corrupt": "nan", "fault-corrupt-rate": 0.3, "seed": 1})
    reasons = {reason for record in rounds for reason in record["rejected"]}
    assert "non-finite" in reasons <= {"non-finite", "quarantined", "offline"}


# Edge servers that are nodes

RELAYED: dict[str, Any] = {"edge-servers": "nodes", "alpha": 2}


def modelled(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rounds without what passes through Flower's hub, of which a relay has more."""
    return [
        {
            **{key: value for key, value in record.items() if key not in ("sent", "accepted")},
            "by_link": {link: total for link, total in record["by_link"].items() if "hub" not in link},
        }
        for record in rounds
    ]


@pytest.mark.parametrize("changes", [{}, {"strict": True}, {"engine": "inprocess"}], ids=str)
def test_edge_servers_that_are_nodes_give_the_rounds_of_emulated_ones(
    run: Run, changes: dict[str, Any]
) -> None:
    emulated = run(**{**RELAYED, "edge-servers": "emulated"})
    relayed = run(**RELAYED, **changes)
    assert modelled(relayed) == modelled(emulated)
    # Three edge servers: one exchange a round, and two gossip steps in every second round.
    more = [now["sent"] - before["sent"] for now, before in zip(relayed, emulated, strict=True)]
    assert more == [0, 3, 9, 3, 9]


def test_a_run_says_at_which_level_of_realism_it_was(run: Run, tmp_path: Path) -> None:
    run(**RELAYED)
    (folder,) = tmp_path.iterdir()
    assert read_config(folder)["realism"].startswith("E2 relayed: ")


def test_lost_edge_servers_are_counted_and_the_run_goes_on(run: Run) -> None:
    faults = {"fault-corrupt": "nan", "fault-corrupt-rate": 0.2, "seed": 1}
    rounds = run(**{**RELAYED, **faults}, iterations=16)
    reasons = {reason for record in rounds for reason in record["rejected"]}
    assert reasons == {"non-finite", "edge non-finite"}
    assert sum(sum(record["rejected"].values()) for record in rounds) == sum(
        record["sent"] - record["accepted"] for record in rounds
    )


def test_our_engine_inside_flowers_runs_the_edge_servers_too(run: Run, tmp_path: Path) -> None:
    flowers = InProcessGrid(SD_FEEL.loaded.client_app, 9)

    class Handed:
        """What Flower hands over, as far as an engine that takes over looks at it."""

        run, get_node_ids = flowers.run, flowers.get_node_ids

    parent = tmp_path / "inside"
    parent.mkdir()
    values = {**DEFAULTS, **SMALL, **RELAYED, "engine": "inprocess", "output-dir": str(parent)}
    context = Context(flowers.run.run_id, 1, {}, RecordDict(), values)
    with flower_identity(flowers.run.run_id):
        SD_FEEL.loaded.server_app(Handed(), context)  # type: ignore[arg-type]
    (folder,) = parent.iterdir()
    assert [record["central"] for record in read_rounds(folder)] == [
        record["central"] for record in run(**RELAYED)
    ]


RELAYED_JOB = Job(
    "sd_feel",
    "num-clients=6 num-servers=3 tau1=2 tau2=2 alpha=3 participation=0.8 batch-size=5 evaluate-every=4 "
    "iterations=64 edge-servers=nodes",
    brief="",
)


def resume(folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(SD_FEEL.folder), "--resume", str(folder)]
    subprocess.run([*command, *options], check=True, timeout=400, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_relayed_gossip_on_flowers_engine_and_on_ours_ends_with_the_same_bits(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, options in ((ours, ()), (theirs, ("--engine", "flower"))):
        folder.mkdir()
        finish(start(RELAYED_JOB, folder, *options))
    assert_same_run(ours, theirs)


def test_a_run_with_edge_servers_that_are_nodes_resumes_to_the_same_bits(tmp_path: Path) -> None:
    fixed = {**SMALL, **RELAYED, "participation": 0.6, "checkpoint-every": 1}

    def go(parent: Path, **changes: Any) -> None:
        values = {**fixed, "output-dir": str(parent), **changes}
        plan = plan_run(SD_FEEL.spec, [f"{key}={json.dumps(value)}" for key, value in values.items()])
        run_app(SD_FEEL.loaded, plan)

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    go(whole, iterations=16)
    go(stopped, iterations=8)
    go(stopped, iterations=16, resume=str(next(stopped.iterdir())))
    assert_same_run(whole, stopped)


@pytest.mark.slow
def test_relayed_gossip_killed_on_flowers_engine_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    finish(start(RELAYED_JOB, whole))
    folder = kill_in_a_run(RELAYED_JOB, killed, signal.SIGTERM, "--engine", "flower")
    resume(folder, "--engine", "flower")
    assert_same_run(whole, killed)
