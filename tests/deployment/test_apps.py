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

from hedgerow.sim import Deployment, read_rounds

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


@dataclass(frozen=True)
class Pair:
    """The same run twice: in process and deployed; and what the deployment left behind."""

    here: Path
    there: Path
    home: Path
    leftovers: list[str]


@pytest.fixture(scope="module", params=CASES, ids=[case.app for case in CASES])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there")
    # CEPS's nodes tell a monitor only what their owners let them.
    policy = tmp_path_factory.mktemp("policy") / "hedgerow-node.toml"
    policy.write_text("monitor = true\n")
    told = [{"role": role} for role in case.roles] or [{}] * NODES
    node_config = [{"policy": str(policy), **one} for one in told]
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(case.folder), "--nodes", str(NODES)]
    subprocess.run([*command, "-c", f"{case.config} output-dir={here}"], check=True, timeout=240)
    with Deployment(case.folder, NODES, tls=True, node_config=node_config) as deployment:
        end = deployment.run(deployment.plan(case.config, f"output-dir={there}"), timeout=900)
        logs = "\n".join(node.log()[-2000:] for node in deployment.nodes)
    assert end.exit_code == 0, f"{end}\n{logs}"
    runs = (next(parent.iterdir()) for parent in (here, there))
    return Pair(*runs, deployment.home, left_running(deployment.home))


def rounds(run: Path) -> list[dict[str, Any]]:
    records = read_rounds(run)
    for record in records:
        del record["wall_seconds"]
    return records


def test_a_deployment_ends_with_the_bits_of_the_engine(pair: Pair) -> None:
    if not (pair.here / "model.npz").exists():  # Models stay on the nodes.
        assert not (pair.there / "model.npz").exists()
        return
    with np.load(pair.here / "model.npz") as here, np.load(pair.there / "model.npz") as there:
        assert sorted(here.files) == sorted(there.files)
        assert [name for name in here.files if not np.array_equal(here[name], there[name])] == []


def test_every_round_of_a_deployment_has_the_numbers_of_the_engine(pair: Pair) -> None:
    here, there = rounds(pair.here), rounds(pair.there)
    assert len(here) >= 4
    assert there == here


def test_a_deployment_loses_no_reply(pair: Pair) -> None:
    summary = json.loads((pair.there / "summary.json").read_text())
    assert (summary["status"], summary["lost-replies"]) == ("completed", {})


def test_a_deployment_leaves_no_process_and_no_key(pair: Pair) -> None:
    assert pair.leftovers == []
    assert not pair.home.exists()
