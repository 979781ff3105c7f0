"""``hedgerow run``: an app on this machine."""

from __future__ import annotations

import logging
import os
import shlex
import traceback
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import AppPath, RunConfig, bad_options, interruptible

if TYPE_CHECKING:
    from flwr.app import UserConfig

__all__ = ["Engine", "run"]


class Engine(StrEnum):
    """Who carries the messages."""

    INPROCESS = "inprocess"
    FLOWER = "flower"


def run(
    app_path: AppPath,
    run_config: RunConfig = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Number of nodes. Default: what the app says, else 2."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:N or auto: the app's run-config key 'device'.")
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="inprocess: here, without Ray. flower: through 'flwr run'.")
    ] = Engine.INPROCESS,
    resume: Annotated[
        str | None,
        typer.Option(help="Folder of a run that was stopped: its settings, from its last checkpoint on."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no log below warnings.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Serialise every message, as a deployment does (inprocess).")
    ] = False,
    client_cpus: Annotated[
        int, typer.Option(min=1, help="CPUs that Ray reserves for a client (flower).")
    ] = 1,
    client_gpus: Annotated[
        float, typer.Option(min=0.0, help="Share of a GPU that Ray reserves for a client (flower).")
    ] = 0.0,
) -> None:
    """Run an app on this machine.

    Exits with 0 if the run completed, 1 if it failed, 2 on bad options, 130 if interrupted,
    143 if terminated.
    """
    from hedgerow.sim.deploy.flower_run import flower_run
    from hedgerow.sim.runs.app import find_app, load_app, own_settings
    from hedgerow.sim.runs.checkpoint import CheckpointError
    from hedgerow.sim.runs.foreign import Records, earlier_run
    from hedgerow.sim.runs.launch import run_app
    from hedgerow.sim.runs.plan import plan_run, resumed_config, toml_value
    from hedgerow.sim.runs.recorder import RunFolderError
    from hedgerow.sim.runs.settings import SettingsError
    from hedgerow.strategies import RosterError, TooFewRepliesError

    with bad_options():
        if strict and engine is Engine.FLOWER:
            raise ValueError("--strict: Flower's engine has no strict mode; use --engine inprocess")
        spec = find_app(app_path)
        before: list[str] = []
        foreign = resume is not None and "resume" not in spec.config
        if resume is not None and foreign:
            earlier, earlier_nodes = earlier_run(resume)
            before = [f"{key}={toml_value(value)}" for key, value in earlier.items()]
            nodes = nodes or earlier_nodes
        elif resume is not None:
            before = resumed_config(spec, resume)
        if quiet and "quiet" in spec.config:
            run_config = [*(run_config or []), "quiet=true"]
        plan = plan_run(spec, [*before, *(run_config or [])], num_nodes=nodes, device=device)
        if plan.faults is not None and engine is Engine.FLOWER:
            raise ValueError("fault-*: Flower's engine plays no faults; use --engine inprocess")

    if engine is Engine.FLOWER:
        raise typer.Exit(flower_run(spec, plan, client_cpus=client_cpus, client_gpus=client_gpus))
    if quiet:
        logging.getLogger("flwr").setLevel(logging.WARNING)
    try:
        with (
            bad_options(SettingsError, RunFolderError, CheckpointError, FileNotFoundError),
            interruptible(_how_to_go_on(app_path, plan.run_config)),
        ):
            every = plan.run_config.get("checkpoint-every")
            records = Records(
                output_dir=_output_dir(plan.run_config),
                resume=Path(resume).expanduser().resolve() if resume and foreign else None,
                checkpoint_every=every if isinstance(every, int) and every > 0 else 10,
                quiet=quiet,
            )
            run_app(load_app(spec.folder), plan, strict=strict, records=records)
    except (RosterError, TooFewRepliesError) as error:
        typer.echo(f"Run failed: {error}", err=True)
        raise typer.Exit(1) from error
    except Exception as error:
        # Of another's app it is the app's; ours are Hedgerow, and what they raise is left to ``mistakes``.
        if own_settings(spec) is not None or not _raised_in(spec.folder, error):
            raise
        traceback.print_exc()
        typer.echo(f"Run failed: the app {spec.name} raised this, and not Hedgerow, which ran it", err=True)
        raise typer.Exit(1) from error


def _how_to_go_on(app_path: str, config: UserConfig) -> Callable[[], str]:
    """Return what says how to go on with the run that starts now, whose folder only the app will know."""
    parent = Path(os.environ.get("HEDGEROW_OUTPUT_DIR", Path.cwd())) / _output_dir(config)
    before = set(_run_folders(parent))

    def say() -> str:
        made = sorted(set(_run_folders(parent)) - before, key=lambda folder: folder.stat().st_mtime)
        folder = config.get("resume") or (made[-1] if made else None)
        if folder is None or not ("resume" in config or (Path(str(folder)) / "checkpoint").is_dir()):
            return "Interrupted"
        command = shlex.join(["hedgerow", "run", app_path, "--resume", str(folder)])
        return f"Interrupted; go on with: {command}"

    return say


def _output_dir(config: UserConfig) -> Path:
    """Return where an app's run folders go; an app without the key ``output-dir`` has the suite's default."""
    return Path(str(config.get("output-dir") or "runs"))


def _run_folders(parent: Path) -> list[Path]:
    return [file.parent for file in parent.expanduser().glob("*/config.json")]


def _raised_in(folder: Path, error: Exception) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return folder in Path(last.filename).resolve().parents
