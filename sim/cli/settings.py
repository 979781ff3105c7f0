"""``hedgerow settings``: the settings of an app."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import APP_HELP, bad_options

if TYPE_CHECKING:
    from hedgerow.sim.runs.app import AppSpec


def settings(
    app_path: Annotated[
        str | None,
        typer.Argument(metavar="APP", help=f"{APP_HELP}. With --changed, by default the app of each run."),
    ] = None,
    changed: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="The settings of a run folder that differ from the defaults; of several too."
        ),
    ] = None,
    # A shell turns ``--changed runs/*`` into the option's value and further arguments.
    more: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", hidden=True)] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Update the defaults in the app's pyproject.toml instead.")
    ] = False,
) -> None:
    """List an app's run-config keys by group, each with its default, meaning and valid values."""
    from hedgerow.sim.runs.app import find_app, settings_module
    from hedgerow.sim.runs.settings_files import listing, write_settings

    with bad_options():
        if changed is not None and write:
            raise ValueError("--write must be used without --changed")
        if changed is not None:
            # Of what a shell finds, the second comes as APP.
            first = [Path(app_path)] if app_path and _is_no_app(Path(app_path)) else []
            app = find_app(app_path) if app_path and not first else None
            others = [*first, *(more or [])]
            typer.echo(_all_changed(changed, others, app))
            return
        if app_path is None:
            raise ValueError("APP must be given, or --changed RUN")
        if more:
            raise ValueError("a run must be given by --changed")
        spec = find_app(app_path)
        known = settings_module(spec).SETTINGS
        text = "\n".join(map(str, write_settings(known, spec.folder))) if write else listing(known)
    if text:
        typer.echo(text)


def _is_no_app(path: Path) -> bool:
    return path.exists() and not (path / "pyproject.toml").exists()


def _all_changed(run: Path, others: Sequence[Path], app: AppSpec | None) -> str:
    """Return what each run changed; if there are several, each under its name and without what is no run."""
    if not others:
        return _changed(run, app)
    runs = [folder for folder in sorted({run, *others}) if (folder / "config.json").is_file()]
    if not runs:
        raise ValueError(f"--changed must be given a run folder, got {run} and {len(others)} more")
    return "\n\n".join(f"{folder}\n{_changed(folder, app, several=True)}" for folder in runs)


def _changed(run: Path, app: AppSpec | None, *, several: bool = False) -> str:
    from hedgerow.sim.runs.app import settings_module
    from hedgerow.sim.runs.folder import read_config, recorded_settings
    from hedgerow.sim.runs.settings_files import changed
    from hedgerow.wire.checks import plain_name

    name = str(read_config(run).get("app"))
    if app is not None and several and plain_name(name) != plain_name(app.name):
        return f"a run of {name}"
    known = settings_module(app or _app_of(run)).SETTINGS
    return changed(known, recorded_settings(run)) or "all settings are the defaults"


def _app_of(run: Path) -> AppSpec:
    """Return the app that a run's config names, or the one that it is a copy of."""
    from hedgerow.sim.runs.app import find_app
    from hedgerow.sim.runs.folder import read_config

    config = read_config(run)
    for name in filter(None, (config.get("app"), config.get("copy-of"))):
        try:
            return find_app(str(name))
        except ValueError:
            continue
    raise ValueError(
        f"APP must be given: {run} is a run of {config.get('app')!r}, which is not found by name"
    )
