"""Progress is a live line on a terminal, log lines elsewhere, and never in the log's way."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from logging import INFO, StreamHandler
from typing import Any

import pytest
from rich.console import Console

from hedgerow.sim.runs import live
from hedgerow.sim.runs.live import LiveProgress


@dataclass(frozen=True)
class Round:
    round: int
    central: dict[str, Any] = field(default_factory=dict)
    bits: int = 2_500_000
    sim_seconds: float = 1.25


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    return clock


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(live, "log", lambda level, text, *values: lines.append(text % values))
    return lines


@contextmanager
def terminal(num_rounds: int, quiet: bool = False) -> Iterator[tuple[io.StringIO, LiveProgress]]:
    """Progress on a terminal that Flower's log goes to as well."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, legacy_windows=False)
    handler = StreamHandler(screen)
    logging.getLogger("flwr").addHandler(handler)
    try:
        with redirect_stderr(screen), LiveProgress(num_rounds, quiet, console=console) as progress:
            yield screen, progress
    finally:
        assert handler.stream is screen
        logging.getLogger("flwr").removeHandler(handler)


def test_each_evaluated_round_is_a_log_line(logged: list[str], clock: Clock) -> None:
    with LiveProgress(4, console=Console(file=io.StringIO())) as progress:
        progress(Round(0, {"loss": 2.3, "accuracy": 0.1}))
        clock.now += 20
        progress(Round(1))
        clock.now += 20
        progress(Round(2, {"loss": 1.0, "accuracy": 0.5}))
    assert logged == [
        "round 0/4 | loss 2.3000 | accuracy 0.1000 | 2.5 Mbit | 1.2 simulated s | 0:00 real",
        "round 2/4 | 0:40 left | loss 1.0000 | accuracy 0.5000 | 2.5 Mbit | 1.2 simulated s | 0:40 real",
    ]


@dataclass(frozen=True)
class Event(Round):
    """A round of a method whose rounds are events, many iterations apart."""

    iterations: int = 0
    total_iterations: int | None = 4001


def test_where_iterations_end_a_run_they_are_what_is_counted(logged: list[str], clock: Clock) -> None:
    with LiveProgress(4001, console=Console(file=io.StringIO())) as progress:
        progress(Event(0, {"loss": 2.0}))
        clock.now += 30
        progress(Event(5, {"loss": 1.0}, iterations=1001))
        clock.now += 60
        progress(Event(9, {"loss": 1.0}, iterations=4001))
    assert [line.split(" | loss")[0] for line in logged] == [
        "iteration 0/4001",
        "iteration 1001/4001 | 1:30 left",
        "iteration 4001/4001",
    ]


def test_a_terminal_shows_one_line_that_is_rewritten(logged: list[str]) -> None:
    with terminal(2) as (screen, progress):
        for n in range(3):
            progress(Round(n, {"loss": 2.0 - n}))
    assert "round 1/2 | 0:00 left | loss 1.0000" in screen.getvalue()
    assert "\x1b[2K" in screen.getvalue()
    assert screen.getvalue().count("\n") == 1
    assert logged == []


def test_flowers_log_passes_above_the_live_line() -> None:
    with terminal(2) as (screen, progress):
        progress(Round(0, {"loss": 2.0}))
        logging.getLogger("flwr").log(INFO, "a message of Flower's")
        progress(Round(1, {"loss": 1.0}))
    # The live line is erased before the message and drawn again after it.
    before, after = screen.getvalue().split("a message of Flower's")
    assert before.endswith("\x1b[2K")
    assert after.startswith("\nround 0/2")


def test_quiet_shows_nothing(logged: list[str]) -> None:
    with terminal(2, quiet=True) as (screen, progress):
        progress(Round(0, {"loss": 2.0}))
    assert (logged, screen.getvalue()) == ([], "")
