"""Edge servers that are orchestrators of their own: the models of emulated ones, and what breaks."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from tests.strategies.changing_grid import ChangingGrid
from tests.strategies.quadratic import Quadratics
from tests.wire.links.addresses import addresses

from hedgerow.sim import flower_identity
from hedgerow.strategies import EdgeServerSDFeel, SDFeel
from hedgerow.wire import Traffic

C = 7
CLUSTERS = (0, 0, 1, 2, 2, 2, 3)
SIZES = (30, 20, 10, 20, 15, 5, 8)
PROBLEM = Quadratics(SIZES, centres=range(1, C + 1), curvatures=[1, 0.5, 2, 1, 0.25, 4, 0.7])


def strategies(servers: int = 4, **options: Any) -> list[EdgeServerSDFeel]:
    peers = addresses(servers)
    defaults = {"topology": "ring", "tau1": 2, "tau2": 2, "alpha": 1, "seed": 3, "fraction_evaluate": 0.0}
    return [
        EdgeServerSDFeel(
            edge=d,
            peers=peers,
            min_available_nodes=CLUSTERS.count(d),
            **{**defaults, "peer_timeout": 20.0, **options},
        )
        for d in range(servers)
    ]


def run(
    servers: Sequence[EdgeServerSDFeel],
    arrays: ArrayRecord,
    num_rounds: int,
    grids: Mapping[int, ChangingGrid] | None = None,
) -> dict[int, Any]:
    """Run each server in a thread with a grid of its own clients; return models, or what was raised."""
    done: dict[int, Any] = {}

    def serve(strategy: EdgeServerSDFeel) -> None:
        others = [i for i, server in enumerate(CLUSTERS) if server != strategy.edge]
        own = (grids or {}).get(strategy.edge)
        grid = own or ChangingGrid(PROBLEM.client_app(), C, away=others)
        try:
            done[strategy.edge] = strategy.start(grid, arrays, num_rounds=num_rounds, timeout=60.0).arrays
        except Exception as error:
            done[strategy.edge] = error

    with flower_identity(1):
        threads = [threading.Thread(target=serve, args=(one,)) for one in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return dict(sorted(done.items()))


@pytest.mark.parametrize(
    ("topology", "alpha", "participation"), [("path", 1, 1.0), ("ring", 2, 0.6), ("complete", 3, 1.0)]
)
def test_servers_of_their_own_end_with_the_bits_of_emulated_ones(
    topology: str, alpha: int, participation: float
) -> None:
    options: dict[str, Any] = {"topology": topology, "alpha": alpha, "participation": participation}
    arrays = ArrayRecord({"w": Array(np.random.default_rng(1).standard_normal(300).astype(np.float32))})
    emulated = SDFeel(
        num_servers=4, clusters=CLUSTERS, tau1=2, tau2=2, seed=3, fraction_evaluate=0.0, **options
    )
    with flower_identity(1):
        emulated.start(PROBLEM.grid(), arrays, num_rounds=6, timeout=60.0)
    expected = [record["w"].numpy() for record in emulated.server_models()]
    servers = strategies(**options)
    found = run(servers, arrays, 6)
    for server, one in found.items():
        assert one["w"].numpy().tobytes() == expected[server].tobytes()
    # The modelled links carry the same, whoever books them; what really went over a link is more.
    modelled = emulated.ledger.total("edge->edge")
    assert sum((one.ledger.total("edge->edge") for one in servers), Traffic()) == modelled
    real = sum((one.ledger.total("peer->peer") for one in servers), Traffic())
    assert real.nominal_bits == 0
    assert real.payload_bytes > 300 * 4 * modelled.messages
    assert all(one.progress().bits == one.ledger.total().nominal_bits for one in servers)


@pytest.mark.slow
def test_a_server_without_its_checkpoint_begins_where_the_others_are() -> None:
    servers = strategies(topology="complete", lost_after=1.0, peer_timeout=8.0)
    told = [gossip_rounds(one) for one in servers]
    servers[0].on_round_end.append(lambda end: time.sleep(0.2))
    servers[3].on_round_end.append(stops_after(2))
    late: list[threading.Thread] = []
    again = EdgeServerSDFeel(
        edge=3, peers=servers[3].peers, topology="complete", tau1=2, tau2=2, seed=3, fraction_evaluate=0.0,
        min_available_nodes=1, peer_timeout=8.0, lost_after=1.0,
    )  # fmt: skip
    told.append(gossip_rounds(again))

    def serve_again(end: Any) -> None:
        if end.round == 4:
            late.append(threading.Thread(target=lambda: run([again], scalar(), 16)))
            late[0].start()

    servers[0].on_round_end.append(serve_again)
    run(servers, scalar(), 16)
    late[0].join()
    rounds = [end["round"] for end in told[-1]]
    # It has seen no round of before, not even the state before the first.
    assert rounds == list(range(rounds[0], 17))
    assert rounds[0] > 3
    assert [end["servers"] for end in told[0] if "servers" in end][-1] == [0, 1, 2, 3]


class _StoppedError(Exception):
    """A server that was killed, as far as others can tell."""


def stops_after(number: int) -> Callable[[Any], None]:
    def stop(end: Any) -> None:
        if end.round == number:
            raise _StoppedError

    return stop


def scalar(value: float = 0.0) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.full(3, value))})


def gossip_rounds(strategy: EdgeServerSDFeel) -> list[dict[str, Any]]:
    """Have what each round told be kept."""
    ends: list[dict[str, Any]] = []
    strategy.on_round_end = [
        *strategy.on_round_end,
        lambda end: ends.append({"round": end.round, **end.train}),
    ]
    return ends


def test_a_server_that_never_comes_is_left_out_and_the_others_keep_their_mean() -> None:
    servers = strategies(peer_timeout=2.0, lost_after=1.0, topology="ring", alpha=2)[:3]
    told = [gossip_rounds(one) for one in servers]
    found = run(servers, scalar(), 4)
    assert all(isinstance(model, ArrayRecord) for model in found.values()), found
    # Servers 0, 1 and 2 are what is left of the ring, a path.
    assert [end["servers"] for end in told[0] if "servers" in end] == [[0, 1, 2]] * 2


class _Moved(SDFeel):
    """Emulated servers between which client 1 moves before round 3, and client 6's server gets it then."""

    def participants(self, server_round: int) -> list[int]:
        if server_round == 3:
            self.assignment.of = (0, 3, 1, 2, 2, 2, 3)
        return super().participants(server_round)


def test_a_client_that_dials_another_server_is_its_client_from_the_next_round_on() -> None:
    options: dict[str, Any] = {"topology": "ring", "tau1": 2, "tau2": 1, "alpha": 2, "seed": 3}
    emulated = _Moved(num_servers=4, clusters=CLUSTERS, fraction_evaluate=0.0, **options)
    with flower_identity(1):
        emulated.start(PROBLEM.grid(), scalar(), num_rounds=5, timeout=60.0)
    expected = [record["w"].numpy() for record in emulated.server_models()]
    servers = strategies(**options)
    grids = {}
    for d, one in enumerate(servers):
        others = [i for i, server in enumerate(CLUSTERS) if server != d]
        moves: dict[int, dict[int, Callable[[ChangingGrid], None]]] = {
            0: {2: lambda grid: grid.leave(1)},
            3: {2: lambda grid: grid.come(1)},
        }
        grids[d] = ChangingGrid(PROBLEM.client_app(), C, away=others, after=moves.get(d))
        one.on_round_end = [grids[d].told]
    found = run(servers, scalar(), 5, grids)
    assert [one.cluster_sizes.tolist() for one in servers] == [[30.0], [10.0], [40.0], [28.0]]
    for server, one in found.items():
        assert one["w"].numpy().tobytes() == expected[server].tobytes()
