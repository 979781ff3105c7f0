"""The algorithms on arrays: FedMUD against its paper's plain loop, its baselines against their formulas."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.fedmud.cases import alone, of_layers, replying

from hedgerow.strategies import EF21P, Ask, Exchange, FedBAT, FedHM, FedLMT, FedMUD, RoundContext
from hedgerow.strategies.fedmud.fedbat import binarised
from hedgerow.strategies.fedmud.fedhm import truncated
from hedgerow.wire import Layout, decode_indices, rand_k, to_record, to_state_dict
from hedgerow.wire.sign_shares import signed

EXACT = ("mud+f", "mud+aad", "mud+bkd+f", "mud+bkd+aad")
M, N = 4, 5


# FedMUD


def _cut(factors: np.ndarray, method: FedMUD) -> list[np.ndarray]:
    sizes = [int(np.prod(shape)) for shape in method.plan.shapes.values()]
    return np.split(factors.astype(float), np.cumsum(sizes)[:-1])


def test_golden_g1() -> None:
    method = of_layers(
        FedMUD, (2, 2), variant="mud", ratio=1.0, init_a=0.1, measure_bias=True, min_available_nodes=2
    )
    factors = [[1, 0, 1, 0], [0, 1, 0, 1]]

    def work(i: int, ask: Ask, told: Mapping[str, Any]) -> np.ndarray:
        update = np.outer(factors[i][:2], factors[i][2:]).ravel()
        return np.concatenate([factors[i], update]).astype(np.float32)

    ((state, run),) = alone(method, work, 1)
    assert np.array_equal(method.model(state), np.full(4, 0.25))
    assert run.metrics["aggregation-bias"] == 0.25  # diag(0.5, 0.5) was wanted


@pytest.mark.parametrize("variant", EXACT)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_the_server_moves_by_the_mean_of_what_the_nodes_reconstruct(variant: str, seed: int) -> None:
    method = of_layers(
        FedMUD, (8, 6), (5, 8), variant=variant, ratio=0.4, init_a=0.1, seed=seed, min_available_nodes=4
    )
    vectors = np.random.default_rng(seed).standard_normal((4, method.plan.count)).astype(np.float32)
    frozen = method.plan.frozen(seed, 0)
    updates = []
    for vector in vectors:
        parts = zip(method.plan.shapes.items(), _cut(vector, method), strict=True)
        factors = {key: torch.from_numpy(part.reshape(shape)).float() for (key, shape), part in parts}
        deltas = method.plan.deltas(factors, frozen)
        updates.append(np.concatenate([deltas[layer.key].numpy().ravel() for layer in method.coded]))
    ((state, _),) = alone(method, lambda i, ask, told: vectors[i], 1)
    np.testing.assert_allclose(method.model(state), np.mean(updates, axis=0), atol=1e-5)


def test_fedmud_is_fedlmt_when_it_starts_from_zero_with_random_factors_and_never_resets() -> None:
    options = {"ratio": 0.4, "init_a": 0.5}
    mud = of_layers(FedMUD, (8, 6), variant="mud", reset_interval=100, **options)
    lmt = of_layers(FedLMT, (8, 6), **options)
    drawn = next(alone(lmt, lambda i, ask, told: ask.model, 1))[0].factors
    move = np.random.default_rng(0).standard_normal((4, drawn.size)).astype(np.float32)

    def work(i: int, ask: Ask, told: Mapping[str, Any]) -> np.ndarray:
        # At first both factors of FedLMT, which FedMUD's nodes begin with one at a time.
        first = told["server-round"] == 1
        return np.asarray((drawn if first else ask.model) + move[told["server-round"] - 1])

    ours, theirs = (list(alone(method, work, 4)) for method in (mud, lmt))
    for (one, _), (other, _) in zip(ours, theirs, strict=True):
        assert np.array_equal(mud.model(one), lmt.model(other))


# EF21-P


def ef21p(size: int = 12, **parameters: Any) -> EF21P:
    method: EF21P = of_layers(EF21P, (size, 1), **{"ratio": 0.25, **parameters})
    return method


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 8))
def test_what_is_not_sent_is_remembered(seed: int, count: int) -> None:
    # x is the sum of all moves, w of all that was sent: x - w is what is left, in float32.
    moves = np.random.default_rng(seed).standard_normal((count, 12)).astype(np.float32)
    sent = np.zeros(12)
    for state, run in alone(ef21p(), replying(*moves), count):
        assert run.update is not None
        values = run.update["values"]
        sent[decode_indices(run.update["indices"], len(values), 12)] += values
        assert run.metrics["memory-norm"] == pytest.approx(float(np.linalg.norm(state.x - state.w)))
    np.testing.assert_allclose(state.x, moves.sum(0), atol=1e-5)
    np.testing.assert_allclose(state.w, sent, atol=1e-5)


def test_the_largest_entries_are_sent() -> None:
    # Of three values' bits two are left where indices are paid for.
    ((state, run),) = alone(ef21p(), replying(np.arange(12)), 1)
    assert run.update is not None
    assert run.update["values"].tolist() == [10.0, 11.0]
    assert state.w.tolist() == [0.0] * 10 + [10.0, 11.0]
    assert state.x.tolist() == list(range(12))


def test_with_nothing_new_the_nodes_catch_up_with_the_server() -> None:
    moves = [np.arange(1, 13), *(np.zeros(12) for _ in range(5))]
    *_, (state, run) = alone(ef21p(), replying(*moves), 6)
    assert run.metrics["memory-norm"] == 0.0
    assert np.array_equal(state.x, state.w)


@pytest.mark.parametrize("scale", [True, False])
def test_scaled_rand_k_is_unbiased_and_unscaled_values_count_once(scale: bool) -> None:
    method, change, count = ef21p(scale=scale), np.linspace(-1, 1, 12, dtype=np.float32), 2000
    method.federation.layout = Layout(("w0",), ((12, 1),), ("float32",))
    state, total = method.begin(np.zeros(12, np.float32)), np.zeros(12)
    for number in range(1, count + 1):
        exchange = next(method.round(state, RoundContext(method.federation, number, {}, [0], method.parts)))
        assert isinstance(exchange, Exchange)
        kept = rand_k(12, 3, seed=0, round=number, partition_id=0)
        reply = to_record({"values": change[kept]})
        total += exchange.coding.read(reply, change, Layout((), (), ()), 0).vector
    expected = change * (1 if scale else 3 / 12)
    np.testing.assert_allclose(total / count, expected, atol=0.15 if scale else 0.05)


# FedBAT


def fedbat(*sizes: int, **parameters: Any) -> FedBAT:
    method: FedBAT = of_layers(FedBAT, *((size, 1) for size in sizes), **{"seed": 3, **parameters})
    return method


def test_golden_means_of_the_quantiser() -> None:
    x = np.repeat([-0.02, -0.005, 0, 0.005, 0.02], 20_000)
    draws = np.random.default_rng(0).random(x.size)
    quantised = signed(binarised(x, 0.01, draws), np.float32(0.01)).reshape(5, -1)
    assert np.unique(np.abs(quantised)).tolist() == [np.float32(0.01)]
    np.testing.assert_allclose(
        quantised.mean(1, dtype=np.float64), [-0.01, -0.005, 0, 0.005, 0.01], atol=2e-4
    )


@settings(deadline=None, max_examples=30)
@given(share=st.floats(-1, 1), alpha=st.floats(1e-4, 10))
def test_the_quantiser_is_unbiased_up_to_its_step_size(share: float, alpha: float) -> None:
    # Draws that fill [0, 1) evenly give the mean itself, up to their distance.
    even = (np.arange(1000) + 0.5) / 1000
    up = binarised(np.full(1000, share * alpha), alpha, even)
    mean = signed(up, np.float32(alpha)).mean(dtype=np.float64)
    assert mean == pytest.approx(share * alpha, abs=2.1e-3 * alpha)


def test_a_downlink_moves_by_the_mean_magnitude_and_is_unbiased_within_it() -> None:
    mean, count = np.array([0.1, -0.1, 0.05, 0.15]), 4000  # mean magnitude 0.1, which cuts the last entry off
    *_, (state, _) = alone(fedbat(4), lambda i, ask, told: mean.astype(np.float32), count)
    np.testing.assert_allclose(state.weights / count, [0.1, -0.1, 0.05, 0.1], atol=0.006)


def test_each_layer_moves_by_a_step_size_of_its_own_and_what_is_sent_is_that() -> None:
    ((state, run),) = alone(fedbat(2, 3), replying([1, -1, 2, -2, 2]), 1)
    assert run.update is not None
    assert [run.update[f"w{i}:alpha"].tolist() for i in range(2)] == [[1.0], [2.0]]
    assert state.weights.tolist() == [1, -1, 2, -2, 2]


@settings(deadline=None, max_examples=30)
@given(size=st.integers(2, 40), seed=st.integers(0, 999))
def test_what_is_sent_is_what_the_server_moved_by(size: int, seed: int) -> None:
    method = fedbat(size)
    mean = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    ((state, run),) = alone(method, replying(mean), 1)
    assert run.update is not None
    step = method.code.read(run.update, 0)["w0"]
    assert np.array_equal(state.weights, step)
    assert run.metrics["quantisation-error"] == pytest.approx(float(np.linalg.norm(mean - step)))


def test_a_mean_of_zero_moves_nothing() -> None:
    ((state, run),) = alone(fedbat(5), replying(np.zeros(5)), 1)
    assert not state.weights.any()
    assert run.metrics["quantisation-error"] == 0.0


def test_below_one_bit_a_weight_a_share_of_each_layer_moves_another_one_each_round() -> None:
    method = fedbat(60, 140, ratio=(64 + 100) / (32 * 200), budget="model")
    assert method.coded_bits == (64 + 100, 64 + 100)
    before, moved = np.zeros(200), []
    for state, run in alone(method, lambda i, ask, told: np.linspace(1, 2, 200, dtype=np.float32), 2):
        moved.append(state.weights != before)
        before = state.weights
        assert run.update is not None
        assert run.update["w0:bits"].shape == (4,)
    assert [[int(one[:60].sum()), int(one[60:].sum())] for one in moved] == [[30, 70], [30, 70]]
    assert not np.array_equal(*moved)


# FedHM


def test_golden_truncation_of_a_diagonal() -> None:
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    u, v = truncated(matrix, 2)
    assert torch.linalg.norm(matrix - u @ v).item() == pytest.approx(1.0, abs=1e-6)


def test_golden_truncation_error_is_told() -> None:
    method = of_layers(FedHM, (3, 3), ratio=1.0)
    assert method.plan.layers[0].rank == 2
    mean = np.diag([3.0, 2.0, 1.0]).ravel()
    ((state, run),) = alone(method, replying(mean), 1)
    assert run.metrics["truncation-error"] == pytest.approx(1.0, abs=1e-6)
    assert np.array_equal(method.model(state), mean)


@settings(deadline=None, max_examples=30)
@given(m=st.integers(1, 9), n=st.integers(1, 9), rank=st.integers(1, 9), seed=st.integers(0, 99))
def test_truncation_leaves_the_smallest_singular_values(m: int, n: int, rank: int, seed: int) -> None:
    matrix = torch.randn(m, n, generator=torch.Generator().manual_seed(seed))
    u, v = truncated(matrix, rank)
    assert (u.shape, v.shape) == ((m, rank), (rank, n))
    left = np.linalg.norm(np.linalg.svd(matrix.double().numpy(), compute_uv=False)[rank:])
    assert torch.linalg.norm(matrix - u @ v).item() == pytest.approx(left, abs=1e-5)
    np.testing.assert_allclose((u**2).sum(0), (v**2).sum(1), atol=1e-5)  # split evenly


@pytest.mark.parametrize("matrix_view", ["buffer", "convolutions"])
def test_a_convolution_is_truncated_as_the_matrix_of_its_view(matrix_view: str) -> None:
    method = of_layers(FedHM, (4, 3, 2, 2), ratio=0.9, view=matrix_view)
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    factors: dict[str, torch.Tensor] = {}

    def work(i: int, ask: Ask, told: Mapping[str, Any]) -> np.ndarray:
        factors.update(to_state_dict(ask.records["factors"]))
        return ask.model

    next(alone(method, work, 1, weight.numpy().ravel()))
    sent = method.plan.merge({}, factors, {})["w0"]
    matrix = weight if matrix_view == "buffer" else weight.permute(0, 2, 1, 3)
    values = np.linalg.svd(matrix.reshape(8, 6).double().numpy(), compute_uv=False)
    error = torch.linalg.norm(weight - sent).item()
    assert error == pytest.approx(np.linalg.norm(values[method.plan.layers[0].rank :]), abs=1e-5)
