"""A terminal gets a progress bar, a pipe plain lines, and a quiet run nothing; in processes of their own."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tests.sim.cli.command_line import hedgerow

SMALL = ("-c", "model=logistic num-clients=4 num-servers=2 iterations=4 tau1=1")
HEDGEROW = (sys.executable, "-m", "hedgerow.sim")
QUIET = """
from flwr.app import ArrayRecord, ConfigRecord
from hedgerow.clients import sd_feel_client
from hedgerow.sim import simulate
from hedgerow.strategies import SDFeel
from hedgerow.tasks import build_model

on = {"dataset": "mnist-5k", "partition": "iid", "num-clients": 4, "model": "logistic", "seed": 0}
model = ArrayRecord(build_model("logistic", (1, 28, 28), 10, seed=0).state_dict())
strategy = SDFeel(num_servers=2, topology="ring", tau1=1, tau2=1, num_clients=4)
train = ConfigRecord({"learning-rate": 0.1, "batch-size": 10, "seed": 0})
for output_dir in (None, "runs"):
    run = simulate(
        strategy, sd_feel_client(), 4, run_config=on, initial_arrays=model, num_rounds=1, quiet=True,
        output_dir=output_dir, train_config=train,
    )
    print(run.rounds[-1]["round"])
"""


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "TTY_INTERACTIVE")}
    return {**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **changes}


def on_a_terminal(folder: Path, *command: str, **changes: str) -> tuple[str, str]:
    """Return what a command wrote to a piped standard output, and to a standard error that is a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, cwd=folder, env=environment(**changes)
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                read = os.read(ours, 1 << 16)
            except OSError:  # The other end is closed.
                break
            said += read
        os.close(ours)
        assert process.stdout is not None
        out = process.stdout.read().decode()
    assert process.returncode == 0, said.decode()
    return out, said.decode()


# Programs and command lines, one after the other; each ends with a null character.
IN_A_PIPE = """
import json, sys
from hedgerow.sim.cli import app

for one in json.loads(sys.argv[1]):
    exec(one, {}) if isinstance(one, str) else app(one, standalone_mode=False)
    for stream in (sys.stdout, sys.stderr):
        print(end="\\0", file=stream, flush=True)
"""


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """What a run, a quiet simulation and a quiet run write to a pipe, and to another as their error."""
    run = ["run", "sd-feel", *SMALL]
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PIPE, json.dumps([run, QUIET, [*run, "--quiet"]])],
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("piped"),
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(zip(done.stdout.split("\0"), done.stderr.split("\0"), strict=True))


def test_a_run_has_a_bar_and_the_time_left_on_a_terminal_and_its_output_stays_in_the_pipe(
    tmp_path: Path,
) -> None:
    out, err = on_a_terminal(tmp_path, *HEDGEROW, "run", "sd-feel", *SMALL)
    assert "━" in err
    assert "round 2/4 | 0:0" in err
    assert " left | loss" in err
    assert "\x1b[92mINFO" in err
    assert "Run folder:" in out
    assert "\x1b" not in out


def test_a_run_has_plain_log_lines_in_a_pipe(piped: list[tuple[str, str]]) -> None:
    out, err = piped[0]
    assert "\x1b" not in out + err
    assert "INFO :      round 0/4 | loss" in err
    assert "INFO :      round 4/4 | loss" in err


def test_a_sweep_has_a_bar_on_a_terminal_and_a_line_a_run_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = ("sweep", "sd-feel", *SMALL, "--seeds", "0,1", "--jobs", "1")
    out, err = on_a_terminal(tmp_path, *HEDGEROW, *sweep)
    assert out.startswith("[1/2] sd-feel, seed 0: finished after ")
    assert "━" in err
    assert "run 1/2 | about " in err
    assert " s left" in err
    monkeypatch.chdir(tmp_path)
    again = hedgerow(*sweep)
    assert again.stdout.startswith("[1/2] sd-feel, seed 0: kept\n")
    assert (again.stderr, "\x1b" in again.stdout) == ("", False)
    assert "\x1b" not in (tmp_path / "runs/sd-feel/sd-feel/seed-0.log").read_text()


def test_a_quiet_simulation_prints_what_its_program_prints_and_nothing_else(
    piped: list[tuple[str, str]],
) -> None:
    assert piped[1] == ("1\n1\n", "")


def test_a_quiet_run_has_its_table_and_no_log(piped: list[tuple[str, str]]) -> None:
    out, err = piped[2]
    assert "Run folder:" in out
    assert err == ""
