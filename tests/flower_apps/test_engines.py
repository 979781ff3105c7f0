"""Every app on Flower's own engine, on ours, killed and resumed: the same model each time."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import read_rounds

APPS = Path(__file__).parents[2] / "flower_apps"


# Most start a Ray cluster, which takes both cores: one worker runs them in turn. By default one run on
# Flower's engine is in tests/sim/deploy/test_flower_run.py.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


@dataclass(frozen=True)
class Job:
    """A run of an app; it is killed after ``killed_at`` of its rounds, or runs to a ``brief`` end."""

    app: str
    config: str
    brief: str
    killed_at: int = 12

    @property
    def folder(self) -> Path:
        return APPS / self.app


JOBS = (
    Job(
        "sd_feel",
        "num-clients=6 num-servers=3 tau1=2 tau2=2 alpha=3 participation=0.8 batch-size=5 evaluate-every=4 "
        "iterations=64",
        brief="iterations=16",
    ),
    Job(
        "similarity_free",
        "num-clients=5 partition=iid local-iters=2 batch-size=5 num-rounds=32 evaluate-every=4 fixed-c=0.3",
        brief="num-rounds=5",
    ),
    Job(
        "fedmud",
        "num-clients=5 clients-per-round=3 batch-size=64 num-rounds=20 evaluate-every=4 model=mlp "
        "skip-front=0 ratio=0.25 reset-interval=2 init-a=0.1",
        brief="num-rounds=4",
        killed_at=7,
    ),
    Job(
        "ceps",
        "num-clients=6 topology=complete iterations=60 interval-low=3 interval-high=5 features=200 "
        "sparsity=4 measurements=150 evaluate-every=2",
        brief="iterations=9",
    ),
    Job(
        "hsgd",
        "num-groups=2 num-clients=4 patients-per-group=10 participation=0.4 iterations=56 global-interval=4 "
        "local-interval=2 evaluate-every=4",
        brief="iterations=12",
        killed_at=7,
    ),
)
# One node at work at a time: replies come in the same order on every engine.
BUFFERED = Job(
    "sd_feel",
    "method=fedavg num-clients=6 tau1=4 tau2=1 batch-size=5 evaluate-every=4 iterations=64 buffer=2 "
    "buffer-concurrency=1 local-layers=*bias",
    brief="iterations=16",
)
# What has messages or links of its own; killed and resumed they are contracts.
VARIANTS = {
    "edge servers as nodes": (JOBS[0], "edge-servers=nodes"),
    "sums of sd-feel": (JOBS[0], "num-servers=2 participation=1.0 secure-sum=true"),
    "sums of similarity-free": (JOBS[1], "compressor=randk(0.1) secure-sum=true"),
    "sums of fedmud": (JOBS[2], "clients-per-round=4 secure-sum=true"),
    "unsealed ceps": (JOBS[3], "sealed=false"),
    "buffered": (BUFFERED, ""),
}


def settings(job: Job, folder: Path, config: str = "") -> tuple[str, str]:
    return "-c", f"{job.config} output-dir={folder} {config}"


def run_here(job: Job, *options: str) -> str:
    """Run an app in this process, which starts sooner than another."""
    result = hedgerow("run", job.folder, *options)
    assert result.exit_code == 0, result.output[-4000:]
    return result.output


def start(job: Job, folder: Path, *options: str, config: str = "") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(job.folder), *options]
    return subprocess.Popen(
        [*command, *settings(job, folder, config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A shell's background jobs, and so their children, are started deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def finish(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=240)
    text = output.decode()
    assert process.returncode == 0, text[-4000:]
    return text


def final_model(folder: Path) -> dict[str, np.ndarray]:
    (run,) = folder.iterdir()
    if not (run / "model.npz").exists():
        assert run.name.startswith("ceps")  # whose models stay on the nodes
        return {}
    with np.load(run / "model.npz") as stored:
        return {name: stored[name] for name in stored.files}


def assert_same_bits(a: Path, b: Path) -> None:
    first, second = final_model(a), final_model(b)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


@pytest.fixture(scope="session")
def runs_to_the_end(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Path]:
    """A job that nobody interrupts, run once."""

    @cache
    def run(job: Job) -> Path:
        folder = tmp_path_factory.mktemp("uninterrupted")
        run_here(job, *settings(job, folder))
        return folder

    return run


@pytest.mark.parametrize(
    ("job", "more"),
    [
        *(pytest.param(job, "", id=job.app) for job in JOBS),
        *(pytest.param(*one, id=name) for name, one in VARIANTS.items()),
    ],
)
def test_flowers_engine_and_ours_end_with_the_same_bits(job: Job, more: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_here(job, *settings(job, ours, f"{job.brief} {more}"))
    output = finish(start(job, theirs, "--engine", "flower", config=f"{job.brief} {more}"))
    assert_same_bits(ours, theirs)
    here, there = (read_rounds(next(folder.iterdir())) for folder in (ours, theirs))
    for key in ("bits", "payload_bytes", "sim_seconds", "accepted", "central"):
        assert [record[key] for record in here] == [record[key] for record in there], key
    assert "loss" in output


def test_buffered_rounds_on_flowers_engine_count_each_reply_once(tmp_path: Path) -> None:
    job, rounds = replace(BUFFERED, config=f"{BUFFERED.config} buffer=3 buffer-concurrency=0"), 8
    finish(start(job, tmp_path, "--engine", "flower", config="iterations=32 checkpoint-every=3"))
    (folder,) = tmp_path.iterdir()
    ends = read_rounds(folder)[1:]
    assert [record["round"] for record in ends] == list(range(1, rounds + 1))
    sent, accepted = (sum(record[key] for record in ends) for key in ("sent", "accepted"))
    # Six nodes, each with one message at a time.
    assert 3 * rounds <= accepted <= sent <= 3 * rounds + 6
    assert not any(record["rejected"] for record in ends)
    links = ends[-1]["by_link"]
    assert [links[link]["messages"] for link in ("hub->node", "node->hub")] == [sent, accepted]
    assert any(record["train"]["staleness-max"] for record in ends)
    assert ends[-1]["central"]["loss"] < ends[0]["train"]["train-loss"]


# That every method goes on to the same bits is a contract; here real processes get real signals.
@pytest.mark.parametrize(
    ("job", "signum"),
    [
        *(pytest.param(job, signal.SIGKILL, id=job.app) for job in JOBS),
        pytest.param(JOBS[0], signal.SIGTERM, id="SIGTERM"),
        pytest.param(JOBS[0], signal.SIGINT, id="SIGINT"),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(
    job: Job, signum: signal.Signals, runs_to_the_end: Callable[[Job], Path], tmp_path: Path
) -> None:
    run = kill_in_a_run(job, tmp_path, signum)
    run_here(job, "--resume", str(run))
    assert_same_run(runs_to_the_end(job), tmp_path)


@pytest.mark.parametrize(
    "job", [*(pytest.param(job, id=job.app) for job in JOBS), pytest.param(BUFFERED, id="buffered")]
)
def test_a_run_killed_on_flowers_engine_resumes_to_the_same_bits(
    job: Job, runs_to_the_end: Callable[[Job], Path], tmp_path: Path
) -> None:
    options = ("--engine", "flower")
    # It ends all that it started, the ServerApp within a round.
    run = kill_in_a_run(job, tmp_path, signal.SIGTERM, *options)
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(job.folder), "--resume", str(run), *options]
    subprocess.run(command, check=True, timeout=400, stdout=subprocess.DEVNULL)
    # The resumed run has nodes with new ids, which a method that greets its nodes greets again.
    assert_same_run(runs_to_the_end(job), tmp_path, apart_from=("payload_bytes", "by_link"))


def kill_in_a_run(job: Job, folder: Path, signum: signal.Signals, *options: str) -> Path:
    """Start a run, end it after some rounds, and return its folder."""
    process = start(job, folder, *options, config="checkpoint-every=5")
    deadline = time.monotonic() + 300
    while _rounds_written(folder) < job.killed_at:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0].decode()[-4000:]
        time.sleep(0.005)
    process.send_signal(signum)
    process.communicate(timeout=60)
    (run,) = folder.iterdir()
    assert not (run / "summary.json").exists(), "the run ended before it was killed"
    return run


def assert_same_run(a: Path, b: Path, apart_from: tuple[str, ...] = ()) -> None:
    assert_same_bits(a, b)
    first, second = (read_rounds(next(folder.iterdir())) for folder in (a, b))
    for record in (*first, *second):
        for key in ("wall_seconds", *apart_from):
            del record[key]
    assert first == second


def _rounds_written(folder: Path) -> int:
    files = list(folder.glob("*/rounds.jsonl"))
    return len(read_rounds(files[0].parent)) if files else 0
