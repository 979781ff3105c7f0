"""Progress is a live line on a terminal, log lines elsewhere, and never in the log's way."""

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from itertools import pairwise
from logging import INFO, StreamHandler
from pathlib import Path
from typing import Any

import pytest
from flwr.common.logger import ConsoleHandler
from rich.console import Console

from hedgerow.sim.runs import live
from hedgerow.sim.runs.live import LiveProgress, round_table, run_end


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


def test_flowers_log_passes_above_the_live_line() -> None:
    with terminal(2) as (screen, progress):
        progress(Round(0, {"loss": 2.0}))
        logging.getLogger("flwr").log(INFO, "a message of Flower's")
        progress(Round(1, {"loss": 1.0}))
    # The live line is erased before the message and drawn again after it.
    before, after = screen.getvalue().split("a message of Flower's")
    assert before.endswith("\x1b[2K")
    assert re.match(r"\n\S*━+\S* round 0/2", after)


@pytest.mark.parametrize("changes", [{}, {"FORCE_COLOR": "1"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
@pytest.mark.parametrize("tty", [True, False])
def test_a_log_has_colors_on_a_terminal_only(
    tty: bool, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", **changes}.items():
        monkeypatch.setenv(name, value)
    screen = io.StringIO()
    screen.isatty = lambda: tty  # type: ignore[method-assign]
    handler = ConsoleHandler(colored=True, stream=screen)
    logging.getLogger("flwr").addHandler(handler)
    with redirect_stderr(screen), kept_colors():
        live.colour_log()
        logging.getLogger("flwr").log(INFO, "a message")
    logging.getLogger("flwr").removeHandler(handler)
    plain = not tty or "NO_COLOR" in changes or "TERM" in changes
    assert ("\x1b" not in screen.getvalue()) == plain


@contextmanager
def kept_colors() -> Iterator[None]:
    before = {one: one.colored for one in logging.getLogger("flwr").handlers if hasattr(one, "colored")}
    yield
    for handler, colored in before.items():
        handler.colored = colored


def record(n: int, **central: float) -> dict[str, Any]:
    return {"round": n, "central": central, "bits": n * 1_500_000, "sim_seconds": n / 4}


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_table_shows_the_evaluated_rounds() -> None:
    rounds = [record(0, loss=2.3, accuracy=0.1), record(1), record(2, loss=1.0, accuracy=0.75)]
    table = round_table(rounds, "sd-feel on mnist")
    assert table.startswith("sd-feel on mnist")
    assert rows(table) == [
        ["0", "2.3000", "0.1000", "0.00", "0.000"],
        ["2", "1.0000", "0.7500", "0.50", "3.000"],
    ]


def test_a_table_of_a_method_without_time_and_accuracy_has_no_columns_for_them() -> None:
    rounds = [{**record(n, loss=1.0), "sim_seconds": 0.0, "bits": 20_000_000 * n} for n in (0, 1)]
    assert rows(round_table(rounds, "t")) == [["0", "1.0000", "0.0"], ["1", "1.0000", "20.0"]]


def test_a_number_of_a_list_is_a_column_where_it_is_asked_for() -> None:
    rounds = [{**record(0), "central": {"loss": 1.0, "accuracy": [0.5, 0.25]}}]
    assert rows(round_table(rounds, "t")) == [["0", "1.0000", "0.000"]]
    table = round_table(rounds, "t", metrics=("loss", "accuracy[1]"))
    assert rows(table) == [["0", "1.0000", "0.2500", "0.000"]]


def test_a_table_shows_what_went_through_the_hub() -> None:
    def links(n: int) -> dict[str, dict[str, int]]:
        sizes = {"hub->node": 2_000_000, "node->hub": 500_000, "client->edge": 9_000_000}
        return {
            link: {"messages": n, "nominal_bits": 0, "payload_bytes": n * size}
            for link, size in sizes.items()
        }

    rounds = [{**record(n, loss=1.0), "by_link": links(n)} for n in (0, 1)]
    table = round_table(rounds, "t")
    assert "hub MB" in table
    assert [row[-1] for row in rows(table)] == ["0.000", "2.500"]


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 1000])
@pytest.mark.parametrize("most", [2, 3, 20])
def test_a_long_table_is_thinned_evenly_and_keeps_its_ends(count: int, most: int) -> None:
    shown = [int(row[0]) for row in rows(round_table([record(n, loss=1.0) for n in range(count)], "t", most))]
    assert len(shown) == min(count, most)
    assert (shown[0], shown[-1]) == (0, count - 1)
    gaps = [b - a for a, b in pairwise(shown)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_end_says_what_was_lost_where_the_folder_is_and_how_to_go_on(tmp_path: Path) -> None:
    rounds = [{**record(n, loss=1.0), "sent": 5, "accepted": 3, "rejected": {"no reply": 2}} for n in (1, 2)]
    said = run_end(rounds, tmp_path / "a run").splitlines()
    assert said[:3] == [
        "Accepted 6 of 10 replies. Lost: 4 x no reply.",
        f"Run folder: {tmp_path / 'a run'}",
        "Next:",
    ]
    assert [line.split()[:2] for line in said[3:]] == [
        ["hedgerow", one] for one in ("report", "watch", "plot")
    ]
    assert f"hedgerow plot '{tmp_path / 'a run'}' --y loss" in said[5]


def test_a_title_wider_than_the_table_stays_on_one_line() -> None:
    title = "fedmud+bkd+aad on mnist-5k, ratio 0.03125, catchup, " + "x" * 40
    assert round_table([], title).splitlines()[0] == title
