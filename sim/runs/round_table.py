"""A run's rounds as a table for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["round_table"]


def round_table(rounds: list[dict[str, Any]], title: str, most: int = 20) -> str:
    """Return the evaluated rounds as a table for a terminal, at most ``most`` (>= 2), spaced evenly."""
    evaluated = [record for record in rounds if record["central"]] or rounds
    # A method without a model of time has no seconds to show.
    timed = any(record["sim_seconds"] for record in evaluated)
    metrics = [
        name for name in ("loss", "accuracy") if any(name in record["central"] for record in evaluated)
    ]
    places = 1 if evaluated and evaluated[-1]["bits"] > 1e7 else 3
    table = Table(title=title, title_justify="left")
    for column in ("round", *metrics, *(["simulated s"] if timed else []), "Mbit"):
        table.add_column(column, justify="right")
    last = len(evaluated) - 1
    shown = sorted({round(n * last / (most - 1)) for n in range(most)}) if evaluated else []
    for record in (evaluated[i] for i in shown):
        central = record["central"]
        table.add_row(
            str(record["round"]),
            *(_cell(central.get(name), "{:.4f}") for name in metrics),
            *([f"{record['sim_seconds']:.2f}"] if timed else []),
            f"{record['bits'] / 1e6:.{places}f}",
        )
    console = Console(width=100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
