"""Whether nodes took as many local iterations as they were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import MetricRecord, RecordDict
from flwr.common import log

from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.inbox import Node
from hedgerow.strategies.parts.part import Part
from hedgerow.wire.printable import quoted
from hedgerow.wire.records import PayloadError, only_record

if TYPE_CHECKING:
    from hedgerow.strategies.method import Run

__all__ = ["StepsTold"]

_NUM_STEPS = "num-steps"


class StepsTold(Part):
    """Refuses replies of nodes that took another number of iterations than ``config["local-steps"]``.

    Attributes
    ----------
    told : bool
        Whether every reply said how many its node took.
    """

    name = "steps"

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know nothing of replies."""
        self.told = True

    def ask(self, exchange: Exchange, run: Run) -> Exchange:
        """Check what replies to a training exchange say."""
        asked = exchange.config.get("local-steps")
        if exchange.kind != "train" or asked is None:
            return exchange

        def check(node: Node, content: RecordDict) -> None:
            self._check(asked, only_record(content, MetricRecord, "bad metrics").get(_NUM_STEPS))

        return replace(exchange, checks=[*exchange.checks, check])

    def _check(self, asked: int, told: object) -> None:
        if told is not None and told != asked:
            detail = f"took {quoted(told)} steps; config['local-steps'] was {asked}"
            raise PayloadError("num-steps is not local-steps", detail)
        if told is None and self.told:
            self.told = False
            log(
                WARNING,
                "Replies do not tell 'num-steps' in their MetricRecord: whether config['local-steps'] = %d "
                "was honoured is not known, and iterations and simulated seconds are recorded as unknown.",
                asked,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of replies."""
        return {"told": self.told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.told = bool(state["told"])
