"""Secure sums of every method on SuperNodes, one of which is lost in a phase after the other."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.deployment.trials import APPS, Ended, ended, trial

from hedgerow.clients import BatchClientApp
from hedgerow.sim import load_app, plan_run, run_app

pytestmark = pytest.mark.slow

# Which of its messages a node does not answer: by type, counted from 1. It fails before it has read them: on
# devices and in a simulation its state is then as it was.
LOSSY = """
import json
import os
from functools import partial
from pathlib import Path

from hedgerow.clients import BatchClientApp


def lossy(whole, node, missed):
    def handle(kind, calls):
        lost = [at for at, call in enumerate(calls) if kind in missed and misses(kind, call)]
        left = [call for at, call in enumerate(calls) if at not in lost]
        answers = iter(whole.batch_handler(kind)(left) if left else [])
        return [RuntimeError("lost") if at in lost else next(answers) for at in range(len(calls))]

    def misses(kind, call):
        if int(call.context.node_config["partition-id"]) != node:
            return False
        with (Path(os.environ["FLWR_HOME"]) / f"asked-{kind}").open("a+") as asked:
            asked.write(".")
            return asked.tell() in missed[kind]

    return BatchClientApp({kind: partial(handle, kind) for kind in whole._handlers})
"""

Missed = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Case:
    """An app's short run, and which messages a node does not answer, within sums and for the same means."""

    app: str
    package: str
    nodes: int
    config: str
    node: int
    missed: Missed
    plain: Missed
    lost: list[int]


# No keys for the first sum, no update for the second; in the third the others know its masks.
PHASES: Missed = {"query.sum_keys": [1], "train": [1], "query.sum_shares": [1]}
CASES = [
    Case(
        "sd-feel",
        "sd_feel",
        5,
        "method=fedavg tau1=2 tau2=1 iterations=8 batch-size=5 model=logistic evaluate-every=4",
        4,
        PHASES,
        {"train": [1, 2]},
        [1, 1, 0, 0],
    ),
    Case(
        "similarity-free",
        "similarity_free",
        5,
        "algorithm=fedpaq compressor=randk(0.1) num-rounds=3 local-iters=2 batch-size=5 model=logistic "
        "fixed-c=0.05 partition=iid evaluate-every=3",
        4,
        PHASES,
        # A round without all workers' updates is tried again, in a run without sums too, in which nothing
        # else of these is lost: the simulation is of sums.
        {},
        [1, 1, 0],
    ),
    Case(
        "fedmud",
        "fedmud",
        5,
        # Another seed than 0, with which one maximum of a pool turns at the last bit, and the models with it.
        # With the default a this method diverges on LeNet.
        "method=fedmud sync=dense num-rounds=3 clients-per-round=5 model=lenet ratio=0.0625 init-a=0.5 "
        "partition=iid batch-size=200 "
        "evaluate-every=3 seed=1",
        4,
        PHASES,
        {"train": [1, 2]},
        [1, 1, 0],
    ),
]


def simulated(case: Case, missed: Missed, out: Path, *, secure_sum: bool) -> Ended:
    made: dict[str, Any] = {}
    exec(LOSSY, made)
    loaded = load_app(APPS / case.app)
    assert isinstance(loaded.client_app, BatchClientApp)
    loaded = replace(loaded, client_app=made["lossy"](loaded.client_app, case.node, missed))
    plan = plan_run(
        loaded.spec,
        [f"{case.config} quarantine-after=0 secure-sum={str(secure_sum).lower()}", f"output-dir={out}"],
        num_nodes=case.nodes,
    )
    run_app(loaded, plan)
    (folder,) = out.iterdir()
    return ended(folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.app)
def test_a_node_that_is_lost_in_a_phase_is_in_the_sums_that_it_gave_its_update_to(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "app"
    shutil.copytree(APPS / case.app, folder, ignore=shutil.ignore_patterns("__pycache__"))
    module = f"{LOSSY}\n\nfrom {case.package}.client_app import app as whole\n"
    missed = json.dumps(case.missed)
    (folder / case.package / "lossy.py").write_text(f"{module}\napp = lossy(whole, {case.node}, {missed})\n")
    project = (folder / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(
        project.replace(f"{case.package}.client_app:app", f"{case.package}.lossy:app")
    )
    config = f"{case.config} quarantine-after=0 secure-sum=true"
    with trial(folder, case.nodes, config, tmp_path / "there") as one:
        status = one.run.wait(900.0)
        assert status.exit_code == 0, f"{status}\n{one.log[-4000:]}"
        assert one.folder is not None
        run = ended(one.folder)
    assert [sum(each.values()) for each in run.lost] == case.lost, run.lost
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    here = simulated(case, case.plain or case.missed, tmp_path / "here", secure_sum=not case.plain)
    assert [sum(each.values()) for each in here.lost] == case.lost
    # Each sum is off by n R / 2^31 at most, R = 8, and training carries that on.
    assert here.model.keys() == run.model.keys()
    assert max(np.abs(run.model[key] - here.model[key]).max() for key in here.model) < 1e-5
    assert any(np.ptp(run.model[key]) > 0 for key in run.model)
