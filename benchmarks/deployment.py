"""What does an exchange with real SuperNodes cost, and where does the time go?

    python benchmarks/deployment.py                  # stock settings against the shipped ones
    python benchmarks/deployment.py --app hsgd       # the rounds of an app of the suite
    python benchmarks/deployment.py --exchanges      # exchanges a round of every app, counted
    python benchmarks/deployment.py --memory         # memory of a node's processes, every app
    python benchmarks/deployment.py --memory ceps    # of these apps only

One SuperLink and some SuperNodes on this machine, with TLS and authentication; a model of 21,840 parameters
and five SGD steps a round. Stock is Flower as it comes: ``Grid.send_and_receive`` and no setting. Shipped is
what ``hedgerow deploy local`` and the suite's strategies use. With ``--app``, stock are Flower's nodes; the
strategy, which polls as it always does, is the suite's. Both in one run, in turn; the first round, in which
every node installs the app, is not counted. Every node shares these cores: more nodes are slower here,
and are not on devices.
"""

import argparse
import json
import logging
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import psutil
from flwr.app import Message
from processes import memory_of
from reports import report

from hedgerow.sim.deploy.launcher import Deployment, SuperNode
from hedgerow.sim.engine.grid import InProcessGrid
from hedgerow.sim.runs import launch

HERE = Path(__file__).parent
APPS = HERE.parent / "flower_apps"
PHASES = (
    ("pushed", "received", "the node asks (every 3 s) and fetches the message"),
    ("received", "started", "its SuperExec asks and starts a process"),
    ("started", "called", "the process imports Flower, torch and the app"),
    ("called", "done", "five steps of SGD"),
    ("done", "sent", "the reply goes to the SuperNode, which looks every 0.5 s"),
    ("sent", "arrived", "the reply goes to the SuperLink and on to the ServerApp"),
)
# The least of every app: what it imports and keeps, not what it learns.
SMALL = {
    "sd_feel": "num-clients=2 num-servers=2 topology=path tau1=2 tau2=1 iterations=4",
    "similarity_free": "num-clients=2 num-rounds=2 local-iters=2 partition=iid",
    "fedmud": "num-clients=2 clients-per-round=2 num-rounds=2",
    "ceps": "num-clients=2 topology=complete iterations=6 interval-low=1 interval-high=2",
    "hsgd": "num-groups=1 num-clients=2 patients-per-group=20 participation=0.2 iterations=8 "
    "global-interval=4 local-interval=2",
}

# Enough rounds of it to measure.
LONGER = {"sd_feel": "iterations=10", "ceps": "iterations=12", "hsgd": "iterations=12"}


class Watch(threading.Thread):
    """Notes when a node's log says that a message came or a reply went."""

    def __init__(self, node: SuperNode) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.received: list[float] = []
        self.sent: list[float] = []
        self.over = threading.Event()

    def run(self) -> None:
        with self.node.log_file.open() as lines:
            while not self.over.wait(0.02):
                for line in lines:
                    if "Receiving:" in line:
                        self.received.append(time.time())
                    elif "Sending:" in line:
                        self.sent.append(time.time())


def measure(nodes: int, rounds: int, *, shipped: bool, folder: Path) -> dict[str, Any]:
    """Run the app once; return seconds a round, from submission to main, and each phase of an exchange."""
    result = folder / "result.json"
    with Deployment(HERE / "exchange", nodes, tls=True, fast=shipped, warm=shipped) as deployment:
        watches = [Watch(node) for node in deployment.nodes]
        for watch in watches:
            watch.start()
        plan = deployment.plan(
            f"num-rounds={rounds + 1} result={result} own-loop={'true' if shipped else 'false'}"
        )
        submitted = time.time()
        end = deployment.run(plan, echo=False)
        assert end.exit_code == 0, end
        for watch in watches:
            watch.over.set()
            watch.join()
    told = json.loads(result.read_text())
    phases: dict[str, list[float]] = {why: [] for *_, why in PHASES}
    # From the end, because our strategies ask nodes who they are before the first round.
    for i, one in enumerate(told["rounds"][1:], start=1 - len(told["rounds"])):
        for node in one["nodes"]:
            watch = watches[int(node["partition"])]
            when = {**node, "pushed": one["pushed"], "received": watch.received[i], "sent": watch.sent[i]}
            for begin, over, why in PHASES:
                phases[why].append(when[over] - when[begin])
    seconds = [one["over"] - one["pushed"] for one in told["rounds"][1:]]
    return {"round": seconds, "main": told["entered"] - submitted, "phases": phases}


def compare(nodes: int, rounds: int, repeats: int) -> None:
    print(f"{nodes} SuperNodes with TLS, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    found: dict[str, list[dict[str, Any]]] = {"stock": [], "shipped": []}
    for _ in range(repeats):
        for name, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                runs.append(measure(nodes, rounds, shipped=name == "shipped", folder=Path(folder)))
    medians = {}
    for name, runs in found.items():
        seconds = [second for run in runs for second in run["round"]]
        medians[name] = statistics.median(seconds)
        print(f"\n{name}: {medians[name]:.1f} s a round ({min(seconds):.1f} to {max(seconds):.1f})")
        print(f"    submit to main {statistics.median(run['main'] for run in runs):5.1f} s")
        for *_, why in PHASES:
            values = [value for run in runs for value in run["phases"][why]]
            print(f"    {statistics.median(values):5.2f} s ({max(values):5.2f} at most)  {why}")
    print(f"\nratio, stock to shipped: {medians['stock'] / medians['shipped']:.2f}")
    report(
        f"a round of {nodes} SuperNodes on loopback", medians["shipped"], "s",
        medians["stock"] / medians["shipped"], "stock Flower",
    )  # fmt: skip
    print(f"load at the end {os.getloadavg()[0]:.1f}")


def compare_app(name: str, repeats: int) -> None:
    print(f"{name}, 2 SuperNodes with TLS, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    found: dict[str, list[float]] = {"stock": [], "shipped": []}
    for _ in range(repeats):
        for kind, seconds in found.items():
            seconds.extend(app_rounds(name, shipped=kind == "shipped"))
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    for kind, seconds in found.items():
        least, most = min(seconds), max(seconds)
        print(f"{kind}: {medians[kind]:.1f} s a round ({least:.1f} to {most:.1f}), {len(seconds)} rounds")
    print(f"ratio, stock to shipped: {medians['stock'] / medians['shipped']:.2f}")


def app_rounds(name: str, *, shipped: bool) -> list[float]:
    """Return the seconds of an app's rounds on two nodes but the first."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Deployment(APPS / name, 2, tls=True, fast=shipped, warm=shipped) as deployment,
    ):
        config = [SMALL[name], LONGER.get(name, "num-rounds=5"), f"output-dir={folder} quiet=true"]
        end = deployment.run(deployment.plan(*config), echo=False)
        assert end.exit_code == 0, end
        (lines,) = Path(folder).glob("*/rounds.jsonl")
        records = map(json.loads, lines.read_text().splitlines())
        return [record["wall_seconds"] for record in records if record["round"] > 1]


class CountingGrid(InProcessGrid):
    """Counts what is sent: pushes of messages, by their type."""

    exchanges: ClassVar[Counter[str]] = Counter()

    def push_messages(self, messages: Any) -> list[str]:
        pushed: list[Message] = list(messages)
        self.exchanges.update({message.metadata.message_type for message in pushed})
        return list(super().push_messages(pushed))


def exchanges() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print("app               rounds  exchanges a round, by type")
    for name, config in SMALL.items():
        CountingGrid.exchanges.clear()
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(launch, "InProcessGrid", CountingGrid),
        ):
            app = launch.load_app(APPS / name)
            plan = launch.plan_run(app.spec, [config, f"output-dir={folder} quiet=true"])
            with redirect_stdout(None):
                launch.run_app(app, plan)
            (lines,) = Path(folder).glob("*/rounds.jsonl")
            rounds = max(json.loads(line)["round"] for line in lines.read_text().splitlines())
        per_round = {kind: count / rounds for kind, count in CountingGrid.exchanges.items()}
        shown = ", ".join(
            f"{kind} once a run" if kind == "query.whoami" else f"{kind} {count:g}"
            for kind, count in sorted(per_round.items())
        )
        print(f"{name:16} {rounds:7}  {shown}")


def memory(apps: Sequence[str]) -> None:
    print("peak memory in MiB of all of a node's processes, shared pages counted once (PSS), x86-64 here")
    print("app                as Flower    warm")
    for name in apps or SMALL:
        peaks = [peak_memory(name, warm=warm) for warm in (False, True)]
        print(f"{name:16} {peaks[0]:11.0f} {peaks[1]:7.0f}", flush=True)


def peak_memory(name: str, *, warm: bool) -> float:
    """Return the peak MiB of the first node of a run."""
    seen: list[float] = []
    over = threading.Event()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as after:
        deployment = after.enter_context(Deployment(APPS / name, 2, warm=warm))
        watcher = threading.Thread(target=sample, args=(deployment.nodes[0], seen, over), daemon=True)
        watcher.start()
        after.callback(over.set)
        end = deployment.run(deployment.plan(SMALL[name], f"output-dir={folder} quiet=true"), echo=False)
    assert end.exit_code == 0, end
    return max(seen)


def sample(node: SuperNode, seen: list[float], over: threading.Event) -> None:
    while not over.wait(0.2):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(node.pid)
            seen.append(memory_of([process, *process.children(recursive=True)]) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--app", choices=SMALL)
    parser.add_argument("--exchanges", action="store_true")
    parser.add_argument("--memory", nargs="*", choices=SMALL, metavar="APP")
    asked = parser.parse_args()
    if asked.exchanges:
        exchanges()
    elif asked.app:
        compare_app(asked.app, asked.repeats)
    elif asked.memory is not None:
        memory(asked.memory)
    else:
        compare(asked.nodes, asked.rounds, asked.repeats)


if __name__ == "__main__":
    main()
