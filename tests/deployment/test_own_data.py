"""Files that only their nodes have, on SuperNodes: who opened what, and the engine's model on the same files.

Every Python process of a deployment tells which files of the folder it opens. An app that learns from samples
runs on the same three nodes as the next, so that few programs are started.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.deployment.leftovers import left_running
from tests.deployment.opened import opened, watching
from tests.deployment.trials import APPS, Ended, different, ended

from hedgerow.sim import Deployment, find_app, load_app, plan_run, run_app
from hedgerow.sim.deploy.supernode import Split, read_split
from hedgerow.tasks import write_group_split, write_split

pytestmark = pytest.mark.slow

NODES = 3
# An exchange takes seconds: statistics are asked for once, and the nodes evaluate at the end alone.
OWN = "evaluate-every=2 holdout=0.2 standardise=none model=logistic"
CONFIGS = {
    "sd-feel": f"num-servers=3 topology=path tau1=2 tau2=1 iterations=4 batch-size=5 {OWN} "
    "standardise=federated",
    "similarity-free": f"algorithm=ef-fedavg num-rounds=2 local-iters=2 batch-size=5 fixed-c=0.3 {OWN}",
    "fedmud": f"num-rounds=2 clients-per-round=2 batch-size=16 {OWN} model=mlp skip-front=0 ratio=0.5 "
    "training-mode=loop",
    # Sealed, as ever. One-bit codes of devices have sensing matrices that no simulation knows.
    "ceps": "codec=sparse32 problem=logistic topology=complete iterations=5 interval-low=1 interval-high=2 "
    f"sparsity=2 {OWN}",
    "hsgd": "iterations=4 global-interval=4 local-interval=2 participation=0.5 evaluate-every=1 "
    "training-mode=loop",
}


@dataclass
class Deployed:
    """What runs on SuperNodes came to, by app, and which files their processes opened, by home."""

    split: Split
    folder: Path
    runs: dict[str, Ended] = field(default_factory=dict)
    opened: dict[str, set[Path]] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)

    def owned(self, node: int) -> set[Path]:
        config = self.split.node_configs[node]
        return {Path(str(config[key])).resolve() for key in ("data", "match-key-file") if key in config}

    def engine(self, app: str, out: Path) -> Ended:
        """Run the same on the same files in this process."""
        loaded = load_app(APPS / app)
        plan = plan_run(loaded.spec, [*overrides(app, self.split.run_config, out)])
        run_app(loaded, plan, node_configs=self.split.node_configs)
        (folder,) = out.iterdir()
        return ended(folder)


def overrides(app: str, run_config: Mapping[str, object], out: Path) -> list[str]:
    told = [
        f"{key}={str(value).lower() if value is True else repr(value)}" for key, value in run_config.items()
    ]
    return [*told, CONFIGS[app], f"output-dir={out}"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """Four apps, one after the other, on three nodes with TLS and authentication."""
    scratch = tmp_path_factory.mktemp("samples")
    folder = write_split("tests.deployment.biopsies:load", scratch / "own", NODES, "dirichlet(0.5)").parent
    split, env = read_split(folder), watching(folder, scratch)
    done = Deployed(split, folder)
    # CEPS's nodes tell a monitor only what their owners let them.
    policy = scratch / "hedgerow-node.toml"
    policy.write_text("monitor = true\n")
    with Deployment(
        APPS / "sd-feel",
        NODES,
        tls=True,
        node_config=split.node_configs,
        env={**env, "HEDGEROW_DATA_DIR": "", "HEDGEROW_NODE_POLICY": str(policy)},
    ) as deployment:
        for app in [name for name in CONFIGS if name != "hsgd"]:
            deployment.spec = find_app(APPS / app)
            out = scratch / app
            run = deployment.submit(deployment.plan(*overrides(app, split.run_config, out)), echo=False)
            end = run.wait(600)
            logs = "\n".join(node.log()[-2000:] for node in deployment.nodes)
            assert end.exit_code == 0, f"{app} {end}\n{''.join(run.lines)[-4000:]}\n{logs}"
            (there,) = out.iterdir()
            done.runs[app] = ended(there)
    assert left_running(deployment.home) == []
    done.opened, done.processes = opened(env)
    return done


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    """The app of hospitals and devices, by the command line."""
    scratch = tmp_path_factory.mktemp("parties")
    folder = write_group_split("breast-cancer", scratch / "own", 1, "iid", people=40).parent
    done, env = Deployed(read_split(folder), folder), watching(folder, scratch)
    command = [sys.executable, "-m", "hedgerow.sim", "deploy", "local", str(APPS / "hsgd")]
    # Other users could not write what their processes open; test_own_users.py has them.
    command += ["--own-data", str(folder), "--one-user", "--out", str(scratch / "out"), "-c", CONFIGS["hsgd"]]
    shown = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=600
    )
    assert shown.returncode == 0, shown.stdout[-4000:] + shown.stderr
    (there,) = (scratch / "out").iterdir()
    done.runs["hsgd"] = ended(there)
    done.opened, done.processes = opened(env)
    return done


@pytest.fixture(params=["samples", "parties"])
def deployed(request: pytest.FixtureRequest) -> Deployed:
    done: Deployed = request.getfixturevalue(request.param)
    return done


def test_a_node_opens_its_own_files_and_no_others(deployed: Deployed) -> None:
    nodes = len(deployed.split.node_configs)
    assert {i: deployed.opened[f"node{i}"] for i in range(nodes)} == {
        i: deployed.owned(i) for i in range(nodes)
    }


def test_no_server_opens_anybodys_data(deployed: Deployed) -> None:
    # The SuperLink, what it starts for a run, and the ServerApps.
    assert deployed.processes["superlink"] > len(deployed.runs)
    data = set().union(*(deployed.owned(i) for i in range(len(deployed.split.node_configs))))
    others = {home: files for home, files in deployed.opened.items() if not home.startswith("node")}
    assert {home: files & data for home, files in others.items() if files & data} == {}


@pytest.mark.parametrize("app", CONFIGS)
def test_the_model_is_that_of_a_simulation_on_the_same_files(
    app: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    deployed: Deployed = request.getfixturevalue("parties" if app == "hsgd" else "samples")
    there, here = deployed.runs[app], deployed.engine(app, tmp_path)
    # A server of CEPS has no model; what its nodes measure of theirs is in the rounds.
    if app != "ceps":
        assert different(here.model, there.model) == []
    assert there.rounds == here.rounds
    assert len(there.rounds) >= 2
    assert np.isfinite(there.rounds[-1]["central"]["loss"])
