"""What nodes are sent: their settings once, and at each event the payloads that they chose.

Everything that passes through the hub is booked here, and what a node tells its neighbours before its
first message. The router books the payloads themselves.
"""

from collections.abc import Iterator, Mapping, Sequence

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from hedgerow.strategies.exchange import Exchange, Node, Reply, Roster, collect
from hedgerow.strategies.federation import Federation
from hedgerow.strategies.gossip.method import GossipMethod
from hedgerow.strategies.gossip.replies import introduced
from hedgerow.strategies.router import Router, RoutingReport
from hedgerow.wire.ledger import HUB_TO_NODE, NODE_TO_HUB
from hedgerow.wire.message_types import HELLO
from hedgerow.wire.records import payload_bytes

__all__ = ["SET_UP", "Relay"]

# What a node tells its neighbours once, before its first message: the seed of what both must draw.
SET_UP = "node->node set-up"

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

    Attributes
    ----------
    deprived : set[int]
        Who wanted payloads in the last event and got none.
    """

    def __init__(self, method: GossipMethod, federation: Federation, *, monitored: bool) -> None:
        self.method = method
        self.federation = federation
        self.deprived: set[int] = set()
        self._monitored = monitored
        self._router = Router(method.graph, method.sizes, federation.ledger)

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
        return Exchange(nodes, group, introduced).accept(answers)

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
            grid, roster, server_round, k, wants, timeout=self.federation.timeout, first=first
        )
        self.deprived = {i for i in wants if wants[i] and not bundles[i]}
        contents = []
        for i in wants:
            content = self._content(ConfigRecord({**config, "iteration": k, **self.method.event(i, k)}))
            bundle = ConfigRecord({str(j): payload for j, payload in bundles[i].items()})
            content["bundle"] = bundle
            self._book_down(server_round, roster.nodes[i], len(bundle), content)
            contents.append((roster.nodes[i], content))
        return contents

    def book_reply(self, server_round: int, reply: Reply) -> None:
        """Book a reply's way to the hub; what it holds is no traffic of the modelled system."""
        size = payload_bytes(reply.content)
        self.federation.ledger.book(server_round, NODE_TO_HUB, reply.node.partition_id, 0, 0, size)

    def book_set_up(self, server_round: int, i: int) -> None:
        """Book what a new node tells its neighbours before its first message."""
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
        monitor: dict[str, bool] = {"monitor": True} if self._monitored else {}
        own = {"method": self.method.name, "run-seed": seed, **monitor, **self.method.instructions(i)}
        return ConfigRecord({**config, **own})
