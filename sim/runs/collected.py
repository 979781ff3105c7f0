"""Runs as one small file: what their pictures and tables are drawn from, without their folders.

A JSON text: what the sweep said, the settings that all runs share, the environments they ran in, why runs
failed, and a line for each that did not: label, seed, its other settings, traffic by link and lost replies
at the end, and its evaluated rounds as columns, thinned to ``POINTS``: every metric of evaluations, those of
training that the sweep plots, and bits and bytes of the links that it plots. A column is named as in a record
of ``rounds.jsonl``, a metric ``source.name``, a link's cost "bits client->server"; ``null`` is what a round
does not have. ``results.load`` reads it as it reads a sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.folder import lost_replies
from hedgerow.sim.runs.results import COSTS, OF_LINKS, SOURCES, RecordedRun, Results, numbers, spent
from hedgerow.wire.printable import reason

__all__ = ["FORMAT", "POINTS", "collect", "read_collected", "write_collected"]

FORMAT = "hedgerow-results-1"
# The most rounds of a run that are kept.
POINTS = 200
# Single precision, and two digits more.
_DIGITS = 9
# Settings that name folders and files of one machine.
_PLACES = frozenset(("data-dir", "output-dir", "registry", "resume"))
# What of an environment may change a result.
_ENVIRONMENT = ("cpu", "python", "torch", "packages", "git", "app-git")


def collect(results: Results) -> dict[str, Any]:
    """Return the content of the file."""
    settings = [
        {key: value for key, value in run.settings.items() if key not in _PLACES} for run in results.runs
    ]
    first = settings[0]
    shared = {k: v for k, v in first.items() if all(k in s and s[k] == v for s in settings)}
    environments: list[dict[str, Any]] = []
    runs = []
    for run, own in zip(results.runs, settings, strict=True):
        told = run.config.get("environment", {})
        about = {key: told.get(key) for key in _ENVIRONMENT}
        if about not in environments:
            environments.append(about)
        runs.append(
            {
                "label": run.label,
                "seed": run.seed,
                "settings": {key: value for key, value in own.items() if key not in shared},
                "environment": environments.index(about),
                "finished": run.finished,
                "by_link": run.rounds[-1].get("by_link", {}),
                "lost-replies": lost_replies(run.rounds),
                "columns": _columns(run, [*results.xs, *results.ys, *results.columns]),
            }
        )
    return {
        "format": FORMAT,
        "title": results.title,
        "realism": results.realism,
        "app": results.runs[0].config.get("app", ""),
        "x": list(results.xs),
        "y": list(results.ys),
        "columns": list(results.columns),
        "by": results.by,
        "differences": results.differences,
        "settings": shared,
        "environments": environments,
        # Only of sweeps where a run failed: their tables count what means leave out.
        **({"failed": results.failed} if results.failed else {}),
        "runs": runs,
    }


def write_collected(results: Results, path: str | Path) -> int:
    """Write the file, a line a run; return the number of runs."""
    content = collect(results)
    runs = content.pop("runs")
    head = json.dumps(content, indent=1, sort_keys=False)
    lines = ",\n".join(json.dumps(run) for run in runs)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f'{head[:-2]},\n "runs": [\n{lines}\n]}}\n'
    write_file(path, lambda file: file.write(text.encode()))
    return len(runs)


def read_collected(file: Path, *, prefix: bool = False) -> Results:
    """Read the file back; ``prefix`` puts its name before each label.

    Raises
    ------
    ValueError
        If it is no such file.
    """
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        if said["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}, got {said['format']!r}")
        runs = [_run(file, said, run, prefix) for run in said["runs"]]
        shown = said["x"], said["y"], file.stem, file.parent, (), said["by"], said.get("columns", ())
        differences = said.get("differences", False)
        failed = {
            _label(file, label, prefix): {int(seed): why for seed, why in seeds.items()}
            for label, seeds in said.get("failed", {}).items()
        }
        return Results(runs, said["title"], said["realism"], *shown, differences=differences, failed=failed)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not a file of `hedgerow export --json`: {reason(error, file=False)}"
        ) from error


def _run(file: Path, said: Mapping[str, Any], run: Mapping[str, Any], prefix: bool) -> RecordedRun:
    config = {
        "app": said["app"],
        "realism": said["realism"],
        "run": {**said["settings"], **run["settings"]},
        "environment": said["environments"][run["environment"]],
    }
    columns = run["columns"]
    rounds = [_record(columns, at) for at in range(len(columns["round"]))]
    for record in rounds:
        # Of other links the file knows the end only.
        record["by_link"] = {link: {} for link in run["by_link"]} | record["by_link"]
    if rounds:
        rounds[-1] |= {"by_link": run["by_link"], "rejected": run["lost-replies"]}
    return RecordedRun(file, _label(file, run["label"], prefix), run["seed"], config, rounds, run["finished"])


def _label(file: Path, label: str, prefix: bool) -> str:
    return f"{file.stem}: {label}" if prefix else label


def _record(columns: Mapping[str, Sequence[Any]], at: int) -> dict[str, Any]:
    record: dict[str, Any] = {source: {} for source in (*SOURCES, "by_link")}
    for name, values in columns.items():
        total, _, link = name.partition(" ")
        if link and total in OF_LINKS:
            record["by_link"].setdefault(link, {})[OF_LINKS[total]] = values[at]
            continue
        source, dot, metric = name.partition(".")
        if not dot:
            record[name] = values[at]
        elif values[at] is not None:
            record[source][metric] = values[at]
    return record


def _columns(run: RecordedRun, shown: Sequence[str]) -> dict[str, list[Any]]:
    """Return the rounds that are kept, as columns; real seconds of those between go to the next one kept."""
    evaluated = [at for at, record in enumerate(run.rounds) if any(record.get(s) for s in SOURCES[:2])]
    kept = _thinned(evaluated or list(range(len(run.rounds))))
    if kept[-1] != len(run.rounds) - 1:
        kept.append(len(run.rounds) - 1)
    out: dict[str, list[Any]] = {}
    for cost in COSTS.values():
        told = [_short(spent(run.rounds[at], cost)) for at in kept]
        if "." in cost.key and None in told:
            continue
        out[cost.key] = told
        if not cost.cumulative:
            between = zip([-1, *kept], kept, strict=False)
            out[cost.key] = [
                _short(sum(record.get(cost.key, 0.0) for record in run.rounds[a + 1 : b + 1]))
                for a, b in between
            ]
    for source in SOURCES:
        rows = [dict(numbers(run.rounds[at], source)) for at in kept]
        names = {name for row in rows for name in row if source != SOURCES[-1] or name in shown}
        for name in sorted(names):
            out[f"{source}.{name}"] = [_short(row.get(name)) for row in rows]
    # A method has no link of another's.
    crossed = run.rounds[-1].get("by_link", {})
    parts = [name.partition(" ") for name in shown]
    links = [link for total, _, link in parts if link in crossed and total in OF_LINKS]
    # Of a link that is shown in nominal bits its real bytes are kept too, and the other way round.
    for name in dict.fromkeys(f"{total} {link}" for link in links for total in OF_LINKS):
        try:
            costs = run.costs(name)
        except ValueError:  # Not known round by round.
            if name in shown:
                raise
            continue
        out[name] = [_short(costs[at]) for at in kept]
    return out


def _thinned(places: list[int]) -> list[int]:
    """Return at most ``POINTS`` of some places, the first and the last among them, evenly."""
    step = ceil((len(places) - 1) / (POINTS - 1)) if len(places) > POINTS else 1
    kept = places[::step]
    return kept if kept[-1] == places[-1] else [*kept, places[-1]]


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if isfinite(value) else value
    return value
