"""Well-formed lies: what one node, or a fifth of them, do to a run, with bounds, with rules and without."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from tests.strategies.fedmud.cases import fedmud
from tests.strategies.linear_federation import MODEL, LinearFederation
from tests.strategies.linear_federation import run as run_linear
from tests.strategies.quadratic import Quadratics, initial, run

from hedgerow.sim import RunRecorder, flower_identity, read_checkpoint
from hedgerow.strategies import (
    EF21P,
    DivergenceError,
    FedAvg,
    FedBAT,
    FedHM,
    Fixed,
    Node,
    SDFeel,
    SimilarityFree,
)
from hedgerow.strategies.inbox import Inbox
from hedgerow.strategies.limits import Claims, LossBound, UpdateBound
from hedgerow.tasks import partition
from hedgerow.wire import PayloadError

OPEN: dict[str, Any] = {"max_weight_ratio": 0, "max_update_norm_ratio": 0, "max_loss_ratio": 0}
TWENTY = {"sizes": [10 + i for i in range(20)], "centres": [1 + i % 5 for i in range(20)]}
MEAN = float(np.average(TWENTY["centres"], weights=TWENTY["sizes"]))
LIARS = (3, 7, 11, 15)

Lie = Callable[[Any], Any]


def lying(lie: Lie, liars: tuple[int, ...] = (3,), **more: Any) -> Quadratics:
    """Return clients of whom some send another model than they have."""

    def sabotage(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if client not in liars:
            return reply
        model = lie(reply["arrays"]["w"].numpy())  # type: ignore[index,union-attr]
        return RecordDict({**reply, "arrays": ArrayRecord({"w": Array(model)})})

    return Quadratics(**TWENTY, sabotage=sabotage, **more)


def fedavg(**options: Any) -> FedAvg:
    return FedAvg(**{"num_clients": 20, "local_steps": 5, "fraction_evaluate": 0.0, **options})


def similarity_free(**options: Any) -> SimilarityFree:
    return SimilarityFree(
        schedule=Fixed(c=0.1, num_rounds=1),
        **{"min_available_nodes": 20, "min_train_nodes": 19, "fraction_evaluate": 0.0, **options},
    )


LIES: dict[str, Lie] = {
    "scaled by 1e6": lambda w: 1e6 * w,
    "near the end of the numbers": lambda w: np.full_like(w, 3e38),
    "float64's end": lambda w: np.full_like(w, -1.7e308),
}


@pytest.mark.parametrize("strategy", [fedavg, similarity_free])
@pytest.mark.parametrize("lie", LIES)
def test_an_update_beyond_all_bounds_costs_its_own_reply_alone(strategy: Any, lie: str) -> None:
    final, ends = run(strategy(), lying(LIES[lie]), 10)
    assert abs(final[0] - MEAN) < 0.2
    assert [end.rejected for end in ends[1:4]] == [{"update too large": 1}] * 3


def test_a_node_whose_replies_are_refused_three_times_running_rests_longer_each_time() -> None:
    problem = lying(LIES["scaled by 1e6"])
    _, ends = run(fedavg(num_clients=20), problem, 20)
    asked = [r for r, client in problem.seen if client == 3]
    assert asked == [1, 2, 3, 6, 7, 8, 13, 14, 15]
    assert [end.round for end in ends if "quarantined" in end.rejected] == [4, 9, 16]
    assert all(("offline" in end.rejected) == (end.round not in asked) for end in ends[1:])


def test_who_sends_a_good_reply_between_bad_ones_does_not_rest() -> None:
    def twice_of_three(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        bad = client == 3 and server_round % 3
        return RecordDict({"metrics": reply["metrics"]}) if bad else reply

    problem = Quadratics(**TWENTY, sabotage=twice_of_three)
    run(fedavg(), problem, 9)
    assert len([r for r, client in problem.seen if client == 3]) == 9


def test_half_of_the_nodes_never_rest() -> None:
    problem = lying(LIES["scaled by 1e6"], tuple(range(15)))
    _, ends = run(fedavg(), problem, 5)
    assert ends[-1].sent + ends[-1].rejected["offline"] == 20
    assert ends[-1].rejected["offline"] == 9


def test_who_rests_still_rests_when_a_run_goes_on_and_nobody_takes_its_place() -> None:
    def run_on(strategy: FedAvg, rounds: int) -> list[tuple[int, int]]:
        problem = lying(LIES["scaled by 1e6"])
        run(strategy, problem, rounds)
        return sorted(problem.seen)

    whole = run_on(fedavg(), 8)
    first, second = fedavg(), fedavg()
    began = run_on(first, 4)
    second.load_state_dict(first.state_dict())
    assert sorted(began + run_on(second, 8)) == whole


def test_without_bounds_the_same_update_ruins_the_mean() -> None:
    final, ends = run(fedavg(**OPEN), lying(LIES["scaled by 1e6"]), 3)
    assert not ends[-1].rejected
    assert abs(final[0]) > 1e6


def test_sums_of_the_largest_numbers_do_not_overflow_but_end_with_a_clear_error() -> None:
    with pytest.raises(DivergenceError, match=r"Round \d: the global model is not finite, in 'w'"):
        run(fedavg(**OPEN), lying(LIES["float64's end"], tuple(range(20))), 5)


@pytest.mark.parametrize("make", [fedmud, EF21P, FedBAT, FedHM], ids=["FedMUD", "EF21P", "FedBAT", "FedHM"])
def test_compressed_layers_are_bounded_as_they_are_decoded(make: Any) -> None:
    def scaled(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if client != 2:
            return reply
        arrays = {
            key: Array((array.numpy() * np.float32(1e6)).astype(array.numpy().dtype))
            if array.numpy().dtype.kind == "f"
            else array
            for key, array in reply["arrays"].items()  # type: ignore[union-attr]
        }
        return RecordDict({**reply, "arrays": ArrayRecord(arrays)})

    made = _family(make)
    honest, _ = run_linear(_family(make), LinearFederation(), 2)
    final, ends = run_linear(made, LinearFederation(sabotage=scaled), 2)
    assert [end.rejected for end in ends[1:]] == [{"update too large": 1}] * 2
    for key, values in honest.items():
        assert np.linalg.norm(final[key] - values) <= 2 * np.linalg.norm(values) + 1


def _family(make: Any) -> Any:
    if make is fedmud:
        return fedmud()
    # These clients send a sign for every weight.
    ratio: dict[str, Any] = {"budget": "layer"} if make is FedBAT else {"ratio": 0.6}
    return make(**MODEL, **ratio, min_available_nodes=5)


@pytest.mark.parametrize("told", [1e300, [1.0], -1.0, 10.0**6])
def test_batches_that_nobody_can_have_made_are_no_reply(told: Any) -> None:
    def lie(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if client == 2:
            reply["metrics"]["num-batches"] = told  # type: ignore[index]
        return reply

    _, ends = run_linear(fedmud(weighting="num-batches"), LinearFederation(sabotage=lie), 2)
    assert all(end.accepted == 4 and sum(end.rejected.values()) == 1 for end in ends[1:])


# Weights


def claiming(claimed: float, introduced: bool = True) -> Quadratics:
    sizes = list(TWENTY["sizes"])
    centres = list(TWENTY["centres"])
    centres[3] = 50
    if introduced:
        sizes[3] = int(claimed)
        return Quadratics(sizes, centres)
    return Quadratics(
        sizes, centres, introduces_itself=False,
        num_examples=lambda client, server_round: claimed if client == 3 else sizes[client],
    )  # fmt: skip


def test_a_claimed_weight_counts_up_to_a_multiple_of_the_median() -> None:
    taken, _ = run(fedavg(**OPEN), claiming(2**53), 10)
    assert taken[0] > 45
    strategy = fedavg(max_weight_ratio=1)
    held, _ = run(strategy, claiming(10**6), 10)
    assert held[0] < 6
    most = strategy.federation.limits.weight_of(3)
    assert most == sorted(strategy.federation.limits.claims.sizes.values())[9]


def test_by_default_a_claim_counts_up_to_ten_medians_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = fedavg()
    run(strategy, claiming(10**6), 2)
    usual = sorted(strategy.federation.limits.claims.sizes.values())[9]
    assert strategy.federation.limits.weight_of(3) == 10 * usual
    told = [r.getMessage() for r in caplog.records if "claim more than max_weight_ratio" in r.getMessage()]
    assert told == [
        "Partitions [3] claim more than max_weight_ratio = 10 times the median of the examples that nodes "
        f"claim: they count with {10 * usual:g}."
    ]


@pytest.mark.parametrize("make", [fedavg, partial(similarity_free, min_train_nodes=20)])
def test_a_node_that_claims_what_none_has_is_left_out_and_counted(make: Any) -> None:
    strategy = make()
    model, ends = run(strategy, claiming(2**53), 10)
    assert ends[1].rejected["claimed size too large"] == 1
    assert (ends[1].sent, ends[1].accepted) == (19, 19)
    assert 3 not in strategy.federation.limits.claims.sizes
    assert model[0] < 6  # The liar's own centre is 50.


def test_a_reply_that_claims_what_no_node_has_is_refused_alone() -> None:
    problem = Quadratics(
        **TWENTY, num_examples=lambda client, r: 2.0**53 if client == 3 else TWENTY["sizes"][client]
    )
    _, ends = run(fedavg(), problem, 2)
    assert ends[1].rejected == {"claimed size too large": 1}
    assert ends[1].accepted == 19


def test_of_nodes_that_do_not_introduce_themselves_the_liar_does_not_count_from_the_second_round_on() -> None:
    strategy = fedavg()
    _, ends = run(strategy, claiming(2**53, introduced=False), 2)
    assert ends[2].rejected["claimed size too large"] == 1
    assert max(strategy.federation.limits.claims.sizes.values()) < 100


def claims(sizes: dict[int, float]) -> Claims:
    made = Claims(10.0)
    made.sizes = sizes
    return made


def test_a_hospital_beside_phones_is_no_liar() -> None:
    assert claims({0: 10.0, 1: 8.0, 2: 1e6}).largest() > 1e6
    assert claims({0: 10.0, 1: 8.0, 2: 2.0**53}).largest() < 2.0**53
    assert claims({0: 1.0, 1: 2.0**53}).largest() == math.inf


@pytest.mark.parametrize("num_nodes", [10, 20, 50])
@pytest.mark.parametrize("scheme", ["dirichlet(0.1)", "dirichlet(0.3)", "shards(2)", "labels(3)"])
def test_skewed_honest_partitions_stay_within_ten_medians(scheme: str, num_nodes: int) -> None:
    labels = np.repeat(np.arange(10), 6_000)
    for seed in range(3):
        sizes = {i: float(len(part)) for i, part in enumerate(partition(scheme, labels, num_nodes, seed))}
        assert max(sizes.values()) <= claims(sizes).cap()


@pytest.mark.parametrize("rule", ["median", "geometric-median", "clipped(1)", "multi-krum(3,5)"])
def test_under_a_rule_no_claim_of_examples_moves_a_bit_or_a_cluster(rule: str) -> None:
    def clustered(problem: Quadratics) -> Any:
        strategy = SDFeel(
            num_servers=2, clusters=[0] * 9 + [1] * 11,
            topology="complete", tau1=2, tau2=1, aggregation=rule, fraction_evaluate=0.0, max_weight_ratio=0,
        )  # fmt: skip
        return run(strategy, problem, 3)[0]

    centres = claiming(1).centres
    plain, claimed = Quadratics(TWENTY["sizes"], centres), claiming(2**53)
    assert clustered(plain).tobytes() == clustered(claimed).tobytes()


def test_a_node_cannot_change_what_it_claimed() -> None:
    honest = Quadratics(**TWENTY)
    changing = Quadratics(
        **TWENTY, num_examples=lambda client, r: 2.0**53 if client == 3 and r > 1 else TWENTY["sizes"][client]
    )
    assert (run(fedavg(**OPEN), honest, 4)[0] == run(fedavg(**OPEN), changing, 4)[0]).all()


# Robust means


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        *((fedavg, rule) for rule in ("median", "trimmed-mean(0.25)", "krum(4)", "geometric-median")),
        (similarity_free, "median"),
        (similarity_free, "multi-krum(4,8)"),
    ],
)
def test_a_fifth_that_colludes_within_the_bounds_ruins_the_mean_and_not_a_rule(make: Any, rule: str) -> None:
    attack = lying(lambda w: np.full_like(w, 60.0), LIARS)
    ruined, _ = run(make(**OPEN), attack, 8)
    held, ends = run(make(**OPEN, aggregation=rule), attack, 8)
    assert ruined[0] > 10
    assert 0.5 <= held[0] <= 5.0, "no further out than the honest nodes' own minima"
    assert not ends[-1].rejected


def test_a_cluster_of_too_few_replies_for_its_rule_takes_their_median_and_the_record_counts_it() -> None:
    strategy = SDFeel(
        num_servers=2, clusters=[0] * 10 + [1] * 10, topology="complete", tau1=2, tau2=1, alpha=0,
        aggregation="krum(3)", fraction_evaluate=0.0,
    )  # fmt: skip
    silent = lying(lambda w: np.full_like(w, np.nan), (0, 1))
    _, ends = run(strategy, silent, 1)
    assert ends[-1].rejected == {"non-finite": 2}
    assert ends[-1].train["rule-fell-back"] == 1
    median = SDFeel(
        num_servers=2, clusters=[0] * 10 + [1] * 10, topology="complete", tau1=2, tau2=1, alpha=0,
        aggregation="median", fraction_evaluate=0.0,
    )  # fmt: skip
    run(median, silent, 1)
    (first, second), (expected, _) = (
        [record["w"].numpy()[0] for record in one.server_models()] for one in (strategy, median)
    )
    assert first == expected > 0
    assert second > 0


def test_a_round_with_enough_replies_tells_of_no_fallback() -> None:
    _, ends = run(similarity_free(aggregation="krum(4)"), Quadratics(**TWENTY), 1)
    assert "rule-fell-back" not in ends[-1].train


def test_silent_liars_do_not_stop_the_workers_of_similarity_free() -> None:
    strategy = similarity_free(aggregation="krum(8)", min_train_nodes=1)
    held, ends = run(strategy, lying(lambda w: np.full_like(w, np.nan), LIARS), 8)
    assert [end.train["rule-fell-back"] for end in ends[1:]] == [1] * 8
    assert 0.5 <= held[0] <= 5.0


def test_bounds_and_the_mean_by_name_change_no_bit_of_an_honest_run() -> None:
    plain, _ = run(fedavg(**OPEN), Quadratics(**TWENTY), 10)
    bound, _ = run(fedavg(aggregation="mean"), Quadratics(**TWENTY), 10)
    assert plain.tobytes() == bound.tobytes()


# The end of a run


def test_a_loss_that_explodes_ends_the_run_with_a_checkpoint_from_before(tmp_path: Path) -> None:
    losses = {0: 2.0, 1: 1.0, 2: 1.5, 3: 2.8e22}
    strategy = fedavg()
    recorder = RunRecorder(tmp_path, {"run": {}}, checkpoint_every=10)
    recorder.keep_state(strategy=strategy)
    strategy.on_round_end = [recorder.on_round_end]
    with (
        pytest.raises(DivergenceError, match=r"Round 3: the loss is 2.8e\+22, more than 1e\+06 times the 2"),
        recorder.guard(),
        flower_identity(1),
    ):
        strategy.start(
            Quadratics(**TWENTY).grid(), initial(), num_rounds=5,
            evaluate_fn=lambda r, arrays: MetricRecord({"loss": losses[r]}),
        )  # fmt: skip
    assert read_checkpoint(recorder.checkpoint).state["round"] == 2


@pytest.mark.parametrize("loss", [1e300, 3e38])
def test_one_nodes_loss_does_not_end_a_run(loss: float) -> None:
    told = [loss if client == 3 else 1.0 for client in range(20)]
    strategy = fedavg(fraction_evaluate=1.0)
    with flower_identity(1):
        result = strategy.start(
            Quadratics(**TWENTY).grid(), initial(), num_rounds=2,
            evaluate_fn=lambda r, arrays: MetricRecord({"loss": float(np.mean(told)), "node-loss": told}),
        )  # fmt: skip
    assert np.isfinite(result.arrays["w"].numpy()).all()


def telling(loss: Callable[[int, int], float], nodes: int = 20) -> Quadratics:
    """Return clients that tell a training loss of their own, by client and round."""

    def sabotage(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        reply["metrics"]["train-loss"] = loss(client, server_round)  # type: ignore[index]
        return reply

    return Quadratics([10] * nodes, [1.0] * nodes, sabotage=sabotage)


def test_a_training_loss_that_explodes_on_nodes_ends_the_run() -> None:
    problem = telling(lambda client, r: 2.0 if r < 3 else 1e9)
    with pytest.raises(DivergenceError, match=r"Round 3: the loss is 1e\+09, more than 1e\+06 times the 2"):
        run(fedavg(), problem, 5)
    run(fedavg(max_loss_ratio=0), problem, 5)


@pytest.mark.parametrize("nodes", [2, 3, 20])
def test_one_node_that_tells_a_huge_training_loss_does_not_end_a_run(nodes: int) -> None:
    problem = telling(lambda client, r: 1e29 if client == 0 and r > 1 else 1.0, nodes)
    _, ends = run(fedavg(num_clients=nodes), problem, 4)
    assert ends[-1].round == 4
    assert ends[-1].accepted == nodes


def test_a_step_too_large_for_all_is_divergence_and_not_too_few_replies() -> None:
    with pytest.raises(DivergenceError, match=r"20 of 20 updates are too large .* smaller step size"):
        run(fedavg(), Quadratics(**TWENTY, eta=50.0), 10)


# Bounds by themselves


def test_a_bound_goes_by_the_median_of_past_rounds_and_survives_a_checkpoint() -> None:
    model, bound = np.full(4, 0.5), UpdateBound(10.0)
    bound.begin(1)
    for norm in (1.0, 2.0, 9.0):
        bound.check(np.array([norm]), model)
    with pytest.raises(PayloadError, match="update too large"):
        bound.check(np.array([10.1]), model)
    again = UpdateBound(10.0)
    again.load_state_dict(bound.state_dict())
    for one in (bound, again):
        one.begin(2)
        one.check(np.array([20.0]), model)
        with pytest.raises(PayloadError, match=r"norm 20\.1, expected at most 20"):
            one.check(np.array([20.1]), model)
    assert bound.state_dict() == again.state_dict() == [2.0, 20.0]


def test_noise_that_the_run_asked_for_is_not_too_large_and_a_lie_beyond_it_is() -> None:
    rng, model = np.random.default_rng(0), np.full(400, 0.01)
    noise = rng.normal(0.0, 50.0, 400)
    with pytest.raises(PayloadError, match="update too large"):
        UpdateBound(10.0).check(noise, model)
    bound = UpdateBound(10.0)
    bound.check(noise, model, noise=50.0)
    with pytest.raises(PayloadError, match="update too large"):
        bound.check(1.5 * noise, model, noise=50.0)
    # Of one number too, once in ten million.
    bound.check(np.array([5.0]), np.array([0.01]), noise=1.0)


def test_a_round_that_is_begun_again_forgets_what_it_accepted() -> None:
    bound = UpdateBound(10.0)
    for _ in range(2):
        bound.begin(1)
        bound.check(np.array([1.0]), np.ones(1))
    assert bound.state_dict() == [1.0]


def test_what_has_converged_may_move_again() -> None:
    bound = UpdateBound(100.0)
    for server_round in range(1, 20):
        bound.begin(server_round)
        bound.check(np.zeros(4), np.ones(4))
    bound.check(np.full(4, 0.05), np.ones(4))


def test_a_loss_bound_takes_what_is_small_for_one() -> None:
    bound = LossBound(100.0)
    assert bound.problem("central", 1e-9) is None
    assert bound.problem("central", 99.0) is None
    assert bound.problem("central", 101.0) is not None
    assert bound.problem("central", math.nan) == "the loss is nan"
    assert LossBound(0).problem("central", math.inf) is None


# What is refused before it is read


def _reply(content: RecordDict | None) -> Message:
    instruction = Message(RecordDict(), 5, "train", group_id="7")
    reply = Message(RecordDict() if content is None else content, reply_to=instruction)
    if content is None:
        reply.__dict__.update(_content=None)
    return reply


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no content"),
        (RecordDict({"m": MetricRecord({f"k{i}": 1 for i in range(100_000)})}), "too many keys"),
        (RecordDict({f"m{i}": MetricRecord() for i in range(100)}), "too many keys"),
        (RecordDict({"m": MetricRecord({"k" * 2000: 1})}), "long key"),
        (RecordDict({"k" * 2000: MetricRecord()}), "long key"),
    ],
)
def test_a_reply_of_nothing_or_of_too_much_is_one_lost_reply(content: Any, reason: str) -> None:
    def unread(node: Node, content: RecordDict) -> None:
        raise AssertionError("read")

    with flower_identity(1):
        exchange = Inbox([Node(0, 5)], "7", unread)
        assert list(exchange.accept([_reply(content)])) == []
    assert exchange.report.rejected == {reason: 1}
