"""Plot metrics over costs: a mean line and a band over seeds, one panel for each pair of axes.

Optional additional panels show the paired differences from the first line with their 95 % interval.

Lines differ in style and marker as well as in colour, so that figures are readable in black and white.
Figures are built from Matplotlib's objects, without pyplot and its global state.
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

from hedgerow.sim.runs.compare import difference_curve, is_share, measured, t_interval
from hedgerow.sim.runs.results import RecordedRun, Results, cost_named

# Below this many seeds the band is the range of values, from here on a 95 % interval of the mean.
FEW_SEEDS = 5
# The palette of Okabe and Ito, distinguishable with any colour vision.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*")
_MARKERS_A_LINE = 8
# File formats, and their metadata about time and program, which are left out for reproducible files.
_METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_ID = r"[mp][0-9a-f]{10}"


@dataclass(frozen=True)
class Curve:
    """Mean and band of a variant over seeds; one entry for each round that every seed evaluated."""

    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def mean_curve(runs: Sequence[RecordedRun], x: str, y: str) -> Curve:
    """Return mean and band of ``y`` over seeds for each round, over the seeds' mean cost ``x``.

    The band is minimum to maximum for 2 to 4 seeds, the 95 % t interval of the mean from 5 on (clipped to
    [0, 1] for scores in that range), and the line itself for one.

    Raises
    ------
    ValueError
        If ``x`` is not a cost or a run lacks ``y``.
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
        The runs; each variant is a line.
    xs, ys : sequence of str
        Costs (see ``results.cost_named``); metrics or costs.
    log_x, log_y : bool (default: False)
        Logarithmic scale for costs or metrics; points with a zero are then left out.
    by : str (default: "")
        A run-config key: each of its values gets its own column of panels.
    differences : bool (default: False)
        Add a panel of differences from the first line to each panel, paired by seed, with the 95 % interval
        of their mean (none for one seed).

    Raises
    ------
    ValueError
        If a cost is unknown, a run lacks a metric, or a run lacks the setting ``by``.
    """
    columns_of_lines = _columns(results, by)
    pairs = list(product(ys, xs))
    kinds = (False, True) if differences else (False,)
    # With ``by`` each pair and kind is a row. Otherwise panels are placed two in a row.
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
            ax.set_ylabel(f"{_axis_label(y)}, minus {next(iter(lines))}")
        ax.set_title(head, fontsize="medium")
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    axes[0].legend(fontsize="small", handlelength=4)
    figure.suptitle(results.title)
    text = f"{caption(results, xs, ys, differences=differences)} Realism: {results.realism or 'not stated'}."
    figure.supxlabel(textwrap.fill(text, width=60 * columns), fontsize="small", color="#333333")
    return figure


def _columns(results: Results, by: str) -> dict[str, dict[str, Mapping[int, RecordedRun]]]:
    """Return the runs of each line, by column head (empty for a single column) and line label."""
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
    """Write a figure to ``out`` (.png, .svg or .pdf), or without a suffix to all three formats."""
    out = Path(out).expanduser()
    out.parent.mkdir(parents=True, exist_ok=True)
    named = out.suffix.lower() in _METADATA
    paths = [out] if named else [out.with_name(out.name + suffix) for suffix in _METADATA]
    # No date and fixed ids, so that the same runs give the same file.
    with mpl.rc_context({"svg.hashsalt": "hedgerow"}):
        for path in paths:
            figure.savefig(path, dpi=150, metadata=_METADATA[path.suffix.lower()])
            if path.suffix.lower() == ".svg":
                path.write_text(_numbered(path.read_text(encoding="utf-8")), encoding="utf-8")
    return paths


def _numbered(svg: str) -> str:
    """Replace ids in a figure by numbers: Matplotlib's depend on last bits, and thus on the processor."""
    names = dict.fromkeys(re.findall(f'id="({_ID})"', svg))
    numbers = {name: f"n{number}" for number, name in enumerate(names)}
    return re.sub(f'(?<=["#]){_ID}(?=[")])', lambda found: numbers.get(found[0], found[0]), svg)


def default_path(results: Results, xs: Sequence[str], ys: Sequence[str]) -> Path:
    """Return a figure's default path: in the run's or sweep's folder, or for several in this folder."""
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
    """Draw the differences of all lines from the first, in the lines' own colours and styles."""
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


def _axis_label(y: str) -> str:
    """Return the axis label of a metric or cost."""
    try:
        cost = cost_named(y)
    except ValueError:
        return y.replace("-", " ")
    return f"{cost.label} ({cost.unit})" if cost.unit else cost.label


def _dress(ax: Axes, x: str, y: str, log_x: bool, log_y: bool) -> None:
    cost = cost_named(x)
    ax.set_xlabel(_axis_label(x))
    ax.set_ylabel(_axis_label(y))
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
    """Return a figure's caption: data, metrics, number of seeds, bands, failed runs, latency preset."""
    counts = sorted({len(seeds) for seeds in results.variants().values()})
    seeds = " or ".join(map(str, counts)) + (" seed" if counts == [1] else " seeds")
    failed = sum(map(len, results.failed.values()))
    bands = []
    if any(1 < count < FEW_SEEDS for count in counts):
        bands.append("minimum to maximum")
    if any(count >= FEW_SEEDS for count in counts):
        bands.append("95 % t interval of the mean")
    parts = [
        *_task(results),
        *measured(results, ys),
        f"{seeds}: mean" + (f", band: {' or '.join(bands)}." if bands else ", no band."),
        *([f"{failed} of {failed + len(results.runs)} runs failed, and are left out."] if failed else []),
    ]
    presets = sorted(
        {str(r.settings["latency-preset"]) for r in results.runs if "latency-preset" in r.settings}
    )
    if differences:
        parts.append(
            "Differences are paired by seed" + ("." if counts == [1] else ", band: 95 % t interval.")
        )
    if "sim-seconds" in xs and presets:
        parts.append(f"Simulated time: latency preset {', '.join(presets)}.")
    return " ".join(parts)


def _task(results: Results) -> list[str]:
    """Return a sentence on data, model and nodes, from the settings that all runs share."""
    settings = [run.settings for run in results.runs]
    shared = {key: value for key, value in settings[0].items() if all(s.get(key) == value for s in settings)}
    # In an app with several problems the problem implies the data.
    keys = ("problem",) if "problem" in settings[0] else ("dataset", "model", "partition")
    words = [str(shared[key]) for key in keys if key in shared]
    if "num-clients" in shared:
        words.append(f"{shared['num-clients']} nodes")
    return [f"{', '.join(words)}."] if words else []
