"""Local iterations of the mean node, from the reported batches per epoch."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from flwr.app import MetricRecord, RecordDict

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.inbox import checked_metrics
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, only_record

_BATCHES = "num-batches"


class LocalIterations(Part):
    """Counts local iterations; refuses impossible numbers of batches, and missing ones if ``required``."""

    name = "iterations"

    def __init__(
        self, federation: Federation, epochs: int, batch_size: int, *, required: bool = False
    ) -> None:
        self.federation, self.required = federation, required
        self.epochs, self.batch_size = epochs, batch_size
        self.forget()

    def forget(self) -> None:
        """Reset the count."""
        self.count = 0.0

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: RoundContext) -> None:
        """Refuse a reply with more batches than examples, or without batches if they are required."""
        if exchange.reads is not None or not exchange.trains:
            return
        key = self.federation.settings.weighted_by_key
        metrics = checked_metrics(content, key)
        if self.required:
            checked_metrics(content, _BATCHES)
        batches, examples = metrics.get(_BATCHES, 0), metrics[key]
        if not isinstance(batches, int | float) or not 0 <= batches <= examples:  # type: ignore[operator]
            raise PayloadError("bad metrics", f"{_BATCHES}={quoted(batches)} of {quoted(examples)} examples")

    def ended(self, run: RoundContext) -> None:
        """Count a round's iterations: as reported, or for members of a secure sum from their sizes."""
        records = [only_record(content, MetricRecord, "bad metrics") for content in run.contents]
        if len(records) == len(run.absorbed):
            batches = [float(record.get(_BATCHES, 0)) for record in records]  # type: ignore[arg-type]
        else:
            batches = [ceil(self.federation.limits.weight_of(one) / self.batch_size) for one in run.absorbed]
        self.count += self.epochs * sum(batches) / max(1, len(batches))

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        self.count = float(state["count"])
