"""A page that follows a run: it hears of each round, sees nothing but its run, and obeys nobody else."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hedgerow.sim.runs import follow
from hedgerow.sim.runs.folder import Lock
from hedgerow.sim.runs.follow import FollowServer, LiveFolder, check_followed

WriteRun = Callable[..., Path]
SECONDS = 20.0


class Events:
    """Reads server-sent events."""

    def __init__(self, server: FollowServer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=SECONDS)
        self._connection.request("GET", "/events")
        self.response = self._connection.getresponse()

    def next(self) -> tuple[str, Any]:
        lines = []
        while line := self.response.readline().rstrip(b"\n"):
            lines.append(line.decode())
        event, data = lines
        return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    def until(self, event: str) -> Any:
        while True:
            name, told = self.next()
            if name == event:
                return told

    def close(self) -> None:
        self.response.close()
        self._connection.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_EVERY", 0.02)


@pytest.fixture
def serve() -> Iterator[Callable[[Path], FollowServer]]:
    servers = []

    def start(folder: Path) -> FollowServer:
        server = FollowServer(check_followed(folder))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: FollowServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=SECONDS)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    answer = response.status, response.read().decode(), response.headers
    connection.close()
    return answer


def append(folder: Path, *numbers: int, end: str = "\n", **more: Any) -> None:
    lines = [json.dumps({"round": n, "central": {"loss": 1 / n}, **more}) for n in numbers]
    with (folder / "rounds.jsonl").open("a") as file:
        file.write("\n".join(lines) + end)


Serve = Callable[[Path], FollowServer]


def test_a_page_hears_of_the_rounds_there_are_and_of_each_new_one(serve: Serve, write_run: WriteRun) -> None:
    folder = write_run("run", [2.0, 1.0], finished=False, tau1=3)
    lock = Lock(folder)
    events = Events(serve(folder))
    name, about = events.next()
    assert (name, about["folder"], about["settings"]) == ("begin", "run", {"seed": 0, "tau1": 3})
    first = events.until("rounds")
    assert [(one["round"], one["metrics"]["loss"]) for one in first] == [(0, 2.0), (1, 1.0)]
    assert events.until("state") == {"state": "running", "wrong": ""}
    links = {"a->b": {"messages": 2, "nominal_bits": 8, "payload_bytes": 1}}
    append(folder, 2, by_link=links, sent=4, accepted=3, rejected={"timeout": 1})
    (new,) = events.until("rounds")
    assert (new["round"], new["metrics"], new["links"]) == (2, {"loss": 0.5}, {"a->b": [2, 1]})
    assert (new["sent"], new["accepted"], new["rejected"]) == (4, 3, {"timeout": 1})
    lock.release()
    assert events.until("state")["state"] == "stopped"
    (folder / "summary.json").write_text("{}")
    assert events.until("state")["state"] == "finished"
    events.close()


def test_a_run_that_has_not_begun_is_waited_for(serve: Serve, write_run: WriteRun, tmp_path: Path) -> None:
    folder = tmp_path / "soon"
    folder.mkdir()
    events = Events(serve(folder))
    assert events.next() == ("state", {"state": "waiting", "wrong": ""})
    (folder / "config.json").write_text(json.dumps({"run": {"seed": 1}}))
    assert events.until("begin")["settings"] == {"seed": 1}
    append(folder, 1)
    assert [one["round"] for one in events.until("rounds")] == [1]
    events.close()


def news(followed: LiveFolder) -> dict[str, Any]:
    return dict(followed.news())


def test_a_line_that_is_half_written_is_read_when_it_is_whole(write_run: WriteRun) -> None:
    folder = write_run("run", [2.0])
    followed = LiveFolder(folder)
    append(folder, 1, end="")
    assert [one["round"] for one in news(followed)["rounds"]] == [0]
    assert news(followed) == {}
    append(folder, end="\n")
    (whole,) = news(followed)["rounds"]
    assert (whole["round"], whole["metrics"]) == (1, {"loss": 1.0})


def test_a_run_that_goes_on_from_before_begins_anew_on_the_page(write_run: WriteRun) -> None:
    folder = write_run("run", [2.0, 1.0, 0.5])
    followed = LiveFolder(folder)
    assert len(news(followed)["rounds"]) == 3
    kept = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)[:2]
    # As a recorder does it: another file of that name, which has grown past the old one when it is seen.
    (folder / "partial").write_bytes(b"".join(kept) + kept[1].replace(b'"round": 1', b'"round": 2') * 3)
    (folder / "partial").rename(folder / "rounds.jsonl")
    told = list(followed.news())
    assert [name for name, _ in told] == ["begin", "rounds"]
    assert [one["round"] for one in told[1][1]] == [0, 1, 2, 2, 2]
    # As an editor does it: cut off in place.
    with (folder / "rounds.jsonl").open("rb+") as file:
        file.truncate(len(kept[0]))
    told = list(followed.news())
    assert [name for name, _ in told] == ["begin", "rounds"]
    assert [one["round"] for one in told[1][1]] == [0]


def test_what_is_no_round_is_counted_and_left_out(write_run: WriteRun) -> None:
    folder = write_run("run", [2.0])
    followed = LiveFolder(folder)
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(b'garbage\n[1]\n{"round": "x"}\n{"round": 1, "central": 3}\n\xff\n')
        file.write(b'{"round": 2, "central": {"loss": 1e999, "gap": NaN, "big": ' + b"9" * 400 + b"}}\n")
        file.write(b'{"round": 3, "rejected": [1], "central": {"loss": 1}}\n{"round": 4, "bits": -1e999}\n')
    told = news(followed)
    assert [one["round"] for one in told["rounds"]] == [0, 4]
    assert told["rounds"][1]["bits"] is None
    assert told["state"] == {"state": "finished", "wrong": "7 lines of rounds.jsonl are damaged and left out"}
    json.dumps(told, allow_nan=False)


# Who may ask, and for what


def test_the_page_brings_all_that_it_needs_and_may_load_nothing_else(
    serve: Serve, write_run: WriteRun
) -> None:
    server = serve(write_run("run", [1.0]))
    for path, kind in (("/", "text/html"), ("/follow.js", "text/javascript"), ("/page.css", "text/css")):
        status, content, headers = ask(server, path)
        assert status == 200
        assert headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
        assert "innerHTML" not in content
        assert ask(server, path, "HEAD")[:2] == (200, "")


@pytest.mark.parametrize(
    "path",
    ["/config.json", "/../config.json", "//etc/passwd", "/%2e%2e/"],
)
def test_there_is_nothing_else_to_get(serve: Serve, write_run: WriteRun, path: str) -> None:
    assert ask(serve(write_run("run", [1.0])), path)[:2] == (404, "There is no such page.\n")


@pytest.mark.parametrize("path", ["/", "/events", "/page.css"])
def test_a_name_that_others_point_here_is_refused(serve: Serve, write_run: WriteRun, path: str) -> None:
    server = serve(write_run("run", [1.0]))
    port = server.server_port
    for host in (f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""):
        status, content, _ = ask(server, path, Host=host)
        assert (status, "another name" in content) == (421, True), host
    for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert server.is_meant(host)


def test_so_many_pages_follow_and_no_more(
    serve: Serve, write_run: WriteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_MOST_PAGES", 2)
    server = serve(write_run("run", [1.0]))
    pages = [Events(server) for _ in range(2)]
    assert ask(server, "/events")[0] == 503
    # One that goes makes room; it is seen to be gone when there is something to say.
    pages[0].close()
    append(server.folder, 1, 2)
    for number in range(3, 300):
        append(server.folder, number)
        if (events := Events(server)).response.status == 200:
            break
        events.close()
    assert events.response.status == 200
    events.close()
    pages[1].close()
