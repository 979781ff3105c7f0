"""Simulated time as the engine's clock has it, on which delayed replies take time."""

from __future__ import annotations

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.parts.part import Part


class EngineTime(Part):
    """Sets the simulated clock to the engine's after each round.

    A round lasts until its last reply or the timeout, in simulated seconds. The clock stays at zero if no
    reply is delayed, and on devices, where time is real.
    """

    name = "engine-time"

    def ended(self, run: RoundContext) -> None:
        """Advance the clock to the engine's."""
        if (now := getattr(run.grid, "now", None)) is not None:
            clock = run.federation.clock
            clock.advance(max(0.0, now() - clock.seconds))
