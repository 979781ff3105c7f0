"""Child processes: started in their own sessions, watched through their logs, ended with their descendants.

In a session of its own a program does not receive the terminal's Ctrl-C; its owner does, and ends it in good
order. Only processes started here are ever signalled, by process group.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import psutil

# A change of the system clock may move the recorded times a little.
_TOLERANCE = 1.0

_TAIL = 2000
_POLL = 0.1


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class StartError(RuntimeError):
    """A program that did not start; the message has the end of its log."""


def program(name: str) -> str:
    """Return the path of a program of this environment or on PATH; RuntimeError if it is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install 'flwr>=1.41,<2'")
    return found


def free_ports(count: int) -> list[int]:
    """Return different free ports of 127.0.0.1."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Program:
    """A long-running program that can be started, stopped or killed, and started again.

    Parameters
    ----------
    name : str
        Its name in errors.
    command : Sequence[str]
        The program's path and its arguments.
    env : Mapping[str, str]
        Its whole environment.
    log_file : Path
        The file for its output and that of its descendants; every start appends to it.
    user : int or None (default: None)
        The user and group id to run as, which only root may choose; None for this process's own.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log_file: Path,
        user: int | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.env = dict(env)
        self.log_file = log_file
        self.user = user
        self._process: subprocess.Popen[bytes] | None = None
        # Its process group while a member may be alive; later the number may be reused.
        self._group: int | None = None
        self._started_at = 0

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the last start; RuntimeError if it was never started."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status of the last start: None while it runs, negative for a signal."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the program, which must not be running."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already, as process {self.pid}")
        self._started_at = self.log_file.stat().st_size if self.log_file.exists() else 0
        # Another user may have no access to this process's working directory.
        identity: dict[str, Any] = (
            {}
            if self.user is None
            else {"user": self.user, "group": self.user, "extra_groups": [], "cwd": "/"}
        )
        with self.log_file.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                **identity,
            )
        self._group = self._process.pid
        _guardian.watch(self._process.pid)

    def log(self) -> str:
        """Return what was logged since the last start."""
        with self.log_file.open("rb") as file:
            file.seek(self._started_at)
            return file.read().decode(errors="replace")

    def wait_until(self, ready: Callable[[], bool], patience: float) -> None:
        """Wait until the program is ready; StartError if it ends, or is not ready in ``patience`` seconds."""
        end = time.monotonic() + patience
        while not ready():
            if not self.running:
                raise self.failure(f"ended at its start with exit code {self.returncode}")
            if time.monotonic() > end:
                raise self.failure(f"did not start within {patience:g} s")
            time.sleep(_POLL)

    def failure(self, what: str) -> StartError:
        """Return an error with the end of the log."""
        return StartError(f"{self.name} {what}; the end of its log:\n{self.log()[-_TAIL:].rstrip()}")

    def descendants(self, name: str = "") -> list[int]:
        """Return the process ids of the program's descendants, or of those that run ``name``."""
        if not self.running:
            return []
        return [child.pid for child in _children(self.pid) if not name or name in _words(child)]

    def stop(self, patience: float = 15.0) -> None:
        """End the program and its descendants with SIGTERM, and with SIGKILL after ``patience`` seconds."""
        stop_all([self], patience)

    def kill(self) -> None:
        """Kill the program and its descendants at once, like a power cut."""
        stop_all([self], 0.0)

    def suspend(self) -> None:
        """Suspend the program and its descendants, like a stalled machine, until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a suspended program."""
        self._signal(signal.SIGCONT)

    def _signal(self, sign: signal.Signals) -> None:
        for group in _living(self._groups()):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sign)

    def _groups(self) -> set[int]:
        return set() if self._group is None else {self._group}


def stop_all(programs: Iterable[Program], patience: float = 15.0) -> None:
    """End programs with their descendants at the same time, with SIGTERM and then SIGKILL."""
    programs = list(programs)
    left = stop_groups(set[int]().union(*(one._groups() for one in programs)), patience)
    for one in programs:
        if one._group not in left:
            one._group = None


def stop_groups(leaders: set[int], patience: float = 15.0) -> set[int]:
    """End process groups and their leaders' descendants like ``stop_all``; return the surviving groups."""
    groups = set(leaders)
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        if not seconds:
            continue
        groups = _living(groups)
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sign)
                # A suspended process handles SIGTERM only after it continues.
                os.killpg(group, signal.SIGCONT)
        end = time.monotonic() + seconds
        while groups and time.monotonic() < end:
            time.sleep(_POLL)
            groups = _living(groups)
    return groups


class _Guardian:
    """Starts the process that ends programs when this process is gone, even by SIGKILL (``_guard``)."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()

    def watch(self, pid: int) -> None:
        """Watch over the leader of a process group."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                command = [sys.executable, "-m", "hedgerow.sim.deploy.processes"]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, start_new_session=True, text=True
                )
            assert self._process.stdin is not None
            print(f"{pid} {began(pid)!r}", file=self._process.stdin, flush=True)


_guardian = _Guardian()


def began(pid: int) -> float:
    """Return the time at which a process started; 0 if it ended."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return 0.0


def _living(groups: set[int]) -> set[int]:
    """Return the non-empty process groups among these and their leaders' descendants."""
    # A detached child can be found only while its parent is alive.
    members = [child for group in groups if _group(group) == group for child in _children(group)]
    groups = groups | {_group(child.pid) for child in members}
    alive = psutil.process_iter(["status"])
    found = {_group(one.pid) for one in alive if one.info["status"] != psutil.STATUS_ZOMBIE}
    return (groups & found) - {0, os.getpgrp()}


def _group(pid: int) -> int:
    """Return the process group of a process, 0 if it ended."""
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _children(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _words(process: psutil.Process) -> set[str]:
    """Return a process's name and the words of its command without folders."""
    try:
        # A forked process has its own name but its parent's command.
        return {process.name(), *(Path(word).name for word in process.cmdline())}
    except psutil.Error:
        return set()


def _guard() -> None:
    """Read lines of a process id and its start time until the pipe closes, then end these processes.

    The guardian's own process runs this, in a session of its own. A later process of the same id has another
    start time and is left alone.
    """
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.chdir("/")
    started = [line.split() for line in sys.stdin]
    stop_groups({int(pid) for pid, when in started if abs(began(int(pid)) - float(when)) < _TOLERANCE}, 10.0)


if __name__ == "__main__":
    _guard()
