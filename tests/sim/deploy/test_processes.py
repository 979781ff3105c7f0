"""Programs are started apart and ended with all that they started, and nothing else is."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hedgerow.sim import StartError
from hedgerow.sim.deploy import processes
from hedgerow.sim.deploy.processes import Program, stop_all

# A parent with a child in its own group and a detached one; each says on a line of the log who it is.
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print("children", *(child.pid for child in children), flush=True)
time.sleep(60)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""

Make = Callable[..., Program]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Program] = []

    def build(code: str, name: str = "the thing") -> Program:
        one = Program(name, [sys.executable, "-c", code], os.environ, tmp_path / f"{len(made)}.log")
        made.append(one)
        return one

    yield build
    stop_all(made, 0.0)


def started(one: Program, word: str) -> Program:
    one.start()
    one.wait_until(lambda: word in one.log(), 20)
    return one


def state(pid: int) -> str:
    """Return S (it sleeps), T (it is stopped), Z (it ended), ...; empty if there is no such process."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout[:1]


def alive(pid: int) -> bool:
    return state(pid) not in ("", "Z")


def children(one: Program) -> list[int]:
    return [int(pid) for pid in one.log().split()[1:3]]


# Starting


def test_a_program_that_ends_at_its_start_is_named_with_the_end_of_its_log(make: Make) -> None:
    one = make("print('x' * 9000); print('no such port'); raise SystemExit(3)", "the SuperLink")
    one.start()
    with pytest.raises(
        StartError, match=r"the SuperLink ended at its start with exit code 3(.|\n)*no such port"
    ) as e:
        one.wait_until(lambda: False, 20)
    assert len(str(e.value)) < 3000


def test_what_a_program_started_is_found_by_name(make: Make) -> None:
    one = started(make(FAMILY), "children")
    assert sorted(one.descendants()) == sorted(children(one))
    assert sorted(one.descendants(Path(sys.executable).name)) == sorted(children(one))
    assert one.descendants("flwr-clientapp") == []


# Ending


@pytest.mark.parametrize("end", [Program.stop, Program.kill])
def test_a_program_ends_with_all_that_it_started(make: Make, end: Callable[[Program], None]) -> None:
    one = started(make(FAMILY), "children")
    family = [one.pid, *children(one)]
    assert all(alive(pid) for pid in family)
    end(one)
    assert [pid for pid in family if alive(pid)] == []
    assert not one.running


def test_a_suspended_program_hangs_with_all_that_it_started_until_it_is_resumed(make: Make) -> None:
    one = started(make(FAMILY), "children")
    family = [one.pid, *children(one)]
    one.suspend()
    end = time.monotonic() + 10
    while {state(pid) for pid in family} != {"T"} and time.monotonic() < end:
        time.sleep(0.01)
    assert {state(pid) for pid in family} == {"T"}
    one.resume()
    assert "T" not in {state(pid) for pid in family}


def test_programs_end_with_their_owner_though_it_is_killed(tmp_path: Path) -> None:
    owner = f"""
import os, sys, time
from pathlib import Path
from hedgerow.sim.deploy.processes import Program
one = Program("it", [sys.executable, "-c", {FAMILY!r}], os.environ, Path({str(tmp_path / "log")!r}))
one.start()
one.wait_until(lambda: "children" in one.log(), 20)
print(one.pid, *one.log().split()[1:], flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        family = [int(pid) for pid in running.stdout.readline().split()]
        assert len(family) == 3
        assert all(alive(pid) for pid in family)
        running.kill()
    end = time.monotonic() + 20
    while any(alive(pid) for pid in family) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in family)


def test_programs_are_stopped_together(make: Make) -> None:
    several = [started(make(DEAF), "deaf") for _ in range(3)]
    began = time.monotonic()
    stop_all(several, 0.5)
    assert time.monotonic() - began < 5
    assert not any(one.running for one in several)


def test_this_process_is_never_signalled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled: list[int] = []
    one = started(make(FAMILY), "children")
    kill = os.killpg
    monkeypatch.setattr(
        processes.os, "killpg", lambda group, sign: (signalled.append(group), kill(group, sign))
    )
    one.stop()
    assert os.getpgrp() not in signalled
    assert set(signalled) <= {one.pid, *children(one)}
