"""Every app on SuperNodes of its own, with TLS and authentication: the numbers of the in-process engine.

Bit for bit: a node's arithmetic is the same in a process of its own, and sums run in the order of partitions.
Three rounds or more, so that what nodes keep between rounds (error memories, CEPS's variables) must survive.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.deployment.leftovers import left_running

from hedgerow.sim import Deployment, read_model, read_rounds

pytestmark = pytest.mark.slow

APPS = Path(__file__).parents[2] / "flower_apps"
NODES = 4


@dataclass(frozen=True)
class Case:
    """An app, and about the least that it can learn."""

    app: str
    config: str
    roles: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return APPS / self.app


CASES = (
    Case(
        "sd_feel",
        "num-servers=2 topology=path tau1=2 tau2=1 iterations=6 participation=0.8 batch-size=5 "
        "model=logistic evaluate-every=1",
    ),
    Case(
        "sd_feel",
        "method=fedavg secure-sum=true tau1=2 tau2=1 iterations=6 batch-size=5 model=logistic "
        "evaluate-every=1",
    ),
    Case(
        "sd_feel",
        "edge-servers=nodes num-servers=2 topology=path tau1=2 tau2=1 alpha=2 iterations=6 batch-size=5 "
        "model=logistic evaluate-every=1",
        ("client", "client", "edge", "edge"),
    ),
    Case(
        "similarity_free",
        "algorithm=ef-fedavg num-rounds=3 local-iters=2 batch-size=5 partition=iid model=logistic "
        "fixed-c=0.3 evaluate-every=1",
    ),
    Case(
        "fedmud",
        "num-rounds=3 clients-per-round=3 batch-size=64 model=mlp skip-front=0 ratio=0.25 init-a=0.1 "
        "reset-interval=2 partition=iid train-loss-samples=200 evaluate-every=1",
    ),
    Case(
        "ceps",
        # Sealed, devices draw their sensing matrices' seeds themselves: other numbers.
        "sealed=false topology=complete iterations=7 interval-low=1 interval-high=2 features=60 sparsity=3 "
        "measurements=90 samples-low=30 samples-high=60 evaluate-every=1",
    ),
    Case(
        "hsgd",
        "num-groups=2 patients-per-group=10 participation=0.4 iterations=12 global-interval=4 "
        "local-interval=2 evaluate-every=1",
    ),
)


def rounds(run: Path) -> list[dict[str, Any]]:
    records = read_rounds(run)
    for record in records:
        del record["wall_seconds"]
    return records


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.app)
def test_a_deployment_ends_with_the_bits_of_the_engine_and_leaves_nothing(case: Case, tmp_path: Path) -> None:
    # CEPS's nodes tell a monitor only what their owners let them.
    policy = tmp_path / "hedgerow-node.toml"
    policy.write_text("monitor = true\n")
    told = [{"role": role} for role in case.roles] or [{}] * NODES
    node_config = [{"policy": str(policy), **one} for one in told]
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(case.folder), "--nodes", str(NODES)]
    subprocess.run([*command, "-c", f"{case.config} output-dir={tmp_path / 'here'}"], check=True, timeout=240)
    with Deployment(case.folder, NODES, tls=True, node_config=node_config) as deployment:
        end = deployment.run(deployment.plan(case.config, f"output-dir={tmp_path / 'there'}"), timeout=900)
        logs = "\n".join(node.log()[-2000:] for node in deployment.nodes)
    assert end.exit_code == 0, f"{end}\n{logs}"
    assert left_running(deployment.home) == []
    assert not deployment.home.exists()
    here, there = (next((tmp_path / parent).iterdir()) for parent in ("here", "there"))
    assert len(rounds(here)) >= 4
    # Devices round their part of a sum by draws of their own.
    summed = "secure-sum=true" in case.config
    if not summed:
        assert rounds(there) == rounds(here)
    summary = json.loads((there / "summary.json").read_text())
    assert (summary["status"], summary["lost-replies"]) == ("completed", {})
    # Of CEPS models stay on the nodes.
    assert (there / "model.npz").exists() == (here / "model.npz").exists() == (case.app != "ceps")
    if case.app != "ceps":
        ours, theirs = read_model(here), read_model(there)
        assert ours.keys() == theirs.keys()
        most = 1e-5 if summed else 0.0
        assert [name for name in ours if np.abs(ours[name] - theirs[name]).max() > most] == []
