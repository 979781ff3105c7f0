"""Flower's command line with its own home, a run's live logs, and the run's true status."""

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
from hedgerow.wire.links.proxies import without_proxy_here

_STARTED = re.compile(r"Successfully started run (\d+)")
_FOLDER = re.compile(r"Run folder: (.+?)\s*$")
# A busy machine may be slow: queries in a row that may go unanswered, and the time limit of each.
_ATTEMPTS = 6
_ANSWER_SECONDS = 30.0
_PAUSE_SECONDS = 1.0
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_COMPLETED = "finished:completed"


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs, with their own home and without network access.

    They use no proxy for this machine.
    """
    return {
        **without_proxy_here(os.environ),
        "FLWR_HOME": str(home),
        # A per-run environment would take precedence over this one, and needs a network.
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
        # Flower's programs start one another by name.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def healthy(port: int, ca: Path | None = None) -> bool:
    """Return whether a SuperLink on this machine answers, over TLS if a CA is given."""
    trust = ssl.create_default_context(cafile=str(ca)) if ca else None
    try:
        url = f"{'https' if ca else 'http'}://127.0.0.1:{port}/health"
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        handlers += [urllib.request.HTTPSHandler(context=trust)] if trust else []
        with urllib.request.build_opener(*handlers).open(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False


@dataclass(frozen=True)
class RunEnd:
    """A run's final status in Flower's terms; ``finished:completed`` is success."""

    run_id: int | None
    status: str
    details: str = ""

    @property
    def exit_code(self) -> int:
        """0 if the run completed, 1 if not."""
        return 0 if self.status == _COMPLETED else 1


class FlowerRun:
    """A run that ``flwr run`` submits and follows; its lines are kept and printed as they come.

    They have colors on a terminal only.

    Parameters
    ----------
    arguments : Sequence[str]
        The arguments of ``flwr run``, without ``--stream``.
    env : Mapping[str, str]
        From ``environment``.
    superlink : str (default: "")
        The connection's name in the home's config.toml; empty for Flower's default.
    echo : bool (default: True)
        Print the lines.
    prefix : str (default: "")
        Prefix of each printed line.
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
        """The run's folder from its log; None if the log does not name one."""
        found = (named for line in reversed(self.lines) if (named := _FOLDER.search(line)))
        return next((Path(one[1]) for one in found), None)

    @property
    def following(self) -> bool:
        """Whether the run's logs are still followed, which ends with the run."""
        return self._process.poll() is None

    def submitted(self, patience: float = 60.0) -> int:
        """Wait until Flower has accepted the run, and return its id; RuntimeError if it does not."""
        end = time.monotonic() + patience
        while self.run_id is None:
            if not self._reader.is_alive() or time.monotonic() > end:
                raise RuntimeError("flwr run started no run:\n" + "".join(self.lines[-20:]))
            time.sleep(0.05)
        return self.run_id

    def wait(self, timeout: float | None = None) -> RunEnd:
        """Follow the run to its end and query its status, because ``flwr run`` always exits with 0.

        TimeoutError if the run has not ended after ``timeout`` seconds.
        """
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise TimeoutError(f"run {self.run_id} has not ended after {timeout} s")
        self._process.wait()
        if self.run_id is None:
            return RunEnd(None, "not started", "".join(self.lines[-3:]).strip())
        return self._end()

    def status(self) -> RunEnd:
        """Query the run's current status."""
        if self.run_id is None:
            return RunEnd(None, "not started")
        shown = self._flwr("list", *self._superlink, "--run-id", str(self.run_id), "--format", "json")
        try:
            run = json.loads(shown)["runs"][0]
        except (ValueError, LookupError):
            return RunEnd(self.run_id, "unknown")
        return RunEnd(self.run_id, str(run.get("status", "unknown")), str(run.get("status-details", "")))

    def stop(self) -> None:
        """Stop the run with ``flwr stop``."""
        self._flwr("stop", str(self.submitted()), *self._superlink)

    def close(self) -> None:
        """Stop following the run, which continues on the SuperLink."""
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
        colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        with self._process.stdout as lines:
            for printed in lines:
                line = printed if colored else _COLOR.sub("", printed)
                self.lines.append(line)
                if self._echo:
                    # One call, because several runs may be followed at once.
                    print(f"{self._prefix}{line}", end="", flush=True)
                if started := _STARTED.search(line):
                    self.run_id = int(started[1])

    def _end(self) -> RunEnd:
        """Query until the run has ended, because its logs may break off before.

        If Flower does not answer, use the status in the run's folder on this machine, if there is one.
        """
        unanswered = 0
        while not (found := self.status()).status.startswith("finished"):
            unanswered = unanswered + 1 if found.status == "unknown" else 0
            if unanswered == _ATTEMPTS:
                return self._witness() or found
            time.sleep(_PAUSE_SECONDS)
        return found

    def _witness(self) -> RunEnd | None:
        """Return a completed status if the run's folder has one that is newer than the run's start."""
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
        # Flower's client retries for ever if the SuperLink is gone.
        try:
            return subprocess.run(
                command, env=self._env, capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
            ).stdout
        except subprocess.TimeoutExpired:
            return ""
