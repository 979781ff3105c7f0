"""Nodes that the engine knows are not asked who they are, and a run comes to the same without that."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from tests.strategies.recording_grid import RecordingGrid

from hedgerow.clients import fedmud_client, sd_feel_client
from hedgerow.sim import FaultModel, InProcessGrid
from hedgerow.strategies import FedMUD, Feel, Node, Roster
from hedgerow.tasks import build_model
from hedgerow.wire import WHOAMI, to_record, view

NODES = 12
TRAIN = ConfigRecord({"seed": 0, "batch-size": 8, "learning-rate": 0.1})
TASK = {"dataset": "mnist-5k", "model": "logistic", "seed": 0, "data-dir": "", "device": "cpu"}


def config(nodes=NODES, partition="dirichlet(0.3)", **more):
    return {**TASK, "num-clients": nodes, "partition": partition, **more}


def arrays() -> ArrayRecord:
    return to_record(build_model("logistic", (1, 28, 28), 10, 0).state_dict())


def feel(nodes=NODES, **options):
    return Feel(clients_per_round=4, min_available_nodes=nodes, fraction_evaluate=0.0, **options)


def fedmud(nodes=NODES, **options):
    model = build_model("logistic", (1, 28, 28), 10, 0)
    return FedMUD.for_model(
        model, num_clients_per_round=4, min_available_nodes=nodes, local_epochs=1, fraction_evaluate=0.0,
        ratio=1.0, skip_front=0, skip_back=0, **options,
    )  # fmt: skip


METHODS = {"feel": (feel, sd_feel_client()), "fedmud": (fedmud, fedmud_client())}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_comes_to_the_same_whether_nodes_are_asked_or_known(name: str) -> None:
    make, app = METHODS[name]
    ended = {}
    for kind in (InProcessGrid, RecordingGrid):
        strategy, grid = make(), kind(app, NODES, run_config=config())
        result = strategy.start(grid, arrays(), num_rounds=3, train_config=TRAIN)
        ended[kind] = {key: view(array).tobytes() for key, array in result.arrays.items()}
        ended[kind, "sizes"] = {i: strategy.federation.limits.weight_of(i) for i in range(NODES)}
        ended[kind, "traffic"] = strategy.ledger.state_dict()
    assert isinstance(grid, RecordingGrid)  # Its nodes must be asked.
    assert [kind for kind, _, _ in grid.sent].count(WHOAMI) == NODES
    for what in ((), ("sizes",), ("traffic",)):
        one, other = (ended[(kind, *what) if what else kind] for kind in (InProcessGrid, RecordingGrid))
        assert one == other


@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_known_nodes_that_goes_on_ends_as_one_that_was_not_stopped(name: str) -> None:
    make, app = METHODS[name]

    def begun():
        return make(), InProcessGrid(app, NODES, run_config=config())

    strategy, grid = begun()
    whole = strategy.start(grid, arrays(), num_rounds=4, train_config=TRAIN).arrays
    strategy, grid = begun()
    strategy.start(grid, arrays(), num_rounds=2, train_config=TRAIN)
    kept = strategy.state_dict(), grid.state_dict()
    assert set(kept[1]["nodes"]) == {str(node.partition_id) for node in grid._all._made.values()}
    assert len(kept[1]["nodes"]) < NODES
    strategy, grid = begun()
    strategy.load_state_dict(kept[0])
    grid.load_state_dict(kept[1])
    resumed = strategy.start(grid, arrays(), num_rounds=4, train_config=TRAIN).arrays
    assert all(np.array_equal(view(whole[key]), view(resumed[key])) for key in whole)


def test_the_roster_says_of_known_nodes_what_they_would_tell() -> None:
    app, ends = sd_feel_client(), []
    for kind in (InProcessGrid, RecordingGrid):
        strategy = feel()
        roster = strategy.federation.gather(kind(app, NODES, run_config=config()))
        ends.append((list(roster.nodes), list(roster.present), dict(roster.node_ids), set(roster.online)))
        assert (roster.known is not None) is (kind is InProcessGrid)
    assert ends[0] == ends[1]


def pass_on(message: Message, context: Context, call_next) -> Message:
    return call_next(message, context)


@pytest.mark.parametrize(
    ("app", "options"),
    [
        (sd_feel_client(), {"node_configs": [{"name": f"n{i}"} for i in range(NODES)]}),
        (sd_feel_client(), {"faults": FaultModel(dropout=0.1)}),
        (sd_feel_client(), {"strict": True}),
        (sd_feel_client(), {"real_time": True}),
        (sd_feel_client(), {"run_config": config(partition="own")}),
        (sd_feel_client(), {"run_config": config(nodes=NODES - 1)}),
        (sd_feel_client(lambda context: None), {}),
        (ClientApp(mods=[pass_on]), {}),
    ],
    ids=["names", "faults", "strict", "real time", "own data", "more nodes", "own task", "plain app"],
)
def test_nodes_are_asked_where_they_may_say_more_than_the_engine_knows(app, options) -> None:
    grid = InProcessGrid(app, NODES, **{"run_config": config(), **options})
    assert grid.known_nodes() is None


def test_node_configs_that_say_nothing_are_none() -> None:
    grid = InProcessGrid(sd_feel_client(), NODES, run_config=config(), node_configs=[{}] * NODES)
    assert grid.known_nodes() is not None


def test_nodes_are_asked_where_their_owner_wrote_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = InProcessGrid(sd_feel_client(), NODES, run_config=config())
    assert grid.known_nodes() is not None
    monkeypatch.setenv("HEDGEROW_NODE_POLICY", "/nowhere.toml")
    assert grid.known_nodes() is None


def test_nodes_are_asked_where_a_strategy_would_leave_one_of_them_out() -> None:
    grid = InProcessGrid(sd_feel_client(), NODES, run_config=config())

    def admits(node: Node) -> str | None:
        return "too far" if node.partition_id == 7 else None

    assert Roster.of_known(grid, NODES, lambda node: None) is not None
    assert Roster.of_known(grid, NODES, admits) is None
    assert Roster.of_known(grid, NODES + 1, None) is None


def test_a_known_node_that_lies_rests_and_comes_back() -> None:
    grid = InProcessGrid(sd_feel_client(), NODES, run_config=config())
    roster = Roster.of_known(grid, NODES, None)
    assert roster is not None
    assert roster.rest(3, server_round=1)
    roster.refresh(grid, 1.0, 2)
    assert list(roster.present) == [i for i in range(NODES) if i != 3]
    assert roster.nodes[3].node_id not in roster.online
    assert 3 not in roster.node_ids
    roster.refresh(grid, 1.0, 4)
    assert list(roster.present) == list(range(NODES))
    assert roster.take_refusals() == {"quarantined": 1}


def test_of_a_million_nodes_those_that_take_part_are_made() -> None:
    many = 10**6
    grid = InProcessGrid(
        sd_feel_client(), many, run_config=config(nodes=many, partition="with-replacement(10)")
    )
    strategy = feel(nodes=many)
    strategy.start(grid, arrays(), num_rounds=2, train_config=TRAIN)
    assert strategy.report.accepted == 4
    assert len(grid._all._made) == 8
    assert len(grid.state_dict()["nodes"]) == 8
    assert isinstance(strategy.state_dict()["federation"]["sizes"], np.ndarray)
