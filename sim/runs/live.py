"""Show the progress of a run: a progress bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import INFO, WARNING, StreamHandler
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from flwr.common import log
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hedgerow.sim.runs.folder import lost_replies
from hedgerow.sim.runs.results import SOURCES, numbers
from hedgerow.wire.checks import int_at_least
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.printable import shown

# Width of a progress bar, in characters.
_BAR = 20


class RoundProgress(Protocol):
    """The record of a round: an object with at least these fields.

    If it has a ``total_iterations`` other than None, it also has ``iterations``.
    """

    @property
    def round(self) -> int:
        """Round number; 0 is the state before training."""

    @property
    def central(self) -> Mapping[str, Any]:
        """Metrics of the central evaluation; empty if there was none."""

    @property
    def bits(self) -> int:
        """Nominal bits since the start."""

    @property
    def sim_seconds(self) -> float:
        """Simulated seconds since the start."""


def terminal() -> Console:
    """Return the console of standard error; whatever ``FORCE_COLOR`` says, a pipe is no terminal."""
    return Console(stderr=True, force_terminal=sys.stderr.isatty())


def live_line(console: Console) -> Live:
    """Return a line that stays below what is printed; standard output is left alone if it is no terminal."""
    return Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())


def bar(done: int, total: int, text: str) -> Table:
    """Return a progress bar with a text on one line; a narrow terminal cuts off the text's end."""
    line = Table.grid(padding=(0, 1))
    line.add_column()
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(ProgressBar(max(total, 1), done, width=_BAR), Text(text))
    return line


def colour_log() -> None:
    """Let Flower's log have colors on a terminal only."""
    console = terminal()
    for handler in logging.getLogger("flwr").handlers:
        if hasattr(handler, "colored"):
            handler.colored = console.is_interactive and not console.no_color


@contextmanager
def only_warnings(quiet: bool) -> Iterator[None]:
    """Keep messages below WARNING out of Flower's log while the block runs, if ``quiet``."""
    logger = logging.getLogger("flwr")
    level = logger.level
    if quiet:
        logger.setLevel(max(level, WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)


class LiveProgress:
    """Shows the progress of a run; pass it to a strategy's ``on_round_end`` inside its ``with`` block.

    On a terminal a progress bar below the log is drawn again after each round. Elsewhere each evaluated
    round is a line of Flower's log. Metrics are from the last evaluation. If a round has
    ``total_iterations``, progress is in iterations instead of rounds.

    Parameters
    ----------
    num_rounds : int
        Rounds of the whole run, >= 1; an upper bound if progress is in iterations.
    quiet : bool (default: False)
        Show nothing.
    console : Console or None (default: None)
        Console of the bar; None for standard error, as Flower's log.
    """

    def __init__(self, num_rounds: int, quiet: bool = False, *, console: Console | None = None) -> None:
        int_at_least(1, num_rounds=num_rounds)
        self.num_rounds = num_rounds
        self.quiet = quiet
        self._console = console or terminal()
        self._live: Live | None = None
        self._moved: list[tuple[StreamHandler[Any], TextIO]] = []
        self._central: Mapping[str, Any] = {}
        # Count and time from which the pace is measured: a resumed run does not start at 0.
        self._first: tuple[int, float] | None = None
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if not self.quiet and self._console.is_interactive:
            self._live = live_line(self._console)
            terminals = (sys.stdout, sys.stderr)
            self._live.start()
            self._move_logs(terminals)
        return self

    def __exit__(self, *_: object) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, end: RoundProgress) -> None:
        """Show a round that ended."""
        if end.central:
            self._central = dict(end.central)
        now = time.monotonic()
        unit, done, total = self._count(end)
        if self._first is None:
            # The first reported round has already run, unless it is the state before training.
            begun = unit == "round" and end.round > 0
            self._first = (done - 1, self._started) if begun else (done, now)
        if self.quiet:
            return
        left = self._seconds_left(done, total, now)
        # The most important part comes first: a narrow terminal cuts off the end.
        parts = [f"{unit} {done}/{total}", *([] if left is None else [f"{duration(left)} left"])]
        line = " | ".join([*parts, *self._costs(end, now)])
        if self._live is not None:
            self._live.update(bar(done, total, line), refresh=True)
        elif end.central:
            log(INFO, "%s", line)

    def _count(self, end: RoundProgress) -> tuple[str, int, int]:
        """Return the unit of progress, how many are done and how many there will be."""
        total = getattr(end, "total_iterations", None)
        if total is None:
            return "round", end.round, self.num_rounds
        return "iteration", getattr(end, "iterations", 0), total

    def _costs(self, end: RoundProgress, now: float) -> list[str]:
        metrics = [n for n in ("loss", "accuracy") if isinstance(self._central.get(n), int | float)]
        parts = [f"{name} {self._central[name]:.4f}" for name in metrics]
        parts.append(f"{end.bits / 1e6:.1f} Mbit")
        parts += [f"{end.sim_seconds:.1f} simulated s"] if end.sim_seconds else []
        return [*parts, f"{duration(now - self._started)} real"]

    def _seconds_left(self, done: int, total: int, now: float) -> float | None:
        assert self._first is not None
        first, since = self._first
        if done <= first or done >= total:
            return None
        return (now - since) / (done - first) * (total - done)

    def _move_logs(self, terminals: tuple[TextIO, TextIO]) -> None:
        """Redirect logs on the terminal so that they appear above the live line.

        A handler keeps the stream that it was created with, so Live's replacement of ``sys.stderr`` alone
        would not reach it, and log and line would overwrite each other.
        """
        for logger in (logging.getLogger("flwr"), logging.getLogger()):
            for handler in logger.handlers:
                if isinstance(handler, StreamHandler) and handler.stream in terminals:
                    self._moved.append((handler, handler.stream))
                    handler.setStream(sys.stderr)


def duration(seconds: float) -> str:
    """Return seconds as ``1:05`` or ``2:01:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# A run's rounds as a table


def round_table(
    rounds: list[dict[str, Any]],
    title: str,
    most: int = 20,
    *,
    metrics: Sequence[str] = ("loss", "accuracy"),
) -> str:
    """Return a table of the evaluated rounds, at most ``most`` (>= 2), evenly spaced.

    ``Mbit`` is nominal traffic of the modelled links, ``hub MB`` real traffic through Flower's hub.
    """
    evaluated = [record for record in rounds if record["central"]] or rounds
    central = [dict(numbers(record, "central")) for record in evaluated]
    # Methods without a model of time have no simulated seconds.
    timed = any(record["sim_seconds"] for record in evaluated)
    metrics = [name for name in metrics if any(name in measured for measured in central)]
    hub = [_hub_bytes(record) for record in evaluated]
    places = 1 if evaluated and evaluated[-1]["bits"] > 1e7 else 3
    table = Table()
    costs = [*(["simulated s"] if timed else []), "Mbit", *(["hub MB"] if any(hub) else [])]
    for column in ("round", *metrics, *costs):
        table.add_column(column, justify="right")
    last = len(evaluated) - 1
    rows = sorted({round(n * last / (most - 1)) for n in range(most)}) if evaluated else []
    for i in rows:
        record = evaluated[i]
        table.add_row(
            str(record["round"]),
            *(_cell(central[i].get(name), "{:.4f}") for name in metrics),
            *([_cell(record["sim_seconds"], "{:.2f}")] if timed else []),
            f"{record['bits'] / 1e6:.{places}f}",
            *([f"{hub[i] / 1e6:.{places}f}"] if any(hub) else []),
        )
    console = Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    # Rich would wrap a table's title at the table's width.
    return f"{title}\n{capture.get()}"


def run_end(rounds: Sequence[Mapping[str, Any]], folder: Path | None) -> str:
    """Return the text below the table: lost replies, the run folder, commands to continue with."""
    lines = []
    if lost := lost_replies(rounds):
        sent, accepted = (sum(record.get(key) or 0 for record in rounds) for key in ("sent", "accepted"))
        reasons = ", ".join(f"{count} x {shown(why)}" for why, count in sorted(lost.items()))
        lines.append(f"Accepted {accepted} of {sent} replies. Lost: {reasons}.")
    if folder is not None:
        lines += [f"Run folder: {folder}", "Next:"]
        place = shlex.quote(os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder))
        metric = _metric_to_plot(rounds)
        commands = {
            f"hedgerow report {place}": "the run as one page",
            f"hedgerow watch {place} --open": "the same in the browser",
            f"hedgerow plot {place} --y {shlex.quote(metric)}" if metric else "": "a figure",
        }
        widest = max(map(len, commands))
        lines += [f"  {command:{widest}}  {words}" for command, words in commands.items() if command]
    return "\n".join(lines)


def _metric_to_plot(rounds: Sequence[Mapping[str, Any]]) -> str:
    """Return the accuracy, or else the first metric of the last evaluated round."""
    for record in reversed(rounds):
        for source in SOURCES:
            if names := [name for name, _ in numbers(record, source)]:
                return "accuracy" if "accuracy" in names else names[0]
    return ""


def _hub_bytes(record: dict[str, Any]) -> int:
    # Earlier versions recorded no traffic by link.
    links = record.get("by_link", {})
    return sum(links[leg]["payload_bytes"] for leg in (HUB_TO_NODE, NODE_TO_HUB) if leg in links)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
