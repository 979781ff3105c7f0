"""Read runs and sweeps as labelled series.

A run is a folder of ``recorder.RunRecorder``; a sweep is a folder with a ``sweep.json``. A series is a
metric (loss, accuracy, ...) over a cumulative cost (rounds, iterations, simulated seconds, bits, ...). Only
evaluated rounds are points: nothing is interpolated.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hedgerow.sim.runs.common_settings import role_of
from hedgerow.sim.runs.durable import write_file
from hedgerow.sim.runs.folder import lost_replies, opened, read_config, read_file, read_json, read_rounds
from hedgerow.sim.runs.joined import (
    SERVERS,
    SITES,
    OrchestratorFolder,
    joined_config,
    joined_rounds,
    parts_beneath,
    parts_of_runs,
)
from hedgerow.wire.extras import needed
from hedgerow.wire.printable import reason, shown

if TYPE_CHECKING:
    from pandas import DataFrame

_UNOBSERVED = {
    SERVERS + "loss": "{}: the global model u was not evaluated ('hedgerow evaluate' does it); "
    f"'{SERVERS}loss' is the mean of the edge servers' losses of their own models",
    SITES + "disagreement": "{}: no site saw all models, so no loss was measured; "
    f"'{SITES}disagreement' is the mean over the sites, each of its own nodes",
}
# Longest reason shown for a failed run, in characters.
_LONGEST = 300
# Bytes of a log's end in which its last line is sought.
_TAIL = 1 << 16
# Longest label of a run, in characters, but for its app and data set, and the settings that it keeps longest.
LONGEST_LABEL = 48
_TELLING = ("method", "algorithm", "model")
# Sources of metrics, in order of precedence.
SOURCES = ("central", "evaluate", "train")


@dataclass(frozen=True)
class Cost:
    """A cost of a run: an x axis for metrics.

    Parameters
    ----------
    key : str
        A field of a record of ``rounds.jsonl``; "train.gradients" is a field of its ``train``.
    label, unit : str
        Name and unit for display; the unit of a count is empty.
    cumulative : bool (default: True)
        Whether a record holds the sum since the start, or only its round's share.
    """

    key: str
    label: str
    unit: str
    cumulative: bool = True


COSTS: Mapping[str, Cost] = {
    "rounds": Cost("round", "rounds", ""),
    "iterations": Cost("iterations", "local iterations", ""),
    "sim-seconds": Cost("sim_seconds", "simulated time", "s"),
    "bits": Cost("bits", "nominal traffic", "bit"),
    "payload-bytes": Cost("payload_bytes", "serialised traffic", "B"),
    "gradients": Cost("train.gradients", "gradients per node", ""),
    "communications": Cost("train.communications", "communications per node", ""),
    "wall-seconds": Cost("wall_seconds", "real time", "s", cumulative=False),
}
# Fields of a link's traffic, by the cost that sums them over the links.
OF_LINKS = {"bits": "nominal_bits", "payload-bytes": "payload_bytes"}


def cost_named(name: str) -> Cost:
    """Return a cost of ``COSTS``, or of one link as in "bits client->server"; ValueError for another name."""
    total, _, link = name.partition(" ")
    if name in COSTS:
        return COSTS[name]
    if link and total in OF_LINKS:
        cost = COSTS[total]
        return Cost(OF_LINKS[total], f"{cost.label} {link}", cost.unit)
    raise ValueError(
        f"x must be one of {', '.join(COSTS)}, or bits or payload-bytes of a link, as 'bits client->server', "
        f"got {name!r}"
    )


def spent(record: Mapping[str, Any], cost: Cost) -> float | None:
    """Return a record's value of a cost; None if it was not recorded."""
    source, _, name = cost.key.rpartition(".")
    value = (record.get(source, {}) if source else record).get(name)
    if isinstance(value, int | float):
        return value
    # Nodes report nothing before the first round.
    return 0.0 if source and record.get("round") == 0 else None


class Point(NamedTuple):
    """One evaluated round of a run: cumulative cost ``x`` and metric ``y``."""

    round: int
    x: float
    y: float


@dataclass(frozen=True)
class RecordedRun:
    """One run, read from its folder.

    Parameters
    ----------
    folder : Path
        The run's folder.
    label : str
        The settings that distinguish it, except the seed; runs with the same label are repetitions.
    seed : int
        The run config's ``seed``; 0 if it has none.
    config : dict
        ``config.json``.
    rounds : sequence of dict
        The records of ``rounds.jsonl``.
    finished : bool
        Whether the run completed.
    """

    folder: Path
    label: str
    seed: int
    config: Mapping[str, Any]
    rounds: Sequence[Mapping[str, Any]]
    finished: bool

    @property
    def settings(self) -> Mapping[str, Any]:
        """The run config."""
        settings: Mapping[str, Any] = self.config.get("run", {})
        return settings

    @property
    def metrics(self) -> set[str]:
        """Names of the metrics that any of its rounds has."""
        return {name for record in self.rounds for source in SOURCES for name, _ in numbers(record, source)}

    def costs(self, x: str) -> list[float]:
        """Return the cumulative cost at the end of each record; ``x`` as in ``cost_named``.

        Raises
        ------
        ValueError
            If ``x`` is not a cost, or the run did not record it.
        """
        cost = cost_named(x)
        if x not in COSTS:
            return self._link_costs(x, x.partition(" ")[2], cost.key)
        try:
            values = [float(spent(record, cost)) for record in self.rounds]  # type: ignore[arg-type]
        except (KeyError, TypeError):  # float(None): the nodes did not report it.
            raise ValueError(f"x = {x!r}: {self.folder} does not record {cost.key!r}") from None
        return values if cost.cumulative else list(accumulate(values))

    def series(self, x: str, y: str) -> list[Point]:
        """Return metric or cost ``y`` over cost ``x``: one point for each record that has ``y``.

        Raises
        ------
        ValueError
            If ``x`` is not a cost or no record has ``y``.
        """
        values: list[float | None] = [_metric(record, y) for record in self.rounds]
        if y.partition(" ")[0] in COSTS and all(value is None for value in values):
            values = [*self.costs(y)]
        points = [
            Point(record["round"], cost, value)
            for record, cost, value in zip(self.rounds, self.costs(x), values, strict=True)
            if value is not None
        ]
        if not points:
            raise ValueError(f"y must be {self._known(y)}, got {y!r}")
        return points

    def records(self, y: str) -> bool:
        """Return whether ``series`` has points of a metric or cost."""
        try:
            return bool(self.series("rounds", y))
        except ValueError:
            return False

    def value_at(self, name: str, round: int) -> float | None:
        """Return a cost at the end of a round, or a metric's last value up to it; None if not recorded.

        Parameters
        ----------
        name : str
            A cost as in ``cost_named``, or a metric.
        round : int
            One of the recorded rounds.
        """
        cost, _, link = name.partition(" ")
        if name in COSTS:
            numbered = dict(zip((record["round"] for record in self.rounds), self.costs(name), strict=True))
            return numbered.get(round)
        if link and cost in OF_LINKS:
            record = next((record for record in self.rounds if record["round"] == round), {})
            spent = record.get("by_link", {}).get(link, {}).get(OF_LINKS[cost])
            return None if spent is None else float(spent)
        values = [_metric(record, name) for record in self.rounds if record["round"] <= round]
        return next((value for value in reversed(values) if value is not None), None)

    def _known(self, y: str) -> str:
        """Return the recorded metrics, for the error about one that is not."""
        if listed := sorted(name for name in self.metrics if name.startswith(f"{y}[")):
            return f"one number of this list, as {listed[0]!r}"
        named = sorted({re.sub(r"\[\d+\]$", "[…]", name) for name in self.metrics})
        return f"a metric of {self.folder} ({', '.join(named) or 'it has none'})"

    def _link_costs(self, x: str, link: str, key: str) -> list[float]:
        # A record omits a link without traffic so far, and the entry of a link with unknown traffic.
        found = [record.get("by_link", {link: {}}).get(link, {key: 0.0}).get(key) for record in self.rounds]
        known = {name for record in self.rounds for name in record.get("by_link", {})}
        if known and link not in known:
            raise ValueError(f"x must be of a link of {self.folder} ({', '.join(sorted(known))}), got {x!r}")
        values = [float(value) for value in found if value is not None]
        if len(values) < len(found):
            raise ValueError(
                f"x = {x!r}: {self.folder} does not record it round by round (`hedgerow export` keeps the "
                "links that the sweep file has in x, y or columns)"
            )
        return values


@dataclass(frozen=True)
class Results:
    """Runs, and how to present them by default.

    Parameters
    ----------
    runs : sequence of RecordedRun
        By variant in the sweep's order, then by seed.
    title, realism : str
        The sweep's title, and its statement of what was emulated and what was real.
    xs, ys : sequence of str
        Default costs and metrics of plots.
    name : str
        A short name for files.
    folder : Path or None
        The sweep's or the run's folder; None for several.
    warnings : sequence of str
        Caveats for readers of a comparison.
    by : str
        Default setting to split plots by, one panel for each value; empty for none.
    columns : sequence of str
        Default columns of tables next to ``ys``, as in ``RecordedRun.value_at``.
    differences : bool
        Whether plots have panels of paired differences by default.
    failed : mapping of str to mapping of int to str
        Reasons of a sweep's failed runs, by label and seed. They are not among ``runs``: means are over the
        runs that finished.
    """

    runs: Sequence[RecordedRun]
    title: str
    realism: str
    xs: Sequence[str]
    ys: Sequence[str]
    name: str
    folder: Path | None = None
    warnings: Sequence[str] = ()
    by: str = ""
    columns: Sequence[str] = ()
    differences: bool = False
    failed: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    def variants(self) -> dict[str, dict[int, RecordedRun]]:
        """Return the runs by label, then by seed."""
        out: dict[str, dict[int, RecordedRun]] = {}
        for run in self.runs:
            out.setdefault(run.label, {})[run.seed] = run
        return out

    def frame(self) -> DataFrame:
        """Return one row per measured value as a pandas DataFrame, as ``export --csv`` writes it.

        Columns: ``label`` and ``seed`` of the run; each of ``COSTS`` by then, missing if not recorded;
        ``source``, ``metric`` and ``value``; ``run``, the folder.
        """
        rows = [
            {
                "label": run.label,
                "seed": run.seed,
                **{x: spent(record, cost) for x, cost in COSTS.items()},
                "wall-seconds": wall,
                "source": source,
                "metric": metric,
                "value": value,
                "run": str(run.folder),
            }
            for run in self.runs
            for record, wall in zip(run.rounds, run.costs("wall-seconds"), strict=True)
            for source in SOURCES
            for metric, value in numbers(record, source)
        ]
        return needed("pandas", "plots").DataFrame(rows)

    def measuring(self, ys: Sequence[str]) -> Results:
        """Return the runs that recorded these metrics, with a warning about the others; all if none did."""
        missing = [(run, [y for y in ys if not run.records(y)]) for run in self.runs]
        kept = [run for run, lacks in missing if not lacks]
        if not kept:
            return self
        out = [f"{run.label}, seed {run.seed}: no {', '.join(no)}, left out" for run, no in missing if no]
        return replace(self, runs=kept, warnings=[*self.warnings, *out])

    def started(self, label: str) -> int:
        """Return how many runs of a variant were started: those to be compared and those that failed."""
        return len(self.variants().get(label, {})) + len(self.failed.get(label, {}))


def load(paths: Sequence[str | Path]) -> Results:
    """Read run folders, sweep folders and files of ``hedgerow export --json`` into one comparison.

    Runs of a sweep keep its labels, prefixed with the sweep's name if there are sweeps of other names
    (``results/fig1.json`` and ``runs/fig1`` are parts of one sweep). Single runs are labeled by the
    settings that differ within their app; runs with equal settings and seed also by their start time. The
    folders that the sites or edge servers of one run wrote are joined into that run. A folder of runs and
    sweeps stands for all of them.

    Raises
    ------
    ValueError
        If a path is none of these, nothing was run yet, or two runs of sweeps have the same label and seed.
    """
    named = [Path(path).expanduser().resolve() for path in paths]
    folders = list(dict.fromkeys(one for place in named for one in _expanded(place)))
    sweeps = [folder for folder in folders if folder.is_file() or os.path.lexists(folder / "sweep.json")]
    strangers = [f for f in folders if f not in sweeps and not os.path.lexists(f / "rounds.jsonl")]
    if strangers or not folders:
        names = ", ".join(map(str, strangers)) or "no path"
        raise ValueError(
            f"{names}: neither a run's folder (rounds.jsonl), nor a sweep's (sweep.json), nor a file of both"
        )
    several = len({place.stem if place.is_file() else place.name for place in folders}) > 1
    parts = [
        read_collected(place, prefix=several) if place.is_file() else _read_sweep(place, prefix=several)
        for place in sweeps
    ]
    of_servers, alone = parts_of_runs([folder for folder in folders if folder not in sweeps])
    joined = [_joined(group) for group in of_servers]
    singles = _labelled([*(read_run(folder) for folder in alone), *joined])
    everything = [run for part in parts for run in part.runs] + singles
    runs = [run for run in everything if run.rounds]
    if not runs:
        raise ValueError(f"{', '.join(map(str, folders))}: no run yet")
    _check_distinct(runs)
    return Results(
        runs=runs,
        title=" / ".join(
            dict.fromkeys([*(part.title for part in parts), *(_app(run) for run in singles if run.rounds)])
        ),
        realism=" / ".join(
            dict.fromkeys(
                [said for part in parts for said in ([part.realism] if part.realism else _realism(part.runs))]
                + _realism(singles)
            )
        ),
        xs=parts[0].xs if parts else ("rounds",),
        ys=parts[0].ys if parts else (_loss_of(singles),),
        name=parts[0].name if parts else "-".join(dict.fromkeys(_app(run) for run in runs)),
        folder=(parts[0].folder if parts else runs[0].folder) if len(folders) == 1 else None,
        warnings=[warning for part in parts for warning in part.warnings]
        + _doubts(everything)
        + [
            said.format(run.folder)
            for run in joined
            if (said := _UNOBSERVED.get(_loss_of([run]))) is not None
        ],
        by=parts[0].by if parts else "",
        columns=parts[0].columns if parts else (),
        differences=bool(parts and parts[0].differences),
        failed=_failed(parts, runs),
    )


def numbers(record: Mapping[str, Any], source: str) -> Iterator[tuple[str, float]]:
    """Yield a source's numeric metrics; the entries of a list as ``name[0]``, ``name[1]``, ..."""
    for name, value in record.get(source, {}).items():
        listed = {f"{name}[{at}]": one for at, one in enumerate(value)} if isinstance(value, list) else {}
        for key, one in (listed or {name: value}).items():
            if isinstance(one, int | float):
                yield key, one


def progress(record: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the unit of progress, how many are done and how many there will be (0 if unknown)."""
    rounds = settings.get("num-rounds", settings.get("num-server-rounds"))
    iterations = record.get("total_iterations") or settings.get("iterations")
    if type(record.get("iterations")) is int and type(iterations) is int and type(rounds) is not int:
        return "iteration", record["iterations"], iterations
    return "round", record["round"], rounds if type(rounds) is int else 0


def data_set(run: RecordedRun) -> str:
    """Return a short name of a run's data; empty if its settings name none."""
    if run.settings.get("partition") == "own":
        return "own data"
    problem, name = (str(run.settings.get(key) or "") for key in ("problem", "dataset"))
    # An app with several problems has the key ``dataset`` in all of them, and reads it in some.
    read = not problem or any(name in str(text) for text in (run.config.get("measured") or {}).values())
    return ", ".join(filter(None, (problem, name if read else "")))


def _metric(record: Mapping[str, Any], y: str) -> float | None:
    if not y.endswith("]"):  # Not of a list.
        found = (record[source].get(y) for source in SOURCES if source in record)
        return next((float(value) for value in found if isinstance(value, int | float)), None)
    for source in SOURCES:
        for name, value in numbers(record, source):
            if name == y:
                return float(value)
    return None


def _expanded(folder: Path) -> list[Path]:
    """Return a run's or sweep's folder itself; of another folder, the runs and sweeps in it."""
    if folder.is_file() or _is_read(folder):
        return [folder]
    held = [place for place in sorted(folder.iterdir()) if _is_read(place)] if folder.is_dir() else []
    return list(dict.fromkeys([*held, *parts_beneath(folder)])) or [folder]


def _is_read(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in ("sweep.json", "rounds.jsonl"))


def _joined(parts: Sequence[OrchestratorFolder]) -> RecordedRun:
    folder = parts[-1].folder
    finished = all((part.folder / "summary.json").is_file() for part in parts)
    return _run(folder, joined_config(parts), joined_rounds(parts), finished)


def _loss_of(runs: Sequence[RecordedRun]) -> str:
    """Return the runs' metric to compare by default: the loss, or its substitute in joined runs."""
    names = set[str]().union(*(run.metrics for run in runs))
    return next((one for one in ("loss", SERVERS + "loss", SITES + "disagreement") if one in names), "loss")


def read_run(folder: Path, label: str = "") -> RecordedRun:
    """Read a run's folder; RunFolderError if it is none, or damaged."""
    config, rounds = read_config(folder), read_rounds(folder)
    return _run(folder, config, rounds, (folder / "summary.json").is_file(), label)


def _run(
    folder: Path, config: Mapping[str, Any], rounds: list[dict[str, Any]], finished: bool, label: str = ""
) -> RecordedRun:
    seed = config.get("run", {}).get("seed", 0)
    if not isinstance(seed, int):  # Another project's app may use the key for anything.
        seed = 0
    return RecordedRun(folder, label, seed, config, rounds, finished)


def _read_sweep(folder: Path, *, prefix: bool) -> Results:
    asked = read_json(folder / "sweep.json")
    runs, warnings = [], []
    failed: dict[str, dict[int, str]] = {}
    for variant in asked["variants"]:
        label = _label(folder, variant["label"], prefix)
        for seed in asked["seeds"]:
            place = folder / variant["folder"] / f"seed-{seed}"
            if (place / "summary.json").is_file():
                runs.append(read_run(place, label))
                continue
            what = "not finished"
            if place.with_name(f"{place.name}.failed").is_dir():
                why = last_line(place.with_name(f"{place.name}.log"))
                failed.setdefault(label, {})[seed] = why
                what = f"failed ({why})"
            warnings.append(f"{label}, seed {seed}: {what}, left out")
    return Results(
        runs,
        asked["title"],
        asked["realism"],
        asked["x"],
        asked["y"],
        folder.name,
        folder,
        warnings,
        asked.get("by", ""),
        asked.get("columns", ()),
        asked.get("differences", False),
        failed,
    )


def last_line(log: Path) -> str:
    """Return the last line of a failed run's output, which gives the reason; "" if there is none."""
    with suppress(OSError):
        with opened(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read(_TAIL).decode(errors="replace").split("\n")
        return next((shown(line, _LONGEST) for line in reversed(lines) if line.strip()), "")
    return ""


def _failed(parts: Sequence[Results], runs: Sequence[RecordedRun]) -> dict[str, dict[int, str]]:
    """Return the failed runs of all parts that did not finish in another part."""
    ended = {(run.label, run.seed) for run in runs}
    out: dict[str, dict[int, str]] = {}
    for part in parts:
        for label, seeds in part.failed.items():
            out.setdefault(label, {}).update({s: w for s, w in seeds.items() if (label, s) not in ended})
    return {label: seeds for label, seeds in out.items() if seeds}


def _app(run: RecordedRun) -> str:
    return str(run.config.get("app", run.folder.name))


def _labelled(runs: list[RecordedRun]) -> list[RecordedRun]:
    """Label runs by app, data set and settings where they differ, and equal runs also by their start."""
    apps: dict[str, dict[str, list[RecordedRun]]] = {}
    for run in runs:
        apps.setdefault(_app(run), {}).setdefault(data_set(run), []).append(run)
    labels: dict[Path, str] = {}
    for app, sets in apps.items():
        for name, ours in sets.items():
            for run, said in zip(ours, _differences(ours), strict=True):
                told = ", ".join(filter(None, (name if len(sets) > 1 else "", said)))
                labels[run.folder] = ": ".join(filter(None, (app if len(apps) > 1 or not told else "", told)))
    twins = Counter((labels[run.folder], run.seed) for run in runs)
    starts = {run.folder: begun(run) for run in runs if twins[labels[run.folder], run.seed] > 1}
    times = Counter((labels[folder], time) for folder, time in starts.items())
    for folder, time in starts.items():
        unique = time if time and times[labels[folder], time] == 1 else folder.name
        labels[folder] = f"{labels[folder]} ({unique})"
    return [replace(run, label=labels[run.folder]) for run in runs]


def _differences(runs: Sequence[RecordedRun]) -> list[str]:
    """Return for each run the settings that differ: of many only as many as tell the runs apart."""
    first = {key: value for run in reversed(runs) for key, value in run.settings.items()}
    keys = [
        key
        for key in first
        if role_of(key).is_experiment
        and any(run.settings[key] != first[key] for run in runs if key in run.settings)
    ]

    def texts(keys: Sequence[str]) -> list[str]:
        return [
            ", ".join(f"{key}={run.settings[key]}" for key in keys if key in run.settings) for run in runs
        ]

    told = texts(keys)
    for key in sorted(keys, key=lambda key: (key in _TELLING, -max(map(len, texts([key]))))):
        fewer = [one for one in keys if one != key]
        if max(map(len, texts(keys))) > LONGEST_LABEL and len(set(texts(fewer))) == len(set(told)):
            keys = fewer
    return shortened(texts(keys))


def shortened(labels: Sequence[str]) -> list[str]:
    """Return labels cut to ``LONGEST_LABEL`` characters; those that differ still do."""
    number = {label: at for at, label in enumerate(dict.fromkeys(labels), start=1)}
    cut = LONGEST_LABEL - 5
    return [one if len(one) <= LONGEST_LABEL else f"{one[:cut]}… {number[one]}" for one in labels]


def begun(run: RecordedRun) -> str:
    """Return a run's start time to the second; empty if not recorded."""
    return str((run.config.get("environment") or {}).get("time") or "")[:19].replace("T", " ")


def _check_distinct(runs: Sequence[RecordedRun]) -> None:
    seen: dict[tuple[str, int], RecordedRun] = {}
    for run in runs:
        twin = seen.setdefault((run.label, run.seed), run)
        if twin is not run:
            raise ValueError(
                f"{twin.folder} and {run.folder} have the same settings ({run.label}) and seed {run.seed}; "
                "give only one of them"
            )


def _realism(runs: Sequence[RecordedRun]) -> list[str]:
    return [str(run.config["realism"]) for run in runs if run.config.get("realism")]


def _doubts(runs: Sequence[RecordedRun]) -> list[str]:
    out = []
    for run in runs:
        if not run.rounds:
            out.append(f"{run.folder}: no round yet, left out")
        elif not run.finished:
            last = run.rounds[-1]["round"]
            out.append(f"{run.label}, seed {run.seed}: not finished, read up to round {last}")
    codes = {json.dumps(_code(run), sort_keys=True) for run in runs}
    if len(codes) > 1:
        out.append(f"the runs come from {len(codes)} versions of the code (config.json: packages, git)")
    return out


def _code(run: RecordedRun) -> Any:
    environment = run.config.get("environment", {})
    return [environment.get("packages"), (environment.get("git") or {}).get("commit")]


# Runs in one small JSON file, from which their plots and tables can be drawn without the folders.
#
# The file holds the sweep's description, the settings that all runs share, their environments, the reasons of
# failed runs, and one line for each other run: label, seed, its other settings, final traffic by link and
# lost replies, and its evaluated rounds as columns, thinned to ``POINTS``. The columns are all metrics of
# evaluations, and those metrics of training and costs of links that the sweep plots. Columns are named as in
# ``rounds.jsonl``, metrics ``source.name``, costs of links "bits client->server"; a missing value is
# ``null``. ``load`` reads the file like a sweep.


FORMAT = "hedgerow-results-1"
# Maximum number of rounds kept of a run.
POINTS = 200
# Enough for single precision.
_DIGITS = 9
# Settings that are paths on one machine.
_PLACES = frozenset(("data-dir", "output-dir", "registry", "resume"))
# Entries of an environment that may affect results.
_ENVIRONMENT = ("cpu", "python", "torch", "packages", "git", "app-git")


def collect(results: Results) -> dict[str, Any]:
    """Return the content of the file."""
    settings = [
        {key: value for key, value in run.settings.items() if key not in _PLACES} for run in results.runs
    ]
    first = settings[0]
    shared = {k: v for k, v in first.items() if all(k in s and s[k] == v for s in settings)}
    environments: list[dict[str, Any]] = []
    runs = []
    for run, own in zip(results.runs, settings, strict=True):
        recorded = run.config.get("environment", {})
        environment = {key: recorded.get(key) for key in _ENVIRONMENT}
        if environment not in environments:
            environments.append(environment)
        runs.append(
            {
                "label": run.label,
                "seed": run.seed,
                "settings": {key: value for key, value in own.items() if key not in shared},
                "environment": environments.index(environment),
                "finished": run.finished,
                **({"measured": run.config["measured"]} if "measured" in run.config else {}),
                "by_link": run.rounds[-1].get("by_link", {}),
                "lost-replies": lost_replies(run.rounds),
                "columns": _columns(run, [*results.xs, *results.ys, *results.columns]),
            }
        )
    return {
        "format": FORMAT,
        "title": results.title,
        "realism": results.realism,
        "app": results.runs[0].config.get("app", ""),
        "x": list(results.xs),
        "y": list(results.ys),
        "columns": list(results.columns),
        "by": results.by,
        "differences": results.differences,
        "settings": shared,
        "environments": environments,
        # Tables count failed runs, which means leave out.
        **({"failed": results.failed} if results.failed else {}),
        "runs": runs,
    }


def write_collected(results: Results, path: str | Path) -> int:
    """Write the file, with one line per run; return the number of runs."""
    content = collect(results)
    runs = content.pop("runs")
    head = json.dumps(content, indent=1, sort_keys=False)
    lines = ",\n".join(json.dumps(run) for run in runs)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f'{head[:-2]},\n "runs": [\n{lines}\n]}}\n'
    write_file(path, lambda file: file.write(text.encode()))
    return len(runs)


def read_collected(file: Path, *, prefix: bool = False) -> Results:
    """Read the file; ``prefix`` puts its name before each label. ValueError if it is not such a file."""
    try:
        content = json.loads(read_file(file.resolve()))
        if content["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}, got {content['format']!r}")
        failed = {
            _label(file, label, prefix): {int(seed): why for seed, why in seeds.items()}
            for label, seeds in content.get("failed", {}).items()
        }
        return Results(
            runs=[_from_columns(file, content, run, prefix) for run in content["runs"]],
            title=content["title"],
            realism=content["realism"],
            xs=content["x"],
            ys=content["y"],
            name=file.stem,
            folder=file.parent,
            by=content["by"],
            columns=content.get("columns", ()),
            differences=content.get("differences", False),
            failed=failed,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is not a file of `hedgerow export --json`: {reason(error, file=False)}"
        ) from error


def _from_columns(
    file: Path, content: Mapping[str, Any], run: Mapping[str, Any], prefix: bool
) -> RecordedRun:
    config = {
        "app": content["app"],
        "realism": content["realism"],
        "run": {**content["settings"], **run["settings"]},
        "environment": content["environments"][run["environment"]],
        **({"measured": run["measured"]} if "measured" in run else {}),
    }
    columns = run["columns"]
    rounds = [_record(columns, at) for at in range(len(columns["round"]))]
    for record in rounds:
        # Of other links the file has only the final traffic.
        record["by_link"] = {link: {} for link in run["by_link"]} | record["by_link"]
    if rounds:
        rounds[-1] |= {"by_link": run["by_link"], "rejected": run["lost-replies"]}
    return RecordedRun(file, _label(file, run["label"], prefix), run["seed"], config, rounds, run["finished"])


def _label(file: Path, label: str, prefix: bool) -> str:
    name = file.stem if file.suffix == ".json" else file.name
    return f"{name}: {label}" if prefix and label != name else label


def _record(columns: Mapping[str, Sequence[Any]], at: int) -> dict[str, Any]:
    record: dict[str, Any] = {source: {} for source in (*SOURCES, "by_link")}
    for name, values in columns.items():
        total, _, link = name.partition(" ")
        if link and total in OF_LINKS:
            record["by_link"].setdefault(link, {})[OF_LINKS[total]] = values[at]
            continue
        source, dot, metric = name.partition(".")
        if not dot:
            record[name] = values[at]
        elif values[at] is not None:
            record[source][metric] = values[at]
    return record


def _columns(run: RecordedRun, shown: Sequence[str]) -> dict[str, list[Any]]:
    """Return the kept rounds as columns; real seconds of dropped rounds are added to the next kept one."""
    evaluated = [at for at, record in enumerate(run.rounds) if any(record.get(s) for s in SOURCES[:2])]
    kept = _thinned(evaluated or list(range(len(run.rounds))))
    if kept[-1] != len(run.rounds) - 1:
        kept.append(len(run.rounds) - 1)
    out: dict[str, list[Any]] = {}
    for cost in COSTS.values():
        values = [_short(spent(run.rounds[at], cost)) for at in kept]
        if "." in cost.key and None in values:
            continue
        out[cost.key] = values
        if not cost.cumulative:
            between = zip([-1, *kept], kept, strict=False)
            out[cost.key] = [
                _short(sum(record.get(cost.key, 0.0) for record in run.rounds[a + 1 : b + 1]))
                for a, b in between
            ]
    for source in SOURCES:
        rows = [dict(numbers(run.rounds[at], source)) for at in kept]
        names = {name for row in rows for name in row if source != SOURCES[-1] or name in shown}
        for name in sorted(names):
            out[f"{source}.{name}"] = [_short(row.get(name)) for row in rows]
    # Methods have different links; skip those that this run does not have.
    crossed = run.rounds[-1].get("by_link", {})
    parts = [name.partition(" ") for name in shown]
    links = [link for total, _, link in parts if link in crossed and total in OF_LINKS]
    # A link that is shown in nominal bits also keeps its real bytes, and vice versa.
    for name in dict.fromkeys(f"{total} {link}" for link in links for total in OF_LINKS):
        try:
            costs = run.costs(name)
        except ValueError:  # Not recorded round by round.
            if name in shown:
                raise
            continue
        out[name] = [_short(costs[at]) for at in kept]
    return out


def _thinned(places: list[int]) -> list[int]:
    """Return at most ``POINTS`` evenly spaced places, including the first and the last."""
    step = ceil((len(places) - 1) / (POINTS - 1)) if len(places) > POINTS else 1
    kept = places[::step]
    return kept if kept[-1] == places[-1] else [*kept, places[-1]]


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if isfinite(value) else value
    return value
