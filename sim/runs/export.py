"""Runs for other tools: every measured value as a row of a CSV file, or a TensorBoard log a run."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hedgerow.sim.runs.results import COSTS, SOURCES, Results

__all__ = ["tidy_rows", "write_csv", "write_tensorboard"]


def tidy_rows(results: Results) -> Iterator[dict[str, Any]]:
    """Yield one row for each measured value: its run, its costs so far, where it was measured, the value."""
    for run in results.runs:
        wall = run.costs("wall-seconds")
        for number, record in enumerate(run.rounds):
            row: dict[str, Any] = {"label": run.label, "seed": run.seed}
            row |= {x: record.get(cost.key, "") for x, cost in COSTS.items()} | {"wall-seconds": wall[number]}
            for source in SOURCES:
                for metric, value in record.get(source, {}).items():
                    yield row | {"source": source, "metric": metric, "value": value, "run": str(run.folder)}


def write_csv(results: Results, path: str | Path) -> int:
    """Write the tidy rows as CSV, aside and renamed; return how many."""
    path = Path(path)
    aside = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = ["label", "seed", *COSTS, "source", "metric", "value", "run"]
    count = 0
    with aside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for count, row in enumerate(tidy_rows(results), start=1):  # noqa: B007
            writer.writerow(row)
    aside.replace(path)
    return count


def write_tensorboard(results: Results, folder: str | Path) -> int:
    """Write the runs' logs under ``folder``, ``<label>/seed-<seed>`` each; return how many.

    A scalar's tag is ``<source>/<metric>`` (``central/loss``), its step the round, its time the run's
    real seconds. Beside the metrics stand the costs, ``cost/bits`` and so on.

    Raises
    ------
    ValueError
        If TensorBoard is not installed, or a log is already there.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError as error:
        raise ValueError(
            f"--tensorboard needs TensorBoard ({error}); install it with: pip install 'hedgerow[tensorboard]'"
        ) from error
    for run in results.runs:
        log = Path(folder) / run.label / f"seed-{run.seed}"
        if log.exists():
            raise ValueError(f"--tensorboard: {log} is already there; valid is a folder without it")
        walls = run.costs("wall-seconds")
        with SummaryWriter(str(log)) as writer:
            for record, wall in zip(run.rounds, walls, strict=True):
                for name in ("bits", "payload_bytes", "sim_seconds"):
                    if record[name] is None:
                        continue
                    writer.add_scalar(f"cost/{name}", record[name], record["round"], walltime=wall)
                for source in SOURCES:
                    for metric, value in record.get(source, {}).items():
                        writer.add_scalar(f"{source}/{metric}", value, record["round"], walltime=wall)
    return len(results.runs)
