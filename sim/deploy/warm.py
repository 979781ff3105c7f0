"""A SuperExec that forks ClientApps from a process with all imports done.

Flower's SuperExec starts a new Python for every message, which imports Flower, torch and the app: three to
five seconds on small devices. Here everything except the app's own modules is already imported, in memory
that forks share until they write to it. Every message still has its own process, and Flower still keeps the
state. The fork calls the function of Flower's command with the same arguments, which ``ps`` then does not
show.

If Flower starts ClientApps in an unexpected way, or the forking process has died, Flower's own way is used,
with one warning.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from logging import WARNING
from pathlib import Path
from typing import Any, NoReturn

from flwr.common import log

from hedgerow.sim.deploy.pace import PollPace
from hedgerow.wire.printable import traced
from hedgerow.wire.process import one_blas_thread

# Flower's environment variable for the seconds between a SuperExec's requests.
TASK_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
# The environment variable with further modules to import once, separated by commas.
PRELOAD = "HEDGEROW_PRELOAD"
_COMMAND = "flwr-clientapp"
_SET_NAME = 15
# The first is imported by a ClientApp's first request alone.
_MODULES = ("httpcore", "torch", "hedgerow.clients", "hedgerow.tasks")
# Installs packages first, of which modules that are already imported would not know.
_COLD = "--allow-runtime-dependency-installation"


def warm_path(home: Path, path: str | None = None) -> dict[str, str]:
    """Return the environment in which ``flower-supernode`` finds this SuperExec as ``flower-superexec``.

    ``home`` is a folder of the node such as its ``FLWR_HOME``; ``path`` as in ``path_with``.
    """
    return path_with("flower-superexec", "hedgerow.sim.deploy.warm", home, path)


def path_with(command: str, module: str, home: Path, path: str | None = None) -> dict[str, str]:
    """Return the environment in which a command of Flower is a module of ours.

    A script is written into ``home``. ``path`` is the rest of the search path; None for this process's
    ``PATH``.
    """
    script = home / "hedgerow" / "bin" / command
    script.parent.mkdir(parents=True, exist_ok=True)
    text = f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n'
    if not script.is_file() or script.read_text(encoding="utf-8") != text:
        new = script.with_name(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.chmod(0o755)
        new.replace(script)
    return {"PATH": f"{script.parent}{os.pathsep}{os.environ.get('PATH', '') if path is None else path}"}


def main() -> None:
    """Run the forking process; its first fork is Flower's SuperExec, with this program's arguments."""
    with suppress(KeyboardInterrupt):  # How the SuperNode stops it, maybe before Flower handles the signal.
        _main()


def _main() -> None:
    # Imported before the fork, so that both processes share it.
    flower_superexec = flower_program("flower-superexec")
    # On other systems it is not safe to fork after system libraries are loaded.
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


# The SuperExec's process


def _launch_by(channel: socket.socket) -> None:
    """Make this process's SuperExec start ClientApps over a channel."""
    try:
        # Imported here, because it fails with an unknown version of Flower.
        from hedgerow.sim.engine._compat import launch_by, pace_superexec  # noqa: PLC0415

        launcher = _Launcher(channel)
        launch_by(launcher.start)
    except ImportError as error:
        log(WARNING, "ClientApps start cold, which is slower: %s", error)
        return
    if TASK_POLL not in os.environ:  # The owner has chosen no other.
        try:
            pace_superexec(launcher.pace)
        except ImportError as error:
            log(WARNING, "ClientApps start up to a second later: %s", error)


class _Launcher:
    """Replaces ``subprocess.Popen`` in the SuperExec."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel: socket.socket | None = channel
        self.pace = PollPace(0.02, 1.0)

    def start(self, command: Sequence[str], **options: Any) -> None:
        """Start a command like ``Popen``, but a ClientApp as a fork."""
        self.pace.active()
        warm = command[0] == _COMMAND and _COLD not in command and options.keys() <= {"stdout", "stderr"}
        if warm and self._channel is not None:
            request = json.dumps({"arguments": list(command), "quiet": bool(options)}) + "\n"
            try:
                self._channel.sendall(request.encode())
            except OSError:
                log(WARNING, "The process that forks ClientApps is gone: they start cold, which is slower.")
                self._channel = None
            else:
                return
        subprocess.Popen(command, **options)


# The forking process


def _serve(channel: socket.socket) -> None:
    """Fork a ClientApp for each line, until the SuperExec is gone."""
    # Reap children automatically. Ctrl-C ends the SuperExec, and its end is the end of this process.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    program = flower_program(_COMMAND)
    _preload([*_MODULES, *filter(None, os.environ.get(PRELOAD, "").split(","))])
    with channel.makefile(encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            if os.fork() == 0:
                lines.close()
                channel.close()
                _become(program, request["arguments"], quiet=request["quiet"])


def _preload(modules: Sequence[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module's import may raise anything
            log(WARNING, "%s was not imported beforehand: %s: %s", module, type(error).__name__, error)
    with one_blas_thread():
        pass  # It looks for the libraries that are loaded: once, for all forks.
    # The garbage collector would write to pages that forks share.
    gc.collect()
    gc.freeze()


def _become(program: Callable[[], object], arguments: list[str], *, quiet: bool) -> NoReturn:
    """Run a program with a command's arguments in this process, and end it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    # A new process seeds NumPy's global generator from the system; the fork reseeds Python's own.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    sys.argv = arguments
    # The process name for ps and top, at most 15 characters.
    ctypes.CDLL(None).prctl(_SET_NAME, arguments[0][:15].encode(), 0, 0, 0)
    _end(_exit_code(program))


def _exit_code(program: Callable[[], object]) -> int:
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        print(traced(error), file=sys.stderr)
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End this fork as Python does, but for the objects of all modules.

    To free them takes half a second of a core, and copies the pages that the forks share.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def flower_program(command: str) -> Callable[[], object]:
    """Return the function behind a Flower command."""
    (point,) = entry_points(group="console_scripts", name=command)
    program: Callable[[], object] = point.load()
    return program


if __name__ == "__main__":
    main()
