"""A run followed in the browser: the page of ``report.py``, rendered again while the run is written.

A small server reads the run's folder and writes nothing. It serves this page and no file. What it shows is
public to whoever may connect, on loopback by default. A page of another site learns nothing of it: requests
that name another host (DNS rebinding) are refused, and nothing allows other origins.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from hedgerow.sim.runs.folder import (
    CONFIG,
    LOCK,
    ROUNDS,
    SUMMARY,
    RunFolderError,
    in_use,
    read_config,
)
from hedgerow.sim.runs.live import duration
from hedgerow.sim.runs.report import Live, Network, report_html, waiting_html
from hedgerow.sim.runs.results import RecordedRun, last_line, load
from hedgerow.wire.printable import shown

__all__ = ["FollowServer", "FollowedRun", "check_followed", "newest_run"]

# A page is rendered again no sooner than so many real seconds after the last one, and no sooner than so many
# times the seconds that the last one took: the processor is the run's.
_EVERY, _SHARE = 1.0, 10.0
# The rounds whose real seconds say how fast the run is now.
_PACE = 20
_STATES = {
    "waiting": "Waiting for the first round.",
    "running": "The run is being written.",
    "stopped": "Nobody writes this run, and it did not end by itself: it was stopped, and may go on.",
    "finished": "The run is finished.",
}
# What a record comes to that holds other things than numbers.
_DAMAGES = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def check_followed(folder: str | Path) -> Path:
    """Return a folder that is a run's or may become one, absolute.

    Raises
    ------
    RunFolderError
        If it is not there, or holds something else.
    """
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise RunFolderError(f"{path} is not there; name the folder of a run, which it prints as it starts")
    if (path / CONFIG).exists():
        read_config(path)
    elif others := sorted({entry.name for entry in path.iterdir()} - {LOCK, CONFIG + ".partial"}):
        raise RunFolderError(
            f"{path} is not the folder of a run: it has no {CONFIG}, and has {shown(others[0])}"
        )
    return path


def newest_run(places: Sequence[str | Path]) -> Path:
    """Return the run folder that was written to last, among these and the runs inside the others.

    Raises
    ------
    RunFolderError
        If there is none; as ``check_followed`` for a single folder that holds none.
    """
    paths = [Path(place).expanduser().resolve() for place in places]
    found = [config.parent for path in paths for config in _configs(path)]
    if not found and len(paths) == 1:
        return check_followed(paths[0])
    if not found:
        raise RunFolderError(f"{', '.join(map(shown, paths))}: no run is there")
    return check_followed(max(found, key=_written))


def _written(run: Path) -> tuple[int, Path]:
    files = [file for file in (run / CONFIG, run / ROUNDS) if file.exists()]
    return max(file.stat().st_mtime_ns for file in files), run


def _configs(path: Path) -> list[Path]:
    """Return the ``config.json`` of a run, or of the runs and sweeps in a folder."""
    own = path / CONFIG
    return [own] if own.is_file() else sorted(path.rglob(f"*/{CONFIG}"))


class FollowedRun:
    """The page of a run, as it is now.

    Parameters
    ----------
    folder : Path
        The run's. It may still be empty, lose rounds when the run is resumed, and start over.
    xs, ys : sequence of str
        As ``report_html`` takes them.
    network : Callable[[RecordedRun], DrawnNetwork or None]
        As ``report_html`` takes it.
    """

    def __init__(
        self, folder: Path, xs: Sequence[str] = (), ys: Sequence[str] = (), network: Network = lambda _: None
    ) -> None:
        self.folder = folder
        self._asked: dict[str, Any] = {"xs": xs, "ys": ys, "network": network}
        self._page, self._due = "", 0.0
        self._of: tuple[object, ...] = ()
        # Matplotlib draws one picture at a time.
        self._lock = threading.Lock()

    def page(self) -> str:
        """Return the page; the previous one if nothing was written since, or it is recent."""
        with self._lock:
            state, begun = self._state(), time.monotonic()
            now = (state, *map(_stamp, (self.folder / name for name in (CONFIG, ROUNDS))))
            # The end of a run is shown at once.
            if now != self._of and (begun >= self._due or self._of[:1] != (state,)):
                self._page, self._of = self._made(state), now
                self._due = time.monotonic() + max(_EVERY, _SHARE * (time.monotonic() - begun))
            return self._page

    def _state(self) -> str:
        if (self.folder / SUMMARY).exists():
            return "finished"
        if not _stamp(self.folder / ROUNDS):
            return "waiting"
        return "running" if in_use(self.folder) else "stopped"

    def _made(self, state: str) -> str:
        nonce = secrets.token_urlsafe()
        try:
            # That it is not finished is no warning here.
            results = replace(load([self.folder]), title=self.folder.name, warnings=())
            live = Live(" ".join([_STATES[state], *self._failure(state)]), _told(results.runs[0]), nonce)
            return report_html(results, live=live, **self._asked)
        except _DAMAGES as error:
            words = _STATES[state] if state == "waiting" else f"Nothing can be shown: {shown(error)}"
            return waiting_html(self.folder.name, Live(" ".join([words, *self._failure(state)]), {}, nonce))

    def _failure(self, state: str) -> list[str]:
        """Return why a run of a sweep failed, which its log says last."""
        said = last_line(self.folder.with_name(f"{self.folder.name}.log"))
        return [f"Its log ends: {said}"] if said and state in ("waiting", "stopped") else []


def _stamp(file: Path) -> tuple[int, ...]:
    """Return what differs when a file was written; empty without the file, or in an empty one."""
    try:
        about = os.stat(file)
    except OSError:
        return ()
    return (about.st_ino, about.st_size, about.st_mtime_ns) if about.st_size else ()


def _told(run: RecordedRun) -> dict[str, str]:
    """Return how far a run is, how long it may take, and who answered last."""
    last, (unit, done, total) = run.rounds[-1], _progress(run.rounds[-1], run.settings)
    told = {unit: f"{done:,} of {total:,}" if total else f"{done:,}"}
    recent = run.rounds[-_PACE:]
    seconds = sum(record.get("wall_seconds") or 0.0 for record in recent[1:])
    steps = done - _progress(recent[0], run.settings)[1]
    if total and steps > 0 and not run.finished:
        told["time left"] = duration(seconds / steps * max(0, total - done))
    if last.get("wall_seconds") is not None:
        told["the last round took"] = f"{last['wall_seconds']:.3g} s"
    if last.get("sent"):
        told["answered, last round"] = f"{last.get('accepted', 0):,} of {last['sent']:,}"
    return told


def _progress(record: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return what is counted, how many there were and how many there will be, 0 where nobody says."""
    rounds = settings.get("num-rounds", settings.get("num-server-rounds"))
    iterations = record.get("total_iterations") or settings.get("iterations")
    if type(record.get("iterations")) is int and type(iterations) is int and type(rounds) is not int:
        return "iteration", record["iterations"], iterations
    return "round", record["round"], rounds if type(rounds) is int else 0


class FollowServer:
    """Serves the page of a run, until it is interrupted.

    Parameters
    ----------
    run : FollowedRun
        The run.
    host : str (default: "127.0.0.1")
        The address to listen at: loopback, unless others are to see the run.
    port : int (default: 0)
        The port; 0 for a free one.

    Raises
    ------
    OSError
        If nothing can listen there.
    """

    def __init__(self, run: FollowedRun, host: str = "127.0.0.1", port: int = 0) -> None:
        self.run, self.host = run, host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        app = Starlette(routes=[Route("/", self._answer)])
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))

    @property
    def url(self) -> str:
        """Where the page is."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}/"

    def serve(self) -> None:
        """Answer until Ctrl-C, which is then raised, or until ``server.should_exit``."""
        self.server.run(sockets=[self._socket])

    def _answer(self, request: Request) -> Response:
        if not self._is_meant(request.url.hostname or ""):
            words = "This server has another name; open the address it printed.\n"
            return PlainTextResponse(words, 421, _HEADERS)
        page = self.run.page()
        headers = {**_HEADERS, "ETag": f'"{sha256(page.encode()).hexdigest()}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return HTMLResponse(page, headers=headers)

    def _is_meant(self, name: str) -> bool:
        """Tell whether a request names this server: by an address, or as it was told to listen.

        A name that another site's owner may point here, DNS rebinding, is never one of these.
        """
        if name.lower() in ("localhost", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
