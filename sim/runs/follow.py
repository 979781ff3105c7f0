"""A run followed in the browser while it is written: a small server that reads its folder and writes nothing.

It serves four paths and no file by its name. What it sends is public to whoever may connect, on loopback by
default: numbers of the rounds, and the settings. A page of another site learns nothing of it: requests that
name another host (DNS rebinding) are refused, and nothing allows other origins.

Events (``text/event-stream``): ``begin`` (the config; everything known before is void), ``rounds`` (a list of
records, in their order), ``state`` (``waiting``, ``running``, ``stopped`` or ``finished``, and what is wrong
with the files).
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from hedgerow.sim.runs.folder import (
    CONFIG,
    LOCK,
    ROUNDS,
    SUMMARY,
    RunFolderError,
    in_use,
    read_config,
    shown_settings,
)
from hedgerow.sim.runs.results import SOURCES, numbers
from hedgerow.wire.printable import shown

__all__ = ["FollowServer", "LiveFolder", "check_followed", "newest_run"]

# Real seconds between two looks at the folder, and between two signs of life to a page that hears nothing.
_EVERY, _ALIVE = 0.5, 15.0
# Pages that follow at once; each has a thread and reads for itself.
_MOST_PAGES = 16
# The most rounds that a page is given of what was before it came; later ones it gets all.
_MOST_ROUNDS = 2_000
_PIECE = 8 * 2**20
# A round is a line of some kilobytes; one that does not end is none.
_LONGEST_LINE = 64 * 2**20
_COUNTS = ("iterations", "bits", "payload_bytes", "sim_seconds", "wall_seconds", "sent", "accepted")
_TYPES = {
    "/": ("follow.html", "text/html; charset=utf-8"),
    "/follow.js": ("follow.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
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
        raise RunFolderError(
            f"{path} is not there; valid is the folder of a run, which the run prints when it starts"
        )
    if (path / CONFIG).exists():
        read_config(path)
    elif others := sorted({entry.name for entry in path.iterdir()} - {LOCK, CONFIG + ".partial"}):
        raise RunFolderError(
            f"{path} is not the folder of a run: it has no {CONFIG}, and has {shown(others[0])}"
        )
    return path


def newest_run(places: Sequence[str | Path]) -> Path:
    """Return the run's folder that was written to last, of these and of the runs in those that are none.

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


class LiveFolder:
    """A run's folder, read as it grows; one for each page.

    Parameters
    ----------
    folder : Path
        The folder. It may be empty yet, lose rounds when the run goes on from a checkpoint, and begin anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: tuple[int, int] | None = None
        self._read = 0
        self._rest = b""
        self._state: dict[str, Any] | None = None
        self._damaged = 0

    def news(self) -> Iterator[tuple[str, Any]]:
        """Yield what is new since the last time, as events and what they tell."""
        wrong = ""
        try:
            # Before the rounds: what was written before a run ended is then read before it is said to end.
            state = self._now()
            yield from self._rounds()
        except (OSError, RunFolderError) as error:
            state, wrong = "waiting", str(error)
        if self._damaged:
            wrong = f"{self._damaged} lines of {ROUNDS} are damaged and left out"
        told = {"state": state, "wrong": wrong}
        if told != self._state:
            self._state = told
            yield "state", told

    def _now(self) -> str:
        if (self.folder / SUMMARY).exists():
            return "finished"
        if not (self.folder / CONFIG).exists():
            return "waiting"
        return "running" if in_use(self.folder) else "stopped"

    def _rounds(self) -> Iterator[tuple[str, Any]]:
        if not (self.folder / CONFIG).exists():
            self._file = None
            return
        try:
            stream = (self.folder / ROUNDS).open("rb")
        except FileNotFoundError:
            if self._file is None:
                self._file = (-1, -1)
                yield "begin", self._about()
            return
        with stream:
            about = os.fstat(stream.fileno())
            # A run that goes on writes another file of that name; one cut off in place is shorter.
            if self._file != (about.st_dev, about.st_ino) or about.st_size < self._read:
                self._file = about.st_dev, about.st_ino
                self._read, self._rest, self._damaged = 0, b"", 0
                yield "begin", self._about()
            first = self._read == 0
            stream.seek(self._read)
            found: list[dict[str, Any]] = []
            while piece := stream.read(_PIECE):
                self._read += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                if len(self._rest) > _LONGEST_LINE:
                    self._rest = b""
                    self._damaged += 1
                found += [record for line in lines if (record := self._record(line)) is not None]
                if len(found) > 2 * _MOST_ROUNDS:
                    found = _thinned(found)
        if first and len(found) > _MOST_ROUNDS:
            found = _thinned(found)
        if found:
            yield "rounds", found

    def _about(self) -> dict[str, Any]:
        config = read_config(self.folder)
        return {
            "folder": self.folder.name,
            "app": str(config.get("app", "")),
            "realism": str(config.get("realism", "")),
            "settings": {str(key): _plain(value) for key, value in sorted(shown_settings(config).items())},
        }

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            return _slim(json.loads(line))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            self._damaged += 1
            return None


def _slim(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page shows of a record; what is no finite number is None, as JSON has it."""
    metrics = {
        name: _number(value) for source in reversed(SOURCES) for name, value in numbers(record, source)
    }
    links = record.get("by_link") or {}
    return {
        "round": int(record["round"]),
        "metrics": metrics,
        "rejected": {str(why): _number(count) for why, count in (record.get("rejected") or {}).items()},
        "links": {
            str(link): [_number(one.get("messages")), _number(one.get("payload_bytes"))]
            for link, one in links.items()
        },
        **{key: _number(record.get(key)) for key in _COUNTS},
    }


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    return (
        value if isinstance(value, bool | int | str) else _number(value) if isinstance(value, float) else ""
    )


def _thinned(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    step = -(-len(found) // _MOST_ROUNDS)
    # The last two say what the last round moved.
    return [*found[:-2:step], *found[-2:]]


class FollowServer(ThreadingHTTPServer):
    """Serves a page that follows a run; ``serve_forever`` until ``shutdown`` or an interrupt.

    Parameters
    ----------
    folder : Path
        The run's, as ``check_followed`` returned it.
    host : str (default: "127.0.0.1")
        The address to listen at: loopback, unless others are to see the run.
    port : int (default: 0)
        The port; 0 for a free one.

    Raises
    ------
    OSError
        If nothing can listen there.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.folder, self.host = folder, host
        self.stopping = threading.Event()
        self.pages = threading.BoundedSemaphore(_MOST_PAGES)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        package = files("hedgerow.sim.runs")
        self.content = {
            path: (package.joinpath(name).read_bytes(), kind) for path, (name, kind) in _TYPES.items()
        }
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind the port, without asking the network for this machine's name, as HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def is_meant(self, host: str) -> bool:
        """Tell whether a request's ``Host`` names this server: by an address, or as it was told to listen.

        A name that another site's owner may point here, DNS rebinding, is never one of these.
        """
        name, port = host, "80"
        if not host.endswith("]") and ":" in host:
            name, _, port = host.rpartition(":")
        name = name.removeprefix("[").removesuffix("]").lower()
        if port != str(self.server_port):
            return False
        if name in ("localhost", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def shutdown(self) -> None:
        """End ``serve_forever``, called in another thread, and what pages follow."""
        self.stopping.set()
        super().shutdown()

    def server_close(self) -> None:
        """Close the port and what pages follow."""
        self.stopping.set()
        super().server_close()

    def handle_error(self, *_: Any) -> None:
        """Say nothing of a page that went away."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: FollowServer
    protocol_version = "HTTP/1.1"
    # Seconds for a request to arrive whole.
    timeout = 30
    server_version = "hedgerow"
    sys_version = ""

    def do_GET(self) -> None:
        """Send the page, what it needs, or events until the page goes."""
        if self._refused():
            return
        if self.path == "/events":
            self._events()
        elif self.path in self.server.content:
            content, kind = self.server.content[self.path]
            self._head(HTTPStatus.OK, kind, len(content))
            if self.command == "GET":
                self.wfile.write(content)
        else:
            self._say(HTTPStatus.NOT_FOUND, "There is no such page.")

    def do_HEAD(self) -> None:
        """Send the head of what GET sends; events have no end and none."""
        if self.path == "/events":
            self._say(HTTPStatus.METHOD_NOT_ALLOWED, "")
        else:
            self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Keep the terminal for the run."""

    def _refused(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) == 1 and self.server.is_meant(hosts[0]):
            return False
        self._say(
            HTTPStatus.MISDIRECTED_REQUEST, "This server has another name; open the address it printed."
        )
        return True

    def _events(self) -> None:
        if not self.server.pages.acquire(blocking=False):
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, "Too many pages follow this run.")
            return
        try:
            self._head(HTTPStatus.OK, "text/event-stream; charset=utf-8", None)
            followed, last = LiveFolder(self.server.folder), time.monotonic()
            while not self.server.stopping.is_set():
                for event, told in followed.news():
                    # JSON on one line: no text of a run's files can end the event.
                    data = json.dumps(told, allow_nan=False)
                    self.wfile.write(f"event: {event}\ndata: {data}\n\n".encode())
                    last = time.monotonic()
                if time.monotonic() - last > _ALIVE:
                    self.wfile.write(b":\n\n")
                    last = time.monotonic()
                self.wfile.flush()
                self.server.stopping.wait(_EVERY)
        except OSError:
            # The page went.
            pass
        finally:
            self.server.pages.release()
            self.close_connection = True

    def _say(self, status: HTTPStatus, words: str) -> None:
        content = f"{words}\n".encode()
        self._head(status, "text/plain; charset=utf-8", len(content))
        if self.command != "HEAD":
            with suppress(OSError):
                self.wfile.write(content)

    def _head(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        if length is None:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(length))
        self.end_headers()
