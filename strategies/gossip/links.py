"""The set-up between neighbours before their first message: open or sealed links."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Steps
from hedgerow.strategies.gossip.method import GossipMethod, PayloadSizes
from hedgerow.strategies.inbox import Reply
from hedgerow.strategies.introductions import Introductions, introduction_in, refused_in
from hedgerow.strategies.node import Node
from hedgerow.strategies.parts import Part
from hedgerow.strategies.router import Router
from hedgerow.wire.message_types import HELLO, PUBLISH, UPDATE
from hedgerow.wire.sealed import INTRODUCTION_BYTES, SEAL_BYTES

# A node's one message to its neighbours before its first payload: the seed of their common draws, or with
# sealed links its introduction; the seed is then in the first payload.
SET_UP = "node->node set-up"
_SEED_BYTES = 16


def sealed_sizes(sizes: PayloadSizes) -> PayloadSizes:
    """Return the sizes of payloads that are sealed for each receiver, the first ones with a seed."""
    return replace(sizes, max_bytes=sizes.max_bytes + SEAL_BYTES + _SEED_BYTES, per_receiver=True)


class OpenLinks(Part):
    """Open links: the relay can read payloads."""

    name = "links"

    def __init__(self, method: GossipMethod) -> None:
        self.method = method
        self.forget()

    def forget(self) -> None:
        """Reset the links."""
        # By partition id, the id of the node that has set up its links.
        self._met: dict[int, int] = {}

    def unmet(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that know their settings, but must be sent them again."""
        return []

    def take(self, exchange: Exchange, reply: Reply, run: RoundContext) -> None:
        """Book a new node's set-up messages."""
        i, size = reply.node.partition_id, self.method.set_up_bytes
        if size and exchange.kind == HELLO and self._met.get(i) != reply.node.node_id:
            self._met[i] = reply.node.node_id
            for j in sorted(self.method.graph(0).neighbors(i)):
                run.federation.ledger.book(run.round, SET_UP, i, j, 0, size)

    def state_dict(self) -> dict[str, Any]:
        """Return the nodes that have set up their links."""
        return {"met": {str(i): node_id for i, node_id in sorted(self._met.items())}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint."""
        self._met = {int(i): int(node_id) for i, node_id in state.get("met", {}).items()}


class SealedLinks(OpenLinks):
    """Sealed links: nodes seal payloads for each receiver; the server forwards their introductions.

    ``unopened`` counts the payloads of the last event that their receivers refused, by reason.
    """

    def __init__(self, method: GossipMethod, carrier: Router) -> None:
        self.carrier = carrier
        super().__init__(method)

    def forget(self) -> None:
        """Reset the links."""
        self.introductions = Introductions()
        self.unopened: Counter[str] = Counter()
        self._senders: dict[int, list[int]] = {}

    def opened(self, run: RoundContext) -> Steps[None]:
        """Forget the keys of an earlier run that this one resumes."""
        self.introductions.begin(run.id)
        self._first = not self.introductions.of
        self.carrier.introductions = self.introductions
        yield from ()

    def unmet(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that have not introduced themselves."""
        return [i for i in nodes if i not in self.introductions.of]

    def ask(self, exchange: Exchange, run: RoundContext) -> Exchange:
        """Ask nodes to seal, and add the introductions of new pairs."""
        if exchange.kind == HELLO:
            name = self.carrier.run_name
            config = {"sealed": True, **({} if name is None else {"link-run": name})}
            asks = [replace(ask, config={**ask.config, **self._peers(ask)}) for ask in exchange.asks]
            return replace(exchange, asks=asks, config={**exchange.config, **config})
        if exchange.kind == PUBLISH:
            new = self.introductions.for_sender
            asks = [_beside(ask, new(ask.nodes[0], ask.config["receivers"])) for ask in exchange.asks]
            return replace(exchange, asks=asks)
        if exchange.kind == UPDATE:
            if self._first:
                self.introductions.log()
            self.unopened, self._senders = Counter(), {}
            return replace(exchange, asks=[self._to_receiver(ask, run) for ask in exchange.asks])
        return exchange

    def _peers(self, ask: Ask) -> dict[str, list[int]]:
        # A node trusts the first key only of the peers in its settings.
        peers = list(self.method.peers(ask.nodes[0]))
        return {} if peers == ask.config["neighbours"] else {"peers": peers}

    def _to_receiver(self, ask: Ask, run: RoundContext) -> Ask:
        """Add the senders' introductions for a receiver, as senders got the receiver's before; book both."""
        (i,) = ask.nodes
        self._senders[i] = [int(j) for j in ask.records["bundle"]]
        introductions = self.introductions.for_receiver(i, self._senders[i])
        for j in introductions:
            for one, other in ((i, j), (j, i)):
                run.federation.ledger.book(run.round, SET_UP, one, other, 0, INTRODUCTION_BYTES)
        return _beside(ask, introductions)

    def check(self, node: Node, content: RecordDict, exchange: Exchange, run: RoundContext) -> None:
        """Refuse a node that does not introduce itself."""
        if exchange.kind == HELLO:
            introduction_in(content)

    def take(self, exchange: Exchange, reply: Reply, run: RoundContext) -> None:
        """Store a node's introduction, and record which payloads an update's node could read."""
        i = reply.node.partition_id
        if exchange.kind == HELLO:
            self.introductions.take(i, *introduction_in(reply.content))
        elif exchange.kind == UPDATE:
            senders = self._senders[i]
            refused = refused_in(reply.content, senders)
            self.unopened.update({reason: len(those) for reason, those in refused.items()})
            those = {j for named in refused.values() for j in named}
            self.introductions.confirm(i, senders, those)
            self.carrier.note_read(i, senders, those)

    def ended(self, run: RoundContext) -> None:
        """Report the number of nodes that pin keys, and refused payloads by reason."""
        run.metrics |= self.introductions.metrics(self.carrier.report.withheld, self.unopened)

    def state_dict(self) -> dict[str, Any]:
        """Return the introductions."""
        return self.introductions.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; one of a run with open links has no introductions."""
        if "known" in state:
            self.introductions.load_state_dict(state)


def _beside(ask: Ask, introductions: Mapping[int, bytes]) -> Ask:
    if not introductions:
        return ask
    record = ConfigRecord({str(i): one for i, one in introductions.items()})
    return replace(ask, records={**ask.records, "introductions": record})
