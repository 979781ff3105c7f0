"""Follow a run in the browser: the page of ``report.py``, rendered again while the run is written.

A small server reads the run's folder and writes nothing. It serves this page, the numbers for Prometheus
(``/metrics``) and no file, to everybody who can connect: on loopback by default. Pages of other sites cannot
read it: requests that name another host (DNS rebinding) are refused, and no other origin is allowed.
"""

from __future__ import annotations

import ipaddress
import math
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    DAMAGES,
    LOCK,
    ROUNDS,
    RunFolderError,
    read_config,
    run_folders,
    run_state,
)
from hedgerow.sim.runs.live import duration
from hedgerow.sim.runs.report import Live, Network, report_html, waiting_html
from hedgerow.sim.runs.results import RecordedRun, last_line, load, progress
from hedgerow.sim.runs.trackers import scalars_of
from hedgerow.wire.printable import LONGEST_PATH, shown

# Shortest time between two renderings: in seconds, and as a multiple of the time that the last one took. The
# processor belongs to the run.
_EVERY, _SHARE = 1.0, 10.0
# Number of recent rounds from which the time left is estimated.
_PACE = 20
_STATES = {
    "waiting": "Waiting for the first round.",
    "running": "The run is being written.",
    "stopped": "The run was stopped before its end. It can be resumed.",
    "finished": "The run is finished.",
}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def check_followed(folder: str | Path) -> Path:
    """Return the absolute path of a run's folder, or of an empty folder that may become one.

    Raises
    ------
    RunFolderError
        If the folder does not exist, or holds something else.
    """
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise RunFolderError(f"{path} does not exist; a run prints its folder when it starts")
    if (path / CONFIG).exists():
        read_config(path)
    elif others := sorted({entry.name for entry in path.iterdir()} - {LOCK, CONFIG + ".partial"}):
        raise RunFolderError(f"{path} is not a run folder: it has {shown(others[0])} and no {CONFIG}")
    return path


def newest_run(places: Sequence[str | Path]) -> Path:
    """Return the run folder written to last, of the given ones and of the runs inside them.

    Raises
    ------
    RunFolderError
        If there is none; for a single folder without runs as in ``check_followed``.
    """
    paths = [Path(place).expanduser().resolve() for place in places]
    found = [run for path in paths for run in run_folders(path) if (run / CONFIG).is_file()]
    if not found and len(paths) == 1:
        return check_followed(paths[0])
    if not found:
        raise RunFolderError(f"{', '.join(map(shown, paths))}: no run found")
    return check_followed(max(found, key=_written))


def _written(run: Path) -> tuple[int, Path]:
    files = [file for file in (run / CONFIG, run / ROUNDS) if file.exists()]
    return max(file.stat().st_mtime_ns for file in files), run


class FollowedRun:
    """The current page of a run.

    Parameters
    ----------
    folder : Path
        The run's folder. It may be empty at first, and lose rounds when the run is resumed or started over.
    xs, ys, network
        As in ``report_html``.
    """

    def __init__(
        self, folder: Path, xs: Sequence[str] = (), ys: Sequence[str] = (), network: Network = lambda _: None
    ) -> None:
        self.folder = folder
        self._options: dict[str, Any] = {"xs": xs, "ys": ys, "network": network}
        self._page, self._due = "", 0.0
        self._of: tuple[object, ...] = ()
        # Matplotlib is not thread-safe.
        self._lock = threading.Lock()

    def page(self) -> str:
        """Return the page; the previous one if nothing was written since or it is recent."""
        with self._lock:
            state, begun = run_state(self.folder), time.monotonic()
            now = (state, *map(_stamp, (self.folder / name for name in (CONFIG, ROUNDS))))
            # A new state, such as the end of the run, is shown at once.
            if now != self._of and (begun >= self._due or self._of[:1] != (state,)):
                self._page, self._of = self._made(state), now
                self._due = time.monotonic() + max(_EVERY, _SHARE * (time.monotonic() - begun))
            return self._page

    def metrics(self) -> str:
        """Return the run's numbers in Prometheus's text format, as they are now."""
        state = run_state(self.folder)
        records = () if state == "waiting" else load([self.folder]).runs[0].rounds
        return prometheus_text(self.folder.name, state, records)

    def _made(self, state: str) -> str:
        nonce = secrets.token_urlsafe()
        try:
            # The warning that the run is not finished is redundant here.
            results = replace(load([self.folder]), title=self.folder.name, warnings=())
            live = Live(" ".join([_STATES[state], *self._failure(state)]), _figures(results.runs[0]), nonce)
            return report_html(results, live=live, **self._options)
        except DAMAGES as error:
            words = (
                _STATES[state]
                if state == "waiting"
                else f"The run cannot be shown: {shown(error, LONGEST_PATH)}"
            )
            return waiting_html(self.folder.name, Live(" ".join([words, *self._failure(state)]), {}, nonce))

    def _failure(self, state: str) -> list[str]:
        """Return the last line of a sweep's log of the run, which gives the reason of a failure."""
        line = last_line(self.folder.with_name(f"{self.folder.name}.log"))
        return [f"Its log ends: {line}"] if line and state in ("waiting", "stopped") else []


def _stamp(file: Path) -> tuple[int, ...]:
    """Return values that change when a file is written; none if it is missing or empty."""
    try:
        about = os.stat(file)
    except OSError:
        return ()
    return (about.st_ino, about.st_size, about.st_mtime_ns) if about.st_size else ()


def _figures(run: RecordedRun) -> dict[str, str]:
    """Return a run's progress, the estimated time left, and the last round's duration and replies."""
    last, (unit, done, total) = run.rounds[-1], progress(run.rounds[-1], run.settings)
    figures = {unit: f"{done:,} of {total:,}" if total else f"{done:,}"}
    recent = run.rounds[-_PACE:]
    seconds = sum(record.get("wall_seconds") or 0.0 for record in recent[1:])
    steps = done - progress(recent[0], run.settings)[1]
    if total and steps > 0 and not run.finished:
        figures["time left"] = duration(seconds / steps * max(0, total - done))
    if last.get("wall_seconds") is not None:
        figures["last round took"] = f"{last['wall_seconds']:.3g} s"
    if last.get("sent"):
        figures["replies, last round"] = f"{last.get('accepted', 0):,} of {last['sent']:,}"
    return figures


class FollowServer:
    """Serves the page of a run until interrupted.

    Parameters
    ----------
    run : FollowedRun
        The run.
    host : str (default: "127.0.0.1")
        Address to listen on; any other than loopback shows the run to others.
    port : int (default: 0)
        Port; 0 for a free one.

    Raises
    ------
    OSError
        If the address cannot be used.
    """

    def __init__(self, run: FollowedRun, host: str = "127.0.0.1", port: int = 0) -> None:
        self.run, self.host = run, host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        app = Starlette(routes=[Route("/", self._answer), Route("/metrics", self._metrics)])
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))

    @property
    def url(self) -> str:
        """The page's address."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}/"

    def serve(self) -> None:
        """Answer until Ctrl-C, which is then raised, or until ``server.should_exit``."""
        self.server.run(sockets=[self._socket])

    def _answer(self, request: Request) -> Response:
        if not self._is_meant(request.url.hostname or ""):
            words = "This server has another name; open the address that it printed.\n"
            return PlainTextResponse(words, 421, _HEADERS)
        page = self.run.page()
        headers = {**_HEADERS, "ETag": f'"{sha256(page.encode()).hexdigest()}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return HTMLResponse(page, headers=headers)

    def _metrics(self, request: Request) -> Response:
        """Answer Prometheus; 503 while the records cannot be read, so that it tells the run as down."""
        if not self._is_meant(request.url.hostname or ""):
            return PlainTextResponse("This server has another name.\n", 421, _HEADERS)
        try:
            return Response(self.run.metrics(), headers=_HEADERS, media_type=CONTENT_TYPE)
        except DAMAGES as error:
            return PlainTextResponse(
                f"The run cannot be shown: {shown(error, LONGEST_PATH)}\n", 503, _HEADERS
            )

    def _is_meant(self, name: str) -> bool:
        """Return whether a request names this server: an IP address, localhost or the configured host.

        A host name under another site's control (DNS rebinding) is none of these.
        """
        if name.lower() in ("localhost", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


# A run's numbers in Prometheus's text format, served under ``/metrics``. Names of metrics, losses and nodes
# come from outside: they are values of labels, never names of metrics.


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_RUN_STATES = ("waiting", "running", "stopped", "finished")
# What the sources of ``scalars_of`` are called here: name, type and help of the metric, name of its label.
_FAMILIES = {
    "cost": ("hedgerow_cost", "counter", "Traffic and seconds since the start of the run.", "name"),
    "replies": ("hedgerow_replies", "gauge", "Instructions and replies of the last round.", "name"),
}
_METRIC = ("hedgerow_metric", "gauge", "Metrics of the last round that has them.", "name")


def prometheus_text(run: str, state: str, records: Iterable[Mapping[str, Any]]) -> str:
    """Return the metrics of a run.

    Parameters
    ----------
    run : str
        Its name, the label ``run`` of every sample.
    state : str
        ``waiting``, ``running``, ``stopped`` or ``finished``.
    records : Iterable[Mapping[str, Any]]
        Its rounds, as in ``rounds.jsonl``, in order; none while it is waiting.
    """
    last: dict[str, float] = {}
    lost: Counter[str] = Counter()
    latest, seconds = None, 0.0
    for record in records:
        latest = record["round"]
        seconds += record.get("wall_seconds") or 0.0
        last |= scalars_of(record)
        lost.update(record.get("rejected", {}))
    last["cost/wall_seconds"] = seconds
    lines = _Lines(run)
    for one in _RUN_STATES:
        lines.add(
            "hedgerow_run_state", "gauge", "1 for the state that the run is in.", one == state, state=one
        )
    if latest is None:
        return lines.text()
    lines.add("hedgerow_round", "gauge", "The last recorded round.", latest)
    for tag, value in sorted(last.items()):
        source, _, name = tag.partition("/")
        if source == "lost" or tag == "replies/lost":
            continue
        metric, kind, told, label = _FAMILIES.get(source, _METRIC)
        of = {} if source in _FAMILIES else {"source": source}
        lines.add(metric, kind, told, value, **of, **{label: name})
    for reason, count in sorted(lost.items()):
        lines.add("hedgerow_lost_replies", "counter", "Lost replies since the start.", count, reason=reason)
    return lines.text()


class _Lines:
    """Samples, by metric, each metric with its help and type once."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._metrics: dict[str, list[str]] = {}

    def add(self, metric: str, kind: str, told: str, value: float, **labels: str) -> None:
        """Add a sample."""
        # The format's rule for counters.
        name = f"{metric}_total" if kind == "counter" else metric
        lines = self._metrics.setdefault(name, [f"# HELP {name} {told}", f"# TYPE {name} {kind}"])
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in {"run": self._run, **labels}.items())
        lines.append(f"{name}{{{pairs}}} {_number(float(value))}")

    def text(self) -> str:
        """Return all of them."""
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)


def _escaped(text: str) -> str:
    """Return a label's value: backslash, quote and line feed escaped, nothing that UTF-8 cannot hold."""
    plain = text.encode("utf-8", "replace").decode()
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
