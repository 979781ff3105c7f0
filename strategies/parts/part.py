"""The hooks of a part: it may change exchanges, and observe replies and completed rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Columns, Exchange, Steps
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.node import Node
from hedgerow.wire.printable import quoted


class Part:
    """A concern of a run that is independent of the algorithm.

    A failed attempt of a round must leave a part's state unchanged, except for facts: what was sent, and what
    was disclosed.
    """

    name: str = ""

    @property
    def sees_columns(self) -> bool:
        """Whether the part works without single replies, which an engine then need not create.

        By default True if it overrides none of ``extra_messages``, ``arrived``, ``check`` and ``take``; a
        part that replaces them by ``check_columns`` overrides this with True.
        """
        own = type(self)
        return all(
            getattr(own, hook) is getattr(Part, hook)
            for hook in ("extra_messages", "arrived", "check", "take")
        )

    @property
    def with_sums(self) -> bool:
        """Whether the part works with secure sums, which show no single update.

        By default True if it does not override ``learnt``.
        """
        return type(self).learnt is Part.learnt

    @property
    def with_buffer(self) -> bool:
        """Whether the part works with buffered rounds, whose replies come one by one.

        By default True if it overrides neither ``extra_messages`` nor ``arrived``, which have all messages of
        a round, and are not called.
        """
        own = type(self)
        return own.extra_messages is Part.extra_messages and own.arrived is Part.arrived

    def forget(self) -> None:
        """Reset the state."""

    def opened(self, run: RoundContext) -> Steps[None]:
        """Yield exchanges before an attempt of a round."""
        yield from ()

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Return a changed exchange."""
        return exchange

    def extra_messages(self, exchange: Exchange, nodes: Sequence[Node], run: RoundContext) -> list[Message]:
        """Return messages to send along with those of a training exchange to these nodes."""
        return []

    def arrived(
        self, messages: Iterable[Message], exchange: Exchange, run: RoundContext
    ) -> Iterable[Message]:
        """Return the replies to read in place of those to a training exchange."""
        return messages

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: RoundContext) -> None:
        """Raise PayloadError to refuse a reply before it is read."""

    def check_columns(
        self, exchange: Exchange, metrics: Mapping[str, NDArray[Any]], run: RoundContext
    ) -> str | None:
        """Check all replies' metrics (K,), by name; return a reason to create single replies, or None."""
        return None

    def take(self, exchange: Exchange, reply: Reply, run: RoundContext) -> None:
        """Observe a valid reply."""

    def buffered(self, exchange: Exchange, reply: Reply, run: RoundContext) -> None:
        """Observe a valid reply that enters a buffer, from which an update will take it."""

    def learnt(self, exchange: Exchange, columns: Columns, run: RoundContext) -> None:
        """Observe the models, or changes if ``exchange.coding.changes``; not called with secure sums."""

    def ended(self, run: RoundContext) -> None:
        """Observe a completed round; metrics for its record go into ``run.metrics``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the part's state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""

    def describe(self) -> list[str]:
        """Return lines for the log that describe the part."""
        return []


# Those that are called within a round; a part that leaves one as it is here is not asked.
_HOOKS = (
    "opened", "ask", "extra_messages", "arrived", "check", "check_columns", "take", "buffered", "learnt",
    "ended",
)  # fmt: skip


class Parts(tuple[Part, ...]):
    """The parts of a run; ValueError if two of them have one name.

    ``hooks`` has the parts that override each hook, by its name. ``see_columns`` is whether all of them work
    without single replies.
    """

    hooks: Mapping[str, tuple[Part, ...]]
    see_columns: bool

    def __new__(cls, parts: Iterable[Part] = ()) -> Parts:
        """Return the parts in this order."""
        own = super().__new__(cls, parts)
        if wrong := [part for part in own if not isinstance(part, Part)]:
            raise ValueError(f"parts must be objects of classes derived from Part, got {quoted(wrong[0])}")
        if len(names := [part.name for part in own]) != len(set(names)):
            raise ValueError(f"parts must have different names, got {names}")
        own.hooks = {hook: tuple(part for part in own if _has(part, hook)) for hook in _HOOKS}
        own.see_columns = all(part.sees_columns for part in own)
        return own


def _has(part: Part, hook: str) -> bool:
    return hook in vars(part) or getattr(type(part), hook) is not getattr(Part, hook)
