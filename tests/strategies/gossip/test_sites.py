"""Nodes of several sites, each an orchestrator of its own: the models of one hub, and what breaks."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import networkx as nx
import numpy as np
import pytest
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray
from tests.clients.ceps.federation import squares
from tests.strategies.changing_grid import ChangingGrid
from tests.wire.links.addresses import Wire, addresses

from hedgerow.clients import ceps_client
from hedgerow.sim import flower_identity
from hedgerow.strategies import CEPS, DPSGD, NODE_TO_NODE, SGP, Gossip, Matcha, Site
from hedgerow.strategies.gossip import SET_UP
from hedgerow.strategies.gossip.sites import Sites
from hedgerow.wire import HUB_TO_NODE, NODE_TO_HUB, PEER_TO_PEER, Traffic, view

M, N, S, D, SEED = 6, 60, 3, 90, 5
PROBLEMS = squares(2, M, N, S)


def problem(context: Context) -> Any:
    return PROBLEMS[int(context.node_config["partition-id"])]


def ceps(**parameters: Any) -> CEPS:
    defaults: dict[str, Any] = {
        "dim": N, "sparsity": S, "measurements": D, "topology": "ring", "interval": (2, 4), "seed": SEED,
        "num_clients": M, "num_iterations": 14, "participation": 1.0,
    }  # fmt: skip
    return CEPS(**{**defaults, **parameters})


def d_psgd(**parameters: Any) -> DPSGD:
    defaults: dict[str, Any] = {"learning_rate": 0.02, "local_steps": 2, "topology": "regular(3)"}
    return DPSGD(dim=N, num_clients=M, num_iterations=9, seed=SEED, **{**defaults, **parameters})


def matcha(**parameters: Any) -> Matcha:
    return Matcha(
        dim=N, num_clients=M, learning_rate=0.02, topology="complete", num_iterations=6, seed=SEED,
        **parameters,
    )  # fmt: skip


# Site 0 of two hears one node of site 1, and two of its nodes are heard there.
ARROWS = nx.DiGraph([(i, (i + 1) % M) for i in range(M)] + [(1, 4)])


def sgp(**parameters: Any) -> SGP:
    defaults: dict[str, Any] = {"learning_rate": 0.02, "local_steps": 2}
    return SGP(dim=N, num_clients=M, num_iterations=9, seed=SEED, **{**defaults, **parameters})


METHODS: dict[str, Callable[..., Gossip]] = {
    "ceps": ceps,
    "ceps, some neighbours": lambda **more: ceps(topology="complete", participation=0.5, **more),
    "d-psgd": d_psgd,
    "d-psgd-dn": lambda **more: d_psgd(dynamic=True, topology=None, **more),
    "matcha": matcha,
    "sgp": lambda **more: sgp(topology=ARROWS, **more),
    "sgp, one peer": lambda **more: sgp(topology="one-peer-exponential", **more),
}


def grid_of(strategy: Gossip, own: Sequence[int] = range(M), **options: Any) -> ChangingGrid:
    return ChangingGrid(ceps_client(problem), M, away=set(range(M)) - set(own), **options)


def models(grid: ChangingGrid, own: Sequence[int] = range(M)) -> dict[int, NDArray[np.float64]]:
    states = {node.partition_id: node.state.array_records["ceps"] for node in grid._nodes.values() if
              node.partition_id in own}  # fmt: skip
    return {i: view(arrays["w" if "w" in arrays else "x"]) for i, arrays in sorted(states.items())}


def hub(make: Callable[..., Gossip], **options: Any) -> tuple[Gossip, dict[int, NDArray[np.float64]]]:
    strategy = make(**options)
    grid = grid_of(strategy)
    with flower_identity(1):
        strategy.start(grid, ArrayRecord(), num_rounds=99, timeout=60.0)
    return strategy, models(grid)


def site(own: int, peers: Sequence[str], **options: Any) -> Site:
    return Site(own, peers, **{"timeout": 20.0, "lost_after": 2.0, **options})


def own_nodes(strategy: Gossip) -> list[int]:
    assert strategy.site is not None
    return strategy.site.nodes(M)


def run(
    strategies: Sequence[Gossip], grids: dict[int, ChangingGrid] | None = None
) -> tuple[dict[int, NDArray[np.float64]], list[Exception]]:
    """Run each site in a thread with a grid of its own nodes; return the models by node, and errors."""
    found: dict[int, NDArray[np.float64]] = {}
    errors: list[Exception] = []

    def serve(strategy: Gossip) -> None:
        own = own_nodes(strategy)
        grid = (grids or {}).get(own[0]) or grid_of(strategy, own)
        try:
            strategy.start(grid, ArrayRecord(), num_rounds=99, timeout=60.0)
        except Exception as error:
            errors.append(error)
        found.update(models(grid, own))

    with flower_identity(1):
        threads = [threading.Thread(target=serve, args=(one,)) for one in strategies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return dict(sorted(found.items())), errors


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_sites_end_with_the_bits_of_one_hub(name: str, sealed: bool) -> None:
    one, expected = hub(METHODS[name], sealed=sealed)
    count = 3 if name == "ceps" else 2
    peers = addresses(count)
    several = [METHODS[name](sealed=sealed, site=site(d, peers)) for d in range(count)]
    found, errors = run(several)
    assert not errors
    assert found.keys() == expected.keys()
    for i, model in found.items():
        assert model.tobytes() == expected[i].tobytes()
    # What nodes sent each other is the same, whoever carried it, and is booked once.
    for link in (NODE_TO_NODE, SET_UP):
        assert sum((each.ledger.total(link) for each in several), Traffic()) == one.ledger.total(link)
    # Nothing was lost, also no introduction, or a sealed payload would not have opened.
    assert all(each.completed_rounds for each in several)


def rounds(strategy: Gossip) -> list[dict[str, Any]]:
    """Have what each round told be kept."""
    ends: list[dict[str, Any]] = []
    strategy.on_round_end = [
        *strategy.on_round_end,
        lambda end: ends.append(end.train) if end.round else None,
    ]
    return ends


def test_a_hub_carries_less_where_there_are_sites_and_links_are_booked_as_sent() -> None:
    one, _ = hub(ceps, sealed=True)
    peers = addresses(3)
    several = [ceps(sealed=True, site=site(d, peers)) for d in range(3)]
    told = [rounds(each) for each in several]
    run(several)
    most = max(
        sum(each.ledger.total(leg).payload_bytes for leg in (HUB_TO_NODE, NODE_TO_HUB)) for each in several
    )
    assert most < sum(one.ledger.total(leg).payload_bytes for leg in (HUB_TO_NODE, NODE_TO_HUB)) / 2
    for each, ends in zip(several, told, strict=True):
        assert each.ledger.total(PEER_TO_PEER).payload_bytes > 0
        assert each.progress().bits == each.ledger.total().nominal_bits
        assert {end["lost-sites"] for end in ends} == {0}
        assert sum(end["lost-payloads"] + end["unopened"] for end in ends) == 0


@pytest.mark.usefixtures("devices")
def test_devices_of_several_sites_seal_for_each_other_and_trust_their_first_key() -> None:
    peers, told = addresses(2), []
    for _ in range(2):  # The second run finds keys that the first one made.
        several = [ceps(sealed=True, site=site(d, peers)) for d in range(2)]
        told += [rounds(each) for each in several]
        _, errors = run(several)
        assert not errors
    assert all(sum(end["deliveries"] for end in ends) for ends in told)
    assert sum(end["lost-payloads"] + end["unopened"] for ends in told for end in ends) == 0


def test_a_site_that_never_comes_costs_its_nodes_messages_alone() -> None:
    peers = addresses(3)
    several = [ceps(site=site(d, peers, timeout=2.0, lost_after=0.5)) for d in range(2)]
    told = [rounds(each) for each in several]
    found, errors = run(several)
    assert not errors
    assert sorted(found) == [0, 1, 2, 3]
    assert {end["lost-sites"] for ends in told for end in ends} == {1}
    # On a ring nodes 0 and 3 have a neighbour at the third site, whom they want to hear each time.
    for each, ends in zip(several, told, strict=True):
        (at_the_edge,) = {0, 3}.intersection(own_nodes(each))
        kappa = each.state.appointments[at_the_edge].kappa
        assert sum(end["lost-payloads"] for end in ends) == len(range(kappa, 14, kappa))


def test_a_site_of_another_run_is_not_heard() -> None:
    peers = addresses(2)
    several = [ceps(site=site(d, peers, timeout=1.0, lost_after=0.5), seed=SEED + d) for d in range(2)]
    found, errors = run(several)
    assert not errors
    assert isinstance(several[0].carrier, Sites)
    assert several[0].carrier.absent == {1}
    alone = [ceps(site=site(0, peers, timeout=0.5, lost_after=0.2))]
    expected, _ = run(alone)
    assert all(found[i].tobytes() == expected[i].tobytes() for i in expected)


class _StoppedError(Exception):
    """A site that was killed, as far as others can tell."""


def test_a_site_that_dies_and_comes_back_goes_on_from_its_checkpoint_with_the_others() -> None:
    peers, quick = addresses(2), {"timeout": 5.0, "lost_after": 1.0}
    several = [ceps(num_iterations=40, site=site(d, peers, **quick)) for d in range(2)]
    told = [rounds(each) for each in several]
    kept: list[dict[str, Any]] = []

    def stop(end: Any) -> None:
        if end.round == 3:
            kept.append(several[1].state_dict())
            raise _StoppedError

    several[1].on_round_end = [*several[1].on_round_end, stop]
    grid = grid_of(several[1], own_nodes(several[1]))
    again = ceps(num_iterations=40, site=site(1, peers, **quick))
    told.append(rounds(again))
    late: list[threading.Thread] = []
    errors: list[Exception] = []

    def serve_again(end: Any) -> None:
        if kept and not late and told[0] and told[0][-1]["lost-sites"]:
            again.load_state_dict(kept[0])
            late.append(threading.Thread(target=lambda: errors.extend(run([again], {3: grid})[1])))
            late[0].start()
        if told[0] and told[0][-1]["lost-sites"]:  # Does not run away.
            time.sleep(0.3)

    several[0].on_round_end = [*several[0].on_round_end, serve_again]
    _, stopped = run(several, {3: grid})
    assert [type(error) for error in stopped] == [_StoppedError]
    for thread in late:
        thread.join()
    assert not errors
    lost = [end["lost-sites"] for end in told[0]]
    assert lost[0] == lost[-1] == 0
    assert 1 in lost
    # It does not begin anew, and hears the other site's nodes again.
    assert told[2][0]["iteration"] > told[1][-1]["iteration"]
    assert told[2][-1]["lost-payloads"] == 0


@pytest.mark.slow
def test_a_link_that_is_cut_and_mended_loses_what_was_sent_meanwhile() -> None:
    peers = addresses(2)
    with Wire(peers[0]) as to_first, Wire(peers[1]) as to_second:
        seen = [[peers[0], to_second.address], [to_first.address, peers[1]]]
        several = [
            ceps(num_iterations=50, site=site(d, seen[d], listen=peers[d], timeout=2.0, lost_after=0.5))
            for d in range(2)
        ]
        told = [rounds(each) for each in several]

        def change(end: Any) -> None:
            if end.round == 4:
                to_first.cut()
                to_second.cut()
            if end.round == 8:
                to_first.mend()
                to_second.mend()

        several[0].on_round_end = [*several[0].on_round_end, change]

        def wait(ends: list[dict[str, Any]]) -> None:
            if ends and ends[-1]["lost-sites"]:  # Does not run away.
                time.sleep(0.3)

        for each, ends in zip(several, told, strict=True):
            each.on_round_end = [*each.on_round_end, lambda end, ends=ends: wait(ends)]
        _, errors = run(several)
    assert not errors
    for ends in told:
        lost = [end["lost-sites"] for end in ends]
        assert lost[0] == lost[-1] == 0
        assert 1 in lost
        assert sum(end["lost-payloads"] for end in ends) > 0
        assert ends[-1]["lost-payloads"] == 0


@pytest.mark.parametrize(
    "lie",
    [
        {"next": -1},
        {"next": 2**60},
        {"wants": {"0": [1]}},  # For a node of the other site.
        {"wants": 3},
        {"introductions": {"0": ["AAAA", True]}},
        {"read": {"1": [[0], []]}},
    ],
)
def test_a_site_speaks_for_its_own_nodes_alone(lie: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Sites._tell

    def tell(self: Sites, *args: Any) -> dict[str, Any]:
        told = honest(self, *args)
        return {**told, **lie} if self.site.own == 1 else told

    monkeypatch.setattr(Sites, "_tell", tell)
    peers = addresses(2)
    several = [ceps(sealed=True, site=site(d, peers, timeout=1.0, lost_after=0.5)) for d in range(2)]
    told = rounds(several[0])
    found, errors = run(several)
    assert not errors
    assert len(found) == M
    assert {end["lost-sites"] for end in told} == {1}


def test_payloads_that_nobody_asked_for_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Sites.exchanged

    def exchanged(self: Sites, k: int, bundles: Any) -> Any:
        # The other site sends in the name of all its nodes, to all of this one's.
        received = honest(self, k, bundles)
        more = {j: b"" for j in range(M) if j not in self.nodes}
        return {i: {**more, **received.get(i, {})} for i in self.nodes}

    monkeypatch.setattr(Sites, "exchanged", exchanged)
    test_sites_end_with_the_bits_of_one_hub("ceps", False)
