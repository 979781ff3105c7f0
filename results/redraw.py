"""Redraw the tables and figures of the apps' RESULTS.md and README.md, and of README.md, from the files here.

    python results/redraw.py            # rewrites what differs; `make results`
    python results/redraw.py --check    # exits with 1 if a table differs; writes nothing

A page marks each place with two comments; the first one is one of

    results: summary sd-feel/fig3 --x sim-seconds --y loss --y accuracy --target accuracy=0.9
    results: summary hsgd/fig4-p1 --target auc=0.9 --work mnist-5k
    results: table sd-feel/fig3 --x sim-seconds --y loss --target accuracy=0.9
    results: trials ceps/tuning --y loss --setting learning-rate
    results: trials hsgd/tuning --y loss --setting learning-rate --worst
    results: plot sd-feel/fig3 figures/fig3 --y loss --y accuracy --log-x --differences
    results: claims sd-feel
    results: claims sd-feel --only R9 --only R10
    results: count sd-feel
    results: count
    results: file hsgd/work

``sd-feel/fig3`` is ``results/sd-feel/fig3.json``, which ``hedgerow export runs/fig3 --json`` wrote;
``hsgd/work`` is the table ``results/hsgd/work.md``, which a benchmark printed. ``count`` is the number of
claims with each verdict, of an app or of all. ``--work`` is the table of a device's FLOPs and memory until
a target is reached.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
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
from hedgerow.sim.runs.folder import lost_replies
from hedgerow.sim.runs.plot import draw, save
from hedgerow.sim.runs.results import RecordedRun, Results, load
from hedgerow.sim.runs.sweep_file import read_sweep
from hedgerow.strategies.sd_feel.theory import latency, preset
from hedgerow.wire.clock import Compute

HERE = Path(__file__).parent
ROOT = HERE.parent
_REGION = re.compile(r"(<!-- results: (.+?) -->\n).*?(<!-- end of results -->)", re.DOTALL)
# The verdicts, as the count of claims lists them.
VERDICTS = ("shown", "in part", "not shown", "reversed", "undecidable by construction", "not run")
# Most lines of a cell that are in sight.
_OPEN = 2
# Fewest seeds for an interval.
_FEWEST_SEEDS = 2
# Fewest seeds in which one method must reach a target, and the other must not, to decide a comparison.
_FEWEST_TO_MISS = 3
# A run ended at chance if a metric is at most this far from that of a constant guess.
_NEAR_CHANCE = 0.01


@cache
def results(name: str) -> Results:
    """Return the results in a file."""
    return load([HERE / f"{name}.json"])


@cache
def claims(app: str) -> Mapping[str, Any]:
    """Return the content of ``claims/<app>.toml``; empty without that file."""
    file = HERE / "claims" / f"{app}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


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
            sub.add_argument("--work", default=None)
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
    tried.add_argument("--worst", action="store_true")
    return parser


def region(text: str, page: Path, *, write: bool) -> str:
    """Return the text between two comments of a page."""
    asked = _options().parse_args(shlex.split(text))
    if asked.kind in ("claims", "count"):
        return count(asked.app) if asked.kind == "count" else _claims(asked.app, asked.only)
    if asked.kind == "file":
        return (HERE / f"{asked.name}.md").read_text(encoding="utf-8")
    found = results(asked.name)
    if asked.kind == "trials":
        return trials(found, asked.y, asked.setting, _labels(asked.name), worst=asked.worst)
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
        targets = [_pair(target) for target in asked.target]
        data = asked.work
        return work(found, targets, data) if data else summary(found, xs, ys, targets, asked.only)
    budget = None if asked.budget is None else _pair(asked.budget)
    parts = [
        budget_table(found, x, y, budget[1] if budget and budget[0] == x else common_budget(found, x))
        for x in xs
        for y in ys
    ]
    parts += [target_table(found, x, *_pair(target)) for target in asked.target for x in xs]
    return "\n".join(re.sub(r"^### (.*)$", r"**\1**", part, flags=re.MULTILINE) + "\n" for part in parts)


def _labels(name: str) -> list[str]:
    """Return the labels of the sweep file of ``app/figure``."""
    app, _, figure = name.partition("/")
    sweep = read_sweep(ROOT / "flower_apps" / app / "figures" / f"{figure}.toml")
    return [variant.label for variant in sweep.variants]


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
        *(f"{in_millions(x)[0]} at the end" for x in xs),
        *(f"{in_millions(x)[0]} to {y} {relations[y]} {value:g}" for x, y, value in aims),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for label, seeds in found.variants().items():
        if only and not label.startswith(tuple(only)):
            continue
        runs = list(seeds.values())
        failed = found.started(label) - len(runs)
        cells = [label, f"{len(runs)}, {failed} failed" if failed else str(len(runs))]
        cells += [_last(runs, y) for y in ys]
        cells += [_spread([run.costs(x)[-1] / in_millions(x)[1] for run in runs]) for x in xs]
        for x, y, value in aims:
            costs = [to_target(run, x, y, value) for run in runs]
            reached = [cost / in_millions(x)[1] for cost in costs if cost is not None]
            if len(reached) == found.started(label):
                cells.append(_spread(reached))
            else:
                cells.append(f"reached by {len(reached)}" if reached else "not reached")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def in_millions(x: str) -> tuple[str, float]:
    """Return a cost's name in tables and what it is divided by: a million for bits and bytes."""
    name = re.sub(r"\bbits\b", "Mbit", re.sub(r"\bbytes\b", "MB", x))
    return name, 1.0 if name == x else 1e6


def work(found: Results, targets: Sequence[tuple[str, float]], data: str) -> str:
    """Return a table of a device's FLOPs and memory until each variant of HSGD's app reached targets.

    They are those of an iteration in ``hsgd/work.md`` times the iterations, as in the paper's Table III.
    """
    rows = (line.strip("| ").split(" | ") for line in (HERE / "hsgd/work.md").read_text("utf-8").splitlines())
    step, exchange, memory = next(map(float, row[3:6]) for row in rows if row[:2] == [data, "device"])
    heads = [f"{what} to {y} {value:g}" for y, value in targets for what in ("iterations", "MFLOP", "MB")]
    lines = ["| variant | seeds | " + " | ".join(heads) + " |", "|---|" + "---:|" * (1 + len(heads))]
    for label, seeds in found.variants().items():
        cells = [label, str(found.started(label))]
        for y, value in targets:
            reached = [to_target(run, "iterations", y, value) for run in seeds.values()]
            known = [cost for cost in reached if cost is not None]
            if len(known) < found.started(label):
                cells += [f"reached by {len(known)}", "", ""]
                continue
            interval = next(iter(seeds.values())).settings["local-interval"]
            each = (1.0, step + exchange / interval, memory)
            cells += [_spread([one * cost for cost in known]) for one in each]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def trials(
    found: Results, y: str, settings: Sequence[str], labels: Sequence[str] = (), *, worst: bool = False
) -> str:
    """Return a table of the final ``y`` of each trial of some settings; the best of a row is bold.

    Values are means over seeds or, with ``worst``, those of the worst seed. With ``labels``, those of the
    sweep file, a trial that is not among them is empty; another one without all its runs "diverges".
    """
    tried = tuple(f"{setting}=" for setting in settings)
    higher = higher_is_better(y)
    of_seeds = fmean if not worst else min if higher else max
    # Runs that diverged failed and are missing.
    most = max(len(seeds) for seeds in found.variants().values())
    rows: dict[str, dict[str, float | None]] = {}
    for label in dict.fromkeys((*labels, *found.variants())):
        seeds = found.variants().get(label, {})
        parts = label.split(", ")
        value = ", ".join(part.partition("=")[2] for part in parts if part.startswith(tried))
        row = rows.setdefault(", ".join(part for part in parts if not part.startswith(tried)), {})
        done = len(seeds) == most and all(run.finished for run in seeds.values())
        row[value] = of_seeds(run.series("rounds", y)[-1].y for run in seeds.values()) if done else None
    columns = sorted({value for row in rows.values() for value in row}, key=_numbers)
    lines = [f"| {', '.join(settings)} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        ends = {value: end for value, end in row.items() if end is not None}
        best = (min, max)[higher](ends, key=ends.__getitem__)
        cells = [
            ("" if labels and value not in row else "diverges")
            if value not in ends
            else f"**{ends[value]:.4g}**"
            if value == best
            else f"{ends[value]:.4g}"
            for value in columns
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
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
        return _rounded(values[0], 4)
    return f"{_rounded(fmean(values), 4)} ± {_rounded(stdev(values), 2)}"


def _rounded(value: float, digits: int) -> str:
    """Return a number with so many significant digits, without an exponent if it is large."""
    return f"{float(f'{value:.{digits}g}'):,.12g}"


def _pair(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


@dataclass(frozen=True)
class Finding:
    """One comparison behind a claim: the result, whether it agrees with the paper, and the runs behind it."""

    text: str
    verdict: str
    runs: Sequence[RecordedRun] = ()


@dataclass(frozen=True)
class Side:
    """One variant of a comparison: its runs that are evidence, by seed, and what is said of the others."""

    name: str
    runs: Mapping[int, RecordedRun]
    left_out: Sequence[str]


def no_evidence(run: RecordedRun, chance: Mapping[str, float]) -> str:
    """Return why a run that did not fail is no evidence: "died", "lost replies", or "" if it is evidence.

    A run died if its last loss is no number, or if it ended at chance: the last value of a metric is within
    0.01 of that of a constant guess, as ``chance`` has it, such as ``{"auc": 0.5}``. A metric that a run does
    not record says nothing. A run lost replies if a guard refused one: the paper has no guards.
    """
    ends = {name: run.value_at(name, run.rounds[-1]["round"]) for name in ("loss", *chance)}
    known = {name: value for name, value in ends.items() if value is not None}
    at_chance = any(abs(known[name] - chance[name]) <= _NEAR_CHANCE for name in chance if name in known)
    if at_chance or not all(map(isfinite, known.values())):
        return "died"
    return "lost replies" if lost_replies(run.rounds) else ""


def side(found: Results, name: str, chance: Mapping[str, float]) -> Side:
    """Return a variant's runs that are evidence; runs that failed are counted as runs that died."""
    runs = _variant(found.variants(), name)
    started = found.started(next(iter(runs.values())).label) if runs else 0
    reasons = {seed: no_evidence(run, chance) for seed, run in runs.items()}
    counts = Counter(reasons.values()) + Counter(died=started - len(runs))
    left_out = [
        f"{counts[why]} of {started} runs of {name} {why}" for why in ("died", "lost replies") if counts[why]
    ]
    return Side(name, {seed: run for seed, run in runs.items() if not reasons[seed]}, left_out)


def expanded(test: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return one comparison for each entry of a list in ``at``, ``target``, ``share`` or ``clock``."""
    listed = next(
        (key for key in ("at", "target", "share", "clock") if isinstance(test.get(key), list)), None
    )
    return (
        [test]
        if listed is None
        else [one for value in test[listed] for one in expanded({**test, listed: value})]
    )


def comparisons(claim: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return all comparisons behind a claim."""
    return [one for test in claim.get("test", []) for one in expanded(test)]


def finding(app: str, claim: Mapping[str, Any], test: Mapping[str, Any]) -> Finding:
    """Compare two variants of a figure, paired by seed, without the runs that died.

    ``expect`` is the paper's statement about ``left`` against ``right``: ``lower``, ``higher``, or ``level``,
    within ``margin``, or ``only``: ``left`` reaches the target in every run and ``right`` in none. A claim is
    only reversed if its ``reversed`` says why that is not our set-up. The compared value is one of:

    - by default ``y`` at the last common evaluation (``paired_values``);
    - with ``at``, ``y`` at this cost ``x``, for ``right`` at ``right-at`` if given; ``"end"`` is each run's
      own end;
    - with ``target``, the cost ``x`` at which ``y`` reached it; with ``share``, the target is this share of
      the best plateau;
    - with ``over``, the mean of ``y`` in this last share of the common cost, for metrics that fluctuate.

    ``right`` is multiplied by ``factor`` first. With ``published``, a number, ``left`` is compared with that
    number instead of with another variant. With ``than``, two labels, the difference of ``left`` and
    ``right`` is compared with the difference of these two. ``clock`` is that of ``retimed``, ``compute`` the
    factor of ``computing``.
    """
    figure = test.get("figure", claim["figure"])
    if not (HERE / app / f"{figure}.json").is_file():
        return Finding(f"no runs of `figures/{figure}.toml` yet", "not run")
    found, chance = results(f"{app}/{figure}"), claims(app).get("chance", {})
    names = [test["left"], test.get("right", test["left"]), *test.get("than", ())]
    sides = [side(found, name, chance) for name in names]
    beside = "".join(f"; {said}" for said in dict.fromkeys(said for one in sides for said in one.left_out))
    seeds = [seed for seed in sides[0].runs if all(seed in one.runs for one in sides)]
    if len(seeds) < _FEWEST_SEEDS:
        return Finding(f"seeds to compare: {len(seeds)}{beside}", "not run")
    runs = [
        {
            seed: computing(retimed(one.runs[seed], test.get("clock")), test.get("compute", 1.0))
            for seed in seeds
        }
        for one in sides
    ]
    used = [run for one in runs for run in one.values()]
    if lacking := _without(names, runs, test["y"]):
        return Finding(lacking, "not run")
    if "share" in test:
        test = {**test, "target": test["share"] * plateau(found, test["y"], chance)}
    what, values = _compared(runs, test)
    if "compute" in test:
        what += f" with {test['compute']:g} times t_c"
    if "clock" in test:
        what += f" by {_clock_name(test['clock'])}"
    if "target" in test and higher_is_better(test["y"]):
        best = plateau(found, test["y"], chance)
        what += f" ({test['target'] / best:.0%} of the best plateau)"
    missed = _missed(names, runs, values, test)
    if "target" in test:
        million = in_millions(test["x"])[1]
        values = [{seed: cost / million for seed, cost in one.items()} for one in values]
    text, verdict = missed or _difference(names, values, test)
    if verdict == "reversed" and "reversed" not in claim:
        text, verdict = f"{text}, on the other side", "not shown"
    return Finding(f"{what}: {text}{beside}", verdict, used)


def _without(names: Sequence[str], runs: Sequence[Mapping[int, RecordedRun]], y: str) -> str:
    """Return how many runs of each side recorded a metric, where not all did; else nothing."""
    counts = [
        (name, sum(run.records(y) for run in one.values()), len(one))
        for name, one in zip(names, runs, strict=True)
    ]
    return ", ".join(
        f"{y} is in {some} of {every} runs of {name}" for name, some, every in counts if some < every
    )


def _missed(
    names: Sequence[str],
    runs: Sequence[Mapping[int, RecordedRun]],
    values: Sequence[Mapping[int, float]],
    test: Mapping[str, Any],
) -> tuple[str, str] | None:
    """Return the text and verdict if not every run reached the target; None if all did."""
    seeds = len(runs[0])
    if all(len(known) == seeds for known in values) and test["expect"] != "only":
        return None
    if not _only_one(runs[0], runs[1], values[0], values[1], test["x"]):
        counts = (
            f"{len(known)} of {seeds} runs of {name}" for name, known in zip(names, values, strict=True)
        )
        both = test["expect"] == "only" and all(len(known) == seeds for known in values)
        return f"reached by {' and '.join(counts)}", "reversed" if both else "not shown"
    reached, other = names if values[0] else names[::-1]
    cost = fmean((values[0] or values[1]).values())
    cheaper = "lower" if values[0] else "higher"
    agrees = (cheaper, "only") if values[0] else (cheaper,)
    verdict = (
        "shown" if test["expect"] in agrees else "not shown" if test["expect"] == "level" else "reversed"
    )
    cost /= in_millions(test["x"])[1]
    return f"{reached} {cost:.4g}, {other} never, though it spent as much, {seeds} seeds", verdict


def _difference(
    names: Sequence[str], values: Sequence[Mapping[int, float]], test: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the text and verdict of the paired difference of two sides, or of two differences."""
    left, right, *than = values
    ours, theirs = names[:2]
    if "published" in test:
        theirs, right = "published", dict.fromkeys(left, test["published"])
    factor = test.get("factor", 1.0)
    right = {seed: factor * value for seed, value in right.items()}
    if than:
        left = {seed: left[seed] - right[seed] for seed in left}
        right = {seed: than[0][seed] - than[1][seed] for seed in left}
        ours, theirs = f"{ours} less {theirs}", f"{names[2]} less {names[3]}"
    paired = paired_difference(left, right)
    text = (
        f"{ours} {fmean(left.values()):.4g}, {'' if factor == 1 else f'{factor:g} times '}{theirs} "
        f"{fmean(right.values()):.4g} ({_interval(paired)})"
    )
    return text, judge(paired, test["expect"], test.get("margin", 0.0))


def _compared(
    runs: Sequence[Mapping[int, RecordedRun]], test: Mapping[str, Any]
) -> tuple[str, list[dict[int, float]]]:
    """Return what is compared, in words, and its values of each side by seed."""
    x, y = test["x"], test["y"]
    if "target" in test:
        values = [_by_seed(one, lambda run: to_target(run, x, y, test["target"])) for one in runs]
        return f"{in_millions(x)[0]} to {y} {test['target']:g}", values
    if test.get("at") == "end":
        return f"{y} at the end", [
            _by_seed(one, lambda run: run.value_at(y, run.rounds[-1]["round"])) for one in runs
        ]
    if "at" in test:
        ats = [test["at"], test.get("right-at", test["at"])] * (len(runs) // 2)
        values = [
            _by_seed(one, lambda run, at=at: _value(at_budget(run, x, at, y)))
            for one, at in zip(runs, ats, strict=True)
        ]
        return f"{y} at {x} {' and '.join(f'{at:.4g}' for at in dict.fromkeys(ats))}", values
    end, *values = paired_values(runs[0], runs[1], x, y)[-1]
    if "over" not in test:
        return f"{y} at {x} {end:.4g}", values
    begin = (1 - test["over"]) * end
    values = [_by_seed(one, lambda run: _mean(run, x, y, begin, end)) for one in runs]
    return f"mean {y} over {x} {begin:.4g} to {end:.4g}", values


def plateau(found: Results, y: str, chance: Mapping[str, float]) -> float:
    """Return the highest mean of a score over the last quarter of the iterations, of a figure's variants."""

    def late(run: RecordedRun) -> float:
        points = run.series("iterations", y)
        return fmean(point.y for point in points if point.x >= 0.75 * points[-1].x)

    sides = (side(found, label, chance) for label in found.variants())
    return max(fmean(map(late, one.runs.values())) for one in sides if one.runs)


def retimed(run: RecordedRun, clock: str | float | None) -> RecordedRun:
    """Return a run with the simulated seconds of another clock of Sun et al.'s latency model.

    ``clock`` is a preset of ``theory.preset``, or a number: the paper's rates, and an upload that takes this
    many times as long as a local iteration. None changes nothing.
    """
    if clock is None:
        return run
    system = preset("paper-text" if isinstance(clock, float) else clock)
    if isinstance(clock, float):
        system = replace(system, compute=Compute(system.model_seconds("client->edge") / clock, 1.0))
    periods = {name: run.settings[name] for name in ("tau1", "tau2", "alpha")}
    rounds = [
        {
            **record,
            "sim_seconds": latency(run.settings["method"], system, K=int(record["iterations"]), **periods),
        }
        for record in run.rounds
    ]
    return replace(run, rounds=rounds)


def computing(run: RecordedRun, factor: float) -> RecordedRun:
    """Return a run of HSGD's app with the simulated seconds of ``factor`` times its t_c.

    Its settings have t_c, the seconds of an iteration, as ``compute-seconds``.
    """
    if factor == 1.0:
        return run
    more = (factor - 1.0) * run.settings["compute-seconds"]
    rounds = [
        {**record, "sim_seconds": record["sim_seconds"] + more * record["iterations"]}
        for record in run.rounds
    ]
    return replace(run, rounds=rounds)


def _clock_name(clock: str | float) -> str:
    return f"an upload taking {clock:g} iterations" if isinstance(clock, float) else f"the clock `{clock}`"


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
    return f"{paired.mean:+.4g} [{paired.low:+.4g}, {paired.high:+.4g}], {paired.seeds} seeds"


def judge(paired: Paired, expect: str, margin: float = 0.0) -> str:
    """Return ``shown``, ``reversed`` or ``not shown`` by the interval of a difference."""
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


def whole(app: str, claim: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a claim with the ``default`` entries of its file."""
    return {**claims(app).get("default", {}), **claim}


@cache
def judged(app: str) -> Sequence[tuple[Mapping[str, Any], Sequence[tuple[Mapping[str, Any], Finding]]]]:
    """Return an app's claims, each with its comparisons and what they found."""
    made = (whole(app, claim) for claim in claims(app)["claim"])
    return [(one, [(test, finding(app, one, test)) for test in comparisons(one)]) for one in made]


def claims_table(app: str, only: Sequence[str] = ()) -> str:
    """Return the table of an app's claims, or of some by their ids, from ``claims/<app>.toml``.

    In that file ``say`` maps labels to the words that replace them, and ``size`` figures to their runs' size.
    A claim with several comparisons has a line, with its verdict, for each.
    """
    file = claims(app)
    heads = ("", "the paper's claim", "verdict", "the paper's number", "what was found, and how")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for claim, compared in judged(app):
        if only and claim["id"] not in only:
            continue
        verdict = claim.get("verdict") or overall([found.verdict for _, found in compared])
        texts = [f"{found.verdict}: {_of_figure(claim, test, found)}" for test, found in compared]
        numbers = [*dict.fromkeys(texts), *(claim[key] for key in ("reversed", "note") if key in claim)]
        for label, words in file.get("say", {}).items():
            numbers = [line.replace(label, words) for line in numbers]
        settings = f"Compared: {claim['axis']}; {claim['point']}; {claim['stop']}; {claim['seeds']}"
        how = (settings, f"Runs: {_source(claim, file['size'])}")
        cells = (claim["id"], claim["paper"], verdict, claim["number"], _folded(numbers, how))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _folded(lines: Sequence[str], how: Sequence[str]) -> str:
    """Return a cell of lines, at most ``_OPEN`` of them in sight, with ``how`` below a click."""
    seen, below = (lines, how) if len(lines) <= _OPEN else ((), (*lines, *how))
    summary = "how" if seen else f"{len(lines)} lines, and how"
    return f"{'<br>'.join(seen)}<details><summary>{summary}</summary>{'<br>'.join(below)}</details>"


def _claims(app: str, only: Sequence[str]) -> str:
    """Return the table of claims and, below it, the paragraphs of those against the paper."""
    return "\n".join(filter(None, (claims_table(app, only), contrary(app, only))))


def contrary(app: str, only: Sequence[str] = ()) -> str:
    """Return a list of the paragraphs of claims with a comparison that came out against the paper."""
    found = (claim for claim in claims(app)["claim"] if not only or claim["id"] in only)
    return "".join(f"- **{claim['id']}:** {claim['against']}\n" for claim in found if "against" in claim)


def _of_figure(claim: Mapping[str, Any], test: Mapping[str, Any], found: Finding) -> str:
    """Return a finding, with the figure's name if it is not the claim's first figure."""
    figure = test.get("figure", claim["figure"])
    named = figure == claim["figure"] or f"figures/{figure}.toml" in found.text
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
    """Return how many claims of an app, or of all, have each verdict, and how many a contrary comparison."""
    apps = [app] if app else sorted(file.stem for file in (HERE / "claims").glob("*.toml"))
    rows = [row for one in apps for row in claims_table(one).splitlines()[2:]]
    # What follows the colon is of the claim's comparisons.
    found = Counter(row.split(" | ")[2].partition(":")[0] for row in rows)
    if unknown := sorted(set(found) - set(VERDICTS)):
        raise ValueError(f"verdicts must be of {', '.join(VERDICTS)}, got {', '.join(unknown)}")
    first, *others = VERDICTS
    parts = [f"{found[first]} of {len(rows)} claims {first}"]
    parts += [f"{found[verdict]} {verdict}" for verdict in others if found[verdict]]
    against = sum("against" in claim for one in apps for claim in claims(one)["claim"])
    return ", ".join(parts) + f". Claims in which a comparison came out against the paper: {against}.\n"


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
