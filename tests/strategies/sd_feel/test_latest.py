"""Edge servers with SuperLinks of their own that do not wait for each other."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import networkx as nx
import numpy as np
import pytest
from flwr.app import ArrayRecord
from tests.strategies.peer_addresses import addresses
from tests.strategies.sd_feel.test_edge_server import gossip_rounds, run, scalar, stops_after, strategies

from hedgerow.strategies import as_graph, mixing
from hedgerow.strategies.peers import PeerChannel, Topic
from hedgerow.strategies.sd_feel.asynchronous import lazy_column
from hedgerow.strategies.sd_feel.latest import LatestGossip
from hedgerow.wire import parse_aggregation

MODEL = np.zeros(3)


@contextmanager
def gossips(graph: nx.Graph, **options: Any) -> Iterator[list[LatestGossip]]:
    """Yield each server's end, connected."""
    peers = addresses(len(graph))
    with ExitStack() as stack:
        ends = []
        for d in graph:
            channel = PeerChannel(
                d, peers, graph.neighbors(d), run="run", layout="layout", largest=10_000,
                answer=lambda peer, request: {},
            )  # fmt: skip
            rule = parse_aggregation("mean")
            defaults = {"period": 1, "max_staleness": 1, "rule": rule, "timeout": 5.0}
            one = LatestGossip(graph, stack.enter_context(channel), **{**defaults, **options})
            stack.callback(one.close, 1.0)
            ends.append(one)
        yield ends


def arrives(gossip: LatestGossip, peer: int) -> None:
    end = time.monotonic() + 5.0
    while peer not in gossip._arrived:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_takes_what_came_last_as_often_as_is_allowed_and_waits_for_nothing() -> None:
    with gossips(as_graph("path", 2)) as (first, second):
        alone = first.exchanged(1, MODEL + 1.0, 30.0)
        assert alone.tolist() == [1.0] * 3
        assert (first.report.missing, first.report.members) == (1, [0])
        arrives(second, 0)
        # P of two servers takes each by its size; the second hears of the first's with its model.
        found = second.exchanged(1, MODEL + 5.0, 10.0)
        np.testing.assert_allclose(found, 0.75 * 1.0 + 0.25 * 5.0)
        assert second.report.members == [0, 1]
        again = second.exchanged(2, found, 10.0)
        np.testing.assert_allclose(again, 0.75 * 1.0 + 0.25 * found)
        left = second.exchanged(3, again, 10.0)
        np.testing.assert_allclose(left, again)
        assert (second.report.stale, second.report.members) == (1, [1])
        first.exchanged(2, MODEL + 2.0, 30.0)
        arrives(second, 0)
        np.testing.assert_allclose(second.exchanged(4, MODEL, 10.0), 0.75 * 2.0)
        assert second.report.links[0].received > 0


def test_sizes_travel_along_the_graph_with_the_models() -> None:
    graph = as_graph("path", 3)
    with gossips(graph) as (first, middle, last):
        first.exchanged(1, MODEL, 50.0)
        arrives(middle, 0)
        middle.exchanged(1, MODEL, 30.0)
        arrives(last, 1)
        last.exchanged(1, MODEL, 20.0)
        matrix = mixing(graph, [50.0, 30.0, 20.0]).matrix
        assert last._column(20.0)[0] == pytest.approx(lazy_column(matrix, graph, 2))
        assert min(lazy_column(matrix, graph, d)[d] for d in graph) >= 0


def test_what_is_no_model_is_refused_and_counted() -> None:
    with gossips(as_graph("path", 2)) as (first, second):
        header = b'{"exchange":1,"sizes":[[0,1,30.0]]}'
        whole = len(header).to_bytes(4, "big") + header + MODEL.tobytes()
        lies = {
            b"": "unreadable",
            whole[:-1]: "wrong size",
            whole.replace(b"[0,1,", b"[7,1,"): "unreadable",
            whole.replace(b"30.0", b"-1.0"): "unreadable",
            whole[: -MODEL.nbytes] + (MODEL + np.inf).tobytes(): "non-finite",
            whole[: -MODEL.nbytes] + (MODEL + 1e9).tobytes(): "update too large",
        }
        for number, (lie, reason) in enumerate(lies.items()):
            assert first.channel.tell(1, Topic(1 + number, 0), lie, 5.0)
            arrives(second, 0)
            assert second.exchanged(1 + number, MODEL + 1.0, 10.0).tolist() == [1.0] * 3
            assert second.report.refused == {reason: 1}
        assert first.channel.tell(1, Topic(99, 0), whole, 5.0)
        arrives(second, 0)
        second.exchanged(9, MODEL + 1.0, 10.0)
        assert second.report.members == [0, 1]


def test_servers_that_do_not_wait_all_end_and_one_that_dies_stops_nobody() -> None:
    servers = strategies(max_staleness=2, tau2=1, peer_timeout=4.0, lost_after=1.0)
    told = [gossip_rounds(one) for one in servers]
    servers[2].on_round_end.append(stops_after(3))
    for one in servers:
        one.on_round_end.append(lambda end: time.sleep(0.02))
    found = run(servers, scalar(), 25)
    assert all(isinstance(found[d], ArrayRecord) for d in (0, 1, 3)), found
    for d in (0, 1, 3):
        assert [end["round"] for end in told[d]] == list(range(26))
        assert any(len(end["servers"]) == 3 for end in told[d][1:])
    # The dead one's model is used until it is too old, by its neighbours.
    assert told[1][-1]["servers"] == [0, 1]
    assert told[1][-1]["stale-models"] == 1
    assert told[3][-1]["servers"] == [0, 3]
    # They learnt of each other: alone, servers 0 and 3 would end far apart.
    ends = {d: float(found[d]["w"].numpy()[0]) for d in (0, 3)}
    assert abs(ends[0] - ends[3]) < 4.5
    assert servers[0].ledger.total("peer->peer").payload_bytes > 0
    assert servers[0].ledger.total("edge->edge").messages > 20
