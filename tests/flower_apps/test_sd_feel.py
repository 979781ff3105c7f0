"""The SD-FEEL app: settings that must fit together, and what the paper's formulas say of its runs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from tests.flower_apps.cases import SD_FEEL, Run
from tests.flower_apps.test_settings import DIRECT

from hedgerow.sim import InProcessGrid, flower_identity, plan_run, read_config, read_rounds
from hedgerow.sim.engine._compat import read_toml
from hedgerow.strategies import (
    EdgeServerSDFeel,
    Node,
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
    assert (paper.num_clients, paper.num_servers, paper.topology) == (50, 10, "ring")
    assert (paper.learning_rate, paper.batch_size, paper.partition) == (0.01, 10, "dirichlet(0.5)")


def test_edge_servers_that_are_nodes_make_the_federation_larger() -> None:
    nodes = "edge-servers=nodes num-servers=3"
    assert plan_run(SD_FEEL.spec, [nodes]).num_nodes == 23
    assert plan_run(SD_FEEL.spec, [nodes, "num-clients=6"]).num_nodes == 9
    plan = plan_run(SD_FEEL.spec, [nodes], num_nodes=9)
    assert (plan.num_nodes, plan.run_config["num-clients"]) == (9, 6)
    assert settings.num_nodes(settings.read(plan.run_config)) == 9
    assert plan_run(SD_FEEL.spec, ["num-servers=3 num-clients=6"]).num_nodes == 6


# Edge servers that are orchestrators of their own


def test_the_settings_of_time_reach_the_strategy() -> None:
    assert strategy_of(stragglers="transient(0.1,8)").stragglers == Stragglers(False, 0.1, 8.0)
    # Servers take models for those of their own run.
    digests = [
        strategy_of(**DIRECT, edge=edge, tau1=tau1)._settings_digest()
        for edge, tau1 in ((0, 5), (1, 5), (1, 1))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_an_edge_server_of_its_own_waits_for_its_own_clients_and_takes_no_others() -> None:
    values = settings.read({**DEFAULTS, **DIRECT, "edge": 1})
    # Of 7 clients of 3 servers: 0, 1 and 2; 3 and 4; 5 and 6.
    assert settings.quorum(values) == 2
    strategy = strategy_of(**DIRECT, edge=1)
    assert isinstance(strategy, EdgeServerSDFeel)
    admitted = [i for i in range(8) if strategy.federation.members.admits(Node(i, 100 + i)) is None]
    assert admitted == [3, 4]
    assert strategy.federation.members.admits(Node(0, 100)) == "another server's"
    assert sorted(strategy.graph.neighbors(1)) == [0, 2]
    group = {"clusters": "group", "min-available-nodes": 5}
    assert settings.quorum(settings.read({**DEFAULTS, **DIRECT, **group})) == 5
    # Whoever dials this server's SuperLink.
    assert strategy_of(**DIRECT, **group).federation.members.admits is None


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


@pytest.mark.parametrize("name", PRESETS)
def test_the_clock_is_that_of_the_preset(name: str) -> None:
    expected = preset(name, num_params=10, flops_per_iteration=100.0)
    assert strategy_of(**{"latency-preset": name}).system == expected


@pytest.mark.parametrize("method", METHODS)
def test_training_learns(run: Run, method: str) -> None:
    first, *_, last = run(method=method, **{"learning-rate": 0.05, "iterations": 40})
    assert last["central"]["accuracy"] > 0.6 > first["central"]["accuracy"]
    assert last["central"]["loss"] < first["central"]["loss"] / 2


def test_the_servers_own_models_are_measured_beside_u(run: Run) -> None:
    few, many = (
        run(
            **{
                "evaluate-servers": True,
                "topology": "ring",
                "num-servers": 4,
                "iterations": 20,
                "alpha": alpha,
            }
        )
        for alpha in (0, 20)
    )
    first, *_, last = (one["central"] for one in few)
    assert "servers-accuracy" not in first
    assert last["worst-server-accuracy"] < last["servers-accuracy"] < last["best-server-accuracy"]
    assert last["accuracy"] != last["servers-accuracy"]
    agreed = many[-1]["central"]
    assert agreed["best-server-accuracy"] - agreed["worst-server-accuracy"] < 0.01


@pytest.mark.parametrize("method", [one for one in METHODS if not one.startswith("flwr:")])
def test_simulated_seconds_and_bits_are_the_papers_closed_forms(run: Run, method: str) -> None:
    # Forward and backward of a batch of ten: three times the multiply-accumulates of a forward pass.
    flops = 3 * 10 * LOGISTIC_MACS
    system = preset("honest", num_params=LOGISTIC_PARAMETERS, flops_per_iteration=flops)
    expected = latency(method, system, K=8, tau1=2, tau2=2, alpha=DEFAULTS["alpha"])
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
    rounds = run(method=method, **{"latency-preset": "honest"})
    assert (rounds[0]["sim_seconds"], rounds[0]["bits"]) == (0, 0)
    assert rounds[-1]["sim_seconds"] == pytest.approx(expected, rel=1e-12)
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


# Edge servers that are nodes

RELAYED: dict[str, Any] = {"edge-servers": "nodes", "alpha": 2}


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
    assert read_config(folder)["realism"].startswith("E2 relayed: ")
    assert [record["central"] for record in read_rounds(folder)] == [
        record["central"] for record in run(**RELAYED)
    ]
