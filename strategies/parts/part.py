"""What a part may do: change an exchange before it goes, and take note of rounds that count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import Message, RecordDict

from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.inbox import Node

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

    def ask(self, exchange: Exchange, run: Run) -> Exchange:
        """Return what is asked in place of an exchange."""
        return exchange

    def beside(self, exchange: Exchange, nodes: Sequence[Node], run: Run) -> list[Message]:
        """Return messages that go with those of an exchange, which goes to these nodes."""
        return []

    def arrived(self, messages: Iterable[Message], exchange: Exchange, run: Run) -> Iterable[Message]:
        """Return what is read in place of the messages that come."""
        return messages

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: Run) -> None:
        """Refuse a reply, before it is read, with PayloadError."""

    def accepted(self, node: int, run: Run) -> None:
        """Take note of a valid reply; its round may still come to nothing."""

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
