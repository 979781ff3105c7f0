"""How often a node asks for messages, and what that costs its SuperLink."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hedgerow.sim.deploy import pace as module
from hedgerow.sim.deploy.pace import POLL, PollPace, paced


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(module.time, "sleep", found.sleep)
    return found


def idle(pace: PollPace, clock: Time, seconds: float, request: float = 0.005) -> list[float]:
    """Ask for some seconds without a message; return the waits."""
    end, before = clock.now + seconds, len(clock.slept)
    while clock.now < end:
        clock.now += request
        pace.sleep()
    return clock.slept[before:]


def test_a_node_asks_at_once_after_a_message_and_backs_off_to_flowers_pace(clock: Time) -> None:
    pace = PollPace(clock=clock)
    pace.active()
    waits = idle(pace, clock, 60)
    assert all(0.1 <= wait <= 0.125 for wait in waits[:8])
    assert all(2.4 <= wait <= 3.0 for wait in waits[-5:])
    pace.active()
    assert idle(pace, clock, 0.1)[0] <= 0.125


def test_a_message_waits_for_a_tenth_of_the_time_since_the_last_one_at_most(clock: Time) -> None:
    pace = PollPace(clock=clock)
    pace.active()
    began = clock.now
    for wait in idle(pace, clock, 40):
        assert wait <= max(0.125, 0.1 * (clock.now - began))


@pytest.mark.parametrize("request_seconds", [0.05, 0.2, 0.3])
def test_a_busy_superlink_is_asked_for_at_most_an_eighth_of_the_time(
    clock: Time, request_seconds: float
) -> None:
    pace = PollPace(clock=clock)
    pace.active()
    waits = idle(pace, clock, 30, request_seconds)
    assert len(waits) * request_seconds <= sum(waits) / 7


def test_an_idle_hour_is_no_more_requests_than_of_flowers_nodes_and_a_quarter(clock: Time) -> None:
    pace = PollPace(clock=clock)
    pace.active()
    assert len(idle(pace, clock, 3600)) <= 1.25 * 3600 / 3 + 50


@pytest.mark.parametrize("since", [0.0, 5.0, 600.0])
def test_nodes_that_start_together_do_not_ask_in_step(clock: Time, since: float) -> None:
    began = clock.now
    waits = []
    for _ in range(100):
        clock.now = began
        pace = PollPace(clock=clock)
        clock.now += since
        waits.append(pace.wait())
    assert max(waits) >= 1.15 * min(waits)
    assert len(set(waits)) == 100


def test_of_a_hundred_nodes_that_start_together_few_ask_in_the_same_tenth_of_a_second(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.random, "random", random.Random(0).random)
    began, asked = clock.now, []
    for _ in range(100):
        clock.now = began
        pace = PollPace(clock=clock)
        while clock.now < began + 300:
            pace.sleep()
            asked.append(clock.now - began)
    tenths = Counter(int(10 * at) for at in asked if 240 <= at < 300)
    assert 100 / 3 <= tenths.total() / 60 <= 100 / 2.4
    assert max(tenths.values()) <= 15


@pytest.mark.parametrize(
    "text", ["", "3", "0.1", "0.1-", "-3", "3-0.1", "0-3", "0.1-61", "a-b", "nan-nan", "1-2-3"]
)
def test_other_bounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^poll must be the shortest and the longest wait in seconds, "):
        PollPace.of(text)


bounds = st.floats(0.02, 60.0)


@given(bounds, bounds, st.floats(0, 1e6), st.floats(0, 1e3), st.floats(0, 1, exclude_max=True))
def test_both_bounds_hold_for_every_draw(
    one: float, other: float, since: float, request_seconds: float, draw: float
) -> None:
    least, most = sorted([one, other])
    now = 0.0
    pace = PollPace(least, most, lambda: now)
    now += since
    pace._asked = now
    now += request_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.random, "random", lambda: draw)
        assert least <= pace.wait() <= most


# Flower's own loop, in a process of its own, with a SuperLink that has one message.
LOOP = """
from contextlib import contextmanager
from types import SimpleNamespace
import flwr.supernode.start_client_internal as supernode
from hedgerow.sim.engine._compat import pace_supernode

class Waits:
    def __init__(self, name):
        self.name = name
    def active(self):
        told.append(self.name + " active")
    def sleep(self, seconds):
        told.append(self.name)

@contextmanager
def connection(**options):
    yield 1, *[None] * 7

def pull(**options):
    if not came:
        raise KeyboardInterrupt
    return came.pop(0)

def push(**options):
    for _ in range(3):
        supernode.time.sleep(0.5)

told, came = [], [None, 7, None, None]
supernode._pull_and_store_message, supernode._push_messages = pull, push
supernode._init_connection, supernode.register_signal_handlers = connection, lambda **options: None
pace_supernode(Waits("idle"), Waits("reply"))
state = SimpleNamespace(set_node_id=lambda _: None)
objects = SimpleNamespace(store=lambda: None)
factory = SimpleNamespace(state=lambda: state, objectstore_factory=objects)
try:
    supernode.start_client_internal(
        state_factory=factory, server_address="here:1", node_config={}, insecure=True, isolation="process"
    )
except KeyboardInterrupt:
    print(*told, sep=",")
"""


def test_flowers_loop_waits_at_the_paces_and_says_when_there_was_a_message() -> None:
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split(",") == [
        "idle", "reply active", "reply", "reply", "reply", "idle active", "idle", "idle",
    ]  # fmt: skip


def test_the_programs_arguments_and_exit_code_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "flower-supernode"
    script.write_text("import sys; print(sys.argv); sys.exit(3)")
    done = subprocess.run(paced(str(script), ["--port", "1"]), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, f"{[str(script), '--port', '1']}\n")
    assert done.stderr == ""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function that runs the module and returns what it prints as errors."""

    def run() -> str:
        monkeypatch.setattr(module.sys, "argv", ["pace.py", "flower-supernode"])
        monkeypatch.setattr(module.runpy, "run_path", lambda path, run_name: None)
        module.main()
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("other", ["flwr.no_such_module", "flwr.supercore.superexec.run_superexec"])
def test_another_version_of_flower_keeps_its_own_waits_and_one_line_says_so(
    said: Callable[[], str], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr("hedgerow.sim.engine._compat._SUPERNODE", other)
    monkeypatch.delenv(POLL, raising=False)
    (line,) = said().splitlines()
    assert line.startswith("The node asks for messages every 3 s, as Flower's does: flwr ")
