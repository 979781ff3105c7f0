"""The page from files on three machines to a trained model, as it is written, on four machines of one kernel.

Each machine is a network namespace with an address and a home of its own; the server's holds the bridge.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.deployment.biopsies import load

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy" / "three-machines.md"
SECTION = "## On four machines"
SERVER = "192.168.1.10"


def blocks(heading: str) -> list[str]:
    """Return the commands of a section of the page, block by block."""
    text = PAGE.read_text().partition(heading + "\n")[2].partition("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)


@dataclass
class Machine:
    """A network namespace with a home and a folder to work in."""

    name: str
    home: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.home / "work").mkdir(parents=True)
        # The checkout, where the page has one.
        for folder in ("flower_apps", "docs"):
            (self.home / "work" / folder).symlink_to(ROOT / folder)

    def command(self, script: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, "bash", "-ec", script]

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            key: os.environ[key] for key in ("PYTHONPATH", "OMP_NUM_THREADS", "LANG") if key in os.environ
        }
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**kept, "HOME": str(self.home), "PATH": path, "FLWR_TELEMETRY_ENABLED": "0"}

    def run(self, script: str, timeout: float = 120.0) -> str:
        """Run commands to their end, and return what they say."""
        shown = subprocess.run(
            self.command(script), cwd=self.home / "work", env=self.environment, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout,
        )  # fmt: skip
        assert shown.returncode == 0, f"{self.name}: {script}\n{shown.stdout[-4000:]}"
        return shown.stdout

    def start(self, script: str) -> None:
        """Start a program that stays."""
        with self.log.open("ab") as log:
            self.started.append(
                subprocess.Popen(
                    self.command(f"exec {script}"), cwd=self.home / "work", env=self.environment,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip

    @property
    def log(self) -> Path:
        return self.home / "log.txt"

    def stop(self) -> None:
        for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            pids = subprocess.run(
                ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
            )
            for pid in map(int, pids.stdout.split()):
                os.kill(pid, sign)
            for one in self.started:
                try:
                    one.wait(patience)
                except subprocess.TimeoutExpired:
                    continue


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """The server and three clinics on one LAN."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need root and iproute2")
    names = [f"hedgerow-{os.getpid()}-{what}" for what in ("server", "ward-1", "ward-2", "ward-3")]
    with ExitStack() as after:
        try:
            for name in names:
                ip("netns", "add", name)
                after.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", names[0], "link", "add", "lan", "type", "bridge")
            ip("-n", names[0], "addr", "add", f"{SERVER}/24", "dev", "lan")
            ip("-n", names[0], "link", "set", "lan", "up")
            for i, name in enumerate(names[1:], 1):
                port = ["type", "veth", "peer", "name", f"port{i}", "netns", names[0]]
                ip("-n", name, "link", "add", "eth0", *port)
                ip("-n", name, "addr", "add", f"192.168.1.{10 + i}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", names[0], "link", "set", f"port{i}", "master", "lan")
                ip("-n", names[0], "link", "set", f"port{i}", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        made = [Machine(name, tmp_path / name.rpartition(str(os.getpid()))[2].strip("-")) for name in names]
        for machine in made:
            after.callback(machine.stop)
        yield made


def wait(condition: Callable[[], bool], what: str, log: Path, patience: float = 120.0) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"{what}: not after {patience:g} s\n{log.read_text()[-3000:]}"
        time.sleep(0.2)


def tables(folders: list[Path]) -> None:
    """Write a table of patients for each clinic."""
    data = load(None)
    x, y = data.x_train.reshape(len(data.x_train), -1), data.y_train
    for rows, folder in zip(np.array_split(np.arange(len(x)), len(folders)), folders, strict=True):
        with (folder / "ward.csv").open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow([*(f"feature-{i}" for i in range(x.shape[1])), "outcome"])
            lines.writerows([*map(float, x[row]), ("well", "sick")[int(y[row])]] for row in rows)


@pytest.mark.slow
def test_the_page_leads_from_files_on_three_machines_to_a_trained_model(machines: list[Machine]) -> None:
    server, *clinics = machines
    tables([clinic.home for clinic in clinics])
    _, serve, let_in, node, train, use = blocks(SECTION)

    keys, _, superlink = serve.partition("flower-superlink")
    server.run(keys)
    server.start(f"flower-superlink{superlink}")
    wait(lambda: "8000" in server.run("ss -Hltn 2>/dev/null || netstat -ltn"), "SuperLink", server.log)
    server.run(let_in)
    for i, clinic in enumerate(clinics):
        for key in ("ca.crt", f"node{i}"):
            shutil.copy(server.home / "work" / "keys" / key, clinic.home / "work")
        told = node.replace("node0", f"node{i}").replace("ward-1", f"ward-{i + 1}")
        mode, _, supernode = told.replace("/srv/ward.csv", f"{clinic.home}/ward.csv").partition(
            "hedgerow node"
        )
        clinic.run(mode)
        clinic.start(f"hedgerow node{supernode}")
    for clinic in clinics:
        wait(lambda clinic=clinic: "SuperNode ID" in clinic.log.read_text(), clinic.name, clinic.log)
    # A quarter of the page's rounds: each takes seconds.
    shown = server.run(train.replace("num-rounds=20", "num-rounds=5"), timeout=900)

    (run,) = (server.home / "work" / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["lost-replies"]) == ("completed", {}), shown[-3000:]
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == 6
    # Well above the share of the larger class, 0.63.
    assert rounds[-1]["central"]["accuracy"] > 0.8
    assert len(rounds[-1]["central"]["node-accuracy"]) == 3
    header, *rows = [line.rpartition(",") for line in (clinics[0].home / "ward.csv").read_text().split()]
    new = "\n".join([header[0], *(features for features, _, _ in rows)])
    (server.home / "work" / "new.csv").write_text(f"{new}\n")
    sick = [float(line.split()[1]) > 0.5 for line in server.run(use).splitlines()]
    assert (
        np.mean([("well", "sick")[one] == label for one, (_, _, label) in zip(sick, rows, strict=True)]) > 0.8
    )
    # No clinic is named or seen to the others, and the server has no path of theirs.
    written = (run / "config.json").read_text() + server.log.read_text()
    assert "ward.csv" not in written
