"""Runs as one page: what was run, curves, tables, what crossed each link, what was lost, settings.

The page is one HTML file that needs nothing else: no script, no font, no network; its own policy forbids
what is not in it. It reads in light, in dark and on paper. The same runs give the same bytes.

Whatever comes from a run's files (labels, settings, names of apps, links and reasons) was written by others:
it is text on the page, whatever it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from io import BytesIO
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl

from hedgerow.sim.runs.compare import (
    NOTE,
    ComparisonTable,
    budget_comparison,
    common_budget,
    target_comparison,
)
from hedgerow.sim.runs.diagram import Crossed, DrawnNetwork, links_svg, network_svg, size
from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.folder import lost_replies, shown_settings
from hedgerow.sim.runs.plot import caption, draw, mean_curve
from hedgerow.sim.runs.results import COSTS, SOURCES, RecordedRun, Results, cost_named, numbers

__all__ = ["report_html", "write_report"]

# The most variants whose links are drawn; the table has all.
_MOST_DRAWINGS = 6
# The most metrics that are drawn where nobody says which.
_METRICS = ("loss", "accuracy")
# Colours that no figure has, in whose place the page's own are put.
_INK, _PAPER = "#010203", "#010204"
_OWN_COLOURS = {
    _INK: "currentColor",
    "#000000": "currentColor",
    "#333333": "currentColor",
    _PAPER: "var(--paper)",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_SVG = "{http://www.w3.org/2000/svg}"
# The longest label in a picture.
_LONGEST = 48
_COUNTS = ("messages", "nominal_bits", "payload_bytes")


def write_report(
    results: Results,
    path: str | Path,
    *,
    xs: Sequence[str] = (),
    ys: Sequence[str] = (),
    targets: Mapping[str, float] | None = None,
    network: Callable[[RecordedRun], DrawnNetwork | None] = lambda _: None,
) -> Path:
    """Write the page; see ``report_html``."""
    path = Path(path).expanduser()
    page = report_html(results, xs=xs, ys=ys, targets=targets, network=network)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: file.write(page.encode()))
    return path


def report_html(
    results: Results,
    *,
    xs: Sequence[str] = (),
    ys: Sequence[str] = (),
    targets: Mapping[str, float] | None = None,
    network: Callable[[RecordedRun], DrawnNetwork | None] = lambda _: None,
) -> str:
    """Return the page.

    Parameters
    ----------
    results : Results
        The runs.
    xs, ys : sequence of str (default: what the sweep says, else rounds and loss and accuracy)
        Costs and metrics to draw and to compare.
    targets : Mapping[str, float] (default: none)
        For a metric, what to reach; each gets a table of what that cost.
    network : Callable[[RecordedRun], DrawnNetwork or None]
        Returns the graph of a run, where it has one that is known.

    Raises
    ------
    ValueError
        If a cost that was asked for is unknown, or a run lacks a metric that was asked for.
    """
    asked, results = bool(xs or ys), _readable(results)
    xs, ys = list(xs or results.xs), list(ys or _metrics(results))
    sections = [
        ("run", "What was run", _what(results, ys)),
        ("curves", "Curves", _curves(results, xs, ys, asked)),
        ("comparison", "Comparison", _tables(results, xs, ys, targets or {}, asked)),
        ("links", "What crossed each link", _links(results, network)),
        ("lost", "Lost replies", _lost(results)),
        ("settings", "Settings", _settings(results)),
    ]
    there = [(anchor, head, body) for anchor, head, body in sections if body]
    menu = "".join(f'<li><a href="#{anchor}">{head}</a></li>' for anchor, head, _ in there)
    main = "".join(
        f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{head}</h2>\n{body}</section>\n'
        for anchor, head, body in there
    )
    css = files("hedgerow.sim.runs").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(results.title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(results.title)}</h1>\n"
        f'<p class="muted">Realism: {escape(results.realism or "not stated")}.</p>\n'
        f'<nav aria-label="Contents"><ul>{menu}</ul></nav></header>\n'
        f"<main>\n{_warnings(results)}{main}</main>\n"
        "<footer>Written by <code>hedgerow report</code>.</footer>\n</body>\n</html>\n"
    )


def _readable(results: Results) -> Results:
    """Return the results with texts that any reader of XML takes."""
    runs = [replace(run, label=_printable(run.label)) for run in results.runs]
    return replace(results, runs=runs, title=_printable(results.title), realism=_printable(results.realism))


def _printable(text: object) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in str(text))


def _metrics(results: Results) -> list[str]:
    """Return what to compare: what the sweep says or else is usual, of what every run measured."""
    measured = [
        {name for record in run.rounds for source in SOURCES for name, _ in numbers(record, source)}
        for run in results.runs
    ]
    common = set.intersection(*measured)
    said = [name for name in results.ys if name in common]
    usual = [name for name in _METRICS if name in common and (not said or said == ["loss"])]
    return list(dict.fromkeys([*said, *usual])) or sorted(common)[:2]


# Sections


def _warnings(results: Results) -> str:
    if not results.warnings:
        return ""
    lines = "".join(f"<li>{_cell(warning)}</li>" for warning in results.warnings)
    return f'<div class="note" role="note"><strong>To know first</strong><ul>{lines}</ul></div>\n'


def _what(results: Results, ys: Sequence[str]) -> str:
    rows: dict[tuple[str, ...], list[RecordedRun]] = {}
    for run in results.runs:
        rows.setdefault((_app(run), *_machine(run)), []).append(run)
    table = _table(
        "Which app, code and machine the runs are of",
        ("app", "code", "machine", "engine", "variants", "runs", "seeds"),
        [
            (
                *told,
                str(len({run.label for run in runs})),
                str(len(runs)),
                _seeds([run.seed for run in runs]),
            )
            for told, runs in rows.items()
        ],
        numeric=(False, False, False, False, True, True, False),
    )
    last = _table(
        "Where each variant ended, mean over its seeds",
        ("variant", "seeds", "rounds", *ys, *(cost.label for cost in _spent(results)), "finished"),
        [
            (
                label,
                str(len(seeds)),
                _mean_of([run.rounds[-1].get("round") for run in seeds.values()]),
                *(_last(list(seeds.values()), y) for y in ys),
                *(_cost(list(seeds.values()), cost.key, cost.unit) for cost in _spent(results)),
                f"{sum(run.finished for run in seeds.values())} of {len(seeds)}",
            )
            for label, seeds in results.variants().items()
        ],
        numeric=(False, True, True, *(True for _ in ys), *(True for _ in _spent(results)), True),
    )
    return table + last


def _last(runs: Sequence[RecordedRun], y: str) -> str:
    """Return the mean of a metric's, or a cost's, last values."""
    values = [run.value_at(y, run.rounds[-1]["round"]) for run in runs]
    known = [value for value in values if value is not None and isfinite(value)]
    return f"{fmean(known):.4g}" if len(known) == len(runs) else "n/a"


def _spent(results: Results) -> list[Any]:
    """Return the costs beside rounds that all runs recorded, and of which one spent anything."""
    out = []
    for name, cost in COSTS.items():
        if name == "rounds":
            continue
        try:
            if any(run.costs(name)[-1] for run in results.runs):
                out.append(cost)
        except ValueError:
            continue
    return out


def _cost(runs: Sequence[RecordedRun], key: str, unit: str) -> str:
    name = next(name for name, cost in COSTS.items() if cost.key == key)
    value = fmean(run.costs(name)[-1] for run in runs)
    if not isfinite(value):
        return "n/a"
    if unit in ("B", "bit"):
        return size(value, unit)
    return f"{value:,.1f} {unit}" if unit else f"{value:,.0f}"


def _curves(results: Results, xs: Sequence[str], ys: Sequence[str], asked: bool) -> str:
    figures, unknown = [], []
    for number, (y, x) in enumerate([(y, x) for y in ys for x in xs], start=1):
        try:
            svg = _curve_svg(results, x, y, f"curve-{number}")
        except ValueError as error:
            if asked:
                raise
            unknown.append(f"<p>Not drawn, {_cell(y)} over {_cell(x)}: {_cell(error)}.</p>")
            continue
        words = f"{y} over {cost_named(x).label}"
        figures.append(f"<figure>{svg}<figcaption>{_cell(words)}</figcaption></figure>\n")
    note = f'<p class="muted">{_cell(caption(results, xs, ys, differences=results.differences))}</p>\n'
    drawn = f'<div class="figures">\n{"".join(figures)}</div>\n{note}' if figures else ""
    return drawn + "".join(unknown)


def _curve_svg(results: Results, x: str, y: str, name: str) -> str:
    style: Any = {
        "axes.edgecolor": _INK, "axes.facecolor": "none", "axes.labelcolor": _INK, "figure.facecolor": "none",
        "grid.color": _INK, "legend.edgecolor": _INK, "legend.facecolor": _PAPER, "savefig.facecolor": "none",
        "svg.fonttype": "none", "svg.hashsalt": name, "text.color": _INK, "text.parse_math": False,
        "xtick.color": _INK, "ytick.color": _INK, "font.family": "sans-serif",
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = draw(_briefly(results), [x], [y], by=results.by, differences=results.differences)
        # The page says these.
        figure.suptitle("")
        figure.supxlabel("")
        drawn = BytesIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    ends = []
    for label, seeds in results.variants().items():
        curve = mean_curve(list(seeds.values()), x, y)
        if curve.mean:
            ends.append(f"{label} ends at {curve.mean[-1]:.4g}")
    return _inline(drawn.getvalue(), name, f"{y} over {cost_named(x).label}", "; ".join(ends))


def _briefly(results: Results) -> Results:
    """Return the results with labels that leave a picture its place; no two become one."""
    brief = {
        label: label if len(label) <= _LONGEST else f"{label[: _LONGEST - 5]}… {number}"
        for number, label in enumerate(results.variants(), start=1)
    }
    return replace(results, runs=[replace(run, label=brief[run.label]) for run in results.runs])


def _inline(svg: bytes, name: str, title: str, said: str) -> str:
    """Return a picture of Matplotlib's as a part of a page: its ids its own, its black the page's ink."""
    root = ElementTree.fromstring(svg)
    for parent in root.iter():
        for child in list(parent):
            if not child.tag.startswith(_SVG) or child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        given = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in given.items():
            element.set(key, _own(key, value, name))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"class": "plot", "role": "img", "aria-labelledby": f"{name}-t {name}-d"}
    for number, (tag, words) in enumerate((("title", title), ("desc", said))):
        head = ElementTree.Element(tag, {"id": f"{name}-{tag[0]}"})
        head.text = _printable(words)
        root.insert(number, head)
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _own(key: str, value: str, name: str) -> str:
    """Return an attribute's value with ids that no other picture has, and the page's colours."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    value = value.replace("url(#", f"url(#{name}-")
    for colour, own in _OWN_COLOURS.items():
        value = value.replace(colour, own)
    return value


def _tables(
    results: Results, xs: Sequence[str], ys: Sequence[str], targets: Mapping[str, float], asked: bool
) -> str:
    made: list[str] = []
    for y in ys:
        for x in xs:
            try:
                made.append(_compared(budget_comparison(results, x, y, common_budget(results, x))))
            except ValueError:
                if asked:
                    raise
    made += [_compared(target_comparison(results, x, y, value)) for y, value in targets.items() for x in xs]
    return "".join(made) + (f'<p class="muted">{escape(NOTE)}</p>\n' if made else "")


def _compared(table: ComparisonTable) -> str:
    return _table(table.title, table.columns, table.rows, numeric=table.numeric)


def _links(results: Results, network: Callable[[RecordedRun], DrawnNetwork | None]) -> str:
    crossed = {label: _crossed(list(seeds.values())) for label, seeds in results.variants().items()}
    rows = [
        (label, link, f"{one.messages:,.0f}", size(one.nominal_bits, "bit"), size(one.payload_bytes))
        for label, links in crossed.items()
        for link, one in links.items()
    ]
    if not rows:
        return ""
    figures = []
    seen: set[str] = set()
    left_out = 0
    for label, links in crossed.items():
        run = next(iter(results.variants()[label].values()))
        graph = network(run)
        if not links or (shape := repr((sorted(links), graph))) in seen:
            continue
        if len(seen) == _MOST_DRAWINGS:
            left_out += 1
            continue
        seen.add(shape)
        name = f"links-{len(seen)}"
        drawings = [links_svg(links, name), network_svg(graph, links, f"{name}-net") if graph else ""]
        words = (
            f"{label}: what each kind of node told the other.",
            f"{label}: the network, each link's share.",
        )
        figures += [
            f"<figure>{drawing}<figcaption>{_cell(told)}</figcaption></figure>\n"
            for drawing, told in zip(drawings, words, strict=True)
            if drawing
        ]
    drawn = f'<div class="figures">\n{"".join(figures)}</div>\n' if figures else ""
    more = f"<p>{left_out} more shapes of networks are not drawn.</p>\n" if left_out else ""
    several = (
        ""
        if len(seen) <= 1 and len(crossed) <= 1
        else (
            '<p class="muted">Variants with the same links and the same network are drawn once, with the '
            "traffic of the first.</p>\n"
        )
    )
    table = _table(
        "Traffic of the whole run, mean over seeds; nominal is what the paper counts, payload what was sent",
        ("variant", "link", "messages", "nominal", "payload"),
        rows,
        numeric=(False, False, True, True, True),
    )
    return drawn + more + several + table


def _crossed(runs: Sequence[RecordedRun]) -> dict[str, Crossed]:
    """Return what crossed each link at the end, mean over the runs; what is no number is left out."""
    told: dict[str, list[Crossed]] = {}
    for run in runs:
        links = run.rounds[-1].get("by_link")
        for link, traffic in (links if isinstance(links, dict) else {}).items():
            if isinstance(traffic, dict):
                counts = [traffic.get(key, 0) for key in _COUNTS]
                if all(isinstance(count, int | float) and isfinite(count) for count in counts):
                    told.setdefault(_printable(link), []).append(Crossed(*map(float, counts)))
    return {
        link: Crossed(*(sum(getattr(one, key) for one in ones) / len(runs) for key in _COUNTS))
        for link, ones in told.items()
    }


def _lost(results: Results) -> str:
    rows = []
    for label, seeds in results.variants().items():
        reasons: dict[str, int] = {}
        sent = 0
        for run in seeds.values():
            for reason, count in lost_replies(run.rounds).items():
                reasons[_printable(reason)] = reasons.get(_printable(reason), 0) + count
            sent += sum(record.get("sent", 0) for record in run.rounds)
        of = f"{sum(reasons.values()) / sent:.2%} of {sent:,}" if sent else "n/a"
        rows += [(label, reason, f"{count:,}", of) for reason, count in sorted(reasons.items())]
    if not rows:
        return "<p>None is recorded.</p>\n"
    return _table(
        "Replies that were asked for and not taken, by reason, over all rounds and seeds",
        ("variant", "reason", "replies", "of all that were asked for, lost for any reason"),
        rows,
        numeric=(False, False, True, True),
    )


def _settings(results: Results) -> str:
    told = [shown_settings(run.config) for run in results.runs]
    keys = sorted({str(key) for one in told for key in one})
    shared = {
        key: told[0][key] for key in keys if all(key in one and one[key] == told[0][key] for one in told)
    }
    differing = [key for key in keys if key not in shared and key not in ("seed", "output-dir")]
    rows = [
        (
            label,
            *(_values([shown_settings(run.config).get(key) for run in seeds.values()]) for key in differing),
        )
        for label, seeds in results.variants().items()
    ]
    out = ""
    if differing:
        out += "<h3>What differs</h3>\n" + _table(
            "Settings by variant", ("variant", *differing), rows, numeric=[False] * (1 + len(differing))
        )
    lines = "".join(
        f"<li><code>{_cell(key)} = {_cell(_shown(value))}</code></li>" for key, value in shared.items()
    )
    return out + (f'<h3>What all runs share</h3>\n<ul class="keys">{lines}</ul>\n' if shared else "")


# Texts and tables


def _app(run: RecordedRun) -> str:
    version = run.config.get("version")
    return f"{run.config.get('app', '?')}{f' {version}' if version else ''}"


def _machine(run: RecordedRun) -> tuple[str, str, str]:
    """Return which code, on what, by whose engine."""
    told = run.config.get("environment")
    told = told if isinstance(told, dict) else {}
    packages = told.get("packages")
    packages = packages if isinstance(packages, dict) else {}
    code = [
        f"{name} {packages[name]}" for name in ("hedgerow", "flwr", "torch", "numpy") if packages.get(name)
    ]
    git = told.get("git")
    if isinstance(git, dict) and git.get("commit"):
        code.insert(0, str(git["commit"])[:12] + (" with changes" if git.get("modified") else ""))
    where = [str(told[key]) for key in ("cpu", "gpu", "platform") if told.get(key)]
    if told.get("python"):
        where.append(f"Python {told['python']}")
    return (
        ", ".join(code) or "not recorded",
        ", ".join(where) or "not recorded",
        str(told.get("engine") or "n/a"),
    )


def _seeds(seeds: Iterable[int]) -> str:
    found = sorted(set(seeds))
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def _mean_of(values: Sequence[Any]) -> str:
    return f"{fmean(float(value) for value in values):,.4g}"


def _values(values: Sequence[Any]) -> str:
    return " / ".join(dict.fromkeys("" if value is None else _shown(value) for value in values))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _cell(value: object) -> str:
    return escape(_printable(value))


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[bool]
) -> str:
    def marked(at: int) -> str:
        return ' class="number"' if numeric[at] else ""

    head = "".join(f'<th scope="col"{marked(at)}>{_cell(name)}</th>' for at, name in enumerate(columns))
    body = "".join(
        f'<tr><th scope="row">{_cell(row[0])}</th>'
        + "".join(f"<td{marked(at)}>{_cell(cell)}</td>" for at, cell in enumerate(row[1:], start=1))
        + "</tr>\n"
        for row in rows
    )
    # Wider than a phone, it is moved by touch or by keys.
    return (
        f'<div class="wide" role="region" aria-label="{_cell(title)}" tabindex="0"><table>'
        f"<caption>{_cell(title)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
    )
