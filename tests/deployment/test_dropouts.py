"""A node that is silent in each phase of a secure sum: what is summed, and that the run goes on."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.deployment.trials import APPS, Lapse, ended, engine, trial

from hedgerow.sim import read_rounds

pytestmark = pytest.mark.slow

# The app's own client, silent for longer than a round at the first message of each type in ``misses``.
LATE = """
import os
import time
from functools import partial
from pathlib import Path

from hedgerow.clients import sd_feel_client
from hedgerow.clients import BatchClientApp

whole = sd_feel_client()


def handle(kind, calls):
    for call in calls:
        seen = Path(os.environ["FLWR_HOME"]) / f"missed-{kind}"
        if kind in str(call.context.node_config.get("misses", "")).split() and not seen.exists():
            seen.touch()
            time.sleep(28)
    return whole.batch_handler(kind)(calls)


app = BatchClientApp({kind: partial(handle, kind) for kind in whole._handlers})
"""
NODES, LATE_NODE = 5, 4
PHASES = ("query.sum_keys", "train", "query.sum_shares")
CONFIG = (
    "method=fedavg tau1=2 tau2=1 iterations=8 batch-size=5 model=logistic evaluate-every=4 round-timeout=25 "
    "quarantine-after=0"
)


def test_a_node_that_is_silent_in_a_phase_is_in_the_sums_that_it_gave_its_update_to(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    shutil.copytree(APPS / "sd-feel", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sd_feel" / "late.py").write_text(LATE)
    project = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(project.replace("sd_feel.client_app:app", "sd_feel.late:app"))
    node_config = [{} for _ in range(NODES)]
    node_config[LATE_NODE]["misses"] = " ".join(PHASES)
    config = f"{CONFIG} secure-sum=true"
    with trial(folder, NODES, config, tmp_path / "there", node_config=node_config) as one:
        status = one.run.wait(900.0)
        assert status.exit_code == 0, f"{status}\n{one.log[-4000:]}"
        assert one.folder is not None
        seconds = [record["wall_seconds"] for record in read_rounds(one.folder)]
        run = ended(one.folder)
    # No keys in the first round, no update in the second; in the third the others gave its mask away.
    assert [sum(each.values()) for each in run.lost] == [1, 1, 0, 0], run.lost
    assert [each >= 25 for each in seconds] == [False, True, True, True, False], seconds
    here = engine("sd_feel", NODES, CONFIG, tmp_path / "here", Lapse(LATE_NODE, {2, 3}))
    # Each sum is off by n R / 2^31 at most, R = 8, and training carries that on.
    assert all(np.abs(run.model[key] - here.model[key]).max() < 1e-5 for key in here.model)
