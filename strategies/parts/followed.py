"""Checks that nodes follow a method's instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, only_record


class Followed(Part):
    """Refuses models of nodes that run the ClientApp of another method.

    Such a ClientApp trains in its own way and replies with a model that passes every check of shapes. But its
    replies lack this method's metrics: a valid reply has at least one of the metrics ``tells``, and each of
    them that is also a key of the message's config must have the same value. ``instructions`` and ``client``
    (the ClientApp to use) only serve the error message.
    """

    name = "followed"
    sees_columns = True

    def __init__(self, tells: Sequence[str], instructions: Sequence[str], client: str) -> None:
        self.tells = tuple(tells)
        self.reason = (
            f"the ClientApp ignores {', '.join(instructions)}: its replies tell no "
            f"{' or '.join(map(repr, tells))}; use {client} of hedgerow.clients"
        )

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: RoundContext) -> None:
        """Refuse a model without one of the metrics."""
        if exchange.trains and exchange.reads is None:
            metrics = only_record(content, MetricRecord, "bad metrics")
            if not any(key in metrics for key in self.tells):
                raise PayloadError(self.reason, f"its metrics are {sorted(metrics)}")
            for key in self.tells:
                if (asked := exchange.config.get(key)) is not None and metrics.get(key, asked) != asked:
                    raise PayloadError(f"{key} is not what was asked", f"{quoted(metrics[key])}, not {asked}")

    def check_columns(
        self, exchange: Exchange, metrics: Mapping[str, NDArray[Any]], run: RoundContext
    ) -> str | None:
        """Return None if replies have a metric that needs no comparison with the config."""
        alone = [key for key in self.tells if key in metrics and key not in exchange.config]
        return None if alone else self.reason
