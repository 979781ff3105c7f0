"""The command line."""

from hedgerow.sim.cli.main import app

__all__ = ["app"]
