"""A run's rounds as a table for a terminal."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hedgerow.sim.runs.folder import lost_replies
from hedgerow.sim.runs.results import SOURCES, numbers
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.printable import shown


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
