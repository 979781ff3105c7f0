"""Redraw the tables and figures of the apps' RESULTS.md and README.md, and of README.md, from the files here.

    python results/redraw.py            # rewrites what differs; `make results`
    python results/redraw.py --check    # exits with 1 if a table differs; writes nothing

A page marks each place with two comments; the first one is one of

    results: summary sd-feel/fig3 --x sim-seconds --y loss --y accuracy --target accuracy=0.9
    results: table sd-feel/fig3 --x sim-seconds --y loss --target accuracy=0.9
    results: trials ceps/tuning --y loss --setting learning-rate
    results: plot sd-feel/fig3 figures/fig3 --y loss --y accuracy --log-x --differences
    results: claims sd-feel
    results: claims sd-feel --only R9 --only R10
    results: count sd-feel
    results: count
    results: file hsgd/work

``sd-feel/fig3`` is ``results/sd-feel/fig3.json``, which ``hedgerow export runs/fig3 --json`` wrote;
``hsgd/work`` is the table ``results/hsgd/work.md``, which a benchmark printed. ``count`` is the number of claims
with each verdict, of an app or of all.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hedgerow.sim.runs.compare import (
    Paired,
    at_budget,
    budget_table,
    common_budget,
    higher_is_better,
    paired_difference,
    paired_values,
    target_table,
    to_target,
)
from hedgerow.sim.runs.plot import draw, save
from hedgerow.sim.runs.results import RecordedRun, Results, load

HERE = Path(__file__).parent
ROOT = HERE.parent
_REGION = re.compile(r"(<!-- results: (.+?) -->\n).*?(<!-- end of results -->)", re.DOTALL)
# The verdicts, as the count of claims lists them.
VERDICTS = ("shown", "in part", "not shown", "reversed", "not decidable", "not run")
# Fewest seeds for an interval.
_FEWEST_SEEDS = 2
# Fewest seeds in which one method must reach a target, and the other must not, to decide a comparison.
_FEWEST_TO_MISS = 3


@cache
def results(name: str) -> Results:
    """Return the results in a file."""
    return load([HERE / f"{name}.json"])


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="results:", exit_on_error=False)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("summary", "table", "plot"):
        sub = kinds.add_parser(kind)
        sub.add_argument("name")
        if kind == "plot":
            sub.add_argument("out")
            sub.add_argument("--log-x", action="store_true")
            sub.add_argument("--log-y", action="store_true")
            sub.add_argument("--by", default=None)
            sub.add_argument("--differences", action=argparse.BooleanOptionalAction, default=None)
        else:
            sub.add_argument("--target", action="append", default=[])
        if kind == "table":
            sub.add_argument("--budget", default=None)
        elif kind == "summary":
            sub.add_argument("--only", action="append", default=[])
        sub.add_argument("--x", action="append")
        sub.add_argument("--y", action="append")
    sub = kinds.add_parser("claims")
    sub.add_argument("app")
    sub.add_argument("--only", action="append", default=[])
    kinds.add_parser("count").add_argument("app", nargs="?")
    kinds.add_parser("file").add_argument("name")
    tried = kinds.add_parser("trials")
    tried.add_argument("name")
    tried.add_argument("--y", required=True)
    tried.add_argument("--setting", action="append", required=True)
    return parser


def region(text: str, page: Path, *, write: bool) -> str:
    """Return the text between two comments of a page."""
    asked = _options().parse_args(shlex.split(text))
    if asked.kind == "claims":
        return claims_table(asked.app, asked.only)
    if asked.kind == "count":
        return count(asked.app)
    if asked.kind == "file":
        return (HERE / f"{asked.name}.md").read_text(encoding="utf-8")
    found = results(asked.name)
    if asked.kind == "trials":
        return trials(found, asked.y, asked.setting)
    xs, ys = asked.x or list(found.xs), asked.y or list(found.ys)
    if asked.kind == "plot":
        out = page.parent / asked.out
        if write:
            by = found.by if asked.by is None else asked.by
            differences = found.differences if asked.differences is None else asked.differences
            figure = draw(found, xs, ys, log_x=asked.log_x, log_y=asked.log_y, by=by, differences=differences)
            save(figure, out.with_name(f"{out.name}.svg"))
        return f"![{found.title}]({asked.out}.svg)\n"
    if asked.kind == "summary":
        return summary(found, xs, ys, [_pair(target) for target in asked.target], asked.only)
    budget = None if asked.budget is None else _pair(asked.budget)
    parts = [
        budget_table(found, x, y, budget[1] if budget and budget[0] == x else common_budget(found, x))
        for x in xs
        for y in ys
    ]
    parts += [target_table(found, x, *_pair(target)) for target in asked.target for x in xs]
    return "\n".join(re.sub(r"^### (.*)$", r"**\1**", part, flags=re.MULTILINE) + "\n" for part in parts)


def summary(
    found: Results,
    xs: Sequence[str],
    ys: Sequence[str],
    targets: Sequence[tuple[str, float]],
    only: Sequence[str],
) -> str:
    """Return a table of each variant's final metrics and costs, and its costs to targets.

    A cost to a target is a mean only if every run reached it; a failed run did not, and is in no mean.
    ``only`` are prefixes of labels. The cell of a metric that a variant does not record is empty; ValueError
    if no variant records it.
    """
    for y in ys:
        if not any(_last([run], y) for run in found.runs):
            raise ValueError(f"y = {y!r}: no run of {found.name} records it")
    aims = [(x, y, value) for y, value in targets for x in xs]
    relations = {y: ">=" if higher_is_better(y) else "<=" for y, _ in targets}
    heads = [
        "variant",
        "seeds",
        *(f"{y} at the end" for y in ys),
        *(f"{x} at the end" for x in xs),
        *(f"{x} to {y} {relations[y]} {value:g}" for x, y, value in aims),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for label, seeds in found.variants().items():
        if only and not label.startswith(tuple(only)):
            continue
        runs = list(seeds.values())
        failed = found.started(label) - len(runs)
        cells = [label, f"{len(runs)}, {failed} failed" if failed else str(len(runs))]
        cells += [_last(runs, y) for y in ys]
        cells += [_spread([run.costs(x)[-1] for run in runs]) for x in xs]
        for x, y, value in aims:
            reached = [cost for run in runs if (cost := to_target(run, x, y, value)) is not None]
            if len(reached) == found.started(label):
                cells.append(_spread(reached))
            else:
                cells.append(f"reached by {len(reached)}" if reached else "not reached")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def trials(found: Results, y: str, settings: Sequence[str]) -> str:
    """Return a table of the final ``y`` of each trial of some settings; the best of a row is bold."""
    tried = tuple(f"{setting}=" for setting in settings)
    rows: dict[str, dict[str, float]] = {}
    # Runs that diverged failed and are missing.
    most = max(len(seeds) for seeds in found.variants().values())
    for label, seeds in found.variants().items():
        parts = label.split(", ")
        value = ", ".join(part.partition("=")[2] for part in parts if part.startswith(tried))
        row = rows.setdefault(", ".join(part for part in parts if not part.startswith(tried)), {})
        if len(seeds) == most and all(run.finished for run in seeds.values()):
            row[value] = fmean(run.series("rounds", y)[-1].y for run in seeds.values())
    columns = sorted({value for row in rows.values() for value in row}, key=_numbers)
    best = {label: (min, max)[higher_is_better(y)](row, key=row.__getitem__) for label, row in rows.items()}
    lines = [f"| {', '.join(settings)} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for label, row in rows.items():
        cells = [
            "diverges"
            if value not in row
            else f"**{row[value]:.4g}**"
            if value == best[label]
            else f"{row[value]:.4g}"
            for value in columns
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _numbers(value: str) -> list[float]:
    return [float(part) for part in value.split(", ")]


def _last(runs: Sequence[RecordedRun], y: str) -> str:
    """Return a metric's final value; empty if runs do not have it."""
    values = [run.value_at(y, run.rounds[-1]["round"]) for run in runs]
    return _spread([value for value in values if value is not None]) if None not in values else ""


def _spread(values: Sequence[float]) -> str:
    """Return mean ± sample standard deviation, or the common value if all are equal."""
    if max(values) == min(values):
        return f"{values[0]:,.4g}" if abs(values[0]) < 1e4 else f"{values[0]:,.0f}"
    if abs(fmean(values)) >= 1e4:
        return f"{fmean(values):,.0f} ± {stdev(values):,.0f}"
    return f"{fmean(values):.4g} ± {stdev(values):.2g}"


def _pair(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


@dataclass(frozen=True)
class Finding:
    """One comparison behind a claim: the result, and whether it agrees with the paper."""

    text: str
    verdict: str


def finding(app: str, claim: Mapping[str, Any], test: Mapping[str, Any]) -> Finding:
    """Compare two variants of a figure, paired by seed; report if one was not run.

    ``expect`` is the paper's statement about ``left`` against ``right``: ``lower``, ``higher``, or ``level``,
    within ``margin``. The compared value is one of:

    - by default ``y`` at the last common evaluation (``paired_values``);
    - with ``at``, ``y`` at this cost ``x``, for ``right`` at ``right-at`` if given;
    - with ``target``, the cost ``x`` at which ``y`` reached it;
    - with ``over``, the mean of ``y`` in this last share of the common cost, for metrics that fluctuate.

    ``right`` is multiplied by ``factor`` first. With ``published``, a number, ``left`` is compared with that
    number instead of with another variant.
    """
    figure = test.get("figure", claim["figure"])
    if not (HERE / app / f"{figure}.json").is_file():
        return Finding(f"no runs of `figures/{figure}.toml` yet", "not run")
    found = results(f"{app}/{figure}")
    variants, x, y = found.variants(), test["x"], test["y"]
    names = test["left"], test.get("right", test["left"])
    left, right = (_variant(variants, name) for name in names)
    if missing := [name for name, runs in zip(names, (left, right), strict=True) if not runs]:
        return Finding(f"no run of {', '.join(missing)} finished", "not decidable")
    # The runs that did not fail are not a random sample of all.
    if failed := [
        f"{found.started(label) - len(runs)} of {found.started(label)} runs of {name}"
        for name, runs in zip(names, (left, right), strict=True)
        if len(runs) < found.started(label := next(iter(runs.values())).label)
    ]:
        return Finding(f"{' and '.join(dict.fromkeys(failed))} failed", "not decidable")
    if "target" in test:
        values = [_by_seed(runs, lambda run: to_target(run, x, y, test["target"])) for runs in (left, right)]
        what = f"{x} to {y} {test['target']:g}"
    elif "at" in test:
        ats = test["at"], test.get("right-at", test["at"])
        values = [
            _by_seed(runs, lambda run, at=at: _value(at_budget(run, x, at, y)))
            for runs, at in zip((left, right), ats, strict=True)
        ]
        what = f"{y} at {x} {' and '.join(f'{at:.4g}' for at in dict.fromkeys(ats))}"
    elif "over" in test:
        end = paired_values(left, right, x, y)[-1][0]
        begin = (1 - test["over"]) * end
        values = [_by_seed(runs, lambda run: _mean(run, x, y, begin, end)) for runs in (left, right)]
        what = f"mean {y} over {x} {begin:.4g} to {end:.4g}"
    else:
        at, *values = paired_values(left, right, x, y)[-1]
        what = f"{y} at {x} {at:.4g}"
    missed = [
        name for name, known, runs in zip(names, values, (left, right), strict=True) if len(known) < len(runs)
    ]
    if missed and "target" in test and _only_one(left, right, *values, x):
        reached, other = names if values[0] else names[::-1]
        cost = fmean(next(filter(None, values)).values())
        cheaper = "lower" if values[0] else "higher"
        verdict = {cheaper: "shown", "level": "not shown"}.get(test["expect"], "reversed")
        return Finding(
            f"{what}: {reached} {cost:.4g}, {other} never, though it spent as much, {len(left)} seeds",
            verdict,
        )
    if missed:
        return Finding(f"{what}: not reached by every run of {', '.join(missed)}", "not decidable")
    if "published" in test:
        names, values[1] = (names[0], "published"), dict.fromkeys(values[0], test["published"])
    factor = test.get("factor", 1.0)
    values[1] = {seed: factor * value for seed, value in values[1].items()}
    paired = paired_difference(*values)
    text = (
        f"{what}: {names[0]} {fmean(values[0].values()):.4g}, "
        f"{'' if factor == 1 else f'{factor:g} times '}{names[1]} {fmean(values[1].values()):.4g} "
        f"({_interval(paired)})"
    )
    return Finding(text, judge(paired, test["expect"], test.get("margin", 0.0)))


def _only_one(
    left: Mapping[int, Any],
    right: Mapping[int, Any],
    reached: Mapping[int, float],
    also: Mapping[int, float],
    x: str,
) -> bool:
    """Return whether one side reached a target in each seed, and the other in none at the same cost."""
    if bool(reached) == bool(also) or left.keys() != right.keys() or len(left) < _FEWEST_TO_MISS:
        return False
    costs, others = (reached, right) if reached else (also, left)
    return costs.keys() == others.keys() and all(others[s].costs(x)[-1] >= costs[s] for s in costs)


def _variant(variants: Mapping[str, Any], name: str) -> Any:
    """Return the runs of a label, or of the only label that continues it with a setting."""
    if name in variants:
        return variants[name]
    labels = [label for label in variants if label.startswith(f"{name}, ")]
    return variants[labels[0]] if len(labels) == 1 else {}


def _by_seed(runs: Mapping[int, Any], of: Any) -> dict[int, float]:
    return {seed: value for seed, run in runs.items() if (value := of(run)) is not None}


def _value(point: Any) -> float | None:
    return None if point is None else point.y


def _mean(run: Any, x: str, y: str, begin: float, end: float) -> float | None:
    """Return the mean of the evaluations between two costs, inclusive; None if there are none."""
    found = [point.y for point in run.series(x, y) if begin <= point.x <= end]
    return fmean(found) if found else None


def _interval(paired: Paired) -> str:
    if paired.seeds < _FEWEST_SEEDS:
        return f"{paired.mean:+.4g}, one seed"
    return f"{paired.mean:+.4g} [{paired.low:+.4g}, {paired.high:+.4g}], {paired.seeds} seeds"


def judge(paired: Paired, expect: str, margin: float = 0.0) -> str:
    """Return ``shown``, ``reversed``, ``not shown``, or ``not decidable`` for fewer than two seeds."""
    if paired.seeds < _FEWEST_SEEDS:
        return "not decidable"
    if expect == "level":
        if -margin <= paired.low and paired.high <= margin:
            return "shown"
        return "reversed" if paired.low > margin or paired.high < -margin else "not shown"
    sign = {"lower": -1, "higher": 1}[expect]
    ends = sorted((sign * paired.low, sign * paired.high))
    return "shown" if ends[0] > 0 else "reversed" if ends[1] < 0 else "not shown"


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict of several comparisons."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return "in part: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def claims_table(app: str, only: Sequence[str] = ()) -> str:
    """Return the table of an app's claims, or of some by their ids, from ``claims/<app>.toml``.

    In that file ``say`` maps labels to the words that replace them, and ``size`` figures to their runs' size.
    """
    file = tomllib.loads((HERE / "claims" / f"{app}.toml").read_text(encoding="utf-8"))
    lines = ["| | the paper's claim | verdict | what was found | source |", "|---|---|---|---|---|"]
    for claim in file["claim"]:
        if only and claim["id"] not in only:
            continue
        tests = claim.get("test", [])
        findings = [finding(app, claim, test) for test in tests]
        verdict = claim.get("verdict") or overall([found.verdict for found in findings])
        texts = (_of_figure(claim, *pair) for pair in zip(tests, findings, strict=True))
        numbers = "; ".join([*dict.fromkeys(texts), *([claim["note"]] if "note" in claim else [])])
        for label, words in file.get("say", {}).items():
            numbers = numbers.replace(label, words)
        source = _source(claim, file.get("size", {}))
        lines.append(f"| {claim['id']} | {claim['paper']} | {verdict} | {numbers} | {source} |")
    return "\n".join(lines) + "\n"


def _of_figure(claim: Mapping[str, Any], test: Mapping[str, Any], found: Finding) -> str:
    """Return a finding, with the figure's name if it is not the claim's first figure."""
    figure = test.get("figure", claim["figure"])
    named = figure == claim["figure"] or found.verdict == "not run"
    return found.text if named else f"{figure}: {found.text}"


def _source(claim: Mapping[str, Any], sizes: Mapping[str, str]) -> str:
    """Return the sweep files behind a claim, each with its size from the claims file."""
    if "figure" in claim:
        figures = dict.fromkeys(test.get("figure", claim["figure"]) for test in claim.get("test", [{}]))
        return ", ".join(
            f"`figures/{figure}.toml`" + (f" ({sizes[figure]})" if figure in sizes else "")
            for figure in figures
        )
    return claim.get("from", "")


def count(app: str | None = None) -> str:
    """Return how many claims of an app, or of all apps, have each verdict; a part is left out if none has it."""
    apps = [app] if app else sorted(file.stem for file in (HERE / "claims").glob("*.toml"))
    rows = [row for one in apps for row in claims_table(one).splitlines()[2:]]
    # What follows the colon is of the claim's comparisons.
    found = Counter(row.split(" | ")[2].partition(":")[0] for row in rows)
    first, *others = VERDICTS
    parts = [f"{found[first]} of {len(rows)} claims {first}"]
    parts += [f"{found[verdict]} {verdict}" for verdict in others if found[verdict]]
    return ", ".join(parts) + ".\n"


def pages() -> list[Path]:
    """Return the files that have regions."""
    return [
        ROOT / "README.md",
        *sorted(ROOT.glob("flower_apps/*/README.md")),
        *sorted(ROOT.glob("flower_apps/*/RESULTS.md")),
    ]


def redraw(*, check: bool) -> list[Path]:
    """Update the pages that differ from the results, or only find them with ``check``."""
    changed = []
    for page in pages():
        before = page.read_text(encoding="utf-8")
        after = _REGION.sub(
            lambda found, page=page: f"{found[1]}\n{region(found[2], page, write=not check)}\n{found[3]}",
            before,
        )
        if after != before:
            changed.append(page)
            if not check:
                page.write_text(after, encoding="utf-8")
    return changed


def main() -> int:
    """Redraw or check the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    changed = redraw(check=check)
    for page in changed:
        print(f"{page.relative_to(ROOT)} {'differs from' if check else 'rewritten from'} results/")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
