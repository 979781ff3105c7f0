"""List the runs in folders: one entry for each, also for a run that is damaged."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hedgerow.sim.runs.checkpoint import has_checkpoint
from hedgerow.sim.runs.compare import where, whose
from hedgerow.sim.runs.folder import DAMAGES, in_use, run_folders, run_state
from hedgerow.sim.runs.hooks import shipped_app
from hedgerow.sim.runs.results import begun, data_set, last_line, progress, read_run
from hedgerow.wire.printable import LONGEST_PATH, reason, shown

_METRICS = ("accuracy", "loss")
# Longest name of a model that a table shows; a function of one's own has a longer one.
_LONGEST = 20
_HEADS = (
    "folder",
    "app",
    "method",
    "data set",
    "model",
    "done",
    "accuracy",
    "of",
    "loss",
    "state",
    "started",
)


def listed(places: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the runs in folders, by date; ``error`` is why a run cannot be read, and is empty otherwise."""
    folders = dict.fromkeys(run for place in places for run in run_folders(place))
    return sorted(map(_entry, folders), key=lambda run: (run["started"], run["folder"]))


def _entry(folder: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "folder": os.path.relpath(folder),
        "started": "",
        "state": "damaged",
        "error": "",
    }
    try:
        return entry | _about(folder)
    except DAMAGES as error:
        return {**entry, "error": shown(reason(error), LONGEST_PATH)}


def _about(folder: Path) -> dict[str, Any]:
    run, state = read_run(folder), run_state(folder)
    failed = folder.suffix == ".failed"
    if state == "waiting" and not in_use(folder):
        state = "stopped"
    last: Mapping[str, Any] = run.rounds[-1] if run.rounds else {"round": 0, "iterations": 0}
    unit, done, asked = progress(last, run.settings)
    entry: dict[str, Any] = {
        "started": begun(run),
        "app": str(run.config.get("app", "")),
        "method": str(run.settings.get("method") or run.settings.get("algorithm") or ""),
        "data-set": data_set(run),
        "model": str(run.settings.get("model") or ""),
        "seed": run.seed,
        "unit": unit,
        "done": done,
        "asked": asked,
        "state": "failed" if failed else state,
    }
    for name in _METRICS:
        entry |= {name: run.value_at(name, last["round"]), f"{name}-of": whose(run, name)}
        entry |= {f"{name}-measured": where(run, name)}
    if state != "stopped":
        return entry
    return {
        **entry,
        "log-ends": last_line(folder.with_name(f"{folder.stem if failed else folder.name}.log")),
        "resume": _resume(folder, entry["app"]),
    }


def _resume(folder: Path, app: str) -> str:
    """Return the command that resumes a stopped run; empty if it left no checkpoint."""
    if (folder.parent.parent / "sweep.json").is_file():
        return "the same 'hedgerow sweep' again"
    if not has_checkpoint(folder / "checkpoint"):
        return ""
    return shlex.join(["hedgerow", "run", shipped_app(app) or app, "--resume", os.path.relpath(folder)])


def table(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of the runs that can be read, and below it a line for each that stopped or cannot."""
    rows, notes = [], []
    for run in runs:
        if run["error"]:
            notes.append(f"{shown(run['folder'], LONGEST_PATH)}: cannot be read: {run['error']}")
            continue
        rows.append([shown(cell, LONGEST_PATH) for cell in _cells(run)])
        if "resume" in run:
            how = f"resume with: {run['resume']}" if run["resume"] else "it left no checkpoint to resume from"
            ends = f"; its log ends: {run['log-ends']}" if run["log-ends"] else ""
            notes.append(shown(f"{run['folder']} {run['state']}; {how}{ends}", 3 * LONGEST_PATH))
    shown_columns = [at for at in range(len(_HEADS)) if any(row[at] for row in rows)]
    kept = [[row[at] for at in shown_columns] for row in ([*_HEADS], *rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in kept]
    return "\n".join([*lines, *([""] if lines and notes else []), *notes])


def _cells(run: Mapping[str, Any]) -> list[str]:
    accuracy, loss = ("" if run[name] is None else f"{run[name]:.4g}" for name in _METRICS)
    of = f"{run['done']}/{run['asked']}" if run["asked"] else str(run["done"])
    model = run["model"] if len(run["model"]) <= _LONGEST else ""
    return [
        *(run["folder"], run["app"], run["method"], run["data-set"], model, f"{of} {run['unit']}s"),
        *(accuracy, run["accuracy-of"], loss, run["state"], run["started"][:16]),
    ]
