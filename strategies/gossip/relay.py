"""What nodes are sent: their settings once, and at each event the payloads that they chose.

Everything that passes through the hub is booked here, and what a node tells its neighbours before its
first message. The router books the payloads themselves.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.federation import Federation
from hedgerow.strategies.gossip.appointments import Appointment
from hedgerow.strategies.gossip.introductions import Introductions, introduction_in, refused_in
from hedgerow.strategies.gossip.method import GossipMethod, Scalar
from hedgerow.strategies.gossip.payload_sizes import PayloadSizes
from hedgerow.strategies.gossip.replies import introduced
from hedgerow.strategies.gossip.sites import Sites
from hedgerow.strategies.inbox import Inbox, Node, Reply, Roster, collect
from hedgerow.strategies.router import Router, RoutingReport
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.message_types import HELLO
from hedgerow.wire.records import payload_bytes
from hedgerow.wire.sealed import INTRODUCTION_BYTES, SEAL_BYTES

__all__ = ["SET_UP", "Relay"]

# What a node tells its neighbours once, before its first message: the seed of what both must draw, or where
# they seal what they tell each other, its introduction; then the seed is in the first payload.
SET_UP = "node->node set-up"
_SEED_BYTES = 16

# Seconds that an event waits at most for a new node to introduce itself.
_PATIENCE = 60.0


class Relay:
    """Sends settings and payloads of one run.

    Parameters
    ----------
    method : GossipMethod
        What nodes are told, and how large a message is.
    federation : Federation
        Seed, keys of records, deadline and ledger of the run.
    monitored : bool
        Whether nodes are told that a monitor looks at them.
    sealed : bool (default: False)
        Whether nodes seal for each receiver what they publish.

    Attributes
    ----------
    deprived : set[int]
        Who wanted payloads in the last event and got none.
    introductions : Introductions or None
        Who was introduced to whom; None where nothing is sealed.
    unopened : Counter[str]
        Payloads of the last event that their receivers refused to read, by reason.
    sites : Sites or None
        Where the nodes of other sites are; None where all are here.
    """

    def __init__(
        self, method: GossipMethod, federation: Federation, *, monitored: bool, sealed: bool = False
    ) -> None:
        self.method = method
        self.federation = federation
        self.deprived: set[int] = set()
        self.introductions = Introductions() if sealed else None
        self.unopened: Counter[str] = Counter()
        self.sites: Sites | None = None
        self._senders: dict[int, list[int]] = {}
        self._monitored = monitored
        sizes = _sealed(method.sizes) if sealed else method.sizes
        self._router = Router(method.graph, sizes, federation.ledger)

    @property
    def max_payload(self) -> int:
        """Bytes of the largest payload."""
        return self._router.payloads.max_bytes

    @property
    def report(self) -> RoutingReport:
        """What the last event asked for, carried and lost."""
        return self._router.report

    def hello(
        self, grid: Grid, server_round: int, config: ConfigRecord, nodes: Sequence[Node]
    ) -> Iterator[Reply]:
        """Tell nodes their settings; yield the answers, whose values are their appointments."""
        group, timeout = f"{server_round}-hello", self.federation.timeout
        messages = []
        for node in nodes:
            content = self._content(self._settings(node.partition_id, config))
            self._book_down(server_round, node, 0, content)
            messages.append(Message(content, node.node_id, HELLO, ttl=timeout, group_id=group))
        answers = collect(grid, messages, min(timeout, _PATIENCE)) if messages else iter(())
        for reply in Inbox(nodes, group, self._introduced).accept(answers):
            if self.introductions is not None:
                self.introductions.take(reply.node.partition_id, *introduction_in(reply.content))
            yield reply

    def _introduced(self, node: Node, content: RecordDict) -> Appointment:
        if self.introductions is not None:
            introduction_in(content)
        return introduced(node, content)

    def updates(
        self,
        grid: Grid,
        roster: Roster,
        server_round: int,
        k: int,
        wants: Mapping[int, Sequence[int]],
        config: ConfigRecord,
    ) -> list[tuple[Node, RecordDict]]:
        """Return what those that are due at iteration k are sent: k, and the payloads that they want."""
        first = {i: count for i in wants if (count := self.method.first(i)) is not None}
        bundles = self._router.route(
            grid,
            roster,
            server_round,
            k,
            self._asked_here(k, wants),
            timeout=self.federation.timeout,
            first=first,
            introduce=None if self.introductions is None else self.introductions.for_sender,
        )
        readers: dict[int, list[int]] = defaultdict(list)
        for i in sorted(bundles):
            for j in bundles[i]:
                readers[j].append(i)
        if self.sites is not None:
            self._carry(self.sites, k, wants, bundles)
        self.deprived = {i for i in wants if wants[i] and not bundles[i]}
        self._senders = {i: list(bundle) for i, bundle in bundles.items()}
        self.unopened = Counter()
        contents = []
        for i in wants:
            event = self.method.event(i, k, readers[i])
            content = self._content(ConfigRecord({**config, "iteration": k, **event}))
            bundle = ConfigRecord({str(j): payload for j, payload in bundles[i].items()})
            content["bundle"] = bundle
            self._introduce(server_round, i, content)
            self._book_down(server_round, roster.nodes[i], len(bundle), content)
            contents.append((roster.nodes[i], content))
        return contents

    def _asked_here(self, k: int, wants: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """Return whom nodes of this site and of others want to hear of those that are here."""
        if self.sites is None:
            return wants
        graph, here = self.method.graph(k), self.sites.nodes
        # Who asks for others than neighbours is refused, wherever they are.
        asked = {i: [j for j in wants[i] if j in here or not graph.has_edge(j, i)] for i in wants}
        return {**asked, **self.sites.asked(k)}

    def _carry(
        self, sites: Sites, k: int, wants: Mapping[int, Sequence[int]], bundles: dict[int, dict[int, bytes]]
    ) -> None:
        """Send other sites their nodes' bundles, and put what they send into those of this one's."""
        graph, received = self.method.graph(k), sites.exchanged(k, bundles)
        for i in bundles.keys() - sites.nodes:
            del bundles[i]
        for i in wants:
            elsewhere = {j for j in wants[i] if graph.has_edge(j, i) and j not in sites.nodes}
            come = {j: payload for j, payload in received.get(i, {}).items() if j in elsewhere}
            bundles[i] = dict(sorted({**bundles[i], **come}.items()))
            if lost := len(elsewhere) - len(come):
                self.report.lost["another site's"] += lost

    def _introduce(self, server_round: int, i: int, content: RecordDict) -> None:
        """Put introductions beside payloads whose sender and receiver are new to each other, and book them.

        The sender was told the receiver's when it was asked to publish.
        """
        if self.introductions is None:
            return
        if told := self.introductions.for_receiver(i, self._senders[i]):
            content["introductions"] = ConfigRecord({str(j): one for j, one in told.items()})
        for j in told:
            for one, other in ((i, j), (j, i)):
                self.federation.ledger.book(server_round, SET_UP, one, other, 0, INTRODUCTION_BYTES)

    def take_reply(self, i: int, content: RecordDict) -> None:
        """Note which payloads a valid update could read."""
        if self.introductions is None:
            return
        refused = refused_in(content, self._senders.get(i, ()))
        self.unopened.update({reason: len(senders) for reason, senders in refused.items()})
        those = {j for senders in refused.values() for j in senders}
        self.introductions.confirm(i, self._senders.get(i, ()), those)
        if self.sites is not None:
            self.sites.note_read(i, self._senders.get(i, ()), those)

    def book_reply(self, server_round: int, reply: Reply) -> None:
        """Book a reply's way to the hub; what it holds is no traffic of the modelled system."""
        size = payload_bytes(reply.content)
        self.federation.ledger.book(server_round, NODE_TO_HUB, reply.node.partition_id, 0, 0, size)

    def book_set_up(self, server_round: int, i: int) -> None:
        """Book what a new node tells its neighbours before its first message, where nothing is sealed."""
        if self.introductions is not None:
            return
        if size := self.method.set_up_bytes:
            for j in sorted(self.method.graph(0).neighbors(i)):
                self.federation.ledger.book(server_round, SET_UP, i, j, 0, size)

    def _book_down(self, server_round: int, node: Node, payloads: int, content: RecordDict) -> None:
        bits, size = payloads * self.method.sizes.message_bits, payload_bytes(content)
        self.federation.ledger.book(server_round, HUB_TO_NODE, 0, node.partition_id, bits, size)

    def _content(self, config: ConfigRecord) -> RecordDict:
        return RecordDict({self.federation.settings.configrecord_key: config})

    def _settings(self, i: int, config: ConfigRecord) -> ConfigRecord:
        """Return what a node is told once; the same if it is told again."""
        seed = self.federation.settings.seed
        flags: dict[str, Scalar] = {"monitor": True} if self._monitored else {}
        if self.introductions is not None:
            flags["sealed"] = True
            if self.sites is not None:
                flags["link-run"] = self.sites.name
        own = {"method": self.method.name, "run-seed": seed, **flags, **self.method.instructions(i)}
        # A node trusts the first key of those alone that it is told of here.
        if self.introductions is not None and (peers := list(self.method.peers(i))) != own["neighbours"]:
            own["peers"] = peers
        return ConfigRecord({**config, **own})


def _sealed(sizes: PayloadSizes) -> PayloadSizes:
    """Return the sizes of payloads that are sealed for each receiver, some with a seed before them."""
    return replace(sizes, max_bytes=sizes.max_bytes + SEAL_BYTES + _SEED_BYTES, per_receiver=True)
