"""Hospitals and gateways of HSGD on SuperNodes with files of their own: one comes late, one is killed."""

from pathlib import Path

import numpy as np
import pytest
from tests.deployment.leftovers import left_running
from tests.deployment.trials import APPS, Trial

from hedgerow.sim import Deployment, read_rounds
from hedgerow.sim.deploy.supernode import read_split
from hedgerow.tasks import write_group_split

pytestmark = pytest.mark.slow

# Two hospitals, then their gateways.
LATE, KILLED = 3, 0
CONFIG = (
    "iterations=12 global-interval=1 local-interval=1 participation=1.0 evaluate-every=12 training-mode=loop "
    "min-available-nodes=2 round-timeout=20"
)


def groups(one: Trial) -> list[float]:
    """Return how many groups took part, by round."""
    assert one.folder is not None
    return [record["train"]["groups"] for record in read_rounds(one.folder)[1:]]


def test_a_gateway_comes_late_a_hospital_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    split = read_split(write_group_split("breast-cancer", tmp_path / "own", 2, "iid", people=40).parent)
    config = [CONFIG, *(f"{key}={value!r}" for key, value in split.run_config.items())]
    with Deployment(APPS / "hsgd", 4, node_config=split.node_configs) as deployment:
        deployment.nodes[LATE].stop()
        plan = deployment.plan(*config, f"output-dir={tmp_path / 'out'}")
        one = Trial(deployment, deployment.submit(plan, echo=False), tmp_path / "out")
        one.wait_for_round(1)
        with one.server_held():
            deployment.nodes[LATE].restart()
        while max(groups(one)) < 2:
            one.wait_for_round(len(groups(one)) + 1)
        deployment.nodes[KILLED].kill()
        run = one.end()
    assert left_running(deployment.home) == []
    took_part = [record["train"]["groups"] for record in run.rounds[1:]]
    joined = took_part.index(2)
    assert took_part[:joined] == [1] * joined
    assert took_part[-1] == 1
    assert run.rounds[-1]["train"]["left-out-no-hospital"] == 1
    assert all(np.isfinite(array).all() for array in run.model.values())
