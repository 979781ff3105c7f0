"""Tells each node which of its replies the model has absorbed, so that what it keeps changes exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Exchange
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.parts.part import Part


class Acknowledgements(Part):
    """Gives ``hedgerow.clients.NodeState`` what it needs: the round, and each node's last absorbed one.

    Every training instruction gets ``round-index`` (the round, from 0) and ``acknowledged`` (the round index
    of the node's last reply that the model absorbed, -1 for none).
    """

    name = "acknowledgements"

    def __init__(self) -> None:
        self.forget()

    @property
    def keeps_state(self) -> bool:
        """Whether nodes keep state, so that each learns what was absorbed."""
        return True

    @property
    def with_sums(self) -> bool:
        """Whether secure sums allow it: members of a sum must keep the same state."""
        return not self.keeps_state

    def forget(self) -> None:
        """Forget the acknowledgements."""
        self.acknowledged: dict[int, int] = {}

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Tell the nodes of a training exchange."""
        if exchange.kind != "train" or not self.keeps_state:
            return exchange
        last = {i: self.acknowledged.get(i, -1) for i in exchange.asked}
        asks = [replace(ask, own={**ask.own, "acknowledged": last}) for ask in exchange.asks]
        return replace(exchange, asks=asks, config={**exchange.config, "round-index": run.round - 1})

    def acknowledge(self, nodes: Iterable[int], round_index: int) -> None:
        """Record that the model has absorbed these nodes' replies of a round."""
        self.acknowledged |= dict.fromkeys(nodes, round_index)

    def buffered(self, exchange: Exchange, reply: Reply, run: RoundContext) -> None:
        """Acknowledge a reply in a buffer: its node may be asked again before an update takes it."""
        if "round-index" in exchange.config:
            self.acknowledge([reply.node.partition_id], exchange.config["round-index"])

    def ended(self, run: RoundContext) -> None:
        """Acknowledge the replies that a round has absorbed."""
        if not run.buffered:
            self.acknowledge(run.absorbed, run.round - 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the acknowledgements."""
        return {"acknowledged": {str(node): k for node, k in sorted(self.acknowledged.items())}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the acknowledgements."""
        self.acknowledged = {int(node): int(k) for node, k in state["acknowledged"].items()}
