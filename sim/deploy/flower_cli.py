"""Flower's command line without its pitfalls: a home of its own, a run's logs as they come, its true end."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hedgerow.sim.deploy.processes import program

__all__ = ["FlowerRun", "RunEnd", "environment", "healthy"]

_STARTED = re.compile(r"Successfully started run (\d+)")
_FOLDER = re.compile(r"Run folder: (.+?)\s*$")
# A busy machine may be slow to answer: so many questions in a row without an answer, each of so many seconds.
_ATTEMPTS = 6
_ANSWER_SECONDS = 30.0
_PAUSE_SECONDS = 1.0
_COMPLETED = "finished:completed"


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs, with a home of their own and nothing from outside."""
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        # A per-run environment would stand before this one, and needs a network.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
        # Flower's programs start one another by name.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def healthy(port: int, ca: Path | None = None) -> bool:
    """Return whether a SuperLink on this machine answers; with TLS where its CA is given."""
    trust = ssl.create_default_context(cafile=str(ca)) if ca else None
    try:
        url = f"{'https' if ca else 'http'}://127.0.0.1:{port}/health"
        with urllib.request.urlopen(url, timeout=2, context=trust):
            return True
    except (urllib.error.URLError, OSError):
        return False


@dataclass(frozen=True)
class RunEnd:
    """How a run ended, in Flower's words: ``finished:completed`` is success."""

    run_id: int | None
    status: str
    details: str = ""

    @property
    def exit_code(self) -> int:
        """0 if the run completed, 1 if not."""
        return 0 if self.status == _COMPLETED else 1


class FlowerRun:
    """A run that ``flwr run`` submits and follows; its lines are kept, and printed as they come.

    Parameters
    ----------
    arguments : Sequence[str]
        What follows ``flwr run``, without ``--stream``.
    env : Mapping[str, str]
        From ``environment``.
    superlink : str (default: "")
        The connection's name in the home's config.toml; empty: Flower's default.
    echo : bool (default: True)
        Print the lines.
    prefix : str (default: "")
        What each line that is printed begins with.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        env: dict[str, str],
        *,
        superlink: str = "",
        echo: bool = True,
        prefix: str = "",
    ) -> None:
        self.run_id: int | None = None
        self.lines: list[str] = []
        self._began = time.time()
        self._env = env
        self._superlink = [superlink] if superlink else []
        self._echo, self._prefix = echo, prefix
        self._process = subprocess.Popen(
            [program("flwr"), "run", *arguments, "--stream"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def folder(self) -> Path | None:
        """The run's folder, as its log names it; None if it has not."""
        found = (named for line in reversed(self.lines) if (named := _FOLDER.search(line)))
        return next((Path(one[1]) for one in found), None)

    @property
    def following(self) -> bool:
        """Whether the run's logs are still followed, which ends with the run."""
        return self._process.poll() is None

    def submitted(self, patience: float = 60.0) -> int:
        """Wait until Flower took the run, and return its id.

        Raises
        ------
        RuntimeError
            If Flower did not take it.
        """
        end = time.monotonic() + patience
        while self.run_id is None:
            if not self._reader.is_alive() or time.monotonic() > end:
                raise RuntimeError("flwr run started no run:\n" + "".join(self.lines[-20:]))
            time.sleep(0.05)
        return self.run_id

    def wait(self, timeout: float | None = None) -> RunEnd:
        """Follow the run to its end, and ask Flower how it ended: ``flwr run`` exits with 0 in any case.

        Parameters
        ----------
        timeout : float or None (default: None)
            Seconds to wait at most.

        Raises
        ------
        TimeoutError
            If the run goes on after ``timeout`` seconds.
        """
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise TimeoutError(f"run {self.run_id} goes on after {timeout} s")
        self._process.wait()
        if self.run_id is None:
            return RunEnd(None, "not started", "".join(self.lines[-3:]).strip())
        return self._end()

    def status(self) -> RunEnd:
        """Ask Flower where the run stands now."""
        if self.run_id is None:
            return RunEnd(None, "not started")
        shown = self._flwr("list", *self._superlink, "--run-id", str(self.run_id), "--format", "json")
        try:
            run = json.loads(shown)["runs"][0]
        except (ValueError, LookupError):
            return RunEnd(self.run_id, "unknown")
        return RunEnd(self.run_id, str(run.get("status", "unknown")), str(run.get("status-details", "")))

    def stop(self) -> None:
        """Ask Flower to stop the run, with ``flwr stop``."""
        self._flwr("stop", str(self.submitted()), *self._superlink)

    def close(self) -> None:
        """Follow the run no longer. The run itself is the SuperLink's, and goes on."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(5.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.lines.append(line)
                if self._echo:
                    # In one piece: several runs may be followed at once.
                    print(f"{self._prefix}{line}", end="", flush=True)
                if started := _STARTED.search(line):
                    self.run_id = int(started[1])

    def _end(self) -> RunEnd:
        """Ask until the run has ended: its logs may break off before, and Flower may be slow to answer.

        If Flower does not answer, the run's folder on this machine may have the status.
        """
        unanswered = 0
        while not (found := self.status()).status.startswith("finished"):
            unanswered = unanswered + 1 if found.status == "unknown" else 0
            if unanswered == _ATTEMPTS:
                return self._witness() or found
            time.sleep(_PAUSE_SECONDS)
        return found

    def _witness(self) -> RunEnd | None:
        """Return that the run completed if the folder that its log names says so, and since it began."""
        if self.folder is None:
            return None
        summary = self.folder / "summary.json"
        try:
            completed = json.loads(summary.read_bytes())["status"] == "completed"
            # A resumed run's folder may hold the earlier summary until the run continues.
            of_this_run = summary.stat().st_mtime >= self._began
        except (OSError, ValueError, LookupError, TypeError):
            return None
        details = f"Flower did not answer; {summary} tells"
        return RunEnd(self.run_id, _COMPLETED, details) if completed and of_this_run else None

    def _flwr(self, *arguments: str) -> str:
        command = [program("flwr"), *arguments]
        # A SuperLink that is gone is asked again and again: the answer then is that none came.
        try:
            return subprocess.run(
                command, env=self._env, capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
            ).stdout
        except subprocess.TimeoutExpired:
            return ""
