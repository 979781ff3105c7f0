"""A run's true end is told, whatever ``flwr run`` exits with; a fake ``flwr`` plays Flower's part."""

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from requests.utils import should_bypass_proxies

from hedgerow.sim.deploy import flower_cli
from hedgerow.sim.deploy.flower_cli import FlowerRun, RunEnd, environment, healthy
from hedgerow.sim.deploy.flower_run import follow

# Says what the files beside it say, and writes down how it was called.
FAKE = """#!{python} -IS
import json, os, sys, time
from pathlib import Path
here = Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    print((here / "run").read_text(), flush=True)
    time.sleep(float((here / "seconds").read_text()))
elif sys.argv[1] == "list":
    answers = (here / "list").read_text().splitlines()
    if answers[0] == "slow":
        (here / "list").write_text("\\n".join(answers[1:]))
        time.sleep(30)
    print(answers[0])
    if len(answers) > 1:
        (here / "list").write_text("\\n".join(answers[1:]))
"""

COMPLETED = '{"success": true, "runs": [{"status": "finished:completed", "status-details": ""}]}'
FAILED = '{"success": true, "runs": [{"status": "finished:failed", "status-details": "boom"}]}'

Play = Callable[..., FlowerRun]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    fake = tmp_path / "flwr"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setattr(flower_cli, "program", lambda name: str(tmp_path / name))

    def start(
        run: str = "Successfully started run 7", listed: str = COMPLETED, seconds: float = 0.0
    ) -> FlowerRun:
        for name, text in (("run", run), ("list", listed), ("seconds", str(seconds))):
            (tmp_path / name).write_text(text)
        return FlowerRun(["app", "there"], dict(os.environ), superlink="there")

    return start


@pytest.mark.parametrize(
    ("tty", "no_color", "colored"), [(False, "", False), (True, "", True), (True, "1", False)]
)
def test_colors_are_shown_on_a_terminal_only(
    play: Play, monkeypatch: pytest.MonkeyPatch, tty: bool, no_color: str, colored: bool
) -> None:
    screen = io.StringIO()
    screen.isatty = lambda: tty  # type: ignore[method-assign]
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", screen)
    assert play("\x1b[92mINFO \x1b[0m:   Successfully started run 7").wait().run_id == 7
    assert ("\x1b[92mINFO \x1b[0m:" in screen.getvalue()) == colored
    assert "Successfully started run 7" in screen.getvalue()
    assert ("\x1b" in screen.getvalue()) == colored


def test_a_proxy_is_used_neither_by_us_nor_by_flowers_programs_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for key in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")  # nothing listens there
        monkeypatch.setenv(key.upper(), "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    monkeypatch.delenv("no_proxy", raising=False)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert healthy(server.server_port)
        server.shutdown()
    for key in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(key, environment(tmp_path)[key])
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "[::1]", "intranet.example"):
        assert should_bypass_proxies(f"http://{host}:8000/health", None), host
    assert not should_bypass_proxies("http://192.168.1.10:8000", None)


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_a_run_that_completed_exits_with_0(play: Play, tmp_path: Path) -> None:
    assert play().wait(20) == RunEnd(7, "finished:completed")
    assert RunEnd(7, "finished:completed").exit_code == 0
    assert calls(tmp_path) == [
        '["run", "app", "there", "--stream"]',
        '["list", "there", "--run-id", "7", "--format", "json"]',
    ]


def test_a_run_that_failed_exits_with_1_although_flwr_exits_with_0(
    play: Play, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(play(listed=FAILED)) == 1
    assert "Run 7: finished:failed boom" in capsys.readouterr().err


def test_a_run_that_was_not_taken_exits_with_1(play: Play) -> None:
    end = play(run="no such app").wait(20)
    assert (end.run_id, end.status, end.details, end.exit_code) == (None, "not started", "no such app", 1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many questions, with less time for each."""
    monkeypatch.setattr(flower_cli, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(flower_cli, "_PAUSE_SECONDS", 0.01)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("answer", [COMPLETED, FAILED])
def test_a_slow_answer_is_asked_for_again(play: Play, answer: str) -> None:
    listed = f"slow\nno answer\n{answer}"
    assert play(listed=listed).wait(30).status == json.loads(answer)["runs"][0]["status"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("summary", "ends"),
    [
        ('{"status": "completed"}', 0),
        ('{"status": "completed', 1),
        ('{"status": "failed"}', 1),
        ("[]", 1),
        (None, 1),
    ],
)
def test_where_flower_never_answers_the_runs_own_summary_tells(
    play: Play, tmp_path: Path, summary: str | None, ends: int
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    run = play(
        run=f"Successfully started run 7\nINFO :      Run folder: {folder}\nmore",
        listed="no answer",
        seconds=1,
    )
    run.submitted(20)
    if summary is not None:
        (folder / "summary.json").write_text(summary)
    end = run.wait(30)
    assert (end.run_id, end.exit_code) == (7, ends)
    assert (end.status, "Flower did not answer" in end.details) == (
        ("finished:completed", True) if ends == 0 else ("unknown", False)
    )


@pytest.mark.usefixtures("impatient")
def test_flowers_word_stands_before_the_summarys(play: Play, tmp_path: Path) -> None:
    run = play(run=f"Successfully started run 7\nRun folder: {tmp_path}", listed=FAILED, seconds=1)
    run.submitted(20)
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    assert run.wait(30).status == "finished:failed"


def test_the_id_is_there_while_the_run_goes_on(play: Play) -> None:
    run = play(seconds=30)
    assert run.submitted(20) == 7
    assert run.following
    with pytest.raises(TimeoutError, match=r"run 7 has not ended after 0\.1 s"):
        run.wait(0.1)
    began = time.monotonic()
    run.close()
    assert not run.following
    assert time.monotonic() - began < 10


def test_a_run_is_stopped_by_its_id(play: Play, tmp_path: Path) -> None:
    run = play()
    run.wait(20)
    run.stop()
    assert calls(tmp_path)[-1] == '["stop", "7", "there"]'
