"""Error handling of all commands: one line for a mistake, a traceback only for a bug."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from difflib import get_close_matches
from typing import Any

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.utils import get_params_from_function

from hedgerow.wire.extras import MissingExtraError
from hedgerow.wire.paths import foreign_path
from hedgerow.wire.printable import quoted, traced

_TOO_MANY_FILES = "Too many open files"
BUG = "This is a bug in Hedgerow; please report it to its maintainers, with the command and the lines above."


def machine_lacks(error: BaseException) -> str:
    """Return what this machine lacks, with a remedy, if an error or a cause of it is due to that."""
    seen: BaseException | None = error
    while seen is not None:
        if "No usable temporary directory" in str(seen):
            return "there is no writable folder for temporary files: set TMPDIR to one"
        if getattr(seen, "errno", None) in (errno.EMFILE, errno.ENFILE) or _TOO_MANY_FILES in str(seen):
            return "too many open files: raise the limit (ulimit -n 1024), or use fewer --workers"
        seen = seen.__cause__ or seen.__context__
    return ""


class Command(TyperCommand):
    """A command whose help is shown as written."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help without Typer's escapes of brackets, for a markup that is disabled here."""
        self._describe_arguments()
        return super().get_help(ctx).replace("\\[", "[")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments.

        For an unknown option the error says how a setting of an app is given, and for several folders after
        --resume that it takes one. A path of another system is refused before it names an odd folder.
        """
        given_all = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not any(param.name == "run_config" for param in self.params):
                raise
            key = error.option_name.lstrip("-")
            words = f'{error.message} A setting of the app is given as -c "{key}=VALUE".'
            meant = get_close_matches(error.option_name, error.possibilities or (), cutoff=0.75)
            raise click.NoSuchOption(error.option_name, words, meant, ctx) from error
        except click.UsageError as error:
            folders = [one for one in given_all if one != ctx.params.get("app_path") and os.path.isdir(one)]
            if ctx.params.get("resume") is None or len(folders) < 2:
                raise
            several = ", ".join(map(quoted, folders))
            raise click.UsageError(f"--resume must be one run folder, got {several}", ctx) from error
        for param in self.params:
            given = ctx.params.get(param.name or "")
            for one in given if isinstance(given, list | tuple) else [given]:
                if isinstance(param.type, click.Path) and one and (wrong := foreign_path(str(one))):
                    raise click.BadParameter(f"got {quoted(str(one))}: {wrong}", ctx, param)
        return rest

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing, because Typer lists the arguments and click from 8.5 on would repeat them."""

    def _describe_arguments(self) -> None:
        # Typer 0.20 loses the help of arguments under click 8.5.
        told = get_params_from_function(inspect.unwrap(self.callback)) if self.callback else {}
        for param in self.params:
            if isinstance(param, TyperArgument) and not param.help and param.name in told:
                param.help = getattr(told[param.name].default, "help", None)


class CommandGroup(TyperGroup):
    """A group of commands, which prints their errors."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help without Typer's escapes."""
        return super().get_help(ctx).replace("\\[", "[")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; without any, show the help and exit with 0."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by their panels, in the order in which they were added."""
        found = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        commands = [command for command in found if command is not None]
        panels: dict[str, list[click.Command]] = {}
        for command in commands:
            panel = getattr(command, "rich_help_panel", None)
            panels.setdefault(panel if isinstance(panel, str) else "Commands", []).append(command)
        widest = max((len(command.name or "") for command in commands), default=0)
        for panel, its in panels.items():
            with formatter.section(panel):
                # The whole first sentence, on several lines if needed.
                formatter.write_dl(
                    [(f"{one.name:{widest}}", one.get_short_help_str(limit=200)) for one in its]
                )

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the epilog as it stands."""
        if self.epilog:
            formatter.write(f"\n{self.epilog}\n")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the requested command; for an unknown one, suggest a similar name once."""
        try:
            # Older versions of click make no suggestion, newer ones do, and Typer adds its own.
            return click.Group.resolve_command(self, ctx, args)
        except click.UsageError as error:
            if ctx.resilient_parsing or self.get_command(ctx, args[0]) is not None:
                raise
            # Imported late, because it imports NumPy.
            from hedgerow.wire.checks import did_you_mean

            meant = did_you_mean(args[0], self.list_commands(ctx))
            meant = f" ({meant})" if meant else ""
            raise click.UsageError(f"No such command {quoted(args[0])}{meant}", ctx) from error

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line; an unexpected error exits with 1 and asks for a report."""
        try:
            return super().main(*args, **options)
        except MissingExtraError as error:
            typer.echo(f"Error: {error}", err=True)
            sys.exit(1)
        except Exception as error:
            if lacks := machine_lacks(error):
                typer.echo(f"Error: {lacks}", err=True)
                sys.exit(1)
            typer.echo(traced(error), err=True)
            typer.echo(BUG, err=True)
            sys.exit(1)
