"""Runs whose means are secure sums: equal to plain ones, with nodes lost in each phase, and what is seen."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict
from tests.strategies.summing import SIZE, LossyGrid, app, examples, run, update

from hedgerow.clients import BatchClientApp, each, whoami
from hedgerow.strategies import FedAvg, Feel, HierFAvg, RoundContext, SDFeel, SecureSum, TooFewRepliesError
from hedgerow.strategies.edges import Alone
from hedgerow.wire import (
    HUB_TO_NODE,
    MASKED,
    MASKED_SUM,
    NODE_TO_HUB,
    SUM_KEYS,
    SUM_SHARES,
    WHOAMI,
    default_neighbours,
    payload_bytes,
    survivors_needed,
    to_record,
    view,
)
from hedgerow.wire.masked_sums import Grid

CLIP = SecureSum().clip


def fedavg(n: int, **options: Any) -> FedAvg:
    return FedAvg(min_available_nodes=n, fraction_evaluate=0.0, **{"secure_sum": True, **options})


def mean_update(nodes: list[int], server_round: int) -> np.ndarray:
    weights = np.array([examples(node) for node in nodes], float)
    return weights @ np.array([update(node, server_round) for node in nodes]) / weights.sum()


def bound(members: list[int], survivors: list[int]) -> float:
    most = max(examples(node) for node in members)
    return Grid(len(members)).error(CLIP, len(survivors), sum(examples(node) / most for node in survivors))


@pytest.mark.parametrize("n", [3, 4, 11, 50])
@pytest.mark.parametrize("strict", [False, True])
def test_a_run_is_the_plain_one_within_the_rounding(n: int, strict: bool) -> None:
    if strict and n == 50:
        pytest.skip("what serialises does so for eleven nodes too")
    plain, before = run(fedavg(n, secure_sum=False), LossyGrid(n, strict=strict))
    summed, ends = run(fedavg(n), LossyGrid(n, strict=strict))
    nodes = list(range(n))
    assert 0 < np.abs(summed - plain).max() <= 2 * bound(nodes, nodes)
    for end, other in zip(ends, before, strict=True):
        assert end.train["train-loss"] == pytest.approx(other.train["train-loss"], abs=1e-3)
        assert end.train["clipped"] == 0.0
        assert (end.accepted, end.rejected) == (n, {})


METHODS = {
    "sd-feel": lambda **more: SDFeel(num_servers=3, tau1=1, tau2=1, num_clients=12, **more),
    "hierfavg": lambda **more: HierFAvg(num_servers=3, tau1=1, tau2=2, num_clients=12, **more),
    "feel": lambda **more: Feel(clients_per_round=5, num_clients=12, **more),
    "fedavg": lambda **more: FedAvg(participation=0.7, num_clients=12, **more),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_family(name: str) -> None:
    outcomes = []
    for secure in (False, True):
        strategy = METHODS[name](
            min_available_nodes=12, fraction_evaluate=0.0, max_update_norm_ratio=0.0, secure_sum=secure
        )
        outcomes.append(run(strategy, LossyGrid(12), rounds=4)[0])
    np.testing.assert_allclose(outcomes[0], outcomes[1], atol=4 * 12 * CLIP / 2**29)
    assert not np.array_equal(outcomes[0], outcomes[1])


# Nodes that are lost


@pytest.mark.parametrize("phase", ["train", SUM_SHARES])
@pytest.mark.parametrize("n", [4, 12, 30])
def test_nodes_that_are_lost_in_a_phase(phase: str, n: int) -> None:
    gone = list(range(n))[::3][: n - survivors_needed(n, 0.67)]
    grid = LossyGrid(n, lambda kind, node, time: kind == phase and node in gone and time == 1)
    model, ends = run(fedavg(n), grid, rounds=3)
    everyone = list(range(n))
    # Who is lost after its numbers came is in the sum; who is lost before is not.
    there = [node for node in everyone if node not in gone] if phase == "train" else everyone
    expected = sum(mean_update(there if r == 2 else everyone, r) for r in (1, 2, 3))
    assert np.abs(model - expected).max() <= bound(everyone, there) + 2 * bound(everyone, everyone)
    assert [end.accepted for end in ends] == [n, len(there), n]


def test_a_node_that_fails_before_it_masks_is_lost_alone() -> None:
    def train(call: Any) -> RecordDict:
        if call.partition_id == 2:
            raise RuntimeError("no disk")
        return RecordDict(
            {
                "arrays": to_record({"w": view(call.content["arrays"]["w"]) + 1.0}),
                "metrics": MetricRecord({"num-examples": 5, "num-steps": 1}),
            }
        )

    model, ends = run(fedavg(6), LossyGrid(6, client=app(train)), rounds=1)
    np.testing.assert_allclose(model, 1.0, atol=1e-6)
    assert ends[0].accepted == 5


@pytest.mark.parametrize("phase", ["train", SUM_SHARES])
def test_below_the_threshold_the_round_is_repeated_and_the_run_goes_on(phase: str) -> None:
    grid = LossyGrid(6, lambda kind, node, time: kind == phase and node < 3 and time == 1)
    model, ends = run(fedavg(6), grid, rounds=3)
    everyone = list(range(6))
    expected = sum(mean_update(everyone, r) for r in (1, 2, 3))
    np.testing.assert_allclose(model, expected, atol=3 * bound(everyone, everyone))
    trained = [node for kind, node, _ in grid.sent if kind == "train"]
    assert len(trained) == 4 * 6
    assert [end.accepted for end in ends] == [6, 6, 6]


def test_always_below_the_threshold_ends_the_run_with_the_reason() -> None:
    grid = LossyGrid(6, lambda kind, node, time: kind == "train" and node < 4)
    with pytest.raises(TooFewRepliesError, match="2 x sum below threshold"):
        run(fedavg(6), grid)


class Watched(Alone):
    """Leaves servers alone, and keeps the models that they have."""

    def __init__(self, models: list[Any]) -> None:
        self.models = models

    def mix(self, servers: Any, sizes: Any, run: RoundContext) -> Any:
        self.models.append(servers.copy())
        return (yield from super().mix(servers, sizes, run))


def test_a_cluster_that_has_no_sum_keeps_its_model_and_the_others_go_on() -> None:
    strategy = HierFAvg(
        num_servers=2, tau1=1, tau2=2, num_clients=8, min_available_nodes=8, fraction_evaluate=0.0,
        secure_sum=True,
    )  # fmt: skip
    grid = LossyGrid(8, lambda kind, node, time: kind == "train" and node in (4, 5) and time == 0)
    models: list[Any] = []
    strategy.mixer = Watched(models)
    run(strategy, grid, rounds=2)
    second = sum(mean_update([4, 5, 6, 7], r) for r in (2,))
    np.testing.assert_allclose(models[0][1], second, atol=1e-6)


def test_a_group_too_small_for_a_sum_is_not_asked() -> None:
    with pytest.raises(ValueError, match="secure_sum needs 3 clients in each cluster; the smallest has 2"):
        HierFAvg(num_servers=2, num_clients=4, min_available_nodes=4, secure_sum=True)
    # Where a draw makes it so the round learns nothing.
    grid = LossyGrid(8)
    _, ends = run(fedavg(8, participation=0.3), grid, rounds=20)
    asked = Counter(content["config"]["server-round"] for kind, _, content in grid.sent if kind == "train")
    assert min(asked.values()) >= 3
    small = {end.round: end.rejected for end in ends if end.round not in asked}
    assert small
    assert all(rejected in ({}, {"sum too small": 1}, {"sum too small": 2}) for rejected in small.values())


def test_a_node_that_lies_about_its_shares_is_left_out_and_the_run_goes_on() -> None:
    def spoil(kind: str, node: int, reply: Message) -> None:
        # Node 1 seals rubbish for everybody: its masks cannot be taken off.
        if kind == "train" and node == 1 and MASKED in reply.content:
            shares = reply.content["shares"]
            shares["sealed"] = bytes(len(shares["sealed"]))

    grid = LossyGrid(7)
    grid.pull = spoil
    model, ends = run(fedavg(7), grid, rounds=2)
    others = [0, 2, 3, 4, 5, 6]
    expected = mean_update(others, 1) + mean_update(others, 2)
    np.testing.assert_allclose(model, expected, atol=1e-6)
    assert [end.accepted for end in ends] == [6, 6]
    assert ends[1].rejected == {"bad sum shares": 1}


def test_nodes_that_know_no_sums_are_counted_and_the_run_ends_with_the_reason() -> None:
    plain = BatchClientApp({"train": each(lambda call: RecordDict()), WHOAMI: whoami(lambda context: 5)})
    with pytest.raises(TooFewRepliesError, match="4 x no sum keys"):
        run(fedavg(4), LossyGrid(4, client=plain))


# What the server sees


def seen(secure: bool, rounds: int = 1) -> LossyGrid:
    grid = LossyGrid(8)
    run(fedavg(8, secure_sum=secure), grid, rounds=rounds, start=np.zeros(SIZE))
    return grid


def test_a_server_reads_every_update_of_a_plain_run_and_none_of_a_summed_one() -> None:
    plain = {node: view(c["arrays"]["w"]) for kind, node, c in seen(False).replies if kind == "train"}
    for node, told in plain.items():
        np.testing.assert_allclose(told, update(node, 1), atol=1e-12)
    # The best guess of a server that knows what the update may be: is it in the numbers at all?
    hits, trials = 0, 40
    rng = np.random.default_rng(0)
    for _ in range(trials):
        grid = seen(True)
        words = {node: view(c[MASKED][MASKED]) for kind, node, c in grid.replies if kind == "train"}
        node = int(rng.integers(8))
        share = examples(node) / max(map(examples, range(8)))
        candidates = [Grid(8).encode(update(other, 1), CLIP, share) for other in (node, 99)]
        # What masks would be left of either guess; the right one's would not stand out.
        left = [np.abs((words[node][:SIZE] - one).view(np.int32).astype(float)).mean() for one in candidates]
        hits += left[0] < left[1]
    assert 8 <= hits <= 32  # 40 coins: outside once in 10^4.


def test_masks_are_fresh_each_round() -> None:
    rounds: dict[int, list[np.ndarray]] = {}
    for kind, node, content in seen(True, 3).replies:
        if kind == "train":
            rounds.setdefault(node, []).append(view(content[MASKED][MASKED]))
    assert all(np.mean(one[0] == one[1]) < 0.2 and np.mean(one[1] == one[2]) < 0.2 for one in rounds.values())


def test_keys_are_asked_for_once_and_again_of_who_failed() -> None:
    grid = LossyGrid(6, lambda kind, node, time: kind == "train" and node == 4 and time == 1)
    run(fedavg(6), grid, rounds=4)
    asked = [node for kind, node, _ in grid.sent if kind == SUM_KEYS]
    assert sorted(asked) == sorted([*range(6), 4])
    shares = [node for kind, node, _ in grid.sent if kind == SUM_SHARES]
    assert len(shares) == 4 * 6 - 1


def test_what_is_booked_is_what_passed() -> None:
    grid, strategy = LossyGrid(7), fedavg(7)
    run(strategy, grid, rounds=2)
    down = sum(payload_bytes(c) for kind, _, c in grid.sent if kind != WHOAMI)
    up = sum(payload_bytes(c) for kind, _, c in grid.replies if kind != WHOAMI)
    links = strategy.ledger.by_link()
    assert links[HUB_TO_NODE].payload_bytes == down
    assert links[NODE_TO_HUB].payload_bytes == up
    # And on the links of the modelled system all but names of records, configs and metrics.
    assert 0.9 * up < links["client->cloud"].payload_bytes <= up
    assert 0.9 * down < links["cloud->client"].payload_bytes <= down


def test_bytes_of_a_round_are_as_documented() -> None:
    n = 50
    grid = LossyGrid(n)
    run(fedavg(n), grid, rounds=1)
    k = default_neighbours(n)
    sealed = [len(c["shares"]["sealed"]) for kind, _, c in grid.replies if kind == "train"]
    assert set(sealed) == {(n - 1) * (16 * (k + 1) + 28)}
    told = [len(c["shares"]["shares"]) for kind, _, c in grid.replies if kind == SUM_SHARES]
    assert set(told) == {(n - 1) * 17}
    plans = [c[MASKED_SUM] for kind, _, c in grid.sent if kind == "train"]
    assert {len(plan["introductions"]) for plan in plans} == {64 * n}


# Bounds, clipping, resume


def test_updates_are_clipped_at_the_node_and_it_says_how_many_numbers_were() -> None:
    model, ends = run(fedavg(5, secure_sum=SecureSum(clip=0.1)), LossyGrid(5), rounds=1)
    weights = np.array([examples(node) for node in range(5)], float)
    raw = np.array([update(node, 1) for node in range(5)])
    expected = weights @ np.clip(raw, -0.1, 0.1) / weights.sum()
    np.testing.assert_allclose(model, expected, atol=1e-8)
    share = weights @ np.mean(np.abs(raw) > 0.1, axis=1) / weights.sum()
    assert ends[0].train["clipped"] == pytest.approx(share, abs=1e-6)


def test_a_mean_that_is_too_large_is_refused_as_one_update() -> None:
    def train(call: Any) -> RecordDict:
        late = call.content["config"]["server-round"] == 3
        w = view(call.content["arrays"]["w"]) + (5.0 if late else 0.001)
        return RecordDict(
            {"arrays": to_record({"w": w}), "metrics": MetricRecord({"num-examples": 5, "num-steps": 1})}
        )

    strategy = fedavg(6, max_update_norm_ratio=10.0, max_repeats=0)
    with pytest.raises((RuntimeError, TooFewRepliesError), match="too large"):
        run(strategy, LossyGrid(6, client=app(train)), rounds=3)


def test_a_grid_that_served_a_run_serves_another() -> None:
    grid = LossyGrid(5)
    first, _ = run(fedavg(5), grid, rounds=2)
    second, _ = run(fedavg(5), grid, rounds=2)
    # Sums have other numbers, and so are rounded by other draws.
    np.testing.assert_allclose(first, second, atol=1e-7)
