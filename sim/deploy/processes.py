"""Programs as child processes: started apart, watched through their logs, ended with all that they started.

A program is given a session of its own, so that a Ctrl-C on the terminal reaches its owner alone, who then
ends it in good order. Only processes that were started here are ever signalled, by process group.
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
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

__all__ = ["Program", "StartError", "cores", "free_ports", "program", "stop_all"]

_TAIL = 2000
_POLL = 0.1


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class StartError(RuntimeError):
    """A program did not start; the message names it and shows the end of its log."""


def program(name: str) -> str:
    """Return the path of one of this environment's programs, which need not be on PATH.

    Raises
    ------
    RuntimeError
        If it is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install 'flwr>=1.41,<2'")
    return found


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 that nobody listens on now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class Program:
    """A long-running program, which may be started, stopped or killed, and started again.

    Parameters
    ----------
    name : str
        What errors call it.
    command : Sequence[str]
        The program's path and its arguments.
    env : Mapping[str, str]
        Its whole environment.
    log_file : Path
        Where its output goes, and that of what it starts; appended to by every start.
    user : int or None (default: None)
        The user and group id that it runs as, which only root may choose; None for this process's own.
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
        # Its process group, for as long as a member may live: later the number may be another's.
        self._group: int | None = None
        self._started_at = 0

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the last start.

        Raises
        ------
        RuntimeError
            If it was never started.
        """
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How the last start ended: None while it runs, negative for a signal."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the program, which must not be running."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already, as process {self.pid}")
        self._started_at = self.log_file.stat().st_size if self.log_file.exists() else 0
        # In the folder where its owner was started, another user may have no business.
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
        """Return when the program is ready.

        Raises
        ------
        StartError
            If it ends before, or is not ready after ``patience`` seconds.
        """
        end = time.monotonic() + patience
        while not ready():
            if not self.running:
                raise self.failure(f"ended at its start with exit code {self.returncode}")
            if time.monotonic() > end:
                raise self.failure(f"did not start within {patience:g} s")
            time.sleep(_POLL)

    def failure(self, what: str) -> StartError:
        """Return an error that says what went wrong, and shows the end of the log."""
        return StartError(f"{self.name} {what}; the end of its log:\n{self.log()[-_TAIL:].rstrip()}")

    def descendants(self, name: str = "") -> list[int]:
        """Return the process ids of all that the program started, those of programs ``name`` if given."""
        if not self.running:
            return []
        table = _processes()
        family = _family(self.pid, table)[1:]
        return [pid for pid in family if not name or name in table[pid].words]

    def stop(self, patience: float = 15.0) -> None:
        """End the program and all that it started: asked at first, killed after ``patience`` seconds."""
        stop_all([self], patience)

    def kill(self) -> None:
        """Kill the program and all that it started at once, as a power cut does."""
        stop_all([self], 0.0)

    def suspend(self) -> None:
        """Let the program and all that it started hang, as a stalled machine does, until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a suspended program go on where it was."""
        self._signal(signal.SIGCONT)

    def _signal(self, sign: signal.Signals) -> None:
        for group in _living(self._groups()):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sign)

    def _groups(self) -> set[int]:
        return set() if self._group is None else {self._group}


def stop_all(programs: Iterable[Program], patience: float = 15.0) -> None:
    """End programs together, each with all that it started: asked at first, then killed."""
    programs = list(programs)
    left = stop_groups(set[int]().union(*(one._groups() for one in programs)), patience)
    for one in programs:
        if one._group not in left:
            one._group = None


def stop_groups(leaders: set[int], patience: float = 15.0) -> set[int]:
    """End process groups with all that their leaders started, as ``stop_all`` does; return which live on."""
    groups = set(leaders)
    for sign, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        if not seconds:
            continue
        groups = _living(groups)
        for group in groups:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, sign)
                # A suspended one hears that it shall end when it goes on.
                os.killpg(group, signal.SIGCONT)
        end = time.monotonic() + seconds
        while groups and time.monotonic() < end:
            time.sleep(_POLL)
            groups = _living(groups)
    return groups


class _Guardian:
    """Has programs ended with all that they started when this process is gone, however (``guardian.py``)."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()

    def watch(self, pid: int) -> None:
        """Take on the leader of a process group."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                command = [sys.executable, "-m", "hedgerow.sim.deploy.guardian"]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, start_new_session=True, text=True
                )
            assert self._process.stdin is not None
            print(pid, began(pid), file=self._process.stdin, flush=True)


_guardian = _Guardian()


def began(pid: int) -> str:
    """Return when a process began, in words that no later process of its number shares; empty if it ended."""
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return " ".join(shown.stdout.split())


def _living(groups: set[int]) -> set[int]:
    """Return those process groups that have a member, and those of what their leaders started."""
    table = _processes()
    for group in set(groups):
        # A detached child is found while its parent lives.
        if group in table and table[group].group == group and not table[group].ended:
            groups = groups | {table[pid].group for pid in _family(group, table) if pid in table}
    # What has ended and was not reaped by its parent lives no more.
    alive = {process.group for process in table.values() if not process.ended}
    return (groups & alive) - {os.getpgrp()}


@dataclass(frozen=True)
class _Process:
    parent: int
    group: int
    ended: bool
    words: tuple[str, ...]


def _processes() -> dict[int, _Process]:
    """Return all processes of the machine; their names, and their commands' words without folders."""
    # A fork has its own name, and its parent's command.
    columns = "pid=,ppid=,pgid=,stat=,comm=,args="
    # Else lines may be cut at 80 columns, or at those of COLUMNS.
    shown = subprocess.run(["ps", "-eww", "-o", columns], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in shown.splitlines():
        pid, parent, group, state, *words = line.split()
        names = tuple(word.rpartition("/")[2] for word in words)
        found[int(pid)] = _Process(int(parent), int(group), state.startswith("Z"), names)
    return found


def _family(root: int, table: Mapping[int, _Process]) -> list[int]:
    """Return a process and its descendants, the process first."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    family = [root]
    for pid in family:
        family += children.get(pid, [])
    return family
