"""How every command ends: a mistake is one error, and only what is a bug shows where it happened."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import click
import typer
from typer.core import TyperCommand, TyperGroup

from hedgerow.wire.extras import MissingExtraError
from hedgerow.wire.printable import quoted

__all__ = ["BUG", "Command", "Group"]

BUG = "This is a bug in Hedgerow; please report it to its maintainers, with the command and the lines above."


class Command(TyperCommand):
    """A command whose help reads as it was written."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help; Typer escapes brackets for a markup that is switched off here."""
        return super().get_help(ctx).replace("\\[", "[")


class Group(TyperGroup):
    """Commands, with the one place where what they raise is told."""

    def get_help(self, ctx: click.Context) -> str:
        """Return the help, as a command's."""
        return super().get_help(ctx).replace("\\[", "[")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is asked for; of an unknown one say what may be meant, once."""
        try:
            # Older versions of click make no suggestion, newer ones do, and Typer adds its own.
            return click.Group.resolve_command(self, ctx, args)
        except click.UsageError as error:
            if ctx.resilient_parsing or self.get_command(ctx, args[0]) is not None:
                raise
            # It imports NumPy.
            from hedgerow.wire.checks import did_you_mean

            meant = did_you_mean(args[0], self.commands)
            meant = f" ({meant})" if meant else ""
            raise click.UsageError(f"No such command {quoted(args[0])}{meant}", ctx) from error

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line; exit with 1 and what to report where it raises none of its own errors."""
        try:
            return super().main(*args, **options)
        except MissingExtraError as error:
            typer.echo(f"Error: {error}", err=True)
            sys.exit(1)
        except Exception:
            traceback.print_exc()
            typer.echo(BUG, err=True)
            sys.exit(1)
