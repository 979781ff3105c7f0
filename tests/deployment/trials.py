"""A run on SuperNodes while something breaks: where it stands, what its record says, what is left of it.

Every trial that ends is held to the same account: the run completed, each instruction was answered or is
counted as lost by reason, and nothing that was started for it lives on.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import RecordDict
from tests.deployment.leftovers import left_running

from hedgerow.clients import BatchClientApp
from hedgerow.sim import (
    Deployment,
    FaultModel,
    InProcessGrid,
    RunRecorder,
    SuperNode,
    load_app,
    plan_run,
    read_rounds,
    run_app,
)
from hedgerow.sim.deploy.flower_cli import FlowerRun
from hedgerow.sim.engine.faults import Fate
from hedgerow.wire import Call

APPS = Path(__file__).parents[2] / "flower_apps"

Record = dict[str, Any]
Model = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Ended:
    """What a run left: its rounds, the first of them before training, and its model, if it has one."""

    rounds: list[Record]
    model: Model

    @property
    def lost(self) -> list[dict[str, int]]:
        """Lost replies by reason, of each round of training."""
        return [record["rejected"] for record in self.rounds[1:]]

    @property
    def story(self) -> list[dict[str, int]]:
        """The same, once for all rounds in a row that lost the same."""
        return [lost for lost, _ in groupby(self.lost)]

    def losses(self) -> list[float]:
        return [record["central"]["loss"] for record in self.rounds if record["central"]]


def ended(folder: Path) -> Ended:
    """Read a run folder."""
    rounds = read_rounds(folder)
    for record in rounds:
        del record["wall_seconds"]
    if not (folder / "model.npz").exists():  # Models stay on the nodes.
        return Ended(rounds, {})
    with np.load(folder / "model.npz") as model:
        return Ended(rounds, {name: model[name] for name in model.files})


def wait_for(condition: Callable[[], bool], what: str, patience: float = 300.0) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"{what}: not after {patience:g} s"
        time.sleep(0.05)


@dataclass(frozen=True)
class Trial:
    """A run that goes on."""

    deployment: Deployment
    run: FlowerRun
    out: Path

    @property
    def folder(self) -> Path | None:
        """The run's folder, None until there is one."""
        return next(iter(self.out.iterdir()), None) if self.out.is_dir() else None

    @property
    def log(self) -> str:
        return "".join(self.run.lines)

    def wait_for_round(self, number: int) -> None:
        """Wait until a round is on record."""

        def there() -> bool:
            assert self.run.following, self.log[-3000:]
            rounds = self.folder / "rounds.jsonl" if self.folder else None
            return bool(rounds and rounds.exists() and len(rounds.read_text().splitlines()) > number)

        wait_for(there, f"round {number}")

    def wait_until_at_work(self, node: SuperNode) -> None:
        """Wait until a message is handled at a node."""
        wait_for(lambda: bool(node.descendants("flwr-clientapp")), f"{node.name} at work")

    @property
    def servers(self) -> list[int]:
        """The process ids of the ServerApp."""
        return self.deployment.superlink.descendants("flwr-serverapp")

    @contextmanager
    def server_held(self) -> Iterator[None]:
        """Let the ServerApp take a rest, so that no more rounds pass than a test needs."""
        held = self.servers
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in held:
                os.kill(pid, signal.SIGCONT)

    def end(self, timeout: float = 600.0) -> Ended:
        """Wait for the end of the run, and check its account."""
        status = self.run.wait(timeout)
        assert status.exit_code == 0, f"{status}\n{self.log[-4000:]}"
        assert self.folder is not None
        found, summary = ended(self.folder), json.loads((self.folder / "summary.json").read_text())
        assert summary["status"] == "completed"
        assert summary["lost-replies"] == dict(sum(map(Counter, found.lost), Counter()))
        assert [record["round"] for record in found.rounds if _unaccounted(record)] == []
        return found


# Of nodes that were left out, which were sent nothing.
_LEFT_OUT = ("quarantined", "another partition than registered")


def _unaccounted(record: Record) -> int:
    """Return how many instructions of a round were neither answered nor counted as lost."""
    meant = record["sent"] + record["rejected"].get("offline", 0)
    lost = sum(count for reason, count in record["rejected"].items() if reason not in _LEFT_OUT)
    return int(meant - record["accepted"] - lost)


@contextmanager
def trial(
    app: Path,
    num_nodes: int,
    config: str,
    out: Path,
    *,
    tls: bool = False,
    node_config: Sequence[Mapping[str, str | int]] | None = None,
) -> Iterator[Trial]:
    """Run an app on SuperNodes of its own; after it, nothing of them may be left."""
    with Deployment(app, num_nodes, tls=tls, node_config=node_config) as deployment:
        plan = deployment.plan(config, f"output-dir={out}")
        yield Trial(deployment, deployment.submit(plan, echo=False), out)
    assert left_running(deployment.home) == []
    assert not deployment.home.exists()


@dataclass(frozen=True)
class Lapse:
    """What a node misses: some of its messages, counted from 1, and its state before some round's training.

    Where a round is one message, that of round r has the number r + 1: it is first asked who it is.
    """

    partition: int
    messages: Collection[int]
    forgets_before: int | None = None
    # Rounds in which it is offline: it is sent nothing.
    away: Collection[int] = ()


@dataclass(frozen=True)
class _Missed(FaultModel):
    lapse: Lapse = Lapse(0, ())

    def draw(self, seed: int, partition_id: int, number: int) -> Fate:
        return Fate(dropped=partition_id == self.lapse.partition and number in self.lapse.messages)


def engine(app: str, num_nodes: int, config: str, out: Path, lapse: Lapse | None = None) -> Ended:
    """Run an app in this process, for the numbers that a deployment's must equal."""
    loaded = load_app(APPS / app)
    plan = plan_run(loaded.spec, [config, f"output-dir={out}"], num_nodes=num_nodes)
    if lapse:
        assert isinstance(loaded.client_app, BatchClientApp)
        plan = replace(plan, faults=_Missed(lapse=lapse))
        loaded = replace(loaded, client_app=_forgetful(loaded.client_app, lapse))
    with _away(lapse) if lapse else nullcontext():
        run_app(loaded, plan)
    (folder,) = out.iterdir()
    return ended(folder)


@contextmanager
def _away(lapse: Lapse) -> Iterator[None]:
    done, end, ids = 0, RunRecorder.on_round_end, InProcessGrid.get_node_ids

    def on_round_end(self: RunRecorder, of: Any) -> None:
        nonlocal done
        end(self, of)
        done = of.round

    def get_node_ids(self: InProcessGrid) -> list[int]:
        gone = {lapse.partition} if done + 1 in lapse.away else set()
        return [i for i in ids(self) if self._nodes[i].partition_id not in gone]

    with (
        patch.object(RunRecorder, "on_round_end", on_round_end),
        patch.object(InProcessGrid, "get_node_ids", get_node_ids),
    ):
        yield


def _forgetful(app: BatchClientApp, lapse: Lapse) -> BatchClientApp:
    train = app.batch_handler("train")
    if train is None or lapse.forgets_before is None:
        return app

    def forget_and_train(calls: Sequence[Call]) -> Sequence[RecordDict | Exception]:
        for call in calls:
            now = int(call.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
            if (call.partition_id, now) == (lapse.partition, lapse.forgets_before):
                call.context.state.clear()
        return train(calls)

    return BatchClientApp({**app._handlers, "train": forget_and_train})


def different(one: Model, other: Model) -> list[str]:
    """Return the names of the arrays that are not bit for bit the same in both models."""
    assert one.keys() == other.keys()
    assert one
    return [name for name in one if not np.array_equal(one[name], other[name])]
