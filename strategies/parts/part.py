"""What a part may do: change an exchange before it goes, take note of replies and of rounds that count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hedgerow.strategies.exchange import Columns, Exchange, Steps

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from numpy.typing import NDArray

    from hedgerow.strategies.inbox import Node, Reply
    from hedgerow.strategies.run import Run

__all__ = ["Part"]


class Part:
    """A concern of a run.

    What a part keeps is what counted: a try of a round that came to nothing leaves it as it was. Only facts
    stay all the same: what was asked, and what was told.
    """

    name: str = ""

    @property
    def sees_columns(self) -> bool:
        """Whether it can do without single replies, which an engine then need not make.

        It can where it overrides none of ``beside``, ``arrived``, ``check`` and ``take``; one that does and
        gives ``check_columns`` for them says True.
        """
        own = type(self)
        return all(
            getattr(own, hook) is getattr(Part, hook) for hook in ("beside", "arrived", "check", "take")
        )

    def forget(self) -> None:
        """Be as before a run."""

    def opened(self, run: Run) -> Steps[None]:
        """Yield what is asked before a try of a round."""
        yield from ()

    def ask(self, exchange: Exchange, run: Run) -> Exchange:
        """Return what is asked in place of an exchange."""
        return exchange

    def beside(self, exchange: Exchange, nodes: Sequence[Node], run: Run) -> list[Message]:
        """Return messages that go with those of a training exchange, which goes to these nodes."""
        return []

    def arrived(self, messages: Iterable[Message], exchange: Exchange, run: Run) -> Iterable[Message]:
        """Return what is read in place of the messages that come to a training exchange."""
        return messages

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: Run) -> None:
        """Refuse a reply, before it is read, with PayloadError."""

    def check_columns(self, exchange: Exchange, metrics: Mapping[str, NDArray[Any]], run: Run) -> str | None:
        """Take note of the metrics of all replies (K,), by name; say what is wrong if any is to be refused.

        Then each is read by itself, as ``check`` and ``take`` are told of it.
        """
        return None

    def take(self, exchange: Exchange, reply: Reply, run: Run) -> None:
        """Take note of a valid reply."""

    def learnt(self, exchange: Exchange, columns: Columns, run: Run) -> None:
        """Take note of what nodes learnt: models, or their changes where ``exchange.coding.changes``.

        Where the server sees sums alone, it is not called.
        """

    def ended(self, run: Run) -> None:
        """Take note of a round that counts; ``run.told`` takes what its record says."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the part."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""

    def describe(self) -> list[str]:
        """Return lines that say what the part does, for the log."""
        return []
