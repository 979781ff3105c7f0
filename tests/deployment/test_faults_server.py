"""A ServerApp that is killed, and a second run on the same SuperLink and nodes that goes on where it was."""

import os
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.deployment.trials import APPS, different, ended, engine, trial, wait_for

from hedgerow.sim import FaultModel, load_app, plan_run, run_app
from hedgerow.sim.engine.faults import Fate

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


# Buffered rounds. Each training message waits at its node until the test lets it pass, by its partition and
# the number of the node's round: so the order of replies is known.

GATED = """
import time
from pathlib import Path

from hedgerow.clients import sd_feel_client


def gate(message, context, call_next):
    if message.metadata.message_type == "train":
        number = message.content["config"]["server-round"]
        name = f"{context.node_config['partition-id']}-{number}"
        gates = Path(context.node_config["gates"])
        (gates / f"at-{name}").touch()
        while not (gates / f"open-{name}").exists():
            time.sleep(0.05)
        (gates / f"open-{name}").unlink()
    return call_next(message, context)


app = sd_feel_client(mods=[gate])
"""
BUFFERED = (
    "method=fedavg tau1=3 tau2=1 iterations=12 batch-size=5 model=logistic buffer=2 evaluate-every=1 "
    "checkpoint-every=2"
)


@dataclass(frozen=True)
class _Order(FaultModel):
    """The same order of replies in a simulation: seconds by partition, of its training messages in turn."""

    def draw(self, key: int, partition_id: int, number: int) -> Fate:
        seconds = {0: [1.0, 1.0, 1.0, 1.0, 1.0, 1e3], 1: [5.5, 1.0, 1.0]}
        # The first message is an introduction.
        return Fate(delay=seconds[partition_id][number - 2] if number > 1 else 0.0)


def test_a_buffered_run_whose_server_was_killed_sends_again_what_was_in_flight(tmp_path: Path) -> None:
    app, gates, out = tmp_path / "app", tmp_path / "gates", tmp_path / "there"
    shutil.copytree(APPS / "sd-feel", app)
    (app / "sd_feel" / "client_app.py").write_text(GATED)
    gates.mkdir()

    def let(*names: str) -> None:
        for name in names:
            (gates / f"open-{name}").touch()

    def at_work(name: str) -> None:
        wait_for((gates / f"at-{name}").exists, f"message {name}")

    told = [{"gates": str(gates)}] * 2
    with trial(app, 2, BUFFERED, out, node_config=told) as one:
        # Node 0 makes two updates alone, and has a reply in the buffer; node 1 works on the first version.
        let("0-1", "0-2", "0-3", "0-4", "0-5")
        at_work("0-6")
        at_work("1-1")
        assert one.folder is not None
        wait_for((one.folder / "checkpoint" / "latest.safetensors").exists, "the checkpoint")
        assert [record["round"] for record in ended(one.folder).rounds] == [0, 1, 2]
        for pid in one.servers:
            os.kill(pid, signal.SIGKILL)
        assert one.run.wait(120).status == "finished:failed"
        # Both messages of the killed run are answered, and nobody takes the replies.
        let("0-6", "1-1")
        wait_for(lambda: not list(gates.glob("open-*")), "the end of the earlier work")
        for file in gates.iterdir():
            file.unlink()
        again = one.deployment.plan(BUFFERED, f"output-dir={out} resume={one.folder}")
        resumed = one.deployment.submit(again, echo=False)
        let("0-5")
        at_work("0-6")
        at_work("1-1")
        let("1-1", "1-4", "1-5")
        status = resumed.wait(240)
        assert status.exit_code == 0, "".join(resumed.lines)[-4000:]
    there = ended(one.folder)
    loaded = load_app(APPS / "sd-feel")
    plan = plan_run(loaded.spec, [BUFFERED, f"output-dir={tmp_path / 'here'}"], num_nodes=2)
    run_app(loaded, replace(plan, faults=_Order()))
    (folder,) = (tmp_path / "here").iterdir()
    here = ended(folder)
    assert different(there.model, here.model) == []
    for record in (*there.rounds, *here.rounds):
        del record["sim_seconds"]  # A deployment has no simulated clock.
    assert there.rounds == here.rounds
    assert [record["train"]["staleness-max"] for record in there.rounds[1:]] == [0, 0, 2, 0]
