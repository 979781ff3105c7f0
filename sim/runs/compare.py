"""Compare variants: metrics at a budget, cost of reaching a target, and paired differences.

The variants of a sweep share their random numbers for each seed (data, initial model, mini-batches), so that
the difference of two variants varies less over seeds than either variant. Differences are therefore paired
by seed, with a Student t interval of their mean. The intervals are not corrected for several variants.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isclose, nan, sqrt
from statistics import fmean
from typing import Any

import numpy as np

from hedgerow.sim.runs.results import SOURCES, Point, RecordedRun, Results, data_set, numbers
from hedgerow.wire.extras import needed

CONFIDENCE = 0.95
_MISSING = "n/a"
# All other metrics (losses, errors, distances) are better when lower.
_SHARES = ("accuracy", "auc", "auprc", "auroc", "f1", "precision", "recall")
_HIGHER = (*_SHARES, "utility")

NOTE = (
    "Means and sample standard deviations over seeds. A value at a budget is that of the last evaluation "
    "within it. Differences are paired by seed, with a 95 % Student t interval of their mean, not corrected "
    "for several variants; one seed gives no interval."
)


def higher_is_better(y: str) -> bool:
    """Return whether a metric is a score: its name ends with accuracy, auc, auprc, f1, utility, …"""
    return y.lower().endswith(_HIGHER)


def is_share(y: str) -> bool:
    """Return whether a metric lies in [0, 1]: its name ends with accuracy, auc, f1, …"""
    return y.lower().endswith(_SHARES)


def at_budget(run: RecordedRun, x: str, budget: float, y: str) -> Point | None:
    """Return the last evaluated point within ``budget``; None if the run spent less or has no such point."""
    within = [point for point in run.series(x, y) if _at_most(point.x, budget)]
    return within[-1] if within and _at_most(budget, run.costs(x)[-1]) else None


def to_target(run: RecordedRun, x: str, y: str, target: float) -> float | None:
    """Return the cost of the first evaluated point that reaches ``target``; None if there is none."""
    sign = 1 if higher_is_better(y) else -1
    return next((point.x for point in run.series(x, y) if sign * point.y >= sign * target), None)


def common_budget(results: Results, x: str) -> float:
    """Return the largest budget that every run has spent."""
    return min(run.costs(x)[-1] for run in results.runs)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % Student t interval of a mean; infinite for fewer than two values."""
    if len(values) < 2:
        return -inf, inf
    student = needed("scipy.stats", "plots").t
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * _deviation(values) / sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


@dataclass(frozen=True)
class Paired:
    """The paired difference of a variant from a reference.

    Parameters
    ----------
    mean : float
        Mean over the common seeds; NaN without any.
    low, high : float
        95 % interval of the mean; infinite below two seeds.
    seeds : int
        Number of common seeds.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero; False for a single seed."""
        return self.seeds > 1 and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class ComparisonTable:
    """A table of a comparison, in no particular format.

    Parameters
    ----------
    title : str
        Title of the table.
    columns : sequence of str
        Column heads; the first column names the variant.
    numeric : sequence of bool
        Whether each column is numeric.
    rows : sequence of sequence of str
        Cells of each variant.
    """

    title: str
    columns: Sequence[str]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table in markdown."""
        rule = "|" + "|".join("---:" if number else "---" for number in self.numeric) + "|"
        lines = [f"### {self.title}", "", _row(self.columns), rule, *(_row(row) for row in self.rows)]
        return "\n".join(lines)


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Paired:
    """Return the mean of ``values[seed] - reference[seed]`` over the seeds that both have."""
    differences = [value - reference[seed] for seed, value in values.items() if seed in reference]
    if not differences:
        return Paired(nan, -inf, inf, 0)
    return Paired(fmean(differences), *t_interval(differences), len(differences))


def difference_curve(
    runs: Mapping[int, RecordedRun], reference: Mapping[int, RecordedRun], x: str, y: str
) -> list[tuple[float, Paired]]:
    """Return the paired difference of ``y`` from a reference along ``x``, at the points of ``paired_values``.

    Raises
    ------
    ValueError
        If ``x`` is not a cost or a run lacks ``y``.
    """
    return [
        (cost, paired_difference(ours, theirs)) for cost, ours, theirs in paired_values(runs, reference, x, y)
    ]


def paired_values(
    runs: Mapping[int, RecordedRun], reference: Mapping[int, RecordedRun], x: str, y: str
) -> list[tuple[float, dict[int, float], dict[int, float]]]:
    """Return ``y`` of runs and of a reference along ``x``, by seed: a list of (cost, values, reference).

    The points are, for each seed, the costs at which the less often evaluated of the two was evaluated, up to
    the end of the shorter one. The other's value is from its last evaluation within that cost, which is
    thus at most one of its own evaluation intervals old. The returned cost is the mean over seeds.

    Raises
    ------
    ValueError
        If ``x`` is not a cost or a run lacks ``y``.
    """
    common = [seed for seed in runs if seed in reference]
    if not common:
        return []
    sides = [[side[seed].series(x, y) for seed in common] for side in (runs, reference)]
    ends = [min(ours[-1].x, theirs[-1].x) for ours, theirs in zip(*sides, strict=True)]
    fewest = min(
        sides,
        key=lambda side: min(
            sum(_at_most(point.x, end) for point in points) for points, end in zip(side, ends, strict=True)
        ),
    )
    out = []
    for costs in ([point.x for point in points] for points in zip(*fewest, strict=False)):
        ours, theirs = (
            _known({seed: _last_within(p, cost) for seed, p, cost in zip(common, side, costs, strict=True)})
            for side in sides
        )
        if len(ours) == len(theirs) == len(common):
            out.append((fmean(costs), ours, theirs))
    return out


def _last_within(points: Sequence[Point], cost: float) -> float | None:
    """Return the last value within a cost; None before the first point and beyond the last."""
    place = bisect_right(points, cost * (1 + 1e-9), key=lambda point: point.x)
    return points[place - 1].y if place and _at_most(cost, points[-1].x) else None


def budget_table(
    results: Results, x: str, y: str, budget: float, columns: Sequence[str] | None = None
) -> str:
    """Return ``budget_comparison`` in markdown."""
    return budget_comparison(results, x, y, budget, columns).markdown()


def budget_comparison(
    results: Results, x: str, y: str, budget: float, columns: Sequence[str] | None = None
) -> ComparisonTable:
    """Return each variant's ``y`` at a budget of ``x``, and its difference from the first of several.

    Parameters
    ----------
    results : Results
        The runs.
    x, y : str
        A cost and a metric.
    budget : float
        The budget, in units of ``x``.
    columns : sequence of str or None (default: None)
        Additional columns as in ``RecordedRun.value_at``, at the points at which ``y`` was evaluated, mean
        over seeds. None for those of the sweep.

    Raises
    ------
    ValueError
        If ``x`` is not a cost, a run lacks ``y``, or no run has one of the columns.
    """
    shown = list(results.columns if columns is None else columns)
    points = {
        label: {seed: at_budget(run, x, budget, y) for seed, run in seeds.items()}
        for label, seeds in results.variants().items()
    }
    values = {label: _known({s: p and p.y for s, p in ps.items()}) for label, ps in points.items()}
    evaluated = {label: _known({s: p and p.x for s, p in ps.items()}) for label, ps in points.items()}
    reference = next(iter(values))
    extra = {label: [_beside(results, label, points[label], name) for name in shown] for label in values}
    for place, name in enumerate(shown):
        if all(cells[place] == _MISSING for cells in extra.values()):
            raise ValueError(
                "column must be a cost, bits or payload-bytes of a link that the runs have, or a metric that "
                f"they recorded, got {name!r}"
            )
    several = len(values) > 1
    differ = (f"difference from {reference} [95 % interval]", "differs") if several else ()
    heads = ("variant", f"{y}, mean ± sd", "evaluated at", *shown, *differ, "seeds")
    rows = []
    for label, value in values.items():
        at = _number(fmean(evaluated[label].values())) if evaluated[label] else "n/a"
        difference = _difference(value, values[reference], label == reference) if several else ()
        counted = f"{len(value)} of {results.started(label)}"
        rows.append((label, _mean(value), at, *extra[label], *difference, counted))
    numeric = (False, True, True, *(True for _ in shown), *((True, False) if several else ()), True)
    return ComparisonTable(f"{y} at {x} = {_number(budget)}", heads, numeric, rows)


def target_table(results: Results, x: str, y: str, target: float) -> str:
    """Return ``target_comparison`` in markdown."""
    return target_comparison(results, x, y, target).markdown()


def target_comparison(results: Results, x: str, y: str, target: float) -> ComparisonTable:
    """Return each variant's cost ``x`` at which ``y`` first reached a target.

    A mean is given only if every seed reached the target: a mean over the others would be biased.

    Raises
    ------
    ValueError
        If ``x`` is not a cost or a run lacks ``y``.
    """
    reached = {
        label: _known({seed: to_target(run, x, y, target) for seed, run in seeds.items()})
        for label, seeds in results.variants().items()
    }
    counts = {label: results.started(label) for label in reached}
    reference = next(iter(reached))
    relation, several = ">=" if higher_is_better(y) else "<=", len(reached) > 1
    differ = (f"difference from {reference} [95 % interval]", "differs") if several else ()
    columns = ("variant", f"{x}, mean ± sd", *differ, "reached")
    rows = []
    for label, value in reached.items():
        complete = len(value) == counts[label]
        mean = _mean(value) if complete else "n/a"
        difference: tuple[str, ...] = ()
        if several and complete and len(reached[reference]) == counts[reference]:
            difference = _difference(value, reached[reference], label == reference)
        elif several:
            difference = ("n/a", "n/a")
        rows.append((label, mean, *difference, f"{len(value)} of {counts[label]}"))
    numeric = (False, True, *((True, False) if several else ()), True)
    return ComparisonTable(f"{x} to {y} {relation} {_number(target)}", columns, numeric, rows)


def listing(parts: Sequence[Results], tables: Sequence[ComparisonTable]) -> ComparisonTable:
    """Return one table of groups that are not compared, from a table of each, with their data sets."""
    first, *others = tables
    title = first.title
    if any(one.title != title for one in others):
        title = f"{title.partition(' = ')[0]}, the most that each spent"
    rows = [
        (row[0], data_set(part.runs[0]) or "n/a", *row[1:])
        for part, table in zip(parts, tables, strict=True)
        for row in table.rows
    ]
    columns = (first.columns[0], "data set", *first.columns[1:])
    return ComparisonTable(title, columns, (False, False, *first.numeric[1:]), rows)


def _beside(results: Results, label: str, points: Mapping[int, Point | None], name: str) -> str:
    """Return the cell of an additional column: the mean over the seeds that have a value."""
    runs = results.variants()[label]
    found = [runs[seed].value_at(name, point.round) for seed, point in points.items() if point is not None]
    values = [value for value in found if value is not None]
    return _number(fmean(values)) if values else _MISSING


def _at_most(a: float, b: float) -> bool:
    return a <= b or isclose(a, b, rel_tol=1e-9)


def _known(values: Mapping[int, float | None]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if value is not None}


def _difference(values: Mapping[int, float], reference: Mapping[int, float], itself: bool) -> tuple[str, str]:
    """Return the cells 'difference' and 'differs'."""
    if itself:
        return "reference", ""
    paired = paired_difference(values, reference)
    if not paired.seeds:
        return "n/a", "n/a"
    if paired.seeds == 1:
        return f"{paired.mean:+.4g} [n/a]", "unknown: 1 seed"
    interval = f"{paired.mean:+.4g} [{paired.low:+.4g}, {paired.high:+.4g}]"
    return interval, "yes" if paired.significant else "no"


def _mean(values: Mapping[int, float]) -> str:
    if not values:
        return "n/a"
    mean = _number(fmean(values.values()))
    return f"{mean} ± {_deviation(list(values.values())):.2g}" if len(values) > 1 else mean


def _deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; NaN if a run diverged."""
    with np.errstate(invalid="ignore"):
        return float(np.std(values, ddof=1))


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# What a metric was measured on


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
    source = _source(run, y)
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


def whose(run: RecordedRun, y: str) -> str:
    """Return ``where`` in a word or two: ``held-out``, ``training``, or the same of the ``nodes'``."""
    source, told = _source(run, y), where(run, y)
    if not told or "which does not say" in told or "do not name" in told:
        return "nodes'" if source == "evaluate" else ""
    kind = "training" if source == "train" or "training" in told else "held-out"
    return kind if source == "central" and "by the nodes" not in told else f"nodes', {kind}"


def _source(run: RecordedRun, y: str) -> str:
    """Return where a run's records have a metric; empty if they do not."""
    return next((s for s in SOURCES if any(name == y for r in run.rounds for name, _ in numbers(r, s))), "")


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
