"""Nodes that do not belong: they are told why they do not join, and the run goes on without them."""

from pathlib import Path

import pytest
from tests.deployment.trials import APPS, Trial, trial

from hedgerow.sim import StartError, SuperNode, make_credentials
from hedgerow.sim.deploy.flower_cli import environment
from hedgerow.sim.deploy.processes import free_ports

pytestmark = pytest.mark.slow

CONFIG = "num-servers=2 topology=path tau1=1 tau2=1 iterations=2 batch-size=5 model=logistic evaluate-every=1"


def refusal(one: Trial, name: str, ca: Path, key: Path) -> str:
    """Start one more node, and return why it did not join."""
    deployment, (port,) = one.deployment, free_ports(1)
    arguments = ["--superlink", deployment.address, "--port", str(port)]
    arguments += ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)]
    env, log = environment(deployment.home / name), deployment.logs / f"{name}.log"
    stranger = SuperNode(1, {"partition-id": 1, "num-partitions": 2}, arguments, env, log)
    stranger.start()
    try:
        with pytest.raises(StartError, match="ended at its start") as refused:
            stranger.join(60)
    finally:
        stranger.stop()
    return str(refused.value)


def test_a_wrong_ca_and_an_unknown_key_are_refused_with_a_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    others = make_credentials(tmp_path / "others", 1)
    with trial(APPS / "sd-feel", 2, CONFIG, tmp_path / "out", tls=True) as one:
        ours, own_key = one.deployment.home / "keys", one.deployment.home / "keys" / "node1"
        distrust = refusal(one, "distrusting", others.ca, own_key)
        unknown = refusal(one, "unknown", ours / "ca.crt", others.nodes[0].private)
        run = one.end()
    assert "Failed to initialize the connection to the SuperLink" in distrust
    assert "certificate verify failed" in distrust
    # The SuperLink does not tell whoever asks whether a key is unknown or its node is online already.
    assert "[code: 2004] Failed to activate SuperNode" in unknown
    assert run.story == [{}]


def test_a_node_that_claims_anothers_place_in_the_registry_is_refused_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    # Its key is that of partition 2, and it says 1, whose node is there.
    claims = [{}, {}, {"partition-id": 1}]
    config = f"{CONFIG} num-clients=3 min-available-nodes=2"
    with trial(APPS / "sd-feel", 3, config, tmp_path / "out", tls=True, node_config=claims) as one:
        run = one.end()
    assert run.lost[0]["another partition than registered"] == 1
    assert all(lost["offline"] == 1 for lost in run.lost)
    assert [record["accepted"] for record in run.rounds[1:]] == [2, 2]
