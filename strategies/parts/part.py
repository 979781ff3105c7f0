"""What a part may do: change an exchange before it goes, and take note of rounds that count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hedgerow.strategies.exchange import Exchange, Steps

if TYPE_CHECKING:
    from hedgerow.strategies.method import Run

__all__ = ["Part"]


class Part:
    """A concern of a run.

    What a part keeps is what counted: a try of a round that came to nothing leaves it as it was.
    """

    name: str = ""

    def forget(self) -> None:
        """Be as before a run."""

    def opened(self, run: Run) -> Steps[None]:
        """Yield what is asked before a try of a round."""
        yield from ()

    def ask(self, exchange: Exchange, run: Run) -> Exchange:
        """Return what is asked in place of an exchange."""
        return exchange

    def ended(self, run: Run) -> None:
        """Take note of a round that counts."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the part."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""

    def describe(self) -> list[str]:
        """Return lines that say what the part does, for the log."""
        return []
