"""Simulated time as the engine's clock has it, on which delayed replies take time."""

from __future__ import annotations

from flwr.serverapp import Grid

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.clock import Clock


def follow_engine(clock: Clock, grid: Grid | None) -> None:
    """Advance a simulated clock to the engine's; leave it if the grid has none."""
    if (now := getattr(grid, "now", None)) is not None:
        clock.advance(max(0.0, now() - clock.seconds))


class EngineTime(Part):
    """Sets the simulated clock to the engine's after each round.

    A round lasts until its last reply or the timeout, in simulated seconds. The clock stays at zero if no
    reply is delayed, and on devices, where time is real.
    """

    name = "engine-time"

    def ended(self, run: RoundContext) -> None:
        """Advance the clock to the engine's."""
        follow_engine(run.federation.clock, run.grid)
