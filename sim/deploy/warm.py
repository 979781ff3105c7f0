"""A SuperExec whose ClientApps start warm: one process imports what they need, and forks for each message.

Flower's SuperExec starts a new Python for every message, which imports Flower, torch and the app: three to
five seconds on small devices, whatever the work. Here all but the app's own modules are there already, in
pages that are shared until they are written to. Still every message has a process of its own, which leaves
nothing when it ends; state is where Flower keeps it. Flower starts processes by a command: the same command's
function is called in the fork, with the same arguments, which ``ps`` then does not show.

Where Flower starts ClientApps in another way than is expected here, or the process that forks has died,
Flower's own way is taken, with one warning.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common import log

__all__ = ["PRELOAD", "warm_path"]

# The variable that names further modules to import once, separated by commas.
PRELOAD = "HEDGEROW_PRELOAD"
_COMMAND = "flwr-clientapp"
_SET_NAME = 15
_MODULES = ("torch", "hedgerow.clients", "hedgerow.tasks")
# Installs packages first, which modules that were imported before would not know.
_COLD = "--allow-runtime-dependency-installation"


def warm_path(home: Path, path: str | None = None) -> dict[str, str]:
    """Return the environment in which ``flower-supernode`` finds this SuperExec as its ``flower-superexec``.

    Parameters
    ----------
    home : Path
        A folder of the node's, such as its ``FLWR_HOME``: a script is written there.
    path : str or None (default: None)
        Where programs are looked for otherwise; None for this process's ``PATH``.
    """
    script = home / "hedgerow" / "bin" / "flower-superexec"
    script.parent.mkdir(parents=True, exist_ok=True)
    text = f'#!/bin/sh\nexec "{sys.executable}" -m hedgerow.sim.deploy.warm "$@"\n'
    if not script.is_file() or script.read_text(encoding="utf-8") != text:
        new = script.with_name(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.chmod(0o755)
        new.replace(script)
    return {"PATH": f"{script.parent}{os.pathsep}{os.environ.get('PATH', '') if path is None else path}"}


def main() -> None:
    """Be the process that forks; a first fork is Flower's SuperExec, with this program's arguments."""
    # Imported before the fork, shared by both.
    flower_superexec = _program("flower-superexec")
    # Elsewhere a fork of a process that has loaded the system's own libraries is not safe.
    if sys.platform != "linux":
        flower_superexec()
        return
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _launch_by(theirs)
        flower_superexec()
        return
    theirs.close()
    _serve(ours)


# The SuperExec's side.


def _launch_by(channel: socket.socket) -> None:
    """Have the SuperExec of this process start ClientApps over a channel."""
    try:
        # Here, since it is refused where this Flower is not known.
        from hedgerow.sim.engine._compat import launch_by  # noqa: PLC0415

        launch_by(_Launcher(channel).start)
    except ImportError as error:
        log(WARNING, "Every message waits for its imports: %s", error)


class _Launcher:
    """Stands where the SuperExec looks for ``subprocess.Popen``."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel: socket.socket | None = channel

    def start(self, command: Sequence[str], **options: Any) -> None:
        """Start a command as ``Popen`` does, a ClientApp as a fork."""
        warm = command[0] == _COMMAND and _COLD not in command and options.keys() <= {"stdout", "stderr"}
        if warm and self._channel is not None:
            told = json.dumps({"arguments": list(command), "quiet": bool(options)}) + "\n"
            try:
                self._channel.sendall(told.encode())
            except OSError:
                log(
                    WARNING, "The process that forks ClientApps is gone: every message waits for its imports."
                )
                self._channel = None
            else:
                return
        subprocess.Popen(command, **options)


# The side that forks.


def _serve(channel: socket.socket) -> None:
    """Fork a ClientApp for each line, until the SuperExec is gone."""
    # Who has ended is forgotten; Ctrl-C and the like are the SuperExec's, whose end is this one's.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    program = _program(_COMMAND)
    _preload([*_MODULES, *filter(None, os.environ.get(PRELOAD, "").split(","))])
    with channel.makefile(encoding="utf-8") as lines:
        for line in lines:
            told = json.loads(line)
            if os.fork() == 0:
                lines.close()
                channel.close()
                _become(program, told["arguments"], quiet=told["quiet"])
                return


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # What a module does at its import is its author's.
            log(WARNING, "%s was not imported beforehand: %s: %s", module, type(error).__name__, error)
    # The collector would write to pages that forks share.
    gc.collect()
    gc.freeze()


def _become(program: Callable[[], object], arguments: list[str], *, quiet: bool) -> None:
    """Be a program with a command's arguments, in this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    # A new process seeds NumPy's global generator from the system; the fork reseeds Python's own.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    sys.argv = arguments
    # Its name for ps, top and who looks for it; at most 15 characters.
    ctypes.CDLL(None).prctl(_SET_NAME, arguments[0][:15].encode(), 0, 0, 0)
    program()


def _program(command: str) -> Callable[[], object]:
    """Import what a command of Flower's runs."""
    (point,) = entry_points(group="console_scripts", name=command)
    program: Callable[[], object] = point.load()
    return program


if __name__ == "__main__":
    main()
