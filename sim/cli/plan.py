"""``hedgerow plan``: an app's planner, from its hooks, as a command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import typer
import typer.main

from hedgerow.sim.cli.mistakes import Command, CommandGroup
from hedgerow.sim.cli.options import bad_options, check_ordinary
from hedgerow.sim.runs.hooks import shipped_apps


class PlanGroup(CommandGroup):
    """A command for each app of the suite with a planner, and for any other app by its folder."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the apps of the suite that have planners."""
        return [name for name in shipped_apps() if self.get_command(ctx, name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the planner of an app, by its name or folder; None if it has none."""
        from hedgerow.sim.runs.hooks import hooks_of

        with bad_options():
            folder = shipped_apps().get(cmd_name, Path(cmd_name).expanduser().resolve())
            if cmd_name not in self.commands and (folder / "pyproject.toml").is_file():
                plan = hooks_of(folder).plan
                if plan is not None:
                    self.add_command(_command(cmd_name, plan))
        return super().get_command(ctx, cmd_name)


def _command(name: str, plan: Callable[..., Iterable[Any]]) -> click.Command:
    @functools.wraps(plan)
    def command(**given: Any) -> None:
        from rich.console import Console

        with bad_options():
            check_ordinary(**{key: value for key, value in given.items() if isinstance(value, float)})
            parts = list(plan(**given))
        for part in parts:
            # A line may be a command to copy, so it is not wrapped, and its brackets are not markup.
            typer.echo(part) if isinstance(part, str) else Console().print(part)

    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name, cls=Command)(command)
    return typer.main.get_command(alone)
