"""Checks that nodes took the requested number of local iterations."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING
from typing import Any

from flwr.app import MetricRecord, RecordDict
from flwr.common import log
from numpy.typing import NDArray

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, only_record

_NUM_STEPS = "num-steps"


class ReportedSteps(Part):
    """Refuses replies whose ``num-steps`` differ from ``config["local-steps"]``."""

    name = "steps"

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset the state."""
        self.all_report = True  # every reply had ``num-steps``

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: RoundContext) -> None:
        """Refuse a training reply that reports another number, and record whether it reports one."""
        if (asked := exchange.config.get("local-steps")) is None or not exchange.trains:
            return
        taken = only_record(content, MetricRecord, "bad metrics").get(_NUM_STEPS)
        if taken is not None and taken != asked:
            detail = f"took {quoted(taken)} steps; config['local-steps'] was {asked}"
            raise PayloadError("num-steps is not local-steps", detail)
        if taken is None and self.all_report:
            self.all_report = False
            log(
                WARNING,
                "Replies do not report 'num-steps' in their MetricRecord: whether nodes followed "
                "config['local-steps'] = %d, the iterations, and the simulated seconds are unknown.",
                asked,
            )

    sees_columns = True

    def check_columns(
        self, exchange: Exchange, metrics: Mapping[str, NDArray[Any]], run: RoundContext
    ) -> str | None:
        """Return a reason if a reply reports another number, or none."""
        asked = exchange.config.get("local-steps")
        if asked is None or (_NUM_STEPS in metrics and (metrics[_NUM_STEPS] == asked).all()):
            return None
        return "num-steps is not local-steps"

    def state_dict(self) -> dict[str, Any]:
        """Return whether every reply has reported its number."""
        return {"told": self.all_report}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self.all_report = bool(state["told"])
