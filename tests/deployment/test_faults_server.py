"""A ServerApp that is killed, and a second run on the same SuperLink and nodes that goes on where it was."""

import os
import signal
from pathlib import Path

import pytest
from tests.deployment.trials import APPS, different, ended, engine, trial, wait_for

pytestmark = pytest.mark.slow

# What nodes keep is in the checkpoint, else error memories would start at zero.
CONFIG = (
    "algorithm=ef-fedavg num-rounds=4 local-iters=2 batch-size=5 partition=iid model=logistic fixed-c=0.3 "
    "evaluate-every=1 checkpoint-every=2"
)


def test_a_run_whose_server_was_killed_goes_on_to_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    out = tmp_path / "there"
    with trial(APPS / "similarity-free", 2, f"{CONFIG} checkpoint-nodes=always", out) as one:
        one.wait_for_round(2)
        assert one.folder is not None
        wait_for((one.folder / "checkpoint" / "latest.safetensors").exists, "the checkpoint")
        one.wait_until_at_work(one.deployment.nodes[0])
        assert one.servers
        for pid in one.servers:
            os.kill(pid, signal.SIGKILL)
        assert not (one.folder / "summary.json").exists()
        again = one.deployment.plan(CONFIG, f"checkpoint-nodes=always output-dir={out} resume={one.folder}")
        assert one.deployment.run(again, echo=False, timeout=240).exit_code == 0
        assert one.run.wait(120).status == "finished:failed"
    assert [folder.name for folder in out.iterdir()] == [one.folder.name]
    there, here = ended(one.folder), engine("similarity_free", 2, CONFIG, tmp_path / "here")
    assert different(there.model, here.model) == []
    assert there.rounds == here.rounds
