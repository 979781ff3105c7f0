"""A sweep file: the settings, labels and seeds of several runs.

TOML, for example:

    title = "Loss over simulated time"
    app = "../"                      # the app's folder, relative to the file, or the name of a suite's app
    realism = "what is emulated and what is real"
    x = "sim-seconds"                # what to plot; a text or a list of texts (a link: "bits client->server")
    y = ["loss", "accuracy"]
    columns = ["payload-bytes"]      # optional: additional costs and metrics of `hedgerow table`
    by = "tau1"                      # optional: a column of panels for each value of this setting
    differences = true               # optional: also panels of paired differences from the first variant
    seeds = [0, 1, 2]
    nodes = 10                       # optional: the size of the federation, as `hedgerow run --nodes`
    budget = {sim-seconds = 60}      # optional: budget of each run, if the app has the key `stop-after`
    [base]                           # run-config keys of every run
    iterations = 600
    [[variant]]                      # named methods: a label and run-config keys
    label = "FedAvg"
    method = "fedavg"
    [[variant]]
    label = "another"
    app = "../../another"            # optional: another app; the keys of `base` must be its own too
    [grid]                           # run-config keys with several values: every combination
    tau1 = [1, 3, 20]
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from flwr.app import UserConfig

from hedgerow.sim.engine._compat import flatten_dict
from hedgerow.sim.runs.app import find_app
from hedgerow.sim.runs.hooks import shipped_apps
from hedgerow.sim.runs.kinds import MAX_INT64, MAX_NODES
from hedgerow.sim.runs.results import cost_named
from hedgerow.wire.budget import Budget
from hedgerow.wire.checks import did_you_mean
from hedgerow.wire.printable import quoted, reason, shown

_TABLES = {
    *("title", "app", "realism", "x", "y", "columns", "by", "differences", "seeds", "nodes", "budget"),
    *("base", "grid", "variant"),
}
# Each combination is a line of the plan and a run.
_MAX_POINTS = 100_000
# The sweep sets these itself.
RESERVED = ("output-dir", "resume", "seed")


@dataclass(frozen=True)
class Variant:
    """One point of a sweep: label, folder name and settings."""

    label: str
    folder: str
    settings: UserConfig
    app: str = ""  # another app's folder; empty for the sweep's


@dataclass(frozen=True)
class Sweep:
    """The contents of a sweep file.

    Parameters
    ----------
    file : Path
        The file.
    app : Path
        The app's folder.
    title, realism : str
        For figures and tables.
    xs, ys : tuple of str
        Costs and metrics to plot.
    by : str
        The setting to split plots by; empty for none.
    seeds : tuple of int
        Distinct integers >= 0.
    base : dict
        Run-config keys of every run.
    variants : tuple of Variant
        In the file's order: named variants outermost, the grid's last key innermost.
    nodes : int or None (default: None)
        Size of the federation, >= 1; the app's default if None.
    columns : tuple of str (default: none)
        Additional columns of tables, as in ``Results``.
    differences : bool (default: False)
        Whether plots have panels of paired differences.
    """

    file: Path
    app: Path
    title: str
    realism: str
    xs: tuple[str, ...]
    ys: tuple[str, ...]
    by: str
    seeds: tuple[int, ...]
    base: UserConfig
    variants: tuple[Variant, ...]
    nodes: int | None = None
    columns: tuple[str, ...] = ()
    differences: bool = False


def sweep_of_app(app: str | Path) -> Sweep:
    """Return a sweep of one variant, the app with its defaults; ValueError if there is no Flower App."""
    spec = find_app(app)
    variant = Variant(spec.name, _folder_name(spec.name), {})
    return Sweep(spec.folder, spec.folder, spec.name, "", ("rounds",), ("loss",), "", (0,), {}, (variant,))


def read_sweep(file: str | Path) -> Sweep:
    """Read and check a sweep file; one ValueError lists all its errors."""
    file = Path(file).expanduser().resolve()
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"sweep file {file}: {shown(reason(error, file=False), 300)}") from error
    problems = [_unknown(key) for key in raw if key not in _TABLES]
    app = _of_type(raw, "app", str, "", "a folder, relative to the file", problems)
    if not app:
        problems.append("app must be given: a folder, relative to the file")
    xs = _texts(raw, "x", ["rounds"], problems)
    for x in xs:
        try:
            cost_named(x)
        except ValueError as error:
            problems.append(str(error))
    seeds = raw.get("seeds", [0])
    if not (
        isinstance(seeds, list) and seeds and all(type(s) is int and 0 <= s <= MAX_INT64 for s in seeds)
    ) or len(set(seeds)) < len(seeds):
        problems.append(f"seeds must be a list of distinct integers in [0, 2^63), got {quoted(seeds)}")
        seeds = [0]
    nodes = raw.get("nodes")
    if nodes is not None and not (type(nodes) is int and 1 <= nodes <= MAX_NODES):
        problems.append(f"nodes must be an integer from 1 to {MAX_NODES}, got {quoted(nodes)}")
    base = _settings(raw.get("base", {}), "base", problems) | _budget(raw, problems)
    sweep = Sweep(
        file=file,
        app=_app_folder(file, app),
        title=_of_type(raw, "title", str, file.stem, "a text", problems),
        realism=_of_type(raw, "realism", str, "", "a text", problems),
        xs=xs,
        ys=_texts(raw, "y", ["loss"], problems),
        by=_of_type(raw, "by", str, "", "a run-config key", problems),
        seeds=tuple(seeds),
        base=base,
        variants=_variants(file, raw, problems),
        nodes=nodes,
        columns=_texts(raw, "columns", [], problems) if "columns" in raw else (),
        differences=_of_type(raw, "differences", bool, False, "true or false", problems),
    )
    if problems:
        raise ValueError(f"sweep file {file}:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return sweep


def _budget(raw: Mapping[str, Any], problems: list[str]) -> UserConfig:
    """Return the run config's ``stop-after`` from the file's budget."""
    entries = _of_type(raw, "budget", dict, {}, "a table of one entry, as {sim-seconds = 60}", problems)
    text = ", ".join(f"{key.replace('_', '-')}={value}" for key, value in entries.items())
    try:
        budget = Budget.parse(text)
    except ValueError as error:
        problems.append(f"budget must be a table of one entry, as {{sim-seconds = 60}}: {error}")
        return {}
    return {} if budget is None else {"stop-after": text}


def _unknown(key: str) -> str:
    meant = did_you_mean(key, _TABLES)
    valid = ", ".join(sorted(_TABLES))
    return f"{shown(key)} is not a key of a sweep file{f' ({meant})' if meant else ''}; valid keys: {valid}"


def _app_folder(file: Path, app: str) -> Path:
    """Return the folder of an app that a sweep file names."""
    folder = (file.parent / app).resolve()
    return folder if folder.exists() else shipped_apps().get(app, folder)


def _variants(file: Path, raw: Mapping[str, Any], problems: list[str]) -> tuple[Variant, ...]:
    named = []
    for number, table in enumerate(_of_type(raw, "variant", list, [], "[[variant]] tables", problems)):
        label = table.get("label") if isinstance(table, dict) else None
        if not isinstance(label, str) or not label.strip():
            problems.append(f"variant {number + 1}: label must be a text, got {label!r}")
            continue
        keys = {key: value for key, value in table.items() if key not in ("label", "app")}
        own = _of_type(table, "app", str, "", "a folder, relative to the file, or a suite's app", problems)
        app = str(_app_folder(file, own)) if own else ""
        named.append(([label], _settings(keys, f"variant {label!r}", problems), app))
    grid = _grid(_of_type(raw, "grid", dict, {}, "a table", problems), problems)
    if math.prod(map(len, grid.values())) > _MAX_POINTS:
        problems.append(
            f"grid must have at most {_MAX_POINTS} combinations, got {math.prod(map(len, grid.values()))}"
        )
        return ()
    points = [list(zip(grid, values, strict=True)) for values in product(*grid.values())]
    out = []
    for (words, settings, app), point in product(named or [([], {}, "")], points):
        label = ", ".join(words + [f"{key}={value}" for key, value in point]) or "all"
        out.append(Variant(label, _folder_name(label), {**settings, **dict(point)}, app))
    for what in ("label", "folder"):
        counts = Counter(getattr(variant, what) for variant in out)
        problems += [
            f"{what} must be different for each variant, got {name!r} for {n}"
            for name, n in counts.items()
            if n > 1
        ]
    return tuple(out)


def _grid(raw: Mapping[str, Any], problems: list[str], prefix: str = "") -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for key, values in raw.items():
        if isinstance(values, dict):
            out |= _grid(values, problems, f"{prefix}{key}.")
        elif not isinstance(values, list) or not values:
            problems.append(f"grid: {prefix}{key} must be a list of values, got {values!r}")
        else:
            for value in values:
                _settings({prefix + key: value}, "grid", problems)
            out[prefix + key] = values
    return out


def _settings(raw: Mapping[str, Any], where: str, problems: list[str]) -> UserConfig:
    try:
        settings = flatten_dict(dict(raw))
    except (ValueError, AttributeError) as error:
        problems.append(f"{where}: {error}")
        return {}
    problems += [f"{where} must not set {key}: the sweep sets it" for key in RESERVED if key in settings]
    return settings


def _of_type(
    raw: Mapping[str, Any], key: str, kind: type, default: Any, valid: str, problems: list[str]
) -> Any:
    value = raw.get(key, default)
    if not isinstance(value, kind):
        problems.append(f"{key} must be {valid}, got {value!r}")
        return default
    return value


def _texts(raw: Mapping[str, Any], key: str, default: list[str], problems: list[str]) -> tuple[str, ...]:
    value = raw.get(key, default)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        problems.append(f"{key} must be a text or a list of texts, got {value!r}")
        return tuple(default)
    return tuple(texts)


def _folder_name(label: str) -> str:
    # File names have at most 255 bytes, and the files beside a run's folder have longer names.
    return re.sub(r"[^\w.=+-]+", "_", label).strip("._")[:100] or "variant"
