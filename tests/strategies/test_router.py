"""The router alone: who gets what, what is refused, lost, counted, and forgotten."""

from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.gossip.nodes import Nodes, Spy

from hedgerow.sim import Delay, FaultModel, flower_identity
from hedgerow.strategies import NODE_TO_NODE, PayloadSizes, Roster, Router
from hedgerow.strategies.router import Bundles
from hedgerow.wire import HELLO, HUB_TO_NODE, NODE_TO_HUB, PUBLISH, Ledger

PATH = nx.path_graph(4)
SIZES = PayloadSizes(128, 16)


class Relay:
    """A router with nodes that know their settings."""

    def __init__(
        self,
        graph: Any = PATH,
        sizes: PayloadSizes = SIZES,
        nodes: Nodes | None = None,
        faults: Any = None,
        num_nodes: int = 4,
    ) -> None:
        self.nodes = nodes or Nodes([1] * num_nodes, lambda i, k: [])
        self.grid = Spy(self.nodes, faults=faults)
        self.ledger = Ledger()
        self.router = Router(graph, sizes, self.ledger)
        with flower_identity(1):
            self.roster = Roster.gather(self.grid, num_nodes, 60.0)
            hello = RecordDict({"config": ConfigRecord()})
            greetings = [Message(hello, node.node_id, HELLO, ttl=60.0) for node in self.roster.nodes]
            self.grid.send_and_receive(greetings)
        self.grid.sent.clear()
        self.grid.replies.clear()

    def route(
        self, wants: Mapping[int, Sequence[int]], k: int = 1, first: Mapping[int, int] | None = None
    ) -> Bundles:
        with flower_identity(1):
            return self.router.route(self.grid, self.roster, 1, k, wants, timeout=60.0, first=first)


def senders(bundles: Bundles) -> dict[int, list[int]]:
    return {receiver: sorted(bundle) for receiver, bundle in bundles.items()}


def test_a_receiver_gets_what_its_chosen_neighbours_sent_byte_for_byte() -> None:
    relay = Relay()
    bundles = relay.route({1: [0, 2], 3: [2]}, k=5)
    published = {j: reply["payload"]["bytes"] for _, j, reply in relay.grid.replies}
    assert bundles == {1: {0: published[0], 2: published[2]}, 3: {2: published[2]}}
    assert {event.k for event in relay.nodes.events("publish")} == {5}


def test_a_node_that_is_no_neighbour_is_never_asked_even_on_request() -> None:
    relay = Relay()
    assert senders(relay.route({0: [1, 2, 3, 0, 17, -1]})) == {0: [1]}
    assert [event.node for event in relay.nodes.events("publish")] == [1]
    assert relay.router.report.refused == 5


@settings(max_examples=15, deadline=None)
@given(
    edges=st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(lambda e: e[0] < e[1])),
    wants=st.dictionaries(st.integers(0, 4), st.lists(st.integers(-1, 6), max_size=6)),
)
def test_bundles_are_requests_that_follow_edges_whatever_is_asked(
    edges: set[tuple[int, int]], wants: dict[int, list[int]]
) -> None:
    graph = nx.empty_graph(5)
    graph.add_edges_from(edges)
    bundles = Relay(graph, num_nodes=5).route(wants)
    assert senders(bundles) == {
        i: sorted({j for j in wants[i] if graph.has_edge(i, j)}) for i in sorted(wants)
    }


def test_a_directed_edge_carries_from_sender_to_receiver_and_never_back() -> None:
    relay = Relay(nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]))
    assert senders(relay.route({0: [1, 2, 3], 1: [0, 2], 2: [0, 1], 3: [0, 2]})) == {
        0: [3], 1: [0], 2: [0, 1], 3: [2],
    }  # fmt: skip
    assert relay.router.report.refused == 4


def test_a_sender_publishes_once_for_all_its_receivers() -> None:
    relay = Relay(nx.star_graph(3))
    relay.route({1: [0], 2: [0], 3: [0]})
    assert [event.node for event in relay.nodes.events("publish")] == [0]
    assert relay.router.report.deliveries == 3


def test_a_sender_encodes_for_each_receiver_where_matrices_are_theirs() -> None:
    sizes = PayloadSizes(192, 24, per_receiver=True)
    relay = Relay(nx.star_graph(3), sizes)
    bundles = relay.route({1: [0], 3: [0]})
    (asked,) = relay.nodes.events("publish")
    assert asked.config["receivers"] == [1, 3]
    tagged = {receiver: int.from_bytes(bundle[0][-4:], "little") for receiver, bundle in bundles.items()}
    assert tagged == {1: 1, 3: 3}


def test_the_graph_of_the_iteration_decides() -> None:
    relay = Relay(lambda k: nx.path_graph(4) if k % 2 else nx.star_graph(3))
    assert senders(relay.route({2: [0, 1, 3]}, k=1)) == {2: [1, 3]}
    assert senders(relay.route({2: [0, 1, 3]}, k=2)) == {2: [0]}


def test_a_failed_publisher_is_left_out_and_counted() -> None:
    def fail(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind == "publish" and i == 2:
            raise RuntimeError("no")
        return reply

    relay = Relay(nodes=Nodes([1] * 4, lambda i, k: [], sabotage=fail))
    assert senders(relay.route({1: [0, 2], 3: [2]})) == {1: [0], 3: []}
    assert relay.router.report.lost == {"error 2": 1}


def test_an_offline_publisher_is_not_waited_for_and_counted() -> None:
    relay = Relay()
    relay.roster.online.discard(relay.roster.nodes[2].node_id)
    assert senders(relay.route({1: [0, 2]})) == {1: [0]}
    assert relay.router.report.lost == {"offline": 1}
    assert [event.node for event in relay.nodes.events("publish")] == [0]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (ConfigRecord({"bytes": b"x" * 17}), "too large"),
        (ConfigRecord({"bytes": "text"}), "bad payload"),
        (ConfigRecord({"bytes": [b"one", b"two"]}), "bad payload"),
        (ConfigRecord(), "bad payload"),
        (None, "bad payload"),
    ],
)
def test_what_is_no_payload_is_lost_by_reason(payload: ConfigRecord | None, reason: str) -> None:
    def other(kind: str, i: int, reply: RecordDict) -> RecordDict:
        if kind != "publish" or i != 0:
            return reply
        return RecordDict({} if payload is None else {"payload": payload})

    relay = Relay(nodes=Nodes([1] * 4, lambda i, k: [], sabotage=other))
    assert senders(relay.route({1: [0, 2]})) == {1: [2]}
    assert relay.router.report.lost == {reason: 1}


def test_stragglers_are_not_waited_for() -> None:
    delays = {i: FaultModel(delay=Delay("constant", (5.0 * i,))) for i in range(1, 6)}
    relay = Relay(nx.star_graph(5), faults=delays, num_nodes=6)
    before = relay.grid.now()
    assert senders(relay.route({0: [1, 2, 3, 4, 5]}, first={0: 2})) == {0: [1, 2]}
    assert relay.grid.now() - before < 11
    assert relay.router.report.lost == {"late": 3}


def test_each_receiver_has_its_own_first_repliers() -> None:
    delays = {i: FaultModel(delay=Delay("constant", (5.0 * i,))) for i in range(1, 4)}
    relay = Relay(nx.complete_graph(4), faults=delays)
    bundles = relay.route({1: [0, 2, 3], 2: [0, 1, 3]}, first={1: 2, 2: 1})
    assert senders(bundles) == {1: [0, 2], 2: [0]}


def test_links_and_the_hubs_legs_are_booked_apart() -> None:
    relay = Relay(nx.star_graph(3))
    relay.route({1: [0], 2: [0], 0: [3]})
    links = relay.ledger.by_link()
    assert (links[NODE_TO_NODE].messages, links[NODE_TO_NODE].payload_bytes) == (3, 3 * 16)
    assert links[NODE_TO_NODE].nominal_bits == 3 * (64 + 64)
    assert links[NODE_TO_HUB].messages == links[HUB_TO_NODE].messages == 2
    assert relay.ledger.total() == links[NODE_TO_NODE]
    booked = {(t.src, t.dst) for t in relay.ledger.transfers if t.link == NODE_TO_NODE}
    assert booked == {(0, 1), (0, 2), (3, 0)}


def test_nothing_is_sent_where_nothing_is_wanted() -> None:
    relay = Relay()
    assert relay.route({0: [], 1: []}) == {0: {}, 1: {}}
    assert relay.grid.sent == []


def test_requests_carry_an_iteration_and_nothing_else() -> None:
    relay = Relay()
    relay.route({1: [0, 2]}, k=3)
    assert [(kind, j, dict(content["config"])) for kind, j, content in relay.grid.sent] == [
        (PUBLISH, 0, {"iteration": 3}),
        (PUBLISH, 2, {"iteration": 3}),
    ]
