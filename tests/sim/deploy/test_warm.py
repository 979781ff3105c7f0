"""ClientApps that are forks of a process which has imported what they need."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hedgerow.sim.deploy import warm
from hedgerow.sim.deploy.warm import warm_path

# Serves two commands, whose program is a function of the tests' own.
SERVING = """
import json, os, socket, sys, threading
from hedgerow.sim.deploy import warm

def program():
    import numpy, random
    assert open("/proc/self/comm").read() == "flwr-clientapp\\n"
    line = f"{os.getpid()} {sys.argv[1]} {numpy.random.rand()} {random.random()}\\n"
    os.write(1, line.encode())
    sys.exit(3)

warm._MODULES = ("numpy", "no_such_module")
warm.flower_program = lambda command: program
ours, theirs = socket.socketpair()
def ask():
    for name in ("one", "two"):
        told = {"arguments": ["flwr-clientapp", name], "quiet": False}
        theirs.sendall((json.dumps(told) + "\\n").encode())
    theirs.sendall((json.dumps({"arguments": ["flwr-clientapp", "hush"], "quiet": True}) + "\\n").encode())
    theirs.shutdown(socket.SHUT_WR)
ask()
print(os.getpid(), flush=True)
warm._serve(ours)
"""


class Started(list[list[str]]):
    """What was started in Flower's own way."""

    def __call__(self, command: list[str], **options: Any) -> None:
        self.append(command)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    commands = Started()
    monkeypatch.setattr(subprocess, "Popen", commands)
    return commands


class Channel:
    """What the SuperExec tells the process that forks."""

    def __init__(self, *, broken: bool = False) -> None:
        self.told: list[bytes] = []
        self.broken = broken

    def sendall(self, line: bytes) -> None:
        if self.broken:
            raise BrokenPipeError
        self.told.append(line)


def test_each_command_has_a_process_of_its_own_with_numbers_of_its_own() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SERVING], capture_output=True, text=True, check=True, timeout=60
    )
    (server,), *programs = sorted((line.split() for line in ended.stdout.splitlines()), key=len)
    assert sorted(told[1] for told in programs) == ["one", "two"]
    for column in (0, 2, 3):
        assert len({server, *(told[column] for told in programs)}) == 3
    assert "no_such_module was not imported beforehand" in ended.stdout + ended.stderr


PROGRAM = """
import atexit, sys, threading, time
def late():
    time.sleep(0.2)
    print("thread")
def program():
    atexit.register(print, "at exit")
    threading.Thread(target=late).start()
    print("program")
    {end}
"""


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit()", "sys.exit(3)", "sys.exit('why')", "raise KeyError('why')"]
)
def test_a_fork_ends_as_python_does(end: str) -> None:
    program = PROGRAM.format(end=end)
    fork = "from hedgerow.sim.deploy import warm\nwarm._become(program, ['x'], quiet=False)"
    plain, own = (
        subprocess.run(
            [sys.executable, "-c", program + last], capture_output=True, text=True, timeout=60, check=False
        )
        for last in ("program()", fork)
    )
    assert (own.returncode, own.stdout) == (plain.returncode, plain.stdout)
    assert own.stdout.split("\n") == ["program", "thread", "at exit", ""]
    assert own.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


def test_a_fork_does_not_free_the_modules_that_it_shares() -> None:
    program = "class Kept:\n    def __del__(self): print('freed')\nkept = Kept()\n"
    program += "from hedgerow.sim.deploy import warm\nwarm._become(lambda: None, ['x'], quiet=False)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == ""


def test_what_flowers_client_imports_late_is_imported_before_the_fork() -> None:
    program = "import sys, httpx\nfrom hedgerow.sim.deploy import warm\n"
    program += "warm._preload([m for m in warm._MODULES if m.startswith('http')])\n"
    program += "before = set(sys.modules)\nhttpx.Client().close()\nprint(set(sys.modules) - before)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


def test_a_superexec_that_is_interrupted_while_it_starts_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warm, "flower_program", lambda command: program)
    monkeypatch.setattr(sys, "platform", "darwin")  # where it does not fork
    warm.main()


def test_a_clientapp_is_a_fork_and_all_else_is_started_as_flower_does(started: Started) -> None:
    channel = Channel()
    launcher = warm._Launcher(channel)  # type: ignore[arg-type]
    launcher.start(["flwr-clientapp", "--token", "t"])
    assert channel.told == [b'{"arguments": ["flwr-clientapp", "--token", "t"], "quiet": false}\n']
    assert not started
    launcher.start(["flwr-serverapp", "--token", "t"])
    launcher.start(["flwr-clientapp", "--allow-runtime-dependency-installation"])
    launcher.start(["flwr-clientapp"], env={})
    assert len(channel.told) == 1
    assert [command[0] for command in started] == ["flwr-serverapp", "flwr-clientapp", "flwr-clientapp"]


def test_where_the_forking_process_is_gone_flowers_own_way_is_taken_with_one_warning(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = warm._Launcher(Channel(broken=True))  # type: ignore[arg-type]
    for _ in range(2):
        launcher.start(["flwr-clientapp"])
    assert started == [["flwr-clientapp"]] * 2
    assert caplog.text.count("The process that forks ClientApps is gone") == 1


def test_the_script_stands_first_in_the_nodes_path_and_is_written_once(tmp_path: Path) -> None:
    path = warm_path(tmp_path, "/usr/bin")["PATH"]
    script = tmp_path / "hedgerow" / "bin" / "flower-superexec"
    assert path == f"{script.parent}{os.pathsep}/usr/bin"
    before = script.stat()
    assert before.st_mode & 0o777 == 0o755
    warm_path(tmp_path, "/usr/bin")
    assert script.stat().st_mtime_ns == before.st_mtime_ns
