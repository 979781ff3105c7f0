"""``python -m hedgerow.sim`` is ``hedgerow``."""

from hedgerow.sim.cli import app

app()
