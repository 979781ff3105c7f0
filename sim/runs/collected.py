"""Write runs to one small JSON file, from which their plots and tables can be drawn without the folders.

The file holds the sweep's description, the settings that all runs share, their environments, the reasons of
failed runs, and one line for each other run: label, seed, its other settings, final traffic by link and
lost replies, and its evaluated rounds as columns, thinned to ``POINTS``. The columns are all metrics of
evaluations, and those metrics of training and costs of links that the sweep plots. Columns are named as in
``rounds.jsonl``, metrics ``source.name``, costs of links "bits client->server"; a missing value is ``null``.
``results.load`` reads the file like a sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.folder import lost_replies, read_file
from hedgerow.sim.runs.results import COSTS, OF_LINKS, SOURCES, RecordedRun, Results, numbers, spent
from hedgerow.wire.printable import reason

FORMAT = "hedgerow-results-1"
# Maximum number of rounds kept of a run.
POINTS = 200
# Enough for single precision.
_DIGITS = 9
# Settings that are paths on one machine.
_PLACES = frozenset(("data-dir", "output-dir", "registry", "resume"))
# Entries of an environment that may affect results.
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
        recorded = run.config.get("environment", {})
        environment = {key: recorded.get(key) for key in _ENVIRONMENT}
        if environment not in environments:
            environments.append(environment)
        runs.append(
            {
                "label": run.label,
                "seed": run.seed,
                "settings": {key: value for key, value in own.items() if key not in shared},
                "environment": environments.index(environment),
                "finished": run.finished,
                **({"measured": run.config["measured"]} if "measured" in run.config else {}),
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
        # Tables count failed runs, which means leave out.
        **({"failed": results.failed} if results.failed else {}),
        "runs": runs,
    }


def write_collected(results: Results, path: str | Path) -> int:
    """Write the file, with one line per run; return the number of runs."""
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
    """Read the file; ``prefix`` puts its name before each label. ValueError if it is not such a file."""
    try:
        content = json.loads(read_file(file.resolve()))
        if content["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}, got {content['format']!r}")
        failed = {
            _label(file, label, prefix): {int(seed): why for seed, why in seeds.items()}
            for label, seeds in content.get("failed", {}).items()
        }
        return Results(
            runs=[_run(file, content, run, prefix) for run in content["runs"]],
            title=content["title"],
            realism=content["realism"],
            xs=content["x"],
            ys=content["y"],
            name=file.stem,
            folder=file.parent,
            by=content["by"],
            columns=content.get("columns", ()),
            differences=content.get("differences", False),
            failed=failed,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not a file of `hedgerow export --json`: {reason(error, file=False)}"
        ) from error


def _run(file: Path, content: Mapping[str, Any], run: Mapping[str, Any], prefix: bool) -> RecordedRun:
    config = {
        "app": content["app"],
        "realism": content["realism"],
        "run": {**content["settings"], **run["settings"]},
        "environment": content["environments"][run["environment"]],
        **({"measured": run["measured"]} if "measured" in run else {}),
    }
    columns = run["columns"]
    rounds = [_record(columns, at) for at in range(len(columns["round"]))]
    for record in rounds:
        # Of other links the file has only the final traffic.
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
    """Return the kept rounds as columns; real seconds of dropped rounds are added to the next kept one."""
    evaluated = [at for at, record in enumerate(run.rounds) if any(record.get(s) for s in SOURCES[:2])]
    kept = _thinned(evaluated or list(range(len(run.rounds))))
    if kept[-1] != len(run.rounds) - 1:
        kept.append(len(run.rounds) - 1)
    out: dict[str, list[Any]] = {}
    for cost in COSTS.values():
        values = [_short(spent(run.rounds[at], cost)) for at in kept]
        if "." in cost.key and None in values:
            continue
        out[cost.key] = values
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
    # Methods have different links; skip those that this run does not have.
    crossed = run.rounds[-1].get("by_link", {})
    parts = [name.partition(" ") for name in shown]
    links = [link for total, _, link in parts if link in crossed and total in OF_LINKS]
    # A link that is shown in nominal bits also keeps its real bytes, and vice versa.
    for name in dict.fromkeys(f"{total} {link}" for link in links for total in OF_LINKS):
        try:
            costs = run.costs(name)
        except ValueError:  # Not recorded round by round.
            if name in shown:
                raise
            continue
        out[name] = [_short(costs[at]) for at in kept]
    return out


def _thinned(places: list[int]) -> list[int]:
    """Return at most ``POINTS`` evenly spaced places, including the first and the last."""
    step = ceil((len(places) - 1) / (POINTS - 1)) if len(places) > POINTS else 1
    kept = places[::step]
    return kept if kept[-1] == places[-1] else [*kept, places[-1]]


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if isfinite(value) else value
    return value
