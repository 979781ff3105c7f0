"""``hedgerow sweep``: variants x seeds of a sweep file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import Engine, EngineName, Track, bad_options, check_inprocess, interruptible

if TYPE_CHECKING:
    from hedgerow.sim.runs.sweep import Job, Outcome


def sweep(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml|APP",
            help="A sweep file (see hedgerow.sim.runs.sweep_file), or an app as in 'run'.",
        ),
    ],
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="Changes for every run, as in 'run'. Repeatable."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, for example 0,1,2. Default: the file's, else 0.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes. Default: the file's or the app's own, else 2."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The sweep's folder. Default: runs/<name of FILE or APP>.")
    ] = None,
    engine: EngineName = Engine.INPROCESS,
    track: Track = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Parallel runs. Default: one per core; one with --engine flower."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the runs; start none.")] = False,
) -> None:
    """Run variants x seeds of a sweep file, each in its own folder; finished ones are kept.

    Exits with 0 if all runs are there, 1 if one failed, 2 on bad options, 130 if interrupted, 143 if
    terminated.
    """
    from hedgerow.sim.deploy.flower_run import check_ray
    from hedgerow.sim.deploy.processes import cores
    from hedgerow.sim.runs.sweep import plan_sweep, run_sweep
    from hedgerow.sim.runs.sweep_file import read_sweep, sweep_of_app
    from hedgerow.sim.runs.trackers import check_trackers

    with bad_options():
        check_inprocess(engine, {"--track": bool(track)})
        if engine is Engine.FLOWER:
            check_ray()
        is_file = file.suffix == ".toml" or file.expanduser().is_file()
        asked = read_sweep(file) if is_file else sweep_of_app(file)
        if seeds is not None:
            asked = replace(asked, seeds=_seeds(seeds))
        if nodes is not None:
            asked = replace(asked, nodes=nodes)
        name = asked.file.name if asked.file.is_dir() else asked.file.stem
        folder = (out or Path("runs") / name).expanduser().resolve()
        plan = plan_sweep(
            asked, folder, run_config or [], track=check_trackers(track or []), engine=engine.value
        )
    if dry_run:
        for job in plan:
            typer.echo(f"{'kept' if job.kept else 'run '}  {job.name}  ->  {job.folder}")
        return
    at_once = jobs or (1 if engine is Engine.FLOWER else cores())
    progress = _SweepProgress(plan, at_once)
    with interruptible(lambda: f"Interrupted; start it again to go on in {folder}"), progress:
        outcomes = run_sweep(asked, plan, folder, jobs=at_once, on_end=progress)
    typer.echo(f"Sweep folder: {folder}")
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        typer.echo(f"Failed: {outcome.job.name}: {outcome.error}", err=True)
    if failed:
        raise typer.Exit(1)


def _seeds(text: str) -> tuple[int, ...]:
    from hedgerow.sim.runs.kinds import MAX_INT64

    parts = [part.strip() for part in text.split(",")]
    # A seed has at most 19 digits; Python refuses to read 4,300.
    seeds = [int(part) for part in parts if part.isdecimal() and len(part) < 20]
    if len(seeds) < len(parts) or len(set(seeds)) < len(seeds) or max(seeds) > MAX_INT64:
        raise ValueError(f"--seeds must be distinct integers in [0, 2^63), like 0,1,2, got {text[:100]!r}")
    return tuple(seeds)


class _SweepProgress:
    """A line for each run that ended, and a progress bar on a terminal, with the time left at this pace."""

    def __init__(self, plan: list[Job], at_once: int) -> None:
        from hedgerow.sim.runs.live import live_line, terminal

        self.total = len(plan)
        self.at_once = at_once
        self.ended = 0
        self.seconds: list[float] = []
        console = terminal()
        self._live = live_line(console) if console.is_interactive else None

    def __enter__(self) -> None:
        if self._live is not None:
            self._live.start()
            self._draw("")

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, outcome: Outcome) -> None:
        self.ended += 1
        line, left = f"[{self.ended}/{self.total}] {outcome.job.name}: {outcome.status}", ""
        if outcome.status != "kept":
            self.seconds.append(outcome.seconds)
            pace = sum(self.seconds) / len(self.seconds) / self.at_once
            left = f"about {pace * (self.total - self.ended):.0f} s left"
            line += f" after {outcome.seconds:.0f} s; {left}"
        # Not typer's echo, which would write over the bar.
        print(line, flush=True)
        self._draw(left)

    def _draw(self, left: str) -> None:
        from hedgerow.sim.runs.live import bar

        if self._live is not None:
            runs = f"run {self.ended}/{self.total}"
            self._live.update(bar(self.ended, self.total, f"{runs} | {left}" if left else runs), refresh=True)
