"""What nodes spent on a run, by their own word: gradients and communications, as means of all nodes."""

from collections.abc import Mapping
from typing import Any

from flwr.app import MetricRecord

from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.parts import Part
from hedgerow.strategies.run import Run
from hedgerow.wire.message_types import UPDATE
from hedgerow.wire.records import only_record

__all__ = ["Work"]

_GRADIENTS = "gradients"


class Work(Part):
    """Gradients that each node says it has taken since it began, and communications that it took part in.

    An event has some of the nodes only: what the others spent is what they said last. Means are of all m
    nodes.
    """

    name = "work"

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.forget()

    def forget(self) -> None:
        """Have counted nothing."""
        self._gradients: dict[int, float] = {}
        self._communications = 0

    def take(self, exchange: Exchange, reply: Reply, run: Run) -> None:
        """Count what an update says."""
        if exchange.kind == UPDATE:
            told = only_record(reply.content, MetricRecord, "bad metrics")
            self.tell(reply.node.partition_id, told)

    def ended(self, run: Run) -> None:
        """Tell the counts."""
        run.told |= self.metrics()

    def tell(self, i: int, metrics: MetricRecord) -> None:
        """Count a communication of node i, and take its number of gradients from its reply."""
        self._communications += 1
        told = metrics.get(_GRADIENTS)
        if isinstance(told, int | float) and told >= 0:
            self._gradients[i] = float(told)

    def metrics(self) -> dict[str, float]:
        """Return ``gradients`` and ``communications`` so far, a node."""
        totals = {_GRADIENTS: sum(self._gradients.values()), "communications": self._communications}
        return {key: total / self.num_nodes for key, total in totals.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, for a checkpoint."""
        told = {str(i): number for i, number in sorted(self._gradients.items())}
        return {_GRADIENTS: told, "communications": self._communications}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint."""
        self._gradients = {int(i): float(number) for i, number in state[_GRADIENTS].items()}
        self._communications = int(state["communications"])
