"""Noise within secure sums: norms, grids, dropouts, what a server can tell, and what epsilon says."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.strategies.summed_methods import METHODS, N, distance, grid_of
from tests.strategies.summed_methods import run as run_method
from tests.strategies.summing import SIZE, LossyGrid, app, examples, run, update
from torch import nn

from hedgerow.strategies import FedAvg, SecureSum, SumNoise
from hedgerow.strategies.aggregate.sum_noise import SumReleases
from hedgerow.strategies.aggregate.sum_settings import check_noise
from hedgerow.wire import (
    MASKED,
    SUM_SHARES,
    gaussian_epsilon,
    optimal_zcdp_epsilon,
    survivors_needed,
    to_record,
    view,
    zcdp_epsilon,
)
from hedgerow.wire.discrete_gaussian import CoinFlips
from hedgerow.wire.masked_sums import NoisyGrid


def noisy(clip: float = 1.0, multiplier: float = 1e-3, **parts: Any) -> SecureSum:
    return SecureSum(noise=SumNoise(clip, multiplier, **parts))


def fedavg(n: int, sums: SecureSum, **options: Any) -> FedAvg:
    return FedAvg(min_available_nodes=n, fraction_evaluate=0.0, secure_sum=sums, **options)


# The grid


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e300, 1e300, allow_subnormal=True)),
    st.floats(1e-6, 1e6),
    st.integers(3, 255),
    st.floats(1e-3, 1e3),
)
def test_no_update_is_longer_than_the_clip_in_whole_steps(
    values: np.ndarray, clip: float, members: int, multiplier: float
) -> None:
    grid = NoisyGrid(members, survivors_needed(members) - 1, clip, multiplier)
    steps = grid._within(values)
    # Exact, in Python's integers.
    assert sum(int(step) ** 2 for step in steps) <= grid.largest**2
    length = float(np.linalg.norm(values / np.abs(values).max())) if np.abs(values).max() else 0.0
    scale = min(1.0, clip / np.abs(values).max() / length) if length else 0.0
    assert np.all(np.abs(steps * (clip / grid.largest) - values * scale) <= 1.001 * clip / grid.largest)


@pytest.mark.parametrize("members", [3, 10, 50, 255])
@pytest.mark.parametrize("multiplier", [1e-3, 0.5, 10.0, 1e3])
def test_the_noise_of_the_fewest_that_count_is_as_wide_as_promised_and_sums_fit(
    members: int, multiplier: float
) -> None:
    counted = survivors_needed(members) - 1
    grid = NoisyGrid(members, counted, 1.0, multiplier)
    wanted = multiplier * grid.largest
    # In integers: h sigma^2 >= (z D)^2, by less than one step of sigma.
    assert counted * grid.deviation**2 >= wanted**2
    assert counted * (grid.deviation - 1) ** 2 < wanted**2
    assert members * grid.largest + 12 * math.sqrt(members) * grid.deviation <= 2**31 - 1
    assert grid.rho(10**6) == pytest.approx(2 / multiplier**2, rel=2 / grid.deviation)
    assert grid.rho(10**6) <= 2 / multiplier**2 * (1 + 1e-12)


def test_multipliers_without_a_grid_are_refused() -> None:
    for multiplier in (1e-9, 1e12):
        with pytest.raises(ValueError, match="multiplier must be"):
            NoisyGrid(50, 33, 1.0, multiplier)


def test_noise_on_a_sum_is_of_the_size_that_is_told() -> None:
    grid = NoisyGrid(6, 4, 2.0, 0.5)
    zero = np.zeros(20_000)
    total = np.zeros(zero.size, np.uint32)
    for member in range(4):
        total += grid.encode(zero, CoinFlips(member.to_bytes(32)))
    assert grid.decode(total).std() == pytest.approx(0.5 * 2.0, rel=0.03)


# Runs


def clipped_mean(nodes: list[int], server_round: int, clip: float) -> np.ndarray:
    updates = np.array([update(node, server_round) for node in nodes])
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    mean: np.ndarray = (updates * np.minimum(1, clip / norms)).mean(axis=0)
    return mean


@pytest.mark.parametrize("phase", ["none", "train", SUM_SHARES])
def test_a_mean_is_that_of_clipped_updates_of_equal_weights_whoever_is_lost(phase: str) -> None:
    n, clip = 9, 0.3
    gone = [0, 4]
    grid = LossyGrid(n, lambda kind, node, time: kind == phase and node in gone)
    model, ends = run(fedavg(n, noisy(clip, 0.01)), grid, rounds=2)
    there = [node for node in range(n) if phase != "train" or node not in gone]
    expected = clipped_mean(there, 1, clip) + clipped_mean(there, 2, clip)
    # z C / s on a mean, times the root of survivors over those counted on, and five deviations of two.
    noise = 0.01 * clip / len(there) * math.sqrt(n / (survivors_needed(n, 0.67) - 1))
    assert np.abs(model - expected).max() < 5 * noise * math.sqrt(2)
    assert np.abs(model - expected).max() > 0.2 * noise
    assert [end.accepted for end in ends] == [len(there)] * 2
    assert all("clipped" not in end.train and "train-loss" not in end.train for end in ends)


def test_every_sum_that_is_asked_for_counts_whether_it_comes_or_not() -> None:
    n = 6
    lost = LossyGrid(n, lambda kind, node, time: kind == "train" and node < 3 and time == 1)
    strategy = fedavg(n, noisy(1.0, 4.0))
    _, ends = run(strategy, lost, rounds=3)
    assert [end.train["releases"] for end in ends] == [1, 3, 4]
    assert ends[-1].train["epsilon"] == pytest.approx(optimal_zcdp_epsilon(4 * 2 / 4.0**2, 1e-5), rel=1e-6)
    report = strategy.sum_privacy()
    assert report is not None
    assert report.unprotected == ()
    assert "over 4 releases" in str(report)
    told = strategy.privacy_record
    assert told is not None
    assert told["at-most"] is True
    assert told["report"] == f"at most {report}"


def test_a_node_counts_for_the_sums_that_it_was_asked_for() -> None:
    strategy = fedavg(12, noisy(1.0, 4.0), participation=0.6)
    _, ends = run(strategy, LossyGrid(12), rounds=10)
    assert 6 <= ends[-1].train["releases"] < 10


def test_epsilon_is_infinite_with_the_reason_where_noise_is_of_the_seed_or_rounds_are_lost() -> None:
    seeded = fedavg(5, noisy(1.0, 4.0, source="seed"))
    first, ends = run(seeded, LossyGrid(5), rounds=2)
    assert math.isinf(ends[-1].train["epsilon"])
    assert ends[-1].train["unprotected-seeded-noise"] == 1
    assert math.isfinite(ends[-1].train["releases-epsilon"])
    again, _ = run(fedavg(5, noisy(1.0, 4.0, source="seed")), LossyGrid(5), rounds=2)
    np.testing.assert_array_equal(first, again)
    other, _ = run(fedavg(5, noisy(1.0, 4.0)), LossyGrid(5), rounds=2)
    assert not np.array_equal(first, other)
    # A run that goes on.
    stopped = fedavg(5, noisy(1.0, 4.0))
    run(stopped, LossyGrid(5), rounds=2)
    resumed = fedavg(5, noisy(1.0, 4.0))
    resumed.load_state_dict(stopped.state_dict())
    _, ends = run(resumed, LossyGrid(5), rounds=3)
    assert ends[-1].train["releases"] == 3
    assert ends[-1].train["unprotected-lost-rounds"] == 1
    assert math.isinf(ends[-1].train["epsilon"])
    # Nodes that tell losses.
    told = FedAvg(min_available_nodes=5, secure_sum=noisy(1.0, 4.0), fraction_evaluate=1.0)
    assert told.sums is not None
    report = told.sums.privacy_report()
    assert report is not None
    assert report.unprotected == ("evaluation",)


@pytest.mark.parametrize("name", ["sd-feel", "fedavg by examples", "fedpaq", "fedmud", "fedmud+bkd"])
def test_every_method_with_faint_noise_is_near_the_one_without(name: str) -> None:
    make = METHODS[name][0]
    # A clip that nothing reaches; equal weights differ from the plain run's by examples.
    plain, _ = run_method(make(secure_sum=True), grid_of(name), rounds=1)
    summed, ends = run_method(make(secure_sum=noisy(50.0, 1e-3)), grid_of(name), rounds=1)
    assert 1e-6 < distance(summed, plain) < 0.25
    assert ends[-1].train["releases"] == 1
    assert ends[-1].accepted == N


# What a server can tell


def guess(sums: SecureSum | bool, trials: int) -> int:
    """Return how often a server that knows all but node 3's update, which is one of two, says which it is.

    It knows everything else there is to know: it sees the mean, and all other updates.
    """
    right, rng, n = 0, np.random.default_rng(5), 6
    candidates = [update(3, 1), update(99, 1)]
    others = [node for node in range(n) if node != 3]
    equal = sums is not False
    weights = np.array([1.0 if equal else examples(node) for node in range(n)])
    for _ in range(trials):
        truth = int(rng.integers(2))
        model, _ = run(fedavg(n, sums), Swapped(n, candidates[truth]), rounds=1)  # type: ignore[arg-type]
        known = sum(weights[node] * clip_to(update(node, 1), sums) for node in others)
        left = (model * weights.sum() - known) / weights[3]
        errors = [np.linalg.norm(left - clip_to(one, sums)) for one in candidates]
        right += int(np.argmin(errors)) == truth
    return right


def clip_to(vector: np.ndarray, sums: SecureSum | bool) -> np.ndarray:
    if isinstance(sums, bool) or sums.noise is None:
        return vector
    scaled: np.ndarray = vector * min(1.0, sums.noise.clip / float(np.linalg.norm(vector)))
    return scaled


class Swapped(LossyGrid):
    """Node 3 learns what it is told to."""

    def __init__(self, n: int, own: np.ndarray) -> None:
        def train(call: Any) -> RecordDict:
            learnt = own if call.partition_id == 3 else update(call.partition_id, 1)
            metrics = MetricRecord({"num-examples": examples(call.partition_id), "num-steps": 1})
            w = view(call.content["arrays"]["w"]) + learnt
            return RecordDict({"arrays": to_record({"w": w}), "metrics": metrics})

        super().__init__(n, client=app(train))


def test_who_knows_all_others_reads_the_last_update_of_a_sum_and_not_of_one_with_noise() -> None:
    trials = 24
    assert guess(True, 4) == 4
    # z = 40 against a difference of at most 2 C: no better than coins, outside once in 10^4.
    assert 3 <= guess(noisy(0.5, 40.0), trials) <= 21


# Two sums whose members differ by one node


class Replaying(FedAvg):
    """A server that sends one model twice, the second time to all but node 3, and keeps the means."""

    def __init__(self, n: int, sums: SecureSum) -> None:
        super().__init__(min_available_nodes=n, fraction_evaluate=0.0, secure_sum=sums)
        self.found: list[np.ndarray] = []

    def participants(self, server_round: int) -> list[int]:
        return [i for i in super().participants(server_round) if server_round == 1 or i != 3]

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.state = None
        return super().configure_train(server_round, START, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        told = super().aggregate_train(server_round, replies)
        assert told[0] is not None
        self.found.append(view(told[0]["w"]) - view(START["w"]))
        return told


START = to_record({"w": np.linspace(-1, 1, SIZE)})


class Descending(LossyGrid):
    """Nodes take half a step to their target: what they learn depends on the model that they are sent."""

    def __init__(self, targets: list[np.ndarray]) -> None:
        def train(call: Any) -> RecordDict:
            w = view(call.content["arrays"]["w"])
            metrics = MetricRecord({"num-examples": examples(call.partition_id), "num-steps": 1})
            w = w + 0.5 * (targets[call.partition_id] - w)
            return RecordDict({"arrays": to_record({"w": w}), "metrics": metrics})

        super().__init__(len(targets), client=app(train))


def differenced(sums: SecureSum, own: np.ndarray) -> np.ndarray:
    """Return what a server that knows weights alone makes of two sums: node 3's update and what is on it."""
    n = 7
    targets = [update(node, 1) for node in range(n)]
    targets[3] = own
    server = Replaying(n, sums)
    run(server, Descending(targets))  # type: ignore[arg-type]
    weights = [1.0 if sums.noise else examples(node) for node in range(n)]
    all_of_them, others = sum(weights), sum(weights) - weights[3]
    found: np.ndarray = (server.found[0] * all_of_them - server.found[1] * others) / weights[3]
    return found


def test_two_sums_that_differ_by_a_node_tell_its_update_and_not_with_noise() -> None:
    def learnt(target: np.ndarray) -> np.ndarray:
        return 0.5 * (target - view(START["w"]))

    candidates = [update(3, 1), update(99, 1)]
    for own in candidates:
        # Within the rounding of two sums.
        np.testing.assert_allclose(differenced(SecureSum(), own), learnt(own), atol=1e-6)
    hidden, right, trials = noisy(0.5, 40.0), 0, 24
    assert hidden.noise is not None
    rng = np.random.default_rng(5)
    for _ in range(trials):
        truth = int(rng.integers(2))
        found = differenced(hidden, candidates[truth])
        errors = [np.linalg.norm(found - clip_to(learnt(one), hidden)) for one in candidates]
        right += int(np.argmin(errors)) == truth
    # Coins are outside once in 10^4.
    assert 3 <= right <= 21


def test_a_masked_reply_with_noise_tells_nothing_of_its_update() -> None:
    grid = LossyGrid(6)
    run(fedavg(6, noisy()), grid, rounds=1)
    words = [view(c[MASKED][MASKED]) for kind, _, c in grid.replies if kind == "train"]
    assert all(one.shape == (SIZE,) for one in words)
    high = np.concatenate(words) >> 31
    assert 0.3 < high.mean() < 0.7
    told = [set(c["metrics"]) for kind, _, c in grid.replies if kind == "train"]
    assert told == [{"num-steps"}] * 6


# Accounting


@pytest.mark.parametrize(("z", "count", "delta"), [(1.0, 1, 1e-5), (5.0, 100, 1e-5), (50.0, 10, 1e-3)])
def test_epsilon_is_that_of_an_independent_accountant(z: float, count: int, delta: float) -> None:
    accounting, rdp = pytest.importorskip("dp_accounting"), pytest.importorskip("dp_accounting.rdp")
    releases = SumReleases()
    grid = NoisyGrid(10, 6, 1.0, z)
    for _ in range(count):
        releases.count([1, 2], grid.rho(1000))
    report = releases.report(SumNoise(1.0, z, delta))
    # One node replaced moves a sum by 2 C: a Gaussian mechanism of multiplier z / 2.
    orders = list(1 + np.geomspace(1e-3, 1e4, 4000))
    theirs = rdp.RdpAccountant(orders).compose(accounting.GaussianDpEvent(z / 2), count).get_epsilon(delta)
    assert report.epsilon == pytest.approx(theirs, rel=1e-4)
    assert report.rho == pytest.approx(2 * count / z**2, rel=1e-5)
    # Above the exact curve of continuous noise, and below the simple formula.
    assert gaussian_epsilon(math.sqrt(2 * report.rho), delta) < report.epsilon
    assert report.epsilon < zcdp_epsilon(report.rho, delta)


def test_nothing_was_released_before_the_first_sum() -> None:
    assert SumReleases().report(SumNoise(1.0, 1.0)).epsilon == 0.0


# Settings


def test_a_model_that_counts_takes_no_noise() -> None:
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    values = {"secure-sum": True, "upload-clip": 1.0, "model": "cnn4"}
    with pytest.raises(ValueError, match=r"must be 0 with model = 'cnn4', got 1\.0: noise on the running"):
        check_noise(values, state)
    check_noise({**values, "upload-clip": 0.0}, state)
    check_noise(values, {"w": torch.zeros(2)})
