"""Checks that nodes took the requested number of local iterations."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, only_record

if TYPE_CHECKING:
    from hedgerow.strategies.run import Run

_NUM_STEPS = "num-steps"


class ReportedSteps(Part):
    """Refuses replies whose ``num-steps`` differ from ``config["local-steps"]``."""

    name = "steps"

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the state."""
        self.all_report = True  # every reply had ``num-steps``

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: Run) -> None:
        """Refuse a training reply that reports another number."""
        if (asked := exchange.config.get("local-steps")) is None or not exchange.trains:
            return
        taken = only_record(content, MetricRecord, "bad metrics").get(_NUM_STEPS)
        if taken is not None and taken != asked:
            detail = f"took {quoted(taken)} steps; config['local-steps'] was {asked}"
            raise PayloadError("num-steps is not local-steps", detail)

    sees_columns = True

    def check_columns(self, exchange: Exchange, metrics: Mapping[str, NDArray[Any]], run: Run) -> str | None:
        """Return a reason if a reply reports another number, or none."""
        asked = exchange.config.get("local-steps")
        if asked is None or (_NUM_STEPS in metrics and (metrics[_NUM_STEPS] == asked).all()):
            return None
        return "num-steps is not local-steps"

    def take(self, exchange: Exchange, reply: Reply, run: Run) -> None:
        """Record whether a valid reply reports the number."""
        asked = exchange.config.get("local-steps")
        if asked is None or not self.all_report or not exchange.trains:
            return
        if _NUM_STEPS not in only_record(reply.content, MetricRecord, "bad metrics"):
            self.all_report = False
            log(
                WARNING,
                "Replies do not report 'num-steps' in their MetricRecord: whether nodes followed "
                "config['local-steps'] = %d, the iterations, and the simulated seconds are unknown.",
                asked,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return whether every reply has reported its number."""
        return {"told": self.all_report}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.all_report = bool(state["told"])
