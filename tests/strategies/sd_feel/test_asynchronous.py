"""Edge servers without lock-step, slow clients and moving ones, on the simulated clock."""

import heapq
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.strategies.quadratic import Quadratics, run, servers

from hedgerow.strategies import AsynchronousSDFeel, SDFeel, Stragglers, as_graph, mixing
from hedgerow.strategies.sd_feel import System, preset
from hedgerow.strategies.sd_feel.stragglers import ServerClocks
from hedgerow.strategies.sd_feel.theory import cluster_seconds, inter_seconds, round_seconds
from hedgerow.wire import Compute

SIZES = (30, 20, 10, 20, 15, 5, 8, 12)
CLUSTERS = (0, 0, 1, 1, 2, 2, 3, 3)
PROBLEM = Quadratics(SIZES, centres=range(1, 9), curvatures=[1, 0.5, 2, 1, 0.25, 4, 0.7, 1.1])
# An exchange takes 64 ms, a client's model 640 ms, an iteration 1 s.
SYSTEM = System(100_000, Compute(1e9, 1e9))
STRAGGLERS = Stragglers(lasting=False, probability=0.3, slowdown=4.0)
OPTIONS: dict[str, Any] = {
    "num_servers": 4, "clusters": CLUSTERS, "topology": "ring", "tau1": 2, "seed": 5,
    "system": SYSTEM, "fraction_evaluate": 0.0, "min_available_nodes": 8,
}  # fmt: skip


def strategy(**changes: Any) -> AsynchronousSDFeel:
    defaults = {"tau2": 2, "max_staleness": 1, "topology": "ring", "stragglers": STRAGGLERS}
    return AsynchronousSDFeel(**{**OPTIONS, **defaults, **changes})


def events(tau2: int, max_staleness: int, count: int, topology: str = "ring") -> dict[tuple[int, ...], Any]:
    """Return time and servers' models after each event, by the rounds that servers have ended.

    One event after the other, each server's round computed when it begins: what the strategy does in batches.
    """
    graph = as_graph(topology, 4)
    sizes = np.bincount(CLUSTERS, SIZES)
    P = mixing(graph, sizes).matrix
    theta = min(1.0, 1.0 / (1.0 - P.diagonal().min()))
    models, rounds, link = np.zeros(4), [0] * 4, inter_seconds("sd-feel", SYSTEM)
    sent: dict[int, list[tuple[float, float]]] = {d: [] for d in range(4)}
    uses: dict[tuple[int, int, float], int] = {}
    queue: list[tuple[float, int, float]] = []

    def begin(d: int, now: float) -> None:
        own = [i for i in range(8) if CLUSTERS[i] == d]
        trained = []
        for i in own:
            w = models[d]
            for k in range(2):
                w = w - PROBLEM.eta * PROBLEM.gradient(i, k, w)
            trained.append(w)
        slow = STRAGGLERS.slowest(5, rounds[d] + 1, own)
        mean = np.average(trained, weights=[SIZES[i] for i in own])
        heapq.heappush(queue, (now + cluster_seconds(SYSTEM, tau1=2, slowdown=slow), d, mean))

    for d in range(4):
        begin(d, 0.0)
    found = {}
    for _ in range(count):
        now, d, mean = heapq.heappop(queue)
        models[d] = mean
        rounds[d] += 1
        if rounds[d] % tau2 == 0:
            sent[d].append((now + link, mean))
            new, kept = 0.0, 1.0
            for j in graph.neighbors(d):
                arrived = [one for one in sent[j] if one[0] <= now]
                if not arrived:
                    continue
                at, model = arrived[-1]
                uses[d, j, at] = uses.get((d, j, at), 0) + 1
                if uses[d, j, at] > max_staleness + 1:
                    continue
                new += theta * P[j, d] * model
                kept -= theta * P[j, d]
            models[d] = new + kept * mean
        begin(d, now)
        found[tuple(rounds)] = now, models.copy()
    return found


@pytest.mark.parametrize(("tau2", "max_staleness"), [(1, 0), (1, 3), (2, 1)])
def test_what_is_computed_together_is_what_one_event_after_the_other_gives(
    tau2: int, max_staleness: int
) -> None:
    expected = events(tau2, max_staleness, 200)
    one = strategy(tau2=tau2, max_staleness=max_staleness)
    seen: list[tuple[tuple[int, ...], Any]] = []

    def note(end: Any) -> None:
        if end.round:
            seen.append((tuple(end.train["server-rounds"]), servers(one)))

    one.on_round_end = [note]
    _, ends = run(one, PROBLEM, 25)
    for (rounds, models), end in zip(seen, ends[1:], strict=True):
        now, those = expected[rounds]
        np.testing.assert_allclose(models, those, rtol=1e-12)
        assert end.sim_seconds == pytest.approx(now, rel=1e-12)
        assert end.iterations == sum(rounds) * 2 // 4
    lost = Counter[str]()
    for end in ends[1:]:
        lost.update({key: end.train[key] for key in ("stale-models", "missing-models")})
    # In the first exchange nobody has anything yet; what is too old is left out where so little is allowed.
    assert lost["missing-models"] >= 2
    assert (lost["stale-models"] > 0) == (max_staleness < 3)


def test_a_slow_cluster_holds_up_nobody_else() -> None:
    class FirstIsSlow(Stragglers):
        def factor(self, seed: int, server_round: int, client: int) -> float:
            return 5.0 if client == 0 else 1.0

    slow = FirstIsSlow(lasting=True, probability=0.5, slowdown=5.0)
    _, ends = run(strategy(stragglers=slow, tau2=1), PROBLEM, 20)
    assert ends[-1].train["server-rounds"][1:] == [20, 20, 20]
    quick, late = (cluster_seconds(SYSTEM, tau1=2, slowdown=factor) for factor in (1.0, 5.0))
    # Its last round ends before their next ones do.
    done = int(21 * quick / late)
    assert ends[-1].train["server-rounds"][0] == done
    assert ends[-1].sim_seconds == pytest.approx(max(20 * quick, done * late))
    together = SDFeel(**{**OPTIONS, "stragglers": slow, "topology": "ring", "tau2": 1})
    _, ends = run(together, PROBLEM, 20)
    # In lock-step all wait for it; at the end those beyond its neighbours may be ahead.
    assert ends[-1].sim_seconds == pytest.approx(20 * (late + inter_seconds("sd-feel", SYSTEM)))


def test_every_server_learns_and_agrees_where_nothing_is_learnt() -> None:
    still = Quadratics(SIZES, centres=range(1, 9), curvatures=[0.0] * 8)
    one = strategy(tau2=1, topology="star", clusters=CLUSTERS[::-1])
    u, _ = run(one, still, 30, w0=3.0)
    # The star's mixing matrix has a negative entry; averages of what is late stay where all agree.
    assert mixing(as_graph("star", 4), one.cluster_sizes).matrix.min() < 0
    np.testing.assert_allclose(servers(one), 3.0, rtol=1e-12)
    assert u == pytest.approx(3.0)
    learnt, _ = run(strategy(tau2=1), PROBLEM, 40)
    exact = np.average(range(1, 9), weights=np.multiply(SIZES, [1, 0.5, 2, 1, 0.25, 4, 0.7, 1.1]))
    assert abs(learnt[0] - exact) < 0.5


def test_slow_clients_cost_time_and_change_no_model_in_lock_step() -> None:
    plain, quick, slow = (
        SDFeel(**{**OPTIONS, "tau2": 2, "alpha": 3, "stragglers": who})
        for who in (None, Stragglers(True, 1.0, 1.0), STRAGGLERS)
    )
    (u, ends), (same, as_quick), (late, as_slow) = (run(one, PROBLEM, 8) for one in (plain, quick, slow))
    assert u.tobytes() == same.tobytes() == late.tobytes()
    assert [end.sim_seconds for end in as_quick] == pytest.approx([end.sim_seconds for end in ends])
    assert as_slow[-1].sim_seconds > 1.5 * ends[-1].sim_seconds


def test_servers_wait_for_their_neighbours_alone() -> None:
    clocks = ServerClocks(as_graph("path", 4))
    clocks.work([5.0, 1.0, 1.0, 1.0])
    clocks.exchange(1, 0.5)
    assert clocks.seconds == [5.5, 5.5, 1.5, 1.5]
    clocks.exchange(2, 1.0)
    assert clocks.seconds == [7.5, 7.5, 7.5, 7.5]
    again = ServerClocks(as_graph("path", 4))
    again.load_state_dict(clocks.state_dict())
    assert again.seconds == clocks.seconds
    with pytest.raises(ValueError, match="clocks of 4 servers; valid is 3"):
        ServerClocks(as_graph("path", 3)).load_state_dict(clocks.state_dict())


def test_a_round_of_a_cluster_without_slow_clients_takes_what_the_latency_model_says() -> None:
    for name in ("paper-text", "cifar-large"):
        system = preset(name)
        assert cluster_seconds(system, tau1=7) == round_seconds("sd-feel", system, tau1=7)


def test_stragglers_are_drawn_by_client_and_round_alone() -> None:
    transient, lasting = Stragglers.parse("transient(0.25, 10)"), Stragglers.parse("lasting(0.25,10)")
    assert transient is not None
    assert lasting is not None
    draws = np.array([[transient.factor(1, r, i) for i in range(100)] for r in range(1, 21)])
    assert set(draws.ravel()) == {1.0, 10.0}
    assert 0.21 < (draws > 1).mean() < 0.29
    assert not np.array_equal(draws[0], draws[1])
    assert all(lasting.factor(1, r, i) == lasting.factor(1, 1, i) for r in range(5) for i in range(50))
    assert Stragglers.parse("") is None


# Clients that move


def moving(mobility: float, **changes: Any) -> SDFeel:
    return SDFeel(**{**OPTIONS, "tau2": 1, "alpha": 1, "topology": "path", "mobility": mobility, **changes})


def test_clients_move_along_the_graph_and_u_weighs_clusters_as_they_are() -> None:
    one = moving(0.5)
    seen = [CLUSTERS]
    shares = []

    def note(end: Any) -> None:
        if end.round:
            seen.append(one.clusters)
            shares.append((one.server_weights.copy(), np.bincount(one.clusters, SIZES) / sum(SIZES)))

    one.on_round_end = [note]
    u, ends = run(one, PROBLEM, 12)
    assert seen[1] == CLUSTERS
    moves = [sum(a != b for a, b in zip(x, y, strict=True)) for x, y in pairwise(seen[1:])]
    assert moves == [end.train["moved-clients"] for end in ends[2:]]
    assert sum(moves) > 20
    for before, after in pairwise(seen):
        assert all(abs(a - b) <= 1 for a, b in zip(before, after, strict=True))
        assert len(set(after)) == 4
    for found, expected in shares:
        np.testing.assert_allclose(found, expected)
    assert ends[-1].train["cluster-clients"] == [seen[-1].count(d) for d in range(4)]
    # The same again, though clients are elsewhere now; and from a state in the middle of it.
    states: list[dict[str, Any]] = []
    one.on_round_end = [lambda end: states.append(one.state_dict()) if end.round == 5 else None]
    assert run(one, PROBLEM, 12)[0].tobytes() == u.tobytes()
    other = moving(0.5)
    other.load_state_dict(states[0])
    assert run(other, PROBLEM, 12)[0].tobytes() == u.tobytes()


def test_clients_that_do_not_move_change_no_bit_and_moving_does() -> None:
    still, none = moving(0.0), SDFeel(**{**OPTIONS, "tau2": 1, "alpha": 1, "topology": "path"})
    assert run(still, PROBLEM, 6)[0].tobytes() == run(none, PROBLEM, 6)[0].tobytes()
    assert run(moving(0.5), PROBLEM, 6)[0].tobytes() != run(none, PROBLEM, 6)[0].tobytes()
