"""SD-FEEL, HierFAVG, FEEL and FedAvg through real Flower messages, against goldens and the oracle."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp import strategy as flower
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import sd_feel as oracle
from tests.strategies.quadratic import Quadratics, initial, run, servers

from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import FedAvg, Feel, HierFAvg, RosterError, RoundContext, SDFeel, TooFewRepliesError
from hedgerow.strategies.parts import Parts
from hedgerow.strategies.sd_feel import ClusteredStrategy, contiguous_clusters

PATH3 = [(0, 1), (1, 2)]
SIX = Quadratics(sizes=[30, 20, 10, 20, 15, 5], centres=[1, 2, 3, 4, 5, 6])
SIX_CURVED = Quadratics(sizes=SIX.sizes, centres=SIX.centres, curvatures=[1, 0.5, 2, 1, 0.25, 4])  # golden G9
PAIRS = (0, 0, 1, 1, 2, 2)
FULL: dict[str, Any] = {"fraction_evaluate": 0.0}


def sd_feel(tau1: int, tau2: int, alpha: int, **options: Any) -> SDFeel:
    return SDFeel(
        num_servers=3,
        topology=PATH3,
        clusters=PAIRS,
        tau1=tau1,
        tau2=tau2,
        alpha=alpha,
        **{**FULL, **options},
    )


@pytest.mark.parametrize(
    ("periods", "after", "models"),
    [
        ((2, 2, 1), 2, [0.695579577236, 1.217211078241, 1.665808705499]),
        ((2, 2, 1), 4, [1.250721190808, 2.001405680161, 2.459416452643]),
        ((2, 2, 3), 4, [1.623092064171, 1.792125994861, 1.902009976262]),
        ((1, 1, 1), 8, [1.621271042189, 1.956766704889, 2.147229745163]),
        ((1, 4, 1), 8, [1.271963024038, 2.114689062596, 2.573156427634]),
        ((4, 1, 1), 2, [1.216153266318, 1.817117021944, 2.275125702230]),
        ((2, 2, 0), 4, [0.609034449216, 2.381920217284, 3.395902160939]),
        ((2, 2, 200), 4, [1.734363853652] * 3),
    ],
)
def test_golden_server_models(periods: tuple[int, int, int], after: int, models: list[float]) -> None:
    strategy = sd_feel(*periods)
    run(strategy, SIX_CURVED, after)
    np.testing.assert_allclose(servers(strategy), models, atol=1e-11)


@pytest.mark.parametrize(
    ("make", "rounds", "u"),
    [
        (lambda: HierFAvg(num_servers=3, clusters=PAIRS, tau1=2, tau2=2, **FULL), 4, 1.734363853652),
        (lambda: HierFAvg(num_servers=3, clusters=PAIRS, tau1=2, tau2=1, **FULL), 4, 1.753906828814),
        (lambda: FedAvg(local_steps=2, min_available_nodes=6, **FULL), 4, 1.753906828814),
        (lambda: FedAvg(local_steps=4, min_available_nodes=6, **FULL), 2, 1.611944180006),
        (
            lambda: SDFeel(num_servers=1, clusters=[0] * 6, tau1=2, topology="complete", **FULL),
            3,
            1.442889269068,
        ),
    ],
    ids=["HierFAvg-2-2", "HierFAvg-2-1", "FedAvg-2", "FedAvg-4", "SDFeel-one-server"],
)
def test_golden_baselines(make: Callable[[], ClusteredStrategy], rounds: int, u: float) -> None:
    final, _ = run(make(), SIX_CURVED, rounds)
    assert final[0] == pytest.approx(u, abs=1e-11)


def test_feel_equals_the_oracle_with_its_schedule() -> None:
    strategy = Feel(clients_per_round=2, tau1=3, min_available_nodes=6, seed=3, **FULL)
    final, _ = run(strategy, SIX_CURVED, 20)
    expected = oracle.run(
        np.zeros(1),
        SIX_CURVED.gradient,
        sizes=SIX.sizes,
        clusters=[list(range(6))],
        tau1=3,
        eta=0.1,
        K=60,
        active=lambda r: [i in strategy.participants(r) for i in range(6)],
        inter="none",
    )
    assert final[0] == pytest.approx(expected.states[-1].servers[0, 0], abs=1e-12)


def test_one_cluster_gives_the_numbers_of_flowers_own_fedavg() -> None:
    problem = Quadratics(SIX.sizes, SIX.centres, SIX_CURVED.curvatures)
    theirs = flower.FedAvg(min_train_nodes=6, min_available_nodes=6, fraction_evaluate=0.0)
    with flower_identity(1):
        grid = problem.grid()
        arrays = theirs.start(
            grid, initial(), num_rounds=10, train_config=ConfigRecord({"local-steps": 3})
        ).arrays
    for ours in (
        SDFeel(num_servers=1, clusters=[0] * 6, topology="complete", tau1=3, **FULL),
        FedAvg(local_steps=3, min_available_nodes=6, **FULL),
    ):
        final, _ = run(ours, problem, 10)
        np.testing.assert_allclose(final, arrays["w"].numpy(), rtol=1e-12)


def test_a_third_partys_client_app_needs_no_whoami_and_its_sizes_are_learnt() -> None:
    # Without introductions partition ids are the ranks of node ids: deal the clients accordingly.
    nodes = sorted(SIX.grid()._nodes.values(), key=lambda node: node.node_id)
    rank = {node.partition_id: rank for rank, node in enumerate(nodes)}
    sizes, centres, curvatures = (
        [values[rank[i]] for i in range(6)] for values in (SIX.sizes, SIX.centres, SIX_CURVED.curvatures)
    )
    stranger = Quadratics(sizes, centres, curvatures, introduces_itself=False)
    strategy = SDFeel(num_servers=3, topology=PATH3, min_available_nodes=6, tau1=2, tau2=2, alpha=1, **FULL)
    run(strategy, stranger, 4)
    np.testing.assert_allclose(
        servers(strategy), [1.250721190808, 2.001405680161, 2.459416452643], atol=1e-11
    )


# What is asked of the ClientApp


@pytest.mark.parametrize("clusters", [PAIRS, "group"])
def test_clusters_are_refused_where_no_node_says_which_partition_it_has(clusters: Any) -> None:
    strategy = SDFeel(num_servers=3, topology=PATH3, clusters=clusters, min_available_nodes=6, **FULL)
    with pytest.raises(RosterError, match=r"clusters says which edge server .*mods=\[introduce\]"):
        run(strategy, Quadratics(SIX.sizes, SIX.centres, introduces_itself=False), 2)


@pytest.mark.parametrize("names", [["c", "a", "b"], ["10", "2", "9"]], ids=["words", "numbers"])
def test_the_nodes_groups_are_the_clusters(names: list[str]) -> None:
    # The servers are in the order of the names, "a" and 2 first.
    problem = Quadratics(
        SIX.sizes, SIX.centres, SIX_CURVED.curvatures, group=lambda client: names[PAIRS[client]]
    )
    by_group = SDFeel(
        num_servers=3, topology=PATH3, clusters="group", min_available_nodes=6, tau1=2, tau2=2, **FULL
    )
    run(by_group, problem, 4)
    chosen = SDFeel(num_servers=3, topology=PATH3, clusters=(2, 2, 0, 0, 1, 1), tau1=2, tau2=2, **FULL)
    run(chosen, SIX_CURVED, 4)
    assert by_group.clusters == chosen.clusters
    assert np.array_equal(servers(by_group), servers(chosen))
    resumed = SDFeel(num_servers=3, topology=PATH3, clusters="group", min_available_nodes=6, **FULL)
    resumed.load_state_dict(by_group.state_dict())
    assert np.array_equal(resumed.server_weights, by_group.server_weights)


@pytest.mark.parametrize("group", [lambda client: "all", lambda client: "abc"[client % 3]])
def test_groups_that_are_not_one_a_server_are_named(group: Callable[[int], str]) -> None:
    strategy = SDFeel(num_servers=2, clusters="group", min_available_nodes=6, **FULL)
    words = r"clusters is 'group', so the node configs must name a group for each of the 2 .*got \["
    with pytest.raises(RosterError, match=words):
        run(strategy, Quadratics(SIX.sizes, SIX.centres, group=group), 1)


def test_a_reply_of_another_number_of_steps_is_lost_and_counted() -> None:
    hasty = Quadratics(
        SIX.sizes, SIX.centres, SIX_CURVED.curvatures, steps=lambda client, asked: 1 if client == 3 else asked
    )
    _, ends = run(sd_feel(2, 2, 1), hasty, 4)
    lost = [{"num-steps is not local-steps": 1}] * 3
    assert [end.rejected for end in ends[1:]] == [*lost, {"offline": 1, "quarantined": 1}]
    assert [end.iterations for end in ends] == [0, 2, 4, 6, 8]


def test_an_app_that_does_not_look_at_local_steps_ends_the_run_by_its_name() -> None:
    deaf = Quadratics(SIX.sizes, SIX.centres, steps=lambda client, asked: 5)
    with pytest.raises(TooFewRepliesError, match="6 x num-steps is not local-steps"):
        run(sd_feel(2, 2, 1), deaf, 4)


def test_what_is_not_told_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    silent = Quadratics(SIX.sizes, SIX.centres, SIX_CURVED.curvatures, tells_steps=False)
    strategy = sd_feel(2, 2, 1)
    final, ends = run(strategy, silent, 4)
    assert caplog.text.count("Replies do not report 'num-steps'") == 1
    assert [(end.iterations, end.sim_seconds) for end in ends] == [(0, 0.0)] + [(None, None)] * 4
    assert json.loads(json.dumps(asdict(ends[-1])))["iterations"] is None
    assert np.array_equal(final, run(sd_feel(2, 2, 1), SIX_CURVED, 4)[0])
    # A run that goes on from here does not know either.
    resumed = sd_feel(2, 2, 1)
    resumed.load_state_dict(strategy.state_dict())
    assert (resumed.iterations, resumed.progress().sim_seconds) == (None, None)
    run(strategy, SIX_CURVED, 4)
    assert strategy.iterations == 8


class Shuffled(InProcessGrid):
    """Hands replies over in another order each time."""

    order = np.random.default_rng(1)

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        return [replies[i] for i in self.order.permutation(len(replies))]


def test_arrival_order_changes_no_bit() -> None:
    plain, _ = run(sd_feel(2, 2, 3), SIX_CURVED, 6)
    shuffled, _ = run(sd_feel(2, 2, 3), SIX_CURVED, 6, grid=Shuffled(SIX_CURVED.client_app(), 6, seed=5))
    assert np.array_equal(plain, shuffled)


def test_participation_is_the_probability_of_taking_part_and_nested() -> None:
    full, most, some = (sd_feel(1, 1, 1, participation=p, seed=1) for p in (1.0, 0.8, 0.3))
    drawn = [
        (set(full.participants(r)), set(most.participants(r)), set(some.participants(r)))
        for r in range(1, 400)
    ]
    assert all(a == set(range(6)) and c <= b for a, b, c in drawn)
    assert np.mean([len(c) for _, _, c in drawn]) == pytest.approx(6 * 0.3, abs=0.15)


def test_a_reply_that_is_lost_is_a_client_that_was_absent() -> None:
    no_number = ArrayRecord({"w": Array(np.array([np.nan]))})
    spoilt = Quadratics(
        SIX.sizes,
        SIX.centres,
        SIX_CURVED.curvatures,
        sabotage=lambda client, r, reply: (
            RecordDict({**reply, "arrays": no_number}) if (client, r) == (3, 2) else reply
        ),
    )
    final, ends = run(sd_feel(2, 2, 1), spoilt, 4)
    assert [end.rejected for end in ends[1:]] == [{}, {"non-finite": 1}, {}, {}]
    assert [end.accepted for end in ends[1:]] == [6, 5, 6, 6]
    expected = oracle.run(
        np.zeros(1),
        SIX_CURVED.gradient,
        sizes=SIX.sizes,
        clusters=[[0, 1], [2, 3], [4, 5]],
        edges=PATH3,
        tau1=2,
        tau2=2,
        eta=0.1,
        K=8,
        active=lambda r: [not (i == 3 and r == 2) for i in range(6)],
    )
    weights = np.array([0.5, 0.3, 0.2])
    np.testing.assert_allclose(final, weights @ expected.states[-1].servers, atol=1e-12)


def test_running_statistics_are_averaged_in_clusters_but_never_gossiped() -> None:
    # The equal star on six servers has the self-weight -3/7 at its centre.
    strategy = SDFeel(num_servers=6, topology="star", min_available_nodes=6, **FULL)
    record = ArrayRecord(
        {"w": Array(np.zeros(1)), "bn.running_var": Array(np.zeros(1)), "n": Array(np.zeros(1, int))}
    )
    strategy.federation.vector(record)
    models = np.arange(1.0, 7.0)[:, None] * np.ones((1, 3))
    steps = strategy.mixer.mix(
        models, np.ones(6), RoundContext(strategy.federation, 1, {}, range(6), Parts())
    )
    with pytest.raises(StopIteration) as end:
        next(steps)
    mixed = end.value.value
    assert np.array_equal(mixed[:, 1:], models[:, 1:])
    assert not np.allclose(mixed[:, 0], models[:, 0])


def test_federated_evaluation_evaluates_u_on_a_share_of_the_nodes() -> None:
    strategy = sd_feel(1, 1, 1, fraction_evaluate=0.5)
    final, ends = run(strategy, SIX, 1)
    nodes = [0.5 * (final[0] - c) ** 2 for c in SIX.centres]
    assert min(nodes) <= ends[-1].evaluate["loss"] <= max(nodes)
    _, ends = run(sd_feel(1, 1, 1, fraction_evaluate=1.0), SIX, 1)
    assert ends[-1].evaluate["loss"] == pytest.approx(np.average(nodes, weights=SIX.sizes))


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 20))
def test_contiguous_clusters_are_as_equal_as_can_be(clients: int, servers_: int) -> None:
    servers_ = min(clients, servers_)
    clusters = contiguous_clusters(clients, servers_)
    counts = np.bincount(clusters, minlength=servers_)
    assert sorted(clusters) == list(clusters)
    assert counts.max() - counts.min() <= 1
