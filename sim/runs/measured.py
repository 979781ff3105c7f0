"""On what a metric was measured, and which runs may therefore be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hedgerow.sim.runs.results import SOURCES, RecordedRun, Results, numbers

# Of runs recorded before config.json had ``measured``: metrics on test data, besides names with "test-".
_OF_TEST_DATA = frozenset(("accuracy", "auc", "auprc", "f1", "precision", "recall", "utility"))
# In an app with several problems losses are the problem's objective.
_OBJECTIVES = {
    "loss": "mean of the nodes' objectives at the mean of their models",
    "local-loss": "mean of the nodes' objectives, each at its own model",
}
# Settings that determine the samples and how they are split. A data set that an app makes is its own.
_DATA = (
    *("problem", "dataset", "libsvm", "partition", "classes", "class-0", "class-1", "features"),
    *("samples-low", "samples-high", "noise", "l2", "class-weights"),
)


def where(run: RecordedRun, y: str) -> str:
    """Return on what a run's metric was measured, as its record says; empty if there is no such metric.

    ``measured`` in the config is ``Experiment.samples``; ``held-out`` beside the nodes' metrics is the share
    of their samples on which no node trains.
    """
    source = next((s for s in SOURCES if any(name == y for r in run.rounds for name, _ in numbers(r, s))), "")
    if source == "evaluate":
        return f"by the nodes, mean ({_held_out(run, source) or 'on samples that they do not name'})"
    if source != "central":
        return "by the nodes while they train, mean" if source else ""
    told, name = run.config.get("measured"), y.partition("[")[0]
    if told is None:
        return _inferred(run, y)
    if name in told:
        return str(told[name])
    if "*" not in told:
        return "by the server, which does not say on which samples"
    held_out = _held_out(run, source)
    return f"{told['*']} ({held_out})" if held_out else str(told["*"])


def _held_out(run: RecordedRun, source: str) -> str:
    """Return whether nodes train on the samples on which they measured; empty if they do not say it."""
    shares = [record[source]["held-out"] for record in run.rounds if "held-out" in record[source]]
    texts = {1: "on held-out samples", 0: "on their training samples"}
    return texts.get(min(shares), "partly on their training samples") if shares else ""


def _inferred(run: RecordedRun, y: str) -> str:
    """Return on what a suite's run measured whose record does not say it."""
    training = run.settings.get("train-loss-samples")
    if training is None:
        return ""
    if "problem" in run.settings and y in _OBJECTIVES:
        return _OBJECTIVES[y]
    if run.settings.get("partition") == "own":
        return "measured by the nodes on the samples that they hold out, mean"
    if y == "loss":
        return f"of the averaged model on {f'{training:,}' if training else 'all'} training samples"
    return "of the averaged model on test data" if y.startswith("test-") or y in _OF_TEST_DATA else ""


def measured(results: Results, ys: Sequence[str]) -> list[str]:
    """Return sentences on what each metric was measured on, if known."""
    of: dict[str, list[str]] = {}
    for y in ys:
        if told := where(results.runs[0], y):
            of.setdefault(told, []).append(y)
    return [f"{', '.join(names)}: {told}." for told, names in of.items()]


def groups(results: Results, ys: Sequence[str]) -> list[Results]:
    """Return the runs in groups that may be compared: of one task, data, split and definition of each metric.

    The title of each names what distinguishes it; one group keeps the title.
    """
    parts: dict[tuple[Any, ...], list[RecordedRun]] = {}
    for run in results.runs:
        parts.setdefault((*_task(run), *(where(run, y) for y in ys)), []).append(run)
    if len(parts) < 2:
        return [results]
    differ = [len(set(values)) > 1 for values in zip(*parts, strict=True)]
    mixed = len({run.config.get("app") for run in results.runs}) > 1
    names = ["", *_DATA, *(f"{y} " for y in ys)]
    out = []
    for key, runs in parts.items():
        told = [
            str(value) if not name or name.endswith(" ") else f"{name}={value}"
            for name, value, differs in zip(names, key, differ, strict=True)
            if differs and value not in ("", None)
        ]
        labels = {run.label for run in runs}
        failed = {label: seeds for label, seeds in results.failed.items() if label in labels}
        apps = dict.fromkeys(str(run.config.get("app", run.folder.name)) for run in runs)
        of = results.title if not mixed else " / ".join(apps)
        title = f"{of}: {', '.join(dict.fromkeys(told)) or 'the others'}"
        out.append(replace(results, runs=runs, title=title, failed=failed))
    return out


def _task(run: RecordedRun) -> tuple[Any, ...]:
    """Return the app, unless its data are known by their names, and the settings that determine them."""
    data = [run.settings.get(key) for key in _DATA]
    texts = [str(value) for value in data if value is not None]
    known = texts and "train-loss-samples" in run.settings and not any(":" in text for text in texts)
    own = run.settings.get("partition") == "own"
    app = "" if known and not own else str(run.config.get("app", run.folder.name))
    return app, *data
