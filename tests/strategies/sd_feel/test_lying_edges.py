"""Edge servers that are nodes and lie: what bounds refuse, and what rules make of the rest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from tests.strategies.quadratic import run, servers
from tests.strategies.sd_feel.edge_federation import EdgeFederation, Spoil
from tests.strategies.sd_feel.test_relayed import CLUSTERS, PROBLEM, C, D, WithStatistics, sd_feel, start

from hedgerow.strategies import SDFeel
from hedgerow.wire import parse_aggregation
from hedgerow.wire.edge_servers import robust_step

LIAR = 1
OPEN: dict[str, Any] = {"max_update_norm_ratio": 0, "max_loss_ratio": 0}
RULES = ["median", "trimmed-mean(0.34)", "clipped(0.5)"]
# Each edge server has two neighbours.
OPTIONS: dict[str, Any] = {"tau1": 2, "tau2": 1, "alpha": 2}


def lying(lie: Callable[[Any], Any], kinds: tuple[str, ...] = ("train.intra", "train.gossip")) -> Spoil:
    """Let one edge server tell a lie about its model."""

    def spoil(d: int, kind: str, state: RecordDict, reply: RecordDict) -> RecordDict:
        if d != LIAR or kind not in kinds or "arrays" not in reply:
            return reply
        told = lie(reply["arrays"]["model"].numpy())  # type: ignore[index, union-attr]
        return RecordDict({"arrays": ArrayRecord({"model": Array(told)})})

    return spoil


def outcome(aggregation: str, spoil: Spoil | None, rounds: int = 8, **options: Any) -> Any:
    strategy = sd_feel(aggregation=aggregation, **{**OPTIONS, **options})
    u, ends = run(strategy, PROBLEM, rounds, grid=EdgeFederation(PROBLEM, D, spoil).grid())
    return u, servers(strategy), ends


def honest(models: Any) -> Any:
    return np.delete(models, LIAR)


LIES: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda w: 100 * (w + 1.0),
    "sign-flipped": lambda w: -50 * (np.abs(w) + 1.0),
}


@pytest.mark.parametrize("lie", LIES)
def test_without_bounds_and_rule_one_lying_edge_server_ruins_all_models(lie: str) -> None:
    u, models, _ = outcome("mean", lying(LIES[lie]), **OPEN)
    assert abs(u[0]) > 20
    assert np.abs(honest(models)).max() > 20


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_holds_it_without_any_bound(rule: str, lie: str) -> None:
    u, models, ends = outcome(rule, lying(LIES[lie]), **OPEN)
    assert not ends[-1].rejected
    # The clients' minima are at 1 to 7.
    assert ((honest(models) > 0.5) & (honest(models) < 7.5)).all()
    assert 0.5 < u[0] < 7.5


@pytest.mark.parametrize("kind", ["train.intra", "train.gossip"])
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("rule", ["mean", "clipped(0.5)"])
def test_bounds_refuse_and_count_a_model_that_what_it_was_sent_does_not_allow(
    rule: str, lie: str, kind: str
) -> None:
    u, models, ends = outcome(rule, lying(LIES[lie], (kind,)), rounds=6)
    assert [end.rejected["edge update too large"] for end in ends[1:]] == [1] * 6
    assert ((models >= 0.0) & (models < 7.5)).all()
    assert 0.5 < u[0] < 7.5


@pytest.mark.parametrize("rule", ["mean", *RULES])
def test_nan_is_refused_and_counted_under_every_rule(rule: str) -> None:
    u, _, ends = outcome(rule, lying(lambda w: w * np.nan), rounds=3, **OPEN)
    assert [end.rejected for end in ends[1:]] == [{"edge non-finite": 1}] * 3
    assert np.isfinite(u).all()


@pytest.mark.parametrize("topology", ["ring", "complete"])
@pytest.mark.parametrize("rule", ["mean", *RULES])
def test_no_bound_refuses_an_honest_edge_server(rule: str, topology: str) -> None:
    arrays = ArrayRecord({"w": Array(np.random.default_rng(2).standard_normal(300).astype(np.float32))})
    strategy = sd_feel(aggregation=rule, topology=topology, **{**OPTIONS, "alpha": 3})
    ends: list[Any] = []
    strategy.on_round_end = [ends.append]
    start(strategy, EdgeFederation(PROBLEM, D).grid(), arrays, 3)
    assert [end.rejected for end in ends[1:]] == [{}] * 3


@pytest.mark.parametrize("rule", RULES)
def test_within_a_cluster_edge_servers_take_the_bits_of_emulated_ones(rule: str) -> None:
    arrays = ArrayRecord({"w": Array(np.random.default_rng(1).standard_normal(50).astype(np.float32))})
    emulated, nodes = (sd_feel(kind, alpha=0, aggregation=rule, tau2=1) for kind in ("emulated", "nodes"))
    start(emulated, PROBLEM.grid(), arrays, 4)
    start(nodes, EdgeFederation(PROBLEM, D).grid(), arrays, 4)
    assert servers(emulated).tobytes() == servers(nodes).tobytes()


def test_gossip_that_cuts_nothing_is_that_of_the_paper() -> None:
    emulated, nodes = (sd_feel(kind, aggregation="clipped(1e9)", **OPTIONS) for kind in ("emulated", "nodes"))
    u, _ = run(emulated, PROBLEM, 6)
    again, _ = run(nodes, PROBLEM, 6, grid=EdgeFederation(PROBLEM, D).grid())
    assert again == pytest.approx(u, rel=1e-12)
    assert servers(nodes) == pytest.approx(servers(emulated), rel=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_an_edge_server_that_lost_its_model_is_sent_it_and_no_bit_moves(rule: str) -> None:
    def forget(d: int, kind: str, state: RecordDict, reply: RecordDict) -> RecordDict:
        state.clear()
        return reply

    u, models, _ = outcome(rule, None, rounds=3)
    again, others, ends = outcome(rule, forget, rounds=3)
    assert np.array_equal(u, again)
    assert np.array_equal(models, others)
    # Beside the first round's mean, which begins with what each was sent.
    assert [end.rejected for end in ends[2:]] == [{"edge no state": 3 * D}] * 2


@pytest.mark.parametrize("rule", RULES)
def test_running_statistics_are_no_part_of_gossip_under_a_rule(rule: str) -> None:
    problem = WithStatistics(PROBLEM.sizes, PROBLEM.centres, PROBLEM.curvatures)
    arrays = ArrayRecord(
        {"bn.running_var": Array(np.ones(2)), "n": Array(np.zeros(1, np.int64)), "w": Array(np.zeros(3))}
    )
    still, mixed = (sd_feel(aggregation=rule, tau1=2, tau2=1, alpha=a, **OPEN) for a in (0, 2))
    for strategy in (still, mixed):
        start(strategy, EdgeFederation(problem, D).grid(), arrays, 1)
    pairs = list(zip(still.server_models(), mixed.server_models(), strict=True))
    for one, other in pairs:
        assert np.array_equal(one["bn.running_var"].numpy(), other["bn.running_var"].numpy())
    assert any((one["w"].numpy() != other["w"].numpy()).any() for one, other in pairs)


# One step


def test_a_neighbour_that_lies_moves_a_clipped_step_by_its_weight_times_tau() -> None:
    rng = np.random.default_rng(3)
    models, weights = {j: rng.normal(size=40) for j in range(4)}, {0: 0.2, 1: 0.5, 2: 0.1, 3: 0.2}
    rule = parse_aggregation("clipped(0.7)")
    step = robust_step(1, models, weights, rule)
    for lie in (np.full(40, 1e30), -models[2], np.zeros(40)):
        told = robust_step(1, {**models, 2: lie}, weights, rule)
        assert np.linalg.norm(told - step) <= 2 * weights[2] * 0.7 + 1e-12
    assert np.linalg.norm(step - models[1]) <= 0.5 * 0.7 + 1e-12


@pytest.mark.parametrize("rule", ["median", "trimmed-mean(0.34)"])
def test_of_three_models_a_lie_stays_between_the_two_others(rule: str) -> None:
    rng = np.random.default_rng(4)
    models = {j: rng.normal(size=40) for j in (0, 1)}
    low, high = np.minimum(models[0], models[1]), np.maximum(models[0], models[1])
    for lie in (np.full(40, 1e30), np.full(40, -1e30), -models[0]):
        step = robust_step(0, {**models, 2: lie}, dict.fromkeys(range(3), 0.3), parse_aggregation(rule))
        assert ((low - 1e-15 <= step) & (step <= high + 1e-15)).all()


# What is refused


@pytest.mark.parametrize(("rule", "topology"), [("median", "path"), ("trimmed-mean(0.3)", "ring")])
def test_a_median_that_leaves_nobody_out_of_a_neighbourhood_is_refused(rule: str, topology: str) -> None:
    with pytest.raises(
        ValueError, match=r"must be clipped\(tau\), .* no Byzantine model out of the \d models"
    ):
        sd_feel(aggregation=rule, topology=topology)


def test_one_edge_server_alone_may_take_a_median() -> None:
    strategy = SDFeel(
        num_servers=1, clusters=[0] * C, topology="complete", edge_servers="nodes", aggregation="median"
    )
    assert len(CLUSTERS) == strategy.num_clients
