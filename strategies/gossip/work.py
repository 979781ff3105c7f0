"""Gradients and communications that nodes report, as means over all nodes."""

from collections.abc import Mapping
from typing import Any

from flwr.app import MetricRecord

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.parts import Part
from hedgerow.wire.message_types import UPDATE
from hedgerow.wire.records import only_record

_GRADIENTS = "gradients"


class Work(Part):
    """Counts each node's reported gradients since its start, and its communications.

    An event has only some of the nodes; for the others the last report counts. Means are over all m nodes.
    """

    name = "work"

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.forget()

    def forget(self) -> None:
        """Reset the counts."""
        self._gradients: dict[int, float] = {}
        self._communications = 0

    def take(self, exchange: Exchange, reply: Reply, run: RoundContext) -> None:
        """Count an update."""
        if exchange.kind == UPDATE:
            metrics = only_record(reply.content, MetricRecord, "bad metrics")
            self.tell(reply.node.partition_id, metrics)

    def ended(self, run: RoundContext) -> None:
        """Report the counts."""
        run.metrics |= self.metrics()

    def tell(self, i: int, metrics: MetricRecord) -> None:
        """Count a communication of node i, with the gradients that it reports."""
        self._communications += 1
        gradients = metrics.get(_GRADIENTS)
        if isinstance(gradients, int | float) and gradients >= 0:
            self._gradients[i] = float(gradients)

    def metrics(self) -> dict[str, float]:
        """Return ``gradients`` and ``communications`` so far, per node."""
        totals = {_GRADIENTS: sum(self._gradients.values()), "communications": self._communications}
        return {key: total / self.num_nodes for key, total in totals.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        gradients = {str(i): number for i, number in sorted(self._gradients.items())}
        return {_GRADIENTS: gradients, "communications": self._communications}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self._gradients = {int(i): float(number) for i, number in state[_GRADIENTS].items()}
        self._communications = int(state["communications"])
