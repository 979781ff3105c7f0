"""Run a sweep: each run in its own process and folder, several at once; finished runs are kept.

A sweep can be stopped and started again. An interrupted run resumes from its checkpoint if the app has the
key ``resume``; otherwise it starts afresh, because its checkpoint is incomplete. If the sweep now has more
iterations, finished runs are resumed too.

A sweep's folder holds ``sweep.json`` (the sweep, and how each run ended) and for each run
``<variant>/seed-<seed>/`` (the run folder, with its whole run config as ``settings.toml``, for
``hedgerow run -c``) and ``<variant>/seed-<seed>.log``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from flwr.app import UserConfig

from hedgerow.sim.deploy.processes import cores
from hedgerow.sim.engine._compat import read_toml
from hedgerow.sim.runs.app import AppSpec, find_app, own_settings
from hedgerow.sim.runs.checkpoint import LATEST
from hedgerow.sim.runs.common_settings import role_of
from hedgerow.sim.runs.folder import (
    RunFolderError,
    opened,
    read_config,
    read_json,
    recorded_engine,
    refused,
    write_json,
)
from hedgerow.sim.runs.plan import Plan, parse_overrides, plan_run, toml_text
from hedgerow.sim.runs.settings import Role
from hedgerow.sim.runs.sweep_file import RESERVED, Sweep, Variant
from hedgerow.sim.signals import sigterm_raises

_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_FLOWER = "flower"


@dataclass(frozen=True)
class Outcome:
    """How a job ended: ``kept`` (from an earlier sweep), ``finished`` or ``failed``, and real seconds."""

    job: Job
    status: str
    seconds: float = 0.0
    error: str = ""


def run_sweep(
    sweep: Sweep,
    plan: Sequence[Job],
    out: Path,
    *,
    jobs: int,
    on_end: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Run the unfinished runs, several at once, and write ``sweep.json``; return outcomes in plan order.

    Each run is a process with ``cores() // jobs`` threads (at least one). A failed run does not affect
    others. Ctrl-C or a termination signal stops the processes started here, and no others.

    Parameters
    ----------
    sweep, plan, out
        As in ``plan_sweep``.
    jobs : int
        Number of simultaneous runs, >= 1.
    on_end : Callable[[Outcome], None]
        Called after each run.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be an integer >= 1, got {jobs}")
    threads = max(1, cores() // jobs)
    record = _Record(sweep, out, jobs, threads)
    before = _seconds_before(out)
    outcomes = {
        job.name: Outcome(job, "kept", before.get((job.variant.label, job.seed), 0.0))
        for job in plan
        if job.kept
    }
    record.write(list(outcomes.values()))
    for outcome in outcomes.values():
        on_end(outcome)
    todo = [job for job in plan if not job.kept]
    with sigterm_raises(), closing(_run_all(todo, str(sweep.app), jobs=jobs, threads=threads)) as ended:
        for outcome in ended:
            outcomes[outcome.job.name] = outcome
            record.write(list(outcomes.values()))
            on_end(outcome)
    return [outcomes[job.name] for job in plan]


def _seconds_before(out: Path) -> dict[tuple[str, int], float]:
    """Return the durations of finished runs from an earlier ``sweep.json``."""
    file = out / "sweep.json"
    runs = read_json(file)["runs"] if os.path.lexists(file) else []
    return {(run["label"], run["seed"]): run["seconds"] for run in runs}


@dataclass
class _Record:
    """The contents of ``sweep.json``, written at the start and after each run."""

    sweep: Sweep
    out: Path
    jobs: int
    threads: int
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    clock: float = field(default_factory=time.monotonic)

    def write(self, outcomes: Sequence[Outcome]) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        sweep = self.sweep
        seconds = [outcome.seconds for outcome in outcomes if outcome.status != "failed"]
        write_json(
            self.out / "sweep.json",
            {
                "file": str(sweep.file),
                "app": str(sweep.app),
                "title": sweep.title,
                "realism": sweep.realism,
                "x": sweep.xs,
                "y": sweep.ys,
                "columns": sweep.columns,
                "by": sweep.by,
                "differences": sweep.differences,
                "seeds": sweep.seeds,
                "base": sweep.base,
                "variants": [
                    {key: value for key, value in asdict(variant).items() if key != "app" or value}
                    for variant in sweep.variants
                ],
                "runs": [
                    {
                        "label": outcome.job.variant.label,
                        "seed": outcome.job.seed,
                        "status": outcome.status,
                        "seconds": round(outcome.seconds, 3),
                        **({"error": outcome.error} if outcome.error else {}),
                    }
                    for outcome in outcomes
                ],
                "started": self.started,
                "jobs": self.jobs,
                "threads-a-job": self.threads,
                "cores": cores(),
                "wall-seconds": round(time.monotonic() - self.clock, 3),
                "run-seconds": {
                    "sum": round(sum(seconds), 3),
                    "longest": round(max(seconds, default=0.0), 3),
                },
            },
        )


@dataclass(frozen=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)


def _run_all(queue: Sequence[Job], app: str, *, jobs: int, threads: int) -> Generator[Outcome, None, None]:
    waiting, running = list(reversed(queue)), list[_Running]()
    with tempfile.TemporaryDirectory() as place:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    job = waiting.pop()
                    # A temporary path: an equals sign in the sweep's path would be parsed as 'key=value'.
                    settings = Path(place) / f"{len(waiting)}.toml"
                    running.append(_Running(job, _start(job, job.variant.app or app, settings, threads)))
                time.sleep(_POLL_SECONDS)
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    yield _ended(run)
        finally:
            _stop([run.process for run in running])


def _start(job: Job, app: str, settings: Path, threads: int) -> subprocess.Popen[bytes]:
    partial = job.beside("partial")
    begun = _begun(job)
    if begun is None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    (partial / SETTINGS_FILE).write_text(toml_text(job.settings), encoding="utf-8")
    place, options = {"output-dir": str(partial)}, job.options
    if begun is not None:
        place = {"resume": str(begun)}
    elif "output-dir" not in job.settings:
        place, options = {}, (*options, "--output-dir", str(partial))
    settings.write_text(toml_text({**job.settings, **place}), encoding="utf-8")
    # Ray sets the threads of Flower's engine.
    limits = {} if job.engine == _FLOWER else dict.fromkeys(_THREADS, str(threads))
    with job.log.open("wb" if begun is None else "ab") as log:
        return subprocess.Popen(
            [*_command(app, settings), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **limits},
            start_new_session=True,
        )


def _command(app: str, settings: Path) -> list[str]:
    return [sys.executable, "-m", "hedgerow.sim", "run", app, "--run-config", str(settings)]


def _begun(job: Job) -> Path | None:
    """Return the folder of an interrupted or finished run that can be resumed; None if there is none."""
    partial = job.beside("partial")
    if job.folder.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        shutil.copyfile(job.folder / SETTINGS_FILE, partial / SETTINGS_FILE)
        job.folder.rename(partial / job.folder.name)
    begun = [path.parents[1] for path in partial.glob(f"*/checkpoint/{LATEST}")]
    if len(begun) != 1 or not (partial / SETTINGS_FILE).is_file():
        return None
    with suppress(RunFolderError):
        ran, now = _engines(begun[0], job.engine, job.settings)
        if ran == now and can_resume(begun[0], partial / SETTINGS_FILE, job.settings):
            return begun[0]
    return None


def _ended(run: _Running) -> Outcome:
    """Rename a finished run's folder to its final name, which marks it as finished.

    A failed run is moved aside: the next start must not resume from a state that may be the cause.
    """
    job, seconds = run.job, time.monotonic() - run.started
    partial = job.beside("partial")
    made = [folder for folder in partial.iterdir() if (folder / "summary.json").is_file()]
    if run.process.returncode == 0 and len(made) == 1:
        (partial / SETTINGS_FILE).replace(made[0] / SETTINGS_FILE)
        _keep_rest(partial, made[0])
        made[0].rename(job.folder)
        shutil.rmtree(partial)
        return Outcome(job, "finished", seconds)
    shutil.rmtree(job.beside("failed"), ignore_errors=True)
    partial.rename(job.beside("failed"))
    code = run.process.returncode
    why = f"exit code {code}" if code else f"{len(made)} finished run folders, not 1"
    return Outcome(job, "failed", seconds, f"{why}, see {job.log}")


def _keep_rest(partial: Path, made: Path) -> None:
    """Move files that an app wrote into its ``output-dir`` into the run's folder, as ``output/``."""
    rest = [path for path in partial.iterdir() if path != made]
    if rest:
        (made / "output").mkdir(exist_ok=True)
    for path in rest:
        path.rename(made / "output" / path.name)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop the processes started here and their children: each leads its own process group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, sign)
        end = time.monotonic() + _STOP_SECONDS
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


# The plan of a sweep: variants x seeds, all checked before any starts.
#
# Common random numbers: an app derives data partition, initial model and mini-batches from the run config's
# ``seed`` alone. Runs with one seed thus differ only in their settings, and variants can be compared by seed.
# An app without that key is run with ``hedgerow run --seed``, which seeds the global generators of Python,
# NumPy and torch; whether that determines the run depends on the app.


# File of a run's whole run config, in its folder.
SETTINGS_FILE = "settings.toml"


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Parameters
    ----------
    variant : Variant
        The variant that it repeats.
    seed : int
        Its seed.
    folder : Path
        Folder of the finished run; beside it are ``.partial`` (running or interrupted), ``.failed`` and
        ``.log``.
    settings : dict
        The whole run config, including defaults.
    kept : bool
        Whether it is already finished. A run that now has more iterations is not: it is resumed.
    options : tuple of str (default: none)
        Options of ``hedgerow run`` other than settings.
    engine : str (default: "inprocess")
        As in ``plan_sweep``.
    """

    variant: Variant
    seed: int
    folder: Path
    settings: UserConfig
    kept: bool
    options: tuple[str, ...] = ()
    engine: str = "inprocess"

    @property
    def name(self) -> str:
        """Label and seed."""
        return f"{self.variant.label}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """File of the run's output."""
        return self.beside("log")

    def beside(self, suffix: str) -> Path:
        """Return the path of the folder's name with a suffix."""
        return self.folder.with_name(f"{self.folder.name}.{suffix}")


def plan_sweep(
    sweep: Sweep,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    track: Sequence[str] = (),
    engine: str = "inprocess",
) -> list[Job]:
    """Return every run of a sweep, checked against the app's settings.

    Parameters
    ----------
    sweep : Sweep
        From ``read_sweep``.
    out : Path
        The sweep's folder.
    overrides : sequence of str
        Run-config changes for all runs, as in ``plan_run``, except of keys that the sweep varies.
    track : sequence of str
        Trackers of every run, see ``trackers.check_trackers``.
    engine : str (default: "inprocess")
        ``"flower"`` runs the suite's apps on Flower's own engine, as ``hedgerow run --engine flower`` does.

    Raises
    ------
    ValueError
        If there is no app, a setting is invalid, or a finished run in ``out`` had other settings or ran on
        the other engine.
    """
    specs = {app: find_app(app or sweep.app) for app in {"", *(one.app for one in sweep.variants)}}
    changes = parse_overrides(overrides, specs[""].config)
    _check_overrides(sweep, changes)
    jobs: list[Job] = []
    problems: dict[str, list[str]] = {}
    for variant, seed in product(sweep.variants, sweep.seeds):
        asked = {**sweep.base, **changes, **variant.settings}
        folder, spec = out.resolve() / variant.folder / f"seed-{seed}", specs[variant.app]
        try:
            plan = _plan(spec, asked, sweep.nodes, seed)
            if engine == _FLOWER:
                _check_flower(spec, plan)
            kept = _is_kept(folder, plan, spec.config, engine)
            options = (*_options(plan, sweep.nodes, track), "--engine", engine)
            jobs.append(Job(variant, seed, folder, plan.run_config, kept, options, engine))
        except ValueError as error:
            problems.setdefault(str(error), []).append(f"{variant.label}, seed {seed}")
    if problems:
        raise ValueError("\n".join(f"{_first(names)}: {said}" for said, names in problems.items()))
    return jobs


def _check_flower(spec: AppSpec, plan: Plan) -> None:
    plan.check_no_faults()
    if own_settings(spec) is None:
        raise ValueError(
            f"--engine flower: app {spec.name!r} writes no run folder there; use --engine inprocess"
        )


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _check_overrides(sweep: Sweep, changes: UserConfig) -> None:
    reserved = [key for key in changes if key in RESERVED]
    if reserved:
        raise ValueError(f"-c must not set {', '.join(reserved)}: the sweep sets it")
    varied = {key for variant in sweep.variants for key in variant.settings}
    clash = sorted(varied & set(changes))
    if clash:
        raise ValueError(f"-c must not set {', '.join(clash)}: variants of the sweep file set it")


def _plan(spec: AppSpec, asked: UserConfig, nodes: int | None, seed: int) -> Plan:
    """Return the plan of a run, checked as ``hedgerow run`` will check it."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / SETTINGS_FILE
        file.write_text(toml_text(asked), encoding="utf-8")
        return plan_run(spec, [str(file)], num_nodes=nodes, seed=seed)


def _options(plan: Plan, nodes: int | None, track: Sequence[str]) -> tuple[str, ...]:
    """Return the options of ``hedgerow run`` that are not settings."""
    seed = [] if plan.seed is None else ["--seed", str(plan.seed)]
    size = [] if nodes is None else ["--nodes", str(nodes)]
    return (*seed, *size, *(word for name in track for word in ("--track", name)))


def _engines(run: Path, engine: str, settings: UserConfig) -> tuple[str, str]:
    """Return the engine that ran a run and the one that would now, by the names of ``hedgerow run``."""
    ran = recorded_engine(read_config(run)).removesuffix("-simulation") or "inprocess"
    return ran, "inprocess" if settings.get("engine") == "inprocess" else engine


def _is_kept(folder: Path, plan: Plan, defaults: UserConfig, engine: str) -> bool:
    if not folder.exists():
        return False
    if not (folder / "summary.json").is_file() or not (folder / SETTINGS_FILE).is_file():
        raise ValueError(
            f"{folder} exists and is not a finished run of a sweep; remove it or choose another --out"
        )
    ran, now = _engines(folder, engine, plan.run_config)
    if ran != now:
        raise ValueError(f"{folder} was run on engine {ran}, now {now}; remove it or choose another --out")
    changed = changed_settings(folder / SETTINGS_FILE, plan.run_config, defaults)
    nodes = read_config(folder).get("nodes", plan.num_nodes)
    if nodes != plan.num_nodes:
        changed.append(f"{nodes} nodes, now {plan.num_nodes}")
    if changed and can_resume(folder, folder / SETTINGS_FILE, plan.run_config, defaults):
        return False
    if changed:
        raise ValueError(f"{folder} was run with {'; '.join(changed)}; remove it or choose another --out")
    return True


def can_resume(run: Path, file: Path, settings: UserConfig, defaults: UserConfig | None = None) -> bool:
    """Return whether a run made with the settings in ``file`` can be resumed with the present settings.

    It must have a checkpoint, and its app the key ``resume``; only ``iterations`` may differ, and only grow.
    """
    before = {**(defaults or {}), **_stored(file)}
    if "resume" not in settings or not (run / "checkpoint").is_dir():
        return False
    changed = _changed(before, settings)
    return not changed or (
        changed == ["iterations"] and int(before["iterations"]) < int(settings["iterations"])
    )


def changed_settings(file: Path, settings: UserConfig, defaults: UserConfig | None = None) -> list[str]:
    """Return the settings of an earlier run that differ from the present ones.

    A key that the app did not have then counts with its value in ``defaults``.
    """
    before = {**(defaults or {}), **_stored(file)}
    return [f"{key} = {before.get(key)!r}, now {settings.get(key)!r}" for key in _changed(before, settings)]


def _stored(file: Path) -> UserConfig:
    with refused(file.parent), opened(file):
        return read_toml(file)


def _changed(before: UserConfig, settings: UserConfig) -> list[str]:
    keys = sorted({*before, *settings})
    return [
        key for key in keys if before.get(key) != settings.get(key) and role_of(key) is not Role.IRRELEVANT
    ]
