"""Report runs on one HTML page: summary, curves, tables, traffic, lost replies, settings, machines.

The page is self-contained: no script, font or network access, which its Content-Security-Policy enforces.
It has a light, a dark and a print style. The same runs give the same bytes. ``report.html.j2`` holds the
layout; this module collects the content. `hedgerow watch` serves the same page (``follow.py``).

Labels, settings and names come from run files and are not trusted: they are escaped as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, cast
from xml.etree import ElementTree

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from hedgerow.sim.runs.common_settings import role_of
from hedgerow.sim.runs.compare import (
    NOTE,
    ComparisonTable,
    budget_comparison,
    common_budget,
    groups,
    target_comparison,
)
from hedgerow.sim.runs.diagram import (
    PANEL,
    PAPER,
    WIRE,
    Crossed,
    DrawnNetwork,
    draw_links,
    draw_network,
    size,
)
from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.folder import lost_replies, shown_settings
from hedgerow.sim.runs.hooks import changed_settings
from hedgerow.sim.runs.plot import caption, draw, mean_curve
from hedgerow.sim.runs.results import (
    COSTS,
    RecordedRun,
    Results,
    begun,
    cost_named,
    data_set,
    shortened,
)

# Returns the graph of a run, if it has a known one.
Network = Callable[[RecordedRun], DrawnNetwork | None]

# Number of variants whose links are drawn; the table has all.
_MOST_DRAWINGS = 6
# Number of command lines that are shown.
_MOST_COMMANDS = 4
# Metrics that are drawn by default.
_METRICS = ("loss", "accuracy")
# A placeholder colour that no figure uses, and the page's colours that replace those of a picture.
_INK = "#010203"
_OWN_COLOURS = {
    _INK: "currentColor",
    "#000000": "currentColor",
    "#333333": "currentColor",
    PAPER: "var(--paper)",
    PANEL: "var(--panel)",
    WIRE: "var(--wire)",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = {
    "axes.edgecolor": _INK, "axes.facecolor": "none", "axes.labelcolor": _INK, "figure.facecolor": "none",
    "grid.color": _INK, "legend.edgecolor": _INK, "legend.facecolor": PAPER, "savefig.facecolor": "none",
    "svg.fonttype": "none", "text.color": _INK, "text.parse_math": False, "xtick.color": _INK,
    "ytick.color": _INK, "font.family": "sans-serif",
}  # fmt: skip
_SVG = "{http://www.w3.org/2000/svg}"
_COUNTS = ("messages", "nominal_bits", "payload_bytes")


@dataclass(frozen=True)
class Live:
    """The live part of the page of a run that is being followed.

    Parameters
    ----------
    state : str
        Whether the run is being written, and errors.
    progress : Mapping[str, str]
        Progress figures by name.
    nonce : str
        Nonce that permits the page's script, and only it.
    """

    state: str
    progress: Mapping[str, str]
    nonce: str

    @property
    def policy(self) -> str:
        """Additions to the page's policy: its script, and requests to its own server."""
        return f"; script-src 'nonce-{self.nonce}'; connect-src 'self'"


def write_report(
    results: Results,
    path: str | Path,
    *,
    xs: Sequence[str] = (),
    ys: Sequence[str] = (),
    targets: Mapping[str, float] | None = None,
    network: Network = lambda _: None,
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
    network: Network = lambda _: None,
    live: Live | None = None,
) -> str:
    """Return the page.

    Parameters
    ----------
    results : Results
        The runs.
    xs, ys : sequence of str (default: those of the sweep, else rounds, loss and accuracy)
        Costs and metrics to draw and compare.
    targets : Mapping[str, float] (default: none)
        Target values of metrics; each gets a table of the cost of reaching it.
    network : Callable[[RecordedRun], DrawnNetwork or None]
        Returns the graph of a run, if it has a known one.
    live : Live or None (default: None)
        The live part, for a run that is being followed.

    Raises
    ------
    ValueError
        If ``xs`` has an unknown cost, or ``ys`` a metric that a run lacks.
    """
    asked, results = bool(xs or ys), _readable(results)
    xs, wanted = list(xs or results.xs), list(ys)
    shared, differing = _settings(results)
    every = dict.fromkeys(y for run in results.runs for y in wanted or _metrics(replace(results, runs=[run])))
    parts = [(part, wanted or _metrics(part)) for part in groups(results, [*every])]
    ys = wanted or [*dict.fromkeys(y for _, of_part in parts for y in of_part)]
    with mpl.rc_context(cast(Any, _STYLE)):
        pictures = {**_curves(parts, xs, asked), **_links(results, network)}
    return _page(
        results.title,
        live,
        summary=_summary(results),
        realism=results.realism,
        warnings=results.warnings,
        machines=_machines(results),
        ends=_ends(results, ys),
        captions=[
            (len(parts) > 1) * f"{part.title}. " + caption(part, xs, of_part, differences=part.differences)
            for part, of_part in parts
        ],
        comparisons=[
            one
            for part, of_part in parts
            for one in _comparisons(part, xs, of_part, targets or {}, asked, len(parts) > 1)
        ],
        note=NOTE,
        lost=_lost(results),
        shared=shared,
        differing=differing,
        **pictures,
    )


def waiting_html(title: str, live: Live) -> str:
    """Return the page of a run that has no round yet."""
    return _page(title, live)


def _page(title: str, live: Live | None, **content: Any) -> str:
    template = _environment().get_template("report.html.j2")
    policy = Markup(_POLICY + (live.policy if live else ""))
    return template.render(title=title, live=live, policy=policy, **content)


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else _printable(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _readable(results: Results) -> Results:
    """Return the results with texts that are valid in XML."""
    runs = [replace(run, label=_printable(run.label)) for run in results.runs]
    return replace(results, runs=runs, title=_printable(results.title), realism=_printable(results.realism))


def _printable(text: object) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in str(text))


def _metrics(results: Results) -> list[str]:
    """Return the metrics to compare: the sweep's or the usual ones, of those that every run has."""
    common = set.intersection(*(run.metrics for run in results.runs))
    named = [name for name in results.ys if name in common]
    usual = [name for name in _METRICS if name in common and (not named or named == ["loss"])]
    return list(dict.fromkeys([*named, *usual])) or sorted(common)[:2]


# Sections


def _summary(results: Results) -> dict[str, list[str]]:
    """Return when and how the runs were started, and what they all changed, by name."""
    times = sorted(filter(None, map(begun, results.runs)))
    environments = [_dict(run.config.get("environment")) for run in results.runs]
    commands = [*dict.fromkeys(str(one["command"]) for one in environments if one.get("command"))]
    more = len(commands) - _MOST_COMMANDS
    first, *others = [changed_settings(run.config) for run in results.runs]
    changed = {key: value for key, value in (first or {}).items() if role_of(key).is_experiment}
    shared = [
        f"{key} = {_shown(value)}"
        for key, value in changed.items()
        if all(other is not None and key in other and other[key] == value for other in others)
    ]
    nothing = "nothing in all runs; what differs is under Settings" if others else "nothing"
    if first is None or None in others:
        nothing = "the defaults of an app are not known"
    return {
        "Started": [" to ".join(dict.fromkeys((times[0], times[-1]))) + " UTC"]
        if times
        else ["not recorded"],
        "Command": [
            *(commands[:_MOST_COMMANDS] or ["not recorded"]),
            *([f"and {more} more"] if more > 0 else []),
        ],
        "Not the defaults": shared or [nothing],
    }


def _machines(results: Results) -> ComparisonTable:
    rows: dict[tuple[str, ...], list[RecordedRun]] = {}
    for run in results.runs:
        rows.setdefault((_app(run), *_machine(run)), []).append(run)
    return ComparisonTable(
        "App, code and machine of the runs",
        ("app", "code", "machine", "engine", "variants", "runs", "seeds"),
        (False, False, False, False, True, True, False),
        [
            (*key, str(len({run.label for run in runs})), str(len(runs)), _seeds([run.seed for run in runs]))
            for key, runs in rows.items()
        ],
    )


def _ends(results: Results, ys: Sequence[str]) -> ComparisonTable:
    costs = _spent(results)
    sets = {data_set(run) for run in results.runs}
    rows = []
    for label, seeds in results.variants().items():
        runs = list(seeds.values())
        rounds = fmean(run.rounds[-1]["round"] for run in runs)
        last = [_last(runs, y) for y in ys]
        spent = [_cost(runs, name) for name in costs]
        finished = f"{sum(run.finished for run in runs)} of {len(runs)}"
        on = (data_set(runs[0]) or "n/a",) if len(sets) > 1 else ()
        rows.append((label, *on, str(len(runs)), f"{rounds:,.4g}", *last, *spent, finished))
    on = ("data set",) if len(sets) > 1 else ()
    heads = ("variant", *on, "seeds", "rounds", *ys, *(COSTS[name].label for name in costs), "finished")
    return ComparisonTable(
        "Where each variant ended, mean over its seeds",
        heads,
        [name not in ("variant", "data set") for name in heads],
        rows,
    )


def _last(runs: Sequence[RecordedRun], y: str) -> str:
    """Return the mean of the last values of a metric or cost."""
    values = [run.value_at(y, run.rounds[-1]["round"]) for run in runs]
    known = [value for value in values if value is not None and isfinite(value)]
    return f"{fmean(known):.4g}" if len(known) == len(runs) else "n/a"


def _spent(results: Results) -> list[str]:
    """Return the costs except rounds that all runs recorded and that are not zero in all."""
    out = []
    for name in COSTS:
        try:
            ends = [run.costs(name)[-1] for run in results.runs]
        except ValueError:  # a run did not record it
            continue
        if name != "rounds" and any(ends):
            out.append(name)
    return out


def _cost(runs: Sequence[RecordedRun], name: str) -> str:
    unit, value = COSTS[name].unit, fmean(run.costs(name)[-1] for run in runs)
    if not isfinite(value):
        return "n/a"
    if unit in ("B", "bit"):
        return size(value, unit)
    return f"{value:,.1f} {unit}" if unit else f"{value:,.0f}"


def _curves(parts: Sequence[tuple[Results, Sequence[str]]], xs: Sequence[str], asked: bool) -> dict[str, Any]:
    drawn, unknown = [], []
    pictures = [(part, y, x) for part, ys in parts for y in ys for x in xs]
    for number, (part, y, x) in enumerate(pictures, start=1):
        of = f", {part.title}" if len(parts) > 1 else ""
        try:
            title = f"{y} over {cost_named(x).label}{of}"
            drawn.append((_curve_svg(part, x, y, f"curve-{number}"), title))
        except ValueError as error:
            if asked:
                raise
            unknown.append((y, x, error))
    return {"curves": drawn, "not_drawn": unknown}


def _curve_svg(results: Results, x: str, y: str, name: str) -> Markup:
    ends = []
    for label, seeds in results.variants().items():
        curve = mean_curve(list(seeds.values()), x, y)
        if curve.mean:
            ends.append(f"{label} ends at {curve.mean[-1]:.4g}")

    figure = draw(_briefly(results), [x], [y], by=results.by, differences=results.differences)
    # The page itself has the title and the caption.
    figure.suptitle("")
    figure.supxlabel("")
    return _svg(figure, name, f"{y} over {cost_named(x).label}", "; ".join(ends))


def _briefly(results: Results) -> Results:
    """Return the results with shortened labels, still distinct."""
    brief = dict(zip(results.variants(), shortened([*results.variants()]), strict=True))
    return replace(results, runs=[replace(run, label=brief[run.label]) for run in results.runs])


def _svg(figure: Figure, name: str, title: str, description: str) -> Markup:
    """Return a picture as inline SVG, with ids that are unique on the page and the page's colours."""
    svg = BytesIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    root = ElementTree.fromstring(svg.getvalue())
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
    for number, (tag, words) in enumerate((("title", title), ("desc", description))):
        head = ElementTree.Element(tag, {"id": f"{name}-{tag[0]}"})
        head.text = _printable(words)
        root.insert(number, head)
    return Markup(ElementTree.tostring(root, encoding="unicode", short_empty_elements=False))


def _own(key: str, value: str, name: str) -> str:
    """Return an attribute's value with unique ids and the page's colours."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    value = value.replace("url(#", f"url(#{name}-")
    for colour, own in _OWN_COLOURS.items():
        value = value.replace(colour, own)
    return value


def _comparisons(
    results: Results,
    xs: Sequence[str],
    ys: Sequence[str],
    targets: Mapping[str, float],
    asked: bool,
    of_several: bool,
) -> list[ComparisonTable]:
    made = []
    # Where a single variant ended is in the table of ends.
    for y in ys if asked or len(results.variants()) > 1 else ():
        for x in xs:
            try:
                made.append(budget_comparison(results, x, y, common_budget(results, x)))
            except ValueError:
                if asked:
                    raise
    made += [
        target_comparison(results, x, y, value)
        for y, value in targets.items()
        if not of_several or all(run.records(y) for run in results.runs)
        for x in xs
    ]
    of = f"{results.title}: " if of_several else ""
    return [replace(one, title=f"{of}{one.title}") for one in made]


def _links(results: Results, network: Network) -> dict[str, Any]:
    crossed = {label: _crossed(list(seeds.values())) for label, seeds in results.variants().items()}
    rows = [
        (label, link, f"{one.messages:,.0f}", size(one.nominal_bits, "bit"), size(one.payload_bytes))
        for label, links in crossed.items()
        for link, one in links.items()
    ]
    if not rows:
        return {}
    shapes: dict[str, tuple[str, DrawnNetwork | None]] = {}
    for label, seeds in results.variants().items():
        graph = network(next(iter(seeds.values())))
        if crossed[label]:
            shapes.setdefault(repr((sorted(crossed[label]), graph)), (label, graph))
    drawings: list[tuple[Markup, str]] = []
    for number, (label, graph) in enumerate([*shapes.values()][:_MOST_DRAWINGS], start=1):
        drawn = {
            f"{label}: traffic between kinds of nodes.": draw_links(crossed[label]),
            f"{label}: the network, and each link's share.": graph and draw_network(graph, crossed[label]),
        }
        for words, made in drawn.items():
            if made:
                name = f"links-{number}-{len(drawings)}"
                drawings.append((_svg(made.figure, name, made.title, made.description), words))
    table = ComparisonTable(
        "Traffic of the whole run, mean over seeds: nominal as the paper counts it, payload as it was sent",
        ("variant", "link", "messages", "nominal", "payload"),
        (False, False, True, True, True),
        rows,
    )
    more = max(0, len(shapes) - _MOST_DRAWINGS)
    return {"crossed": table, "drawings": drawings, "more_drawings": more}


def _crossed(runs: Sequence[RecordedRun]) -> dict[str, Crossed]:
    """Return each link's total traffic, mean over the runs; skip entries that are not numbers."""
    found: dict[str, list[Crossed]] = {}
    for run in runs:
        links = run.rounds[-1].get("by_link")
        for link, traffic in (links if isinstance(links, dict) else {}).items():
            if isinstance(traffic, dict):
                counts = [traffic.get(key, 0) for key in _COUNTS]
                if all(isinstance(count, int | float) and isfinite(count) for count in counts):
                    found.setdefault(_printable(link), []).append(Crossed(*map(float, counts)))
    return {
        link: Crossed(*(sum(getattr(one, key) for one in ones) / len(runs) for key in _COUNTS))
        for link, ones in found.items()
    }


def _lost(results: Results) -> ComparisonTable:
    rows = []
    for label, seeds in results.variants().items():
        records = [record for run in seeds.values() for record in run.rounds]
        reasons, sent = lost_replies(records), sum(record.get("sent", 0) for record in records)
        of = f"{sum(reasons.values()) / sent:.2%} of {sent:,}" if sent else "n/a"
        rows += [(label, reason, f"{count:,}", of) for reason, count in sorted(reasons.items())]
    return ComparisonTable(
        "Lost replies by reason, over all rounds and seeds",
        ("variant", "reason", "replies", "lost for any reason, of all requested"),
        (False, False, True, True),
        rows,
    )


def _settings(results: Results) -> tuple[dict[str, str], ComparisonTable]:
    """Return the settings that all runs share, and a table of those that differ."""
    first, *others = [shown_settings(run.config) for run in results.runs]
    keys = sorted({str(key) for one in (first, *others) for key in one})
    shared = {
        key: first[key]
        for key in keys
        if key in first and all(key in one and one[key] == first[key] for one in others)
    }
    differing = [key for key in keys if key not in shared and key not in ("seed", "output-dir")]
    rows = [
        (
            label,
            *(_values([shown_settings(run.config).get(key) for run in seeds.values()]) for key in differing),
        )
        for label, seeds in results.variants().items()
    ]
    heads = ("variant", *differing)
    table = ComparisonTable("Settings by variant", heads, [False] * len(heads), rows)
    return {key: _shown(value) for key, value in shared.items()}, table


# Texts


def _app(run: RecordedRun) -> str:
    version = run.config.get("version")
    return f"{run.config.get('app', '?')}{f' {version}' if version else ''}"


def _machine(run: RecordedRun) -> tuple[str, str, str]:
    """Return code version, machine and engine of a run."""
    environment = _dict(run.config.get("environment"))
    packages, git = _dict(environment.get("packages")), _dict(environment.get("git"))
    code = [
        f"{name} {packages[name]}" for name in ("hedgerow", "flwr", "torch", "numpy") if packages.get(name)
    ]
    if git.get("commit"):
        code.insert(0, str(git["commit"])[:12] + (" with changes" if git.get("modified") else ""))
    where = [str(environment[key]) for key in ("cpu", "gpu", "platform") if environment.get(key)]
    if environment.get("python"):
        where.append(f"Python {environment['python']}")
    return (
        ", ".join(code) or "not recorded",
        ", ".join(where) or "not recorded",
        str(environment.get("engine") or "n/a"),
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _seeds(seeds: Iterable[int]) -> str:
    found = sorted(set(seeds))
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def _values(values: Sequence[Any]) -> str:
    return " / ".join(dict.fromkeys("" if value is None else _shown(value) for value in values))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
