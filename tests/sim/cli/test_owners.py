"""An error is blamed on whoever called for it, and on Hedgerow only where nobody else did."""

import errno
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.sim.cli.command_line import APPS, hedgerow
from tests.sim.tiny_app import CLIENT_APP, write_package

from hedgerow.sim.cli.mistakes import BUG
from hedgerow.sim.runs import checkpoint, durable

# What a server's main does, and the words by which the error's place is named.
MISTAKES = {
    "raise RuntimeError('own')": "(in server_app.py, line 10)",
    "import json; json.loads('{')": "(in the library decoder, called from server_app.py, line 10)",
    "import pandas; pandas.DataFrame({'a': [1]})['b']": "(in the library pandas, called from server_app.py,",
    "import torch; torch.load('/nonexistent.pt')": "(in the library torch, called from server_app.py,",
    "open('/nonexistent')": "(in server_app.py, line 10)",
    "import not_there": "(in server_app.py, line 10)",
    "grid.push_messages(iter([]))": "(in Hedgerow's grid.py,",
    "SDFeel(num_servers=0)": "(in Hedgerow's ",
    "FedAvg(fraction_train=1.0).start(grid=grid, initial_arrays=None)": "(in Flower's ",
    "assert grid is None": "(in server_app.py, line 10)",
    "import sys; sys.exit()": "(in server_app.py, line 10)",
    "raise SystemExit('the end')": "(in server_app.py, line 10)",
    "import argparse; argparse.ArgumentParser().parse_args(['-x'])": "(in the library argparse, called from",
}
SERVER = """
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from hedgerow.strategies import SDFeel

app = ServerApp()

@app.main()
def main(grid, context):
    {mistake}
"""


def blamed(home: Path, mistake: str) -> Any:
    config = "num-server-rounds = 1\n"
    server = SERVER.format(mistake=textwrap.dedent(mistake))
    return hedgerow(
        "run", write_package(home, f"blamed{abs(hash(mistake))}", config, CLIENT_APP, server, "blamed")
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_apps_mistake_is_the_apps_wherever_it_surfaces(mistake: str, tmp_path: Path) -> None:
    shown = blamed(tmp_path / "app", mistake)
    assert shown.exit_code == 1, shown.output
    assert "Traceback" in shown.stderr
    assert BUG not in shown.stderr
    last = shown.stderr.splitlines()[-1]
    assert last.startswith("Run failed: the app blamed raised this, not Hedgerow, which ran it (in ")
    assert MISTAKES[mistake] in last


def test_a_failed_assertion_of_ours_is_our_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    exec(compile("def get_node_ids(self):\n    assert False", durable.__file__, "exec"), made)
    monkeypatch.setattr("hedgerow.sim.InProcessGrid.get_node_ids", made["get_node_ids"])
    shown = blamed(tmp_path / "app", "grid.get_node_ids()")
    assert shown.exit_code == 1
    assert shown.stderr.splitlines()[-1] == BUG


@pytest.mark.parametrize("there", [0, 1, 3])
@pytest.mark.parametrize(
    ("owner", "name"), [(durable.Lines, "append"), (checkpoint, "write_aside"), (checkpoint, "move")]
)
def test_a_full_disk_has_its_own_exit_and_promises_only_a_resume_that_works(
    owner: Any, name: str, there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whichever write the disk is full: a line of the record, a checkpoint, its place."""
    small = "num-clients=2 num-servers=1 iterations=5 tau1=1 tau2=1 topology=complete model=logistic"
    done, real = 0, getattr(owner, name)

    def full(*args: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        if done > there:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a-file")
        return real(*args, **options)

    monkeypatch.setattr(owner, name, full)
    shown = hedgerow(
        "run", APPS / "sd-feel", "-q", "-c", f"{small} checkpoint-every=1", "--output-dir", tmp_path
    )
    assert shown.exit_code == 3, shown.output
    last = shown.stderr.splitlines()[-1]
    assert "No space left on device. " in last
    monkeypatch.setattr(owner, name, real)
    (folder,) = tmp_path.iterdir()
    again = hedgerow("run", APPS / "sd-feel", "-q", "--resume", folder)
    assert (again.exit_code == 0) == ("--resume" in last), again.output
