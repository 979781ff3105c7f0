"""Curves of a metric over its cost: a mean line and a band over seeds, a panel for each pair of axes.

Where a comparison is about a difference, a second panel has the paired differences from the first line, with
their 95 % interval whatever the number of seeds.

Lines differ in style and marker as well as in colour, so that a figure reads in black and white. Figures
are built with Matplotlib's objects: nothing here touches pyplot or its global state.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from hedgerow.sim.runs.compare import difference_curve, is_share, t_interval
from hedgerow.sim.runs.results import SOURCES, RecordedRun, Results, cost_named, numbers

__all__ = ["Curve", "caption", "default_path", "draw", "mean_curve", "save"]

# Below this many seeds the band is the whole range, from here on a 95 % interval of the mean.
FEW_SEEDS = 5
# Colours by Okabe and Ito: told apart with any colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*")
_MARKERS_A_LINE = 8
# Metrics that this suite's apps take of test data, beside those whose names begin with "test-".
_OF_TEST_DATA = frozenset(("accuracy", "auc", "auprc", "f1", "precision", "recall", "utility"))
# Of an app that has several problems: its losses are the problem's objective.
_OBJECTIVES = {
    "loss": "mean of the nodes' objectives at the mean of their models",
    "local-loss": "mean of the nodes' objectives, each at its own model",
}
# The kinds of files, and what each would say of the moment and the program that wrote it.
_METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_ID = r"[mp][0-9a-f]{10}"


@dataclass(frozen=True)
class Curve:
    """A variant's mean over seeds, and its band; one entry for each round that every seed evaluated."""

    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def mean_curve(runs: Sequence[RecordedRun], x: str, y: str) -> Curve:
    """Return mean and band of ``y`` over seeds, round by round, over the seeds' mean cost ``x``.

    The band is minimum to maximum for 2 to 4 seeds, the 95 % t interval of the mean from 5 on (of a
    score between 0 and 1, as much of it as lies there), and the line itself for one.

    Raises
    ------
    ValueError
        If ``x`` is no cost or a run lacks ``y``.
    """
    series = [{point.round: point for point in run.series(x, y)} for run in runs]
    rounds = [number for number in series[0] if all(number in points for points in series)]
    values = [[points[number].y for points in series] for number in rounds]
    bands = [t_interval(v) if len(v) >= FEW_SEEDS else (min(v), max(v)) for v in values]
    if is_share(y):
        bands = [(max(low, 0.0), min(high, 1.0)) for low, high in bands]
    return Curve(
        x=[fmean(points[number].x for points in series) for number in rounds],
        mean=[fmean(v) for v in values],
        low=[low for low, _ in bands],
        high=[high for _, high in bands],
    )


def draw(
    results: Results,
    xs: Sequence[str],
    ys: Sequence[str],
    *,
    log_x: bool = False,
    log_y: bool = False,
    by: str = "",
    differences: bool = False,
) -> Figure:
    """Return a figure with one panel for each metric of ``ys`` over each cost of ``xs``.

    Parameters
    ----------
    results : Results
        What to draw, a line for each variant.
    xs, ys : sequence of str
        Costs (see ``results.cost_named``); metrics, or costs.
    log_x, log_y : bool (default: False)
        Draw costs, or metrics, on a logarithmic scale; what costs nothing is then left out.
    by : str (default: "")
        A run-config key: each of its values gets a column of panels of its own, with that value's variants.
    differences : bool (default: False)
        Each panel gets another, of differences from its first line, paired by seed: their mean and its 95 %
        interval; for one seed there is no interval.

    Raises
    ------
    ValueError
        If a cost is unknown, a run lacks a metric, or no run has the setting ``by``.
    """
    columns_of_lines = _columns(results, by)
    pairs = list(product(ys, xs))
    kinds = (False, True) if differences else (False,)
    # By values: a row for each pair and kind. Else side by side in twos: pairs, or a pair's two kinds.
    panels = [(y, x, difference, head) for y, x in pairs for difference in kinds for head in columns_of_lines]
    columns = len(columns_of_lines) if by else min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1.5 + 4.5 * columns, 1.6 + 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey="row" if by else False).flatten()
    for ax, (y, x, difference, head) in zip(axes, panels, strict=False):
        lines = columns_of_lines[head]
        if difference:
            _differences(ax, lines, x, y)
        else:
            for number, (label, seeds) in enumerate(lines.items()):
                _line(ax, mean_curve(list(seeds.values()), x, y), label, number)
        _dress(ax, x, y, log_x, log_y and not difference)
        if difference:
            ax.set_ylabel(f"{_said(y)}, minus {next(iter(lines))}")
        ax.set_title(head, fontsize="medium")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    axes[0].legend(fontsize="small", handlelength=4)
    figure.suptitle(results.title)
    said = f"{caption(results, xs, ys, differences=differences)} Realism: {results.realism or 'not stated'}."
    words = textwrap.fill(said, width=60 * columns)
    figure.supxlabel(words, fontsize="small", color="#333333")
    return figure


def _columns(results: Results, by: str) -> dict[str, dict[str, Mapping[int, RecordedRun]]]:
    """Return the runs of each line, by the column's head (empty for the only one) and the line's label."""
    out: dict[str, dict[str, Mapping[int, RecordedRun]]] = {}
    for label, seeds in results.variants().items():
        settings = next(iter(seeds.values())).settings
        if by and by not in settings:
            raise ValueError(f"by must be a setting of the runs ({', '.join(settings)}), got {by!r}")
        head = f"{by}={settings[by]}" if by else ""
        words = [word for word in label.split(", ") if word != head]
        out.setdefault(head, {})[", ".join(words) or label] = seeds
    return out


def save(figure: Figure, out: str | Path) -> list[Path]:
    """Write the file that ``out`` names (.png, .svg or .pdf), or without such a suffix all three."""
    out = Path(out).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    named = out.suffix.lower() in _METADATA
    paths = [out] if named else [out.with_name(out.name + suffix) for suffix in _METADATA]
    # Without a date and with fixed ids the same runs give the same file.
    with mpl.rc_context({"svg.hashsalt": "hedgerow"}):
        for path in paths:
            figure.savefig(path, dpi=150, metadata=_METADATA[path.suffix.lower()])
            if path.suffix.lower() == ".svg":
                path.write_text(_numbered(path.read_text(encoding="utf-8")), encoding="utf-8")
    return paths


def _numbered(svg: str) -> str:
    """Return a figure with numbers as ids: Matplotlib's ids depend on last bits, and so on the processor."""
    names = dict.fromkeys(re.findall(f'id="({_ID})"', svg))
    numbers = {name: f"n{number}" for number, name in enumerate(names)}
    return re.sub(f'(?<=["#]){_ID}(?=[")])', lambda found: numbers.get(found[0], found[0]), svg)


def default_path(results: Results, xs: Sequence[str], ys: Sequence[str]) -> Path:
    """Return where a figure goes if the user does not say: with the run or the sweep; of several, here."""
    name = f"{results.name}-{'-'.join(ys)}-over-{'-'.join(xs)}".replace("->", "-to-")
    return (results.folder or Path.cwd()) / re.sub(r"[^\w.=+-]+", "-", name)


def _line(ax: Axes, curve: Curve, label: str, number: int) -> None:
    colour = _COLOURS[number % len(_COLOURS)]
    every = max(1, len(curve.x) // _MARKERS_A_LINE)
    ax.plot(
        curve.x,
        curve.mean,
        label=label,
        color=colour,
        linestyle=_STYLES[number % len(_STYLES)],
        marker=_MARKERS[number % len(_MARKERS)],
        # Markers of different lines start at different points, so that they do not hide each other.
        markevery=(number % every, every),
        markersize=5,
        linewidth=1.4,
    )
    ax.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _differences(ax: Axes, lines: Mapping[str, Mapping[int, RecordedRun]], x: str, y: str) -> None:
    """Draw the differences of all lines from the first, in the looks that the lines have beside."""
    (_, reference), *others = lines.items()
    ax.axhline(0.0, color=_COLOURS[0], linewidth=1.0)
    for number, (label, seeds) in enumerate(others, start=1):
        points = difference_curve(seeds, reference, x, y)
        # One seed has no interval: a line without a band.
        ends = [(p.low, p.high) if p.seeds > 1 else (p.mean, p.mean) for _, p in points]
        curve = Curve(
            [cost for cost, _ in points],
            [paired.mean for _, paired in points],
            [low for low, _ in ends],
            [high for _, high in ends],
        )
        _line(ax, curve, label, number)


def _said(y: str) -> str:
    """Return a metric's name, or a cost's, for people."""
    try:
        cost = cost_named(y)
    except ValueError:
        return y.replace("-", " ")
    return f"{cost.label} ({cost.unit})" if cost.unit else cost.label


def _dress(ax: Axes, x: str, y: str, log_x: bool, log_y: bool) -> None:
    cost = cost_named(x)
    ax.set_xlabel(_said(x))
    ax.set_ylabel(_said(y))
    if y.partition(" ")[0] in ("bits", "payload-bytes"):
        ax.yaxis.set_major_formatter(EngFormatter())
    if cost.unit in ("bit", "B"):
        ax.xaxis.set_major_formatter(EngFormatter())
    if log_x:
        ax.set_xscale("log", nonpositive="mask")
    elif not cost.unit:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if log_y:
        ax.set_yscale("log", nonpositive="mask")
    ax.grid(alpha=0.3)


def caption(results: Results, xs: Sequence[str], ys: Sequence[str] = (), *, differences: bool = False) -> str:
    """Return what a figure's reader must know: of what its lines are, seeds, bands, and whose seconds."""
    counts = sorted({len(seeds) for seeds in results.variants().values()})
    seeds = " or ".join(map(str, counts)) + (" seed" if counts == [1] else " seeds")
    failed = sum(map(len, results.failed.values()))
    bands = []
    if any(1 < count < FEW_SEEDS for count in counts):
        bands.append("minimum to maximum")
    if any(count >= FEW_SEEDS for count in counts):
        bands.append("95 % t interval of the mean")
    said = [
        *_learnt(results),
        *_measured(results, ys),
        f"{seeds}: mean" + (f", band: {' or '.join(bands)}." if bands else ", no band."),
        *([f"{failed} of {failed + len(results.runs)} runs failed, and are left out."] if failed else []),
    ]
    presets = sorted(
        {str(r.settings["latency-preset"]) for r in results.runs if "latency-preset" in r.settings}
    )
    if differences:
        said.append("Differences are paired by seed" + ("." if counts == [1] else ", band: 95 % t interval."))
    if "sim-seconds" in xs and presets:
        said.append(f"Simulated time: latency preset {', '.join(presets)}.")
    return " ".join(said)


def _learnt(results: Results) -> list[str]:
    """Return what all runs learnt from what, a sentence, as far as their settings say it and agree."""
    settings = [run.settings for run in results.runs]
    shared = {key: value for key, value in settings[0].items() if all(s.get(key) == value for s in settings)}
    # An app that has several problems says which data it takes by the problem.
    keys = ("problem",) if "problem" in settings[0] else ("dataset", "model", "partition")
    said = [str(shared[key]) for key in keys if key in shared]
    if "num-clients" in shared:
        said.append(f"{shared['num-clients']} nodes")
    return [f"{', '.join(said)}."] if said else []


def _measured(results: Results, ys: Sequence[str]) -> list[str]:
    """Return what metrics are of, as far as where they were measured says it."""
    of: dict[str, list[str]] = {}
    for y in ys:
        where = _where(results.runs[0], y)
        if where:
            of.setdefault(where, []).append(y)
    return [f"{', '.join(names)}: {where}." for where, names in of.items()]


def _where(run: RecordedRun, y: str) -> str:
    source = next((s for s in SOURCES if any(name == y for r in run.rounds for name, _ in numbers(r, s))), "")
    if source == "evaluate":
        return "measured by the nodes, mean"
    samples = run.settings.get("train-loss-samples")
    if source != "central" or samples is None:
        return ""
    if "problem" in run.settings and y in _OBJECTIVES:
        return _OBJECTIVES[y]
    if y == "loss":
        return f"of the averaged model on {f'{samples:,}' if samples else 'all'} training samples"
    return "of the averaged model on test data" if y.startswith("test-") or y in _OF_TEST_DATA else ""
