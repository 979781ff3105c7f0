"""Runs whose nodes come late, leave, come back under other ids, and introduce themselves wrongly."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from tests.strategies.ceps.test_strategy import both, ceps
from tests.strategies.changing_grid import ChangingGrid
from tests.strategies.fedmud.cases import fedmud
from tests.strategies.gossip.nodes import Nodes
from tests.strategies.gossip.nodes import run as run_gossip
from tests.strategies.linear_federation import MODEL, LinearFederation
from tests.strategies.linear_federation import run as run_linear
from tests.strategies.quadratic import Quadratics, run, servers
from tests.strategies.similarity_free.test_strategy import Federation, family

from hedgerow.sim import flower_identity
from hedgerow.strategies import EF21P, FedAvg, Feel, Fixed, Roster, RosterError, SDFeel, TooFewRepliesError

SIX = Quadratics(sizes=[30, 20, 10, 20, 15, 5], centres=[1, 2, 3, 4, 5, 6])
OPTIONS: dict[str, Any] = {"num_clients": 6, "min_available_nodes": 3, "fraction_evaluate": 1.0}


def introducing(problem: Quadratics, told: Sequence[Mapping[str, Any]]) -> ClientApp:
    """The quadratics' app, whose node i introduces itself by what ``told[i]`` says."""
    app = replace(problem, introduces_itself=False, seen=problem.seen).client_app()

    @app.query("whoami")
    def whoami(message: Message, context: Context) -> Message:
        me = (
            {"num-examples": problem.sizes[i]} if (i := int(context.node_config["partition-id"])) >= 0 else {}
        )
        return Message(RecordDict({"whoami": ConfigRecord({**me, **told[i]})}), reply_to=message)

    return app


def trained(problem: Quadratics) -> dict[int, set[int]]:
    """Return which of the app's nodes trained in each round."""
    return {r: {i for at, i in problem.seen if at == r} for r, _ in problem.seen}


def fresh(**changes: Any) -> Quadratics:
    return replace(SIX, seen=[], **changes)


def test_a_node_joins_in_round_five_and_another_leaves_in_round_three() -> None:
    problem = fresh()
    grid = ChangingGrid(
        problem.client_app(), 6, away=[4], after={2: lambda g: g.leave(1), 4: lambda g: g.come(4)}
    )
    strategy = FedAvg(on_round_end=[grid.told], **OPTIONS)
    final, ends = run(strategy, problem, 6, grid=grid)
    everyone = set(range(6))
    assert trained(problem) == {
        1: everyone - {4}, 2: everyone - {4}, 3: everyone - {1, 4}, 4: everyone - {1, 4},
        5: everyone - {1}, 6: everyone - {1},
    }  # fmt: skip
    assert [end.rejected for end in ends[1:]] == [{"offline": n} for n in (1, 1, 2, 2, 1, 1)]
    assert strategy.federation.limits.claims.sizes == dict(enumerate(map(float, SIX.sizes)))
    # The weighted mean of those who took part, round by round.
    w = 0.0
    for there in trained(problem).values():
        sizes = {i: SIX.sizes[i] for i in there}
        w = sum(n * (w - 0.1 * (w - SIX.centres[i])) for i, n in sizes.items()) / sum(sizes.values())
    assert final[0] == pytest.approx(w, abs=1e-12)


def test_with_everybody_there_a_quorum_changes_no_bit() -> None:
    (all_six, _), (quorum, ends) = (
        run(FedAvg(participation=0.6, **options), fresh(), 5)
        for options in ({"min_available_nodes": 6}, {"num_clients": 6, "min_available_nodes": 3})
    )
    assert np.array_equal(all_six, quorum)
    assert not any(end.rejected for end in ends)


def test_a_node_that_comes_back_under_another_id_goes_on_as_itself() -> None:
    told = [{"name": f"ward-{i}"} for i in range(6)]
    problem = fresh()
    grid = ChangingGrid(
        introducing(problem, told), 6, after={1: lambda g: g.leave(2), 2: lambda g: g.come(2, 4242)}
    )
    strategy = FedAvg(on_round_end=[grid.told], **OPTIONS)
    run(strategy, problem, 4, grid=grid)
    assert [2 in there for there in trained(problem).values()] == [True, False, True, True]
    assert strategy.federation.limits.claims.sizes == dict(enumerate(map(float, SIX.sizes)))


def test_nodes_that_were_asked_before_the_run_are_not_asked_again() -> None:
    told = [{"name": name, "input-shape": [8], "num-classes": 2} for name in "cabfed"]
    problem = fresh()
    grid = ChangingGrid(introducing(problem, told), 6)
    with flower_identity(1):
        roster = Roster.gather(grid, None, 60, quorum=3)
    assert (roster.shapes.input_shape, roster.shapes.num_classes) == ((8,), 2)
    strategy = FedAvg(roster=roster, **OPTIONS | {"num_clients": 0})
    run(strategy, problem, 2, grid=grid)
    assert [kind for kind, _, _ in grid.sent].count("query.whoami") == 6
    assert strategy.federation.members.shapes() == roster.shapes
    # A run that goes on has its nodes where they were, whenever they were asked.
    state = strategy.state_dict()
    state["names"] = {name: i for i, name in enumerate("fedcba")}
    again = FedAvg(roster=roster, **OPTIONS | {"num_clients": 0})
    again.load_state_dict(state)
    run(again, problem, 3, grid=grid)
    assert again.state_dict()["federation"]["names"] == state["federation"]["names"]


def test_who_introduces_itself_wrongly_is_counted_and_the_run_goes_on() -> None:
    told: list[Mapping[str, Any]] = [
        {"name": "a"},
        {"name": "b"},
        {"name": "a"},
        {"name": "c"},
        {},
        {"name": ""},
    ]
    problem = fresh()
    # The one that says a first has it: that is the order of node ids here.
    _, ends = run(FedAvg(**OPTIONS), problem, 8, grid=ChangingGrid(introducing(problem, told), 6))
    lost = {"duplicate name": 1, "malformed introduction": 2, "offline": 3}
    assert ends[1].rejected == lost
    # They are asked again before rounds 3 and 7, where two and six are completed.
    assert [end.round for end in ends if "duplicate name" in end.rejected] == [1, 3, 7]
    assert all(len(there & {0, 2}) == 1 and {1, 3} < there for there in trained(problem).values())


def test_a_resumed_run_knows_its_nodes_by_name_whatever_their_order() -> None:
    options = OPTIONS | {"num_clients": 0, "participation": 0.5, "seed": 3}
    names = ["f", "b", "e", "a", "d", "c"]
    whole, _ = run(
        FedAvg(**options),
        fresh(),
        6,
        grid=ChangingGrid(introducing(fresh(), [{"name": n} for n in names]), 6),
    )
    first = FedAvg(**options)
    run(first, fresh(), 3, grid=ChangingGrid(introducing(fresh(), [{"name": n} for n in names]), 6))
    assert first.state_dict()["federation"]["names"] == {name: i for i, name in enumerate("abcdef")}
    # The same six at other places of the machine, under other node ids, and one that is first by name.
    order = [3, 1, 5, 0, 4, 2]
    shuffled = fresh(sizes=[SIX.sizes[i] for i in order], centres=[SIX.centres[i] for i in order])
    told = [{"name": names[i]} for i in order]
    second = FedAvg(**options)
    second.load_state_dict(first.state_dict())
    resumed, _ = run(second, shuffled, 6, grid=ChangingGrid(introducing(shuffled, told), 6, seed=9))
    assert np.array_equal(resumed, whole)
    assert second.federation.ledger.state_dict() is not None


def test_a_scheduler_draws_from_those_that_are_there() -> None:
    problem = fresh()
    grid = ChangingGrid(problem.client_app(), 6, away=[0, 5], after={10: lambda g: g.come(0)})
    run(Feel(clients_per_round=3, on_round_end=[grid.told], **OPTIONS), problem, 20, grid=grid)
    rounds = trained(problem)
    assert all(len(there) == 3 and 5 not in there for there in rounds.values())
    assert not any(0 in rounds[r] for r in range(1, 11))
    assert any(0 in rounds[r] for r in range(11, 21))


@pytest.mark.parametrize("sync", ["catchup", "broadcast"])
def test_fedmud_draws_from_those_that_are_there_and_brings_newcomers_up_to_date(sync: Any) -> None:
    federation = LinearFederation()
    grid = ChangingGrid(federation.client_app(), 5, away=[3], after={3: lambda g: g.come(3)})
    strategy = fedmud(
        sync=sync, num_clients=0, min_available_nodes=4, num_clients_per_round=4, on_round_end=[grid.told]
    )
    _, ends = run_linear(strategy, federation, 6, grid=grid)
    assert [end.accepted for end in ends[1:]] == [4] * 6
    assert not any(end.rejected for end in ends)
    assert {r for r, client, kind, _ in federation.seen if client == 3 and kind == "train"} <= {4, 5, 6}


def test_similarity_free_lets_go_of_workers_that_left() -> None:
    federation = Federation()
    app = federation.grid._handlers._app
    grid = ChangingGrid(app, 2, after={1: lambda g: g.leave(1)})
    federation.grid = grid
    strategy = family(
        "fedavg", num_clients=2, min_available_nodes=1, schedule=Fixed(c=0.1, num_rounds=1),
        on_round_end=[grid.told],
    )  # fmt: skip
    left = federation.run(strategy, 2)
    alone = Federation().run(family("fedavg"), 1)
    grid = ChangingGrid(app, 2, away=[1])
    federation.grid = grid
    expected = federation.run(family("fedavg", num_clients=2, min_available_nodes=1), 1, start=list(alone))
    # One that left counts no longer as a worker that stayed at x^k.
    np.testing.assert_array_equal(left, expected)


# Clusters


def grouped(names: Sequence[str]) -> list[dict[str, Any]]:
    return [{"partition-id": i} | ({"group": name} if name else {}) for i, name in enumerate(names)]


def by_group(**options: Any) -> SDFeel:
    return SDFeel(
        num_servers=2, topology=[(0, 1)], clusters="group", tau1=1, tau2=2, **{**OPTIONS, **options}
    )


@pytest.mark.parametrize("num_clients", [6, 0])
def test_nodes_that_come_later_join_their_groups_server(num_clients: int) -> None:
    problem = fresh()
    told = grouped(["south", "north", "south", "north", "north", "south"])
    grid = ChangingGrid(
        introducing(problem, told), 6, away=[4, 5], after={2: lambda g: (g.come(4), g.come(5))}
    )
    strategy = by_group(num_clients=num_clients, on_round_end=[grid.told])
    run(strategy, problem, 4, grid=grid)
    assert strategy.clusters == (1, 0, 1, 0, 0, 1)
    assert strategy.cluster_sizes.tolist() == [55, 45]
    assert trained(problem)[4] == set(range(6))
    # Before its nodes came, what is known of a cluster is of those that were there.
    resumed = by_group(num_clients=num_clients)
    resumed.load_state_dict(strategy.state_dict())
    assert np.array_equal(servers(resumed), servers(strategy))
    run(resumed, problem, 6, grid=ChangingGrid(introducing(problem, told), 6, away=[0]))
    assert resumed.clusters == strategy.clusters


def test_nodes_without_a_group_or_of_one_that_has_no_server_are_left_out_and_counted() -> None:
    problem = fresh()
    told = grouped(["a", "b", "a", "b", "", "B"])
    _, ends = run(by_group(), problem, 2, grid=ChangingGrid(introducing(problem, told), 6))
    assert ends[1].rejected == {"no group": 1, "unknown group": 1}
    assert trained(problem)[2] == {0, 1, 2, 3}


def test_groups_of_which_nobody_can_say_which_have_servers_are_named() -> None:
    told = grouped(["a", "b", "c", "a", "b", "c"])
    with pytest.raises(RosterError, match=r"a group for each of the 2 edge servers, got \['a', 'b', 'c'\]"):
        run(by_group(), fresh(), 2, grid=ChangingGrid(introducing(fresh(), told), 6))


def test_where_as_many_take_part_as_come_a_newcomer_joins_the_smallest_cluster() -> None:
    problem = fresh()
    grid = ChangingGrid(problem.client_app(), 6, away=[3, 5], after={1: lambda g: (g.come(3), g.come(5))})
    options = OPTIONS | {"num_clients": 0, "min_available_nodes": 4}
    strategy = SDFeel(num_servers=2, topology=[(0, 1)], tau1=1, tau2=1, on_round_end=[grid.told], **options)
    run(strategy, problem, 3, grid=grid)
    assert strategy.clusters == (0, 0, 1, 0, 1, 1)
    assert trained(problem) == {1: {0, 1, 2, 4}, 2: set(range(6)), 3: set(range(6))}


# Gossip: an absent node is a straggler


def test_a_gossiping_node_that_is_away_is_a_straggler_until_it_comes() -> None:
    nodes = Nodes([1, 2, 1, 2, 2, 2], both)
    strategy = ceps(num_clients=6, min_available_nodes=3)
    grid = ChangingGrid(nodes.app(), 6, away=[2], after={4: lambda g: g.come(2)})
    strategy.on_round_end = [grid.told]
    _, ends, _ = run_gossip(strategy, nodes, 8, grid=grid)  # type: ignore[arg-type]
    first = {i: min(event.k for event in nodes.events("update") if event.node == i) for i in range(6)}
    assert first == {0: 1, 1: 2, 2: 5, 3: 2, 4: 2, 5: 2}
    # Its neighbours go on with what the others sent.
    heard = [event.received.keys() for event in nodes.events("update") if event.node == 1]
    assert heard[:2] == [{0}, {0}]
    assert {0, 2} in heard
    assert all(end.accepted for end in ends[1:])


def test_events_at_which_only_absent_nodes_are_due_do_not_end_a_run() -> None:
    nodes = Nodes([1, *[20] * 5], both)
    grid = ChangingGrid(nodes.app(), 6, after={3: lambda g: g.leave(0)})
    strategy = ceps(num_clients=6, min_available_nodes=3, interval=(1, 20))
    strategy.on_round_end = [grid.told]
    _, ends, _ = run_gossip(strategy, nodes, 25, grid=grid)  # type: ignore[arg-type]
    assert [end.accepted for end in ends[4:20]] == [0] * 16
    assert ends[20].accepted == 5


def test_a_gossip_that_everybody_left_ends() -> None:
    nodes = Nodes([1] * 6, both)
    grid = ChangingGrid(nodes.app(), 6, after={2: lambda g: [g.leave(i) for i in range(6)]})
    strategy = ceps(max_repeats=2)
    strategy.on_round_end = [grid.told]
    with pytest.raises(TooFewRepliesError):
        run_gossip(strategy, nodes, 20, grid=grid)  # type: ignore[arg-type]


def test_who_has_a_name_alone_has_no_place_in_a_graph_and_draws_no_support() -> None:
    def renamed(kind: str, i: int, reply: RecordDict) -> RecordDict:
        return RecordDict({"whoami": ConfigRecord({"name": "x"})}) if (kind, i) == ("whoami", 5) else reply

    nodes = Nodes([1] * 6, both, renamed)
    _, ends, _ = run_gossip(
        ceps(num_clients=6, min_available_nodes=5), nodes, 2, grid=ChangingGrid(nodes.app(), 6)
    )  # type: ignore[arg-type]
    assert ends[1].rejected == {"no partition id": 1}
    federation = LinearFederation()
    nodes_of_layers = federation.client_app()

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type != "query.whoami":
            return nodes_of_layers(message, context)
        i = int(context.node_config["partition-id"])
        me = {"name": "x"} if i == 4 else {"partition-id": i}
        return Message(RecordDict({"whoami": ConfigRecord(me)}), reply_to=message)

    strategy = EF21P(
        **MODEL, ratio=0.5, num_clients=5, min_available_nodes=4, fraction_evaluate=0.0, local_epochs=1
    )
    _, ends = run_linear(strategy, federation, 1, grid=ChangingGrid(app, 5))
    assert ends[1].rejected == {"no partition id": 1, "offline": 1}
    assert {client for _, client, _, _ in federation.seen} == {0, 1, 2, 3}
