"""``hedgerow run``: an app on this machine."""

from __future__ import annotations

import gc
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hedgerow.sim.cli.mistakes import machine_lacks
from hedgerow.sim.cli.options import (
    AppPath,
    Engine,
    EngineName,
    NodeConfig,
    OwnData,
    RunConfig,
    Track,
    bad_options,
    check_inprocess,
    interruptible,
    read_node_configs,
    read_own_data,
)

if TYPE_CHECKING:
    from hedgerow.sim.runs.app import AppSpec
    from hedgerow.sim.runs.foreign import Records
    from hedgerow.sim.runs.plan import Plan


def run(
    app_path: AppPath,
    run_config: RunConfig = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes. Default: the app's own, else 2."),
    ] = None,
    node_config: NodeConfig = None,
    own_data: OwnData = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:N or auto: the app's run-config key 'device'.")
    ] = None,
    engine: EngineName = Engine.INPROCESS,
    resume: Annotated[
        str | None,
        typer.Option(help="Folder of an interrupted run, to continue with its settings."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="The app's run-config key 'seed'. It determines node ids, faults, and the global generators "
            "of Python, NumPy and torch. Default for an app without one: drawn, and recorded in config.json.",
        ),
    ] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Folder for the run folder. Default: the app's own, else runs.")
    ] = None,
    track: Track = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Log only warnings, and show no progress.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Serialize every message, as a deployment does (inprocess).")
    ] = False,
    real_time: Annotated[
        bool,
        typer.Option(
            "--real-time", help="Count handlers' real seconds: a slow node's reply is late (inprocess)."
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Worker processes for the nodes, each on one thread (inprocess). 1: only this "
            "one. Default: one per physical core where the work is large enough.",
        ),
    ] = None,
    client_cpus: Annotated[
        int, typer.Option(min=1, help="CPUs that Ray reserves for a client (flower).")
    ] = 1,
    client_gpus: Annotated[
        float, typer.Option(min=0.0, help="Share of a GPU that Ray reserves for a client (flower).")
    ] = 0.0,
) -> None:
    """Run an app on this machine.

    Exits with 0 if the run completed, 1 if it failed, 2 on bad options, 3 if the run folder could
    not be written, 130 if interrupted, 143 if terminated.
    """
    with _importing():
        from hedgerow.sim.deploy.flower_run import flower_run
        from hedgerow.sim.runs.app import find_app
        from hedgerow.sim.runs.foreign import earlier_run
        from hedgerow.sim.runs.plan import plan_run, resumed_config
        from hedgerow.sim.runs.trackers import check_trackers

    with bad_options():
        check_inprocess(
            engine,
            {
                "--strict": strict,
                "--real-time": real_time,
                "--workers": workers is not None,
                "--track": bool(track),
                "--node-config": bool(node_config),
                "--own-data": own_data is not None,
            },
        )
        trackers = check_trackers(track or [])
        spec = find_app(app_path)
        foreign = resume is not None and "resume" not in spec.config
        before, own = read_own_data(spec, own_data, nodes)
        if foreign:
            earlier = earlier_run(str(resume), spec.config, spec.name)
            before += earlier.overrides
            nodes = nodes or earlier.nodes
            real_time = real_time or earlier.real_time
        elif resume is not None:
            before += resumed_config(spec, resume)
        if quiet and "quiet" in spec.config:
            run_config = [*(run_config or []), "quiet=true"]
        plan = plan_run(
            spec,
            [*before, *(run_config or [])],
            num_nodes=nodes,
            device=device,
            seed=seed,
            output_dir=output_dir,
            workers=workers,
        )
        if foreign and seed is None:
            plan = replace(plan, seed=earlier.seed)
        configs = read_node_configs(spec, node_config, plan.num_nodes, own) if node_config or own else None
        if engine is Engine.FLOWER:
            _check_plan(spec.name, plan)

    if engine is Engine.FLOWER:
        raise typer.Exit(flower_run(spec, plan, client_cpus=client_cpus, client_gpus=client_gpus))
    _run_here(
        spec,
        plan,
        app_path,
        resume if foreign else None,
        quiet=quiet,
        node_configs=configs,
        strict=strict,
        real_time=real_time,
        track=trackers,
    )


def _run_here(
    spec: AppSpec, plan: Plan, app_path: str, resume: str | None, *, quiet: bool, **options: Any
) -> None:
    """Run an app in this process, and turn its errors into exit codes."""
    from hedgerow.global_draws import seed_global_draws
    from hedgerow.sim.cli.owners import blame, is_bug, is_exit_of_others, storage_failed
    from hedgerow.sim.runs.app import load_app
    from hedgerow.sim.runs.checkpoint import CheckpointError
    from hedgerow.sim.runs.folder import RunFolderError
    from hedgerow.sim.runs.launch import run_app, run_seed
    from hedgerow.sim.runs.live import colour_log, only_warnings
    from hedgerow.sim.runs.settings import SettingsError
    from hedgerow.wire.failures import RunFailedError
    from hedgerow.wire.printable import traced

    colour_log()
    how = _how_to_resume(app_path, plan)
    bad = (SettingsError, RunFolderError, CheckpointError)
    try:
        with interruptible(lambda: f"Interrupted{how() and f'; go on with: {how()}'}"), only_warnings(quiet):
            records = _records(plan, resume, quiet=quiet)
            plan = replace(plan, seed=run_seed(plan))
            # Before the app is imported, because that may draw its model.
            seed_global_draws(run_seed(plan), later=True)
            with _importing():
                app = load_app(spec.folder)
            run_app(app, plan, records=records, **options)
    except RunFailedError as error:
        typer.echo(f"Run failed: {error}", err=True)
        raise typer.Exit(1) from error
    except SystemExit as error:
        if not is_exit_of_others(error):
            raise
        typer.echo(traced(error), err=True)
        typer.echo(f"Run failed: {blame(error, spec)}", err=True)
        raise typer.Exit(1) from error
    except Exception as error:
        if lacks := machine_lacks(error):
            typer.echo(f"Error: {lacks}", err=True)
            raise typer.Exit(1) from error
        if isinstance(error, RunFolderError) and storage_failed(error):
            again = how()
            then = f"Make room, then go on with: {again}" if again else "There is no checkpoint to resume."
            typer.echo(f"Run failed: {error}. {then}", err=True)
            raise typer.Exit(3) from error
        if not is_bug(error) and not isinstance(error, bad):
            typer.echo(traced(error), err=True)
            typer.echo(f"Run failed: {blame(error, spec)}", err=True)
            raise typer.Exit(1) from error
        with bad_options(*bad, FileNotFoundError):
            raise


@contextmanager
def _importing() -> Iterator[None]:
    """Do not look for garbage among what is imported, now or later: that took a sixth of the start."""
    gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _check_plan(name: str, plan: Plan) -> None:
    """Raise ValueError for a plan that Flower's engine cannot run."""
    plan.check_no_faults()
    for key, value in {"seed": plan.seed, "output-dir": plan.output_dir}.items():
        if value is not None:
            raise ValueError(f"--{key}: app {name!r} has no key {key!r}; use --engine inprocess")


def _records(plan: Plan, resume: str | None, *, quiet: bool) -> Records:
    """Return how to record the run of a foreign app, new or resumed from ``resume``."""
    from hedgerow.sim.runs.foreign import Records

    every = plan.run_config.get("checkpoint-every")
    return Records(
        output_dir=_output_dir(plan),
        resume=Path(resume).expanduser().resolve() if resume else None,
        checkpoint_every=every if isinstance(every, int) and every > 0 else 10,
        quiet=quiet,
    )


def _how_to_resume(app_path: str, plan: Plan) -> Callable[[], str]:
    """Return what says how to resume the run that starts now, whose folder only the app will know.

    It returns an empty text if there is no checkpoint.
    """
    from hedgerow.sim.runs.checkpoint import has_checkpoint
    from hedgerow.sim.runs.folder import runs_folder

    config = plan.run_config
    parent = runs_folder(_output_dir(plan))
    before = set(_run_folders(parent))

    def say() -> str:
        made = sorted(set(_run_folders(parent)) - before, key=lambda folder: folder.stat().st_mtime)
        folder = config.get("resume") or (made[-1] if made else None)
        # The first round leaves none, nor does an app that cannot go on, or a disk on which none fits.
        if folder is None or not has_checkpoint((Path(str(folder)) / "checkpoint").expanduser()):
            return ""
        return shlex.join(["hedgerow", "run", app_path, "--resume", str(folder)])

    return say


def _output_dir(plan: Plan) -> Path:
    """Return where an app's run folders go; where nobody says, the suite's default."""
    return Path(str(plan.output_dir or plan.run_config.get("output-dir") or "runs"))


def _run_folders(parent: Path) -> list[Path]:
    return [file.parent for file in parent.expanduser().glob("*/config.json")]
