"""Whether nodes follow a method's instructions, or train as they always do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.inbox import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, only_record

if TYPE_CHECKING:
    from hedgerow.strategies.run import Run

__all__ = ["Followed"]


class Followed(Part):
    """Refuses models of nodes that ignore what only this method's ClientApp reads.

    A ClientApp of another method takes the model, trains as it likes and replies with a model: every check of
    shapes passes, and the run is not the method's. Its replies tell no metric of the method's: ``tells`` are
    those by one of which a node shows that it has followed; one that is a key of the message's config too
    must have its value. ``instructions`` and ``client``, the ClientApp to use, are for the error.
    """

    name = "followed"
    sees_columns = True

    def __init__(self, tells: Sequence[str], instructions: Sequence[str], client: str) -> None:
        self.tells = tuple(tells)
        self.reason = (
            f"the ClientApp ignores {', '.join(instructions)}: its replies tell no "
            f"{' or '.join(map(repr, tells))}; use {client} of hedgerow.clients"
        )

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: Run) -> None:
        """Refuse a model without one of the metrics; PayloadError."""
        if exchange.trains and exchange.reads is None:
            told = only_record(content, MetricRecord, "bad metrics")
            if not any(key in told for key in self.tells):
                raise PayloadError(self.reason, f"it tells {sorted(told)}")
            for key in self.tells:
                if (asked := exchange.config.get(key)) is not None and told.get(key, asked) != asked:
                    raise PayloadError(f"{key} is not what was asked", f"{quoted(told[key])}, not {asked}")

    def check_columns(self, exchange: Exchange, metrics: Mapping[str, NDArray[Any]], run: Run) -> str | None:
        """Say whether replies have none of the metrics, or some that are to be compared."""
        alone = [key for key in self.tells if key in metrics and key not in exchange.config]
        return None if alone else self.reason
