"""``hedgerow settings``: what an app can be told."""

from __future__ import annotations

from typing import Annotated

import typer

from hedgerow.sim.cli.options import AppPath, bad_options

__all__ = ["settings"]


def settings(
    app_path: AppPath,
    write: Annotated[
        bool, typer.Option("--write", help="Bring the app's pyproject.toml and README.md up to date instead.")
    ] = False,
) -> None:
    """List an app's run-config keys: each with its default, what it means and what is valid."""
    from hedgerow.sim.runs.app import find_app, settings_module
    from hedgerow.sim.runs.settings_files import listing, write_settings

    with bad_options():
        spec = find_app(app_path)
        known = settings_module(spec).SETTINGS
        if write:
            for path in write_settings(known, spec.folder):
                typer.echo(path)
            return
    typer.echo(listing(known))
