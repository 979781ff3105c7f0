"""The page of a run that is followed: it is the run's report as it grows, and it obeys nobody else."""

import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hedgerow.sim.runs import follow
from hedgerow.sim.runs.folder import Lock
from hedgerow.sim.runs.follow import FollowedRun, FollowServer, check_followed

WriteRun = Callable[..., Path]
Serve = Callable[[Path], FollowServer]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_EVERY", 0.0)
    monkeypatch.setattr(follow, "_SHARE", 0.0)


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def start(folder: Path) -> FollowServer:
        server = FollowServer(FollowedRun(check_followed(folder)))
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.server.should_exit = True
        thread.join(20)


def ask(server: FollowServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    response = connection.getresponse()
    answer = response.status, response.read().decode(), response.headers
    connection.close()
    return answer


def append(folder: Path, *numbers: int, end: str = "\n", **more: Any) -> None:
    costs = dict.fromkeys(("iterations", "bits", "payload_bytes", "sim_seconds"), 0)
    lines = [
        json.dumps({"round": n, "central": {"loss": 1 / n}, "wall_seconds": 2.0, **costs, **more})
        for n in numbers
    ]
    with (folder / "rounds.jsonl").open("a") as file:
        file.write("\n".join(lines) + end)


def said(page: str) -> tuple[str, dict[str, str]]:
    """Return the state that a page tells, and how far the run is."""
    (state,) = re.findall(r'role="status">([^<]*)<', page)
    return state, dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", page))


# What it shows


def test_a_page_is_the_report_of_the_rounds_there_are(write_run: WriteRun) -> None:
    folder = write_run("run", [2.0, 1.0], finished=False, **{"num-rounds": 6})
    run, lock = FollowedRun(folder), Lock(folder)
    state, told = said(run.page())
    assert state == "The run is being written."
    assert told == {"round": "1 of 6", "time left": "0:05", "last round took": "1 s"}
    append(folder, 2, sent=4, accepted=3, rejected={"timeout": 1})
    page = run.page()
    assert said(page)[1] == {
        "round": "2 of 6",
        "time left": "0:06",
        "last round took": "2 s",
        "replies, last round": "3 of 4",
    }
    for words in ("loss over rounds", "timeout", "num-rounds = 6"):
        assert words in page
    lock.release()
    assert said(run.page())[0].endswith("It can be resumed.")
    (folder / "summary.json").write_text("{}")
    state, told = said(run.page())
    assert (state, "time left" in told) == ("The run is finished.", False)


def test_iterations_are_counted_where_a_run_ends_by_them(write_run: WriteRun) -> None:
    page = FollowedRun(write_run("run", [2.0, 1.0], finished=False, iterations=40)).page()
    assert said(page)[1] == {"iteration": "10 of 40", "time left": "0:03", "last round took": "1 s"}


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "soon"
    folder.mkdir()
    run = FollowedRun(folder)
    assert said(run.page())[0] == "Waiting for the first round."
    (folder / "config.json").write_text(json.dumps({"run": {"seed": 1}}))
    append(folder, 1, end="")
    assert "Waiting" in said(run.page())[0] or "no run yet" in said(run.page())[0]
    append(folder, end="\n")
    assert said(run.page())[1]["round"] == "1"


def test_a_run_that_goes_on_from_before_loses_rounds_on_the_page(write_run: WriteRun) -> None:
    folder = write_run("run", [2.0, 1.0, 0.5])
    run = FollowedRun(folder)
    assert said(run.page())[1]["round"] == "2"
    # As a recorder does it: another file of that name.
    kept = (folder / "rounds.jsonl").read_bytes().splitlines(keepends=True)[:2]
    (folder / "partial").write_bytes(b"".join(kept))
    (folder / "partial").rename(folder / "rounds.jsonl")
    assert said(run.page())[1]["round"] == "1"


@pytest.mark.parametrize("line", ["garbage", "[1]", '{"round": "x"}', '{"round": 1, "central": 3}', "\udcff"])
def test_what_is_no_round_is_told(line: str, write_run: WriteRun) -> None:
    folder = write_run("run", [2.0])
    with (folder / "rounds.jsonl").open("a", errors="surrogateescape") as file:
        file.write(line + "\n")
    state, told = said(FollowedRun(folder).page())
    assert (state.startswith("The run cannot be shown: "), told) == (True, {})


def test_a_failed_run_of_a_sweep_is_told_with_its_reason(write_run: WriteRun) -> None:
    folder = write_run("seed-0", [2.0], finished=False)
    folder.with_name("seed-0.log").write_text("[ROUND 1/2]\nRun failed: the loss is <b>1e9</b>\n\n")
    assert said(FollowedRun(folder).page())[0].endswith(
        "Its log ends: Run failed: the loss is &lt;b&gt;1e9&lt;/b&gt;"
    )


def test_the_processor_is_the_runs(write_run: WriteRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new round alone does not draw the page again at once; the end of the run does."""
    monkeypatch.setattr(follow, "_EVERY", 60.0)
    folder = write_run("run", [2.0], finished=False)
    run = FollowedRun(folder)
    first = run.page()
    append(folder, 1)
    assert run.page() == first
    (folder / "summary.json").write_text("{}")
    assert said(run.page())[1]["round"] == "1"


# Who may ask, and for what


def test_the_page_runs_its_own_script_and_loads_nothing_but_itself(serve: Serve, write_run: WriteRun) -> None:
    server = serve(write_run("run", [1.0]))
    status, page, headers = ask(server)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (nonce,) = re.findall(r'<script nonce="([^"]*)">', page)
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith(f"; script-src 'nonce-{nonce}'; connect-src 'self'")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(server, method="HEAD")[:2] == (200, "")


def test_a_page_that_did_not_change_is_not_sent_again(serve: Serve, write_run: WriteRun) -> None:
    folder = write_run("run", [1.0])
    server = serve(folder)
    known = ask(server)[2]["ETag"]
    assert ask(server, If_None_Match=known)[:2] == (304, "")
    append(folder, 1)
    assert ask(server, If_None_Match=known)[0] == 200


_LABEL = r'[a-z]+="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(
    rf"(?P<metric>[a-z_]+)\{{(?P<labels>{_LABEL}(?:,{_LABEL})*)\}} (?P<value>-?[0-9.e+-]+|NaN|[+-]Inf)"
)


def samples(text: str) -> dict[str, dict[str, float]]:
    """Read Prometheus's text format: each metric's samples by their labels but ``run``."""
    found: dict[str, dict[str, float]] = {}
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# TYPE "):
            found[line.split(" ")[2]] = {}
        elif not line.startswith("# HELP "):
            sample = SAMPLE.fullmatch(line)
            assert sample is not None, line
            run, _, rest = sample["labels"].partition(",")
            assert run == 'run="run"'
            assert rest not in found[sample["metric"]]
            found[sample["metric"]][rest] = float(sample["value"])
    return found


def test_prometheus_gets_the_numbers_of_the_last_round(serve: Serve, write_run: WriteRun) -> None:
    folder = write_run("run", [2.0, 1.0], finished=False)
    append(folder, 2, sent=4, accepted=3, rejected={"timeout": 1})
    append(folder, 3, sent=4, accepted=2, rejected={"timeout": 1, 'a "b\\\n': 1}, train={"x/y": float("nan")})
    status, text, headers = ask(serve(folder), "/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    told = samples(text)
    assert told["hedgerow_round"] == {"": 3.0}
    assert told["hedgerow_run_state"]['state="stopped"'] == 1.0
    assert sum(told["hedgerow_run_state"].values()) == 1.0
    assert told["hedgerow_metric"]['source="central",name="loss"'] == pytest.approx(1 / 3)
    assert 'source="train",name="x/y"' in told["hedgerow_metric"]
    assert told["hedgerow_replies"] == {'name="sent"': 4.0, 'name="accepted"': 2.0}
    assert told["hedgerow_lost_replies_total"] == {'reason="timeout"': 2.0, 'reason="a \\"b\\\\\\n"': 1.0}
    assert told["hedgerow_cost_total"]['name="wall_seconds"'] >= 4.0


def test_prometheus_is_told_of_a_run_that_has_not_begun_or_is_damaged(
    serve: Serve, write_run: WriteRun, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    told = samples(ask(serve(tmp_path / "run"), "/metrics")[1])
    assert told.keys() == {"hedgerow_run_state"}
    assert told["hedgerow_run_state"]['state="waiting"'] == 1.0
    folder = write_run("damaged", [1.0])
    with (folder / "rounds.jsonl").open("a") as file:
        file.write("garbage\n")
    assert ask(serve(folder), "/metrics")[0] == 503


@pytest.mark.parametrize("path", ["/config.json", "/../config.json", "//etc/passwd", "/%2e%2e/"])
def test_there_is_nothing_else_to_get(serve: Serve, write_run: WriteRun, path: str) -> None:
    assert ask(serve(write_run("run", [1.0])), path)[0] == 404


def test_a_name_that_others_point_here_is_refused(serve: Serve, write_run: WriteRun) -> None:
    server = serve(write_run("run", [1.0]))
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example:80", "localhost.evil.example"):
        status, content, _ = ask(server, Host=host)
        assert (status, "another name" in content) == (421, True), host
    for host in ("localhost:80", "LOCALHOST", "127.0.0.1:1", "[::1]:80", "192.168.0.7"):
        assert ask(server, Host=host)[0] == 200, host
