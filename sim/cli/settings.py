"""``hedgerow settings``: the settings of an app."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import AppPath, bad_options

__all__ = ["settings"]


def settings(
    app_path: AppPath,
    changed: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The settings of a run folder that differ from the defaults."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Update the app's pyproject.toml and README.md instead.")
    ] = False,
) -> None:
    """List an app's run-config keys by group, each with its default, meaning and valid values."""
    from hedgerow.sim.runs import settings_files
    from hedgerow.sim.runs.app import find_app, settings_module
    from hedgerow.sim.runs.folder import recorded_settings

    with bad_options():
        spec = find_app(app_path)
        known = settings_module(spec).SETTINGS
        if write and changed is not None:
            raise ValueError("--write must not be used with --changed")
        if write:
            text = "\n".join(map(str, settings_files.write_settings(known, spec.folder)))
        elif changed is not None:
            text = (
                settings_files.changed(known, recorded_settings(changed)) or "all settings are the defaults"
            )
        else:
            text = settings_files.listing(known)
    if text:
        typer.echo(text)
