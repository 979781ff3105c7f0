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
from pathlib import Path

from hedgerow.sim.deploy.processes import cores
from hedgerow.sim.runs.checkpoint import LATEST
from hedgerow.sim.runs.folder import read_json, write_json
from hedgerow.sim.runs.plan import toml_text
from hedgerow.sim.runs.sweep_file import Sweep
from hedgerow.sim.runs.sweep_plan import SETTINGS_FILE, Job, can_resume
from hedgerow.sim.signals import sigterm_raises

_POLL_SECONDS = 0.05
_STOP_SECONDS = 10.0


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
    with sigterm_raises(), closing(_run_all(todo, sweep.app, jobs=jobs, threads=threads)) as ended:
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
                "variants": [asdict(variant) for variant in sweep.variants],
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


def _run_all(queue: Sequence[Job], app: Path, *, jobs: int, threads: int) -> Generator[Outcome, None, None]:
    waiting, running = list(reversed(queue)), list[_Running]()
    with tempfile.TemporaryDirectory() as place:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    job = waiting.pop()
                    # A temporary path: an equals sign in the sweep's path would be parsed as 'key=value'.
                    running.append(
                        _Running(job, _start(job, app, Path(place) / f"{len(waiting)}.toml", threads))
                    )
                time.sleep(_POLL_SECONDS)
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    yield _ended(run)
        finally:
            _stop([run.process for run in running])


def _start(job: Job, app: Path, settings: Path, threads: int) -> subprocess.Popen[bytes]:
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
    with job.log.open("wb" if begun is None else "ab") as log:
        return subprocess.Popen(
            [*_command(app, settings), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            start_new_session=True,
        )


def _command(app: Path, settings: Path) -> list[str]:
    return [sys.executable, "-m", "hedgerow.sim", "run", str(app), "--run-config", str(settings)]


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
    return begun[0] if can_resume(begun[0], partial / SETTINGS_FILE, job.settings) else None


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
