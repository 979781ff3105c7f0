"""``hedgerow settings``: the settings of an app."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import AppPath, bad_options

if TYPE_CHECKING:
    from hedgerow.sim.runs.app import AppSpec
    from hedgerow.sim.runs.settings import Setting

__all__ = ["settings"]


def settings(
    app_path: AppPath,
    changed: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="The settings of a run folder that differ from the defaults; of several too."
        ),
    ] = None,
    # A shell turns ``--changed runs/*`` into the option's value and further arguments.
    more: Annotated[list[Path] | None, typer.Argument(metavar="[RUN]...", hidden=True)] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Update the app's pyproject.toml and README.md instead.")
    ] = False,
) -> None:
    """List an app's run-config keys by group, each with its default, meaning and valid values."""
    from hedgerow.sim.runs import settings_files
    from hedgerow.sim.runs.app import find_app, settings_module
    from hedgerow.sim.runs.folder import read_config

    with bad_options():
        if changed is not None and (Path(app_path) / "config.json").is_file():  # ``--changed runs/*`` alone
            for run in sorted({changed, Path(app_path), *(more or [])}):
                if (run / "config.json").is_file():
                    own = find_app(str(read_config(run)["app"]))
                    typer.echo(f"{run}\n{_changed(run, own, settings_module(own).SETTINGS)}\n")
            return
        spec = find_app(app_path)
        known = settings_module(spec).SETTINGS
        if (write or more) and (changed is None) != write:
            raise ValueError("a run must be given by --changed, without --write")
        if write:
            text = "\n".join(map(str, settings_files.write_settings(known, spec.folder)))
        elif changed is None:
            text = settings_files.listing(known)
        elif more:
            runs = [folder for folder in (changed, *more) if (folder / "config.json").is_file()]
            text = "\n\n".join(f"{folder}\n{_changed(folder, spec, known, several=True)}" for folder in runs)
        else:
            text = _changed(changed, spec, known)
    if text:
        typer.echo(text)


def _changed(folder: Path, spec: AppSpec, known: Mapping[str, Setting], *, several: bool = False) -> str:
    from hedgerow.sim.runs import settings_files
    from hedgerow.sim.runs.folder import read_config, recorded_settings
    from hedgerow.wire.checks import plain_name

    app = str(read_config(folder).get("app"))
    if several and plain_name(app) != plain_name(spec.name):
        return f"a run of {app}"
    return settings_files.changed(known, recorded_settings(folder)) or "all settings are the defaults"
