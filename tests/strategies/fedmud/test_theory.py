from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hedgerow.strategies.fedmud.theory import (
    Assumptions,
    expected_downlink,
    expected_missed_merges,
    factor_drift_bound,
    factor_norms,
    max_step,
    residual,
    step_gain,
    theorem_bound,
    weight_drift_bound,
)
from hedgerow.wire import FactoredLayer

# The golden evaluation of Theorem 1.
GOLDEN = Assumptions(
    num_layers=5,
    num_dense_layers=1,
    smoothness=2.0,
    gradient_bound2=1.0,
    noise2=1.0,
    kappa_u2=1.0,
    kappa_v2=1.0,
    epsilon_u2=0.01,
    epsilon_v2=0.0,
    psi2=0.5,
    local_iters=10,
    num_clients=10,
)
STEP = 0.01


def golden_bound(known, reset_iters):
    return theorem_bound(known, STEP, reset_iters, c=1.5, num_iters=10_000, loss_gap=2.0)


@st.composite
def any_assumptions(draw):
    positive = st.floats(1e-2, 10)
    num_layers = draw(st.integers(1, 10))
    return Assumptions(
        num_layers,
        draw(st.integers(0, num_layers)),
        *(draw(positive) for _ in range(8)),
        local_iters=draw(st.integers(1, 50)),
        num_clients=draw(st.integers(1, 100)),
    )


steps = st.floats(1e-5, 1e-1)
resets = st.integers(1, 1000)


def test_golden_bound_of_a_short_reset_interval():
    norms = factor_norms(GOLDEN, STEP, 10)

    assert max_step(GOLDEN, 1.5) == pytest.approx(0.0625, rel=1e-12)
    assert (norms.u2, norms.v2) == pytest.approx((0.04, 0.02), rel=1e-12)
    assert weight_drift_bound(GOLDEN, STEP, 10) == pytest.approx(0.04096384, rel=1e-12)
    assert residual(GOLDEN, STEP, 10) == pytest.approx(0.001023836896, rel=1e-12)
    assert golden_bound(GOLDEN, 10) == pytest.approx(2.447673792, rel=1e-12)


@pytest.mark.parametrize("reset_iters", [100, 1000])
def test_golden_bound_of_a_long_reset_interval(reset_iters):
    norms = factor_norms(GOLDEN, STEP, reset_iters)

    assert (norms.u2, norms.v2) == (1.0, 1.0)
    assert weight_drift_bound(GOLDEN, STEP, reset_iters) == pytest.approx(1.0048, rel=1e-12)
    assert residual(GOLDEN, STEP, reset_iters) == pytest.approx(0.02910612, rel=1e-12)
    assert golden_bound(GOLDEN, reset_iters) == pytest.approx(58.61224, rel=1e-12)


def test_golden_bound_of_fedavg():
    dense = replace(GOLDEN, num_dense_layers=5)

    assert weight_drift_bound(dense, STEP, 10) == pytest.approx(0.2, rel=1e-12)
    assert residual(dense, STEP, 10) == pytest.approx(0.00401, rel=1e-12)
    assert golden_bound(dense, 10) == pytest.approx(8.42, rel=1e-12)


def test_golden_drift_of_the_factors_is_lemma_3():
    assert factor_drift_bound(GOLDEN, STEP, 10) == pytest.approx(4 * 0.01 * (0.04 + 0.02), rel=1e-12)


@settings(deadline=None)
@given(known=any_assumptions(), step=steps, reset_iters=resets)
def test_the_residual_is_the_sum_of_what_lemmas_5_and_6_leave(known, step, reset_iters):
    norms, travelled = factor_norms(known, step, reset_iters), step**2 * known.gradient_bound2
    L_s, product = known.smoothness, norms.u2 * norms.v2
    moved = step**2 * known.noise2 / known.num_clients + 3 * known.num_factored_layers * travelled * (
        norms.u2**2 + norms.v2**2 + travelled * product
    )  # Lemma 5
    aligned = step / 2 * L_s**2 * weight_drift_bound(known, step, reset_iters) + known.num_factored_layers * (
        step / 2 * L_s**2 * factor_drift_bound(known, step, reset_iters)
        + travelled**2 / step**2 / 2 * product
    )  # Lemma 6

    assert residual(known, step, reset_iters) == pytest.approx(L_s / 2 * moved + aligned, rel=1e-9)


def test_the_largest_step_goes_to_zero_with_c_unless_psi_is_large():
    # Only psi^2 >= 2 admits eta = 1 / sqrt T with c near 1.
    assert max_step(GOLDEN, 1.001) < 1e-300
    assert max_step(replace(GOLDEN, psi2=4.0), 1.0001) == 0.5


# The effective step.


def mean_first_step(variant, m, n, a, draws, **size):
    """Return the mean over random factors of <step, -G> / <G, G>, for a step of size 1 from zero."""
    layer, rng = FactoredLayer("w", (m, n), variant, **size), np.random.default_rng(0)

    def uniform(shape):
        return torch.from_numpy(rng.uniform(-a, a, (draws, *shape)))

    frozen = {name: uniform(shape) for name, shape in layer.frozen.items()}
    start = {
        name: (uniform(shape) if name in layer.random else torch.zeros(draws, *shape, dtype=torch.float64))
        for name, shape in layer.trainable.items()
    }
    G = torch.from_numpy(rng.standard_normal((m, n)))
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    (layer.delta(leaves, frozen) * G).sum().backward()
    moved = {name: (leaf - leaf.grad).detach() for name, leaf in leaves.items()}
    step = layer.delta(moved, frozen)  # (draws, m, n)
    along = -(step * G).sum(dim=(1, 2)) / (G * G).sum()
    return float(along.mean())


@pytest.mark.parametrize(
    ("variant", "size", "gain"),
    [
        ("mud", {"rank": 4}, 0.3333),
        ("mud+f", {"rank": 4}, 0.3333),
        ("mud+aad", {"rank": 4}, 0.6667),
        ("mud+bkd", {"blocks": 2, "side": 3}, 0.0833),
        ("mud+bkd+f", {"blocks": 2, "side": 3}, 0.0833),
        ("mud+bkd+aad", {"blocks": 2, "side": 3}, 0.1667),
    ],
)
def test_the_first_step_moves_the_weights_by_its_gain_times_the_gradient(variant, size, gain):
    predicted = step_gain(variant, 0.5, size.get("rank", 1))

    assert predicted == pytest.approx(gain, abs=5e-5)
    assert mean_first_step(variant, 12, 10, 0.5, draws=4_000, **size) == pytest.approx(predicted, rel=0.03)


# The downlink.


@pytest.mark.parametrize(
    ("count", "dense_count", "uncompressed", "missed", "share"),
    [  # CNN4 on FMNIST and SVHN, CNN8, CNN10 of 10 and of 100 classes, all BKD + AAD at 1/32
        (8_200, 387_072, 3_808, 9.93, 0.218),
        (2_018, 387_072, 12_064, 10.0, 0.0808),
        (24_600, 1_170_432, 13_024, 9.93, 0.217),
        (142_074, 4_709_376, 9_952, 9.70, 0.294),
        (97_200, 4_709_376, 56_032, 9.94, 0.214),
    ],
)
def test_golden_downlink_of_one_participant_in_ten(count, dense_count, uncompressed, missed, share):
    total = dense_count + uncompressed

    assert expected_missed_merges(0.1, at_most=dense_count / count) == pytest.approx(missed, abs=5e-3)
    downlink = expected_downlink(count, dense_count, uncompressed, participation=0.1)
    assert downlink / total == pytest.approx(share, abs=5e-4)


def test_where_all_take_part_the_downlink_is_the_nominal_one():
    assert expected_downlink(100, 10_000, 7, participation=1.0) == 107
    assert expected_downlink(100, 10_000, 7, participation=1.0, reset_interval=4) == pytest.approx(107)


def test_a_longer_reset_interval_costs_its_current_factors_and_fewer_merges():
    # (10 / 8 + 1 - 1 / 8) C at s = 8.
    assert expected_downlink(1, 10**9, 0, participation=0.1, reset_interval=8) == pytest.approx(2.125)


@settings(deadline=None, max_examples=15)
@given(
    participation=st.floats(0.1, 1),
    reset_interval=st.integers(1, 6),
    at_most=st.floats(0.5, 30),
    seed=st.integers(0, 2**32),
)
def test_expected_missed_merges_is_what_a_simulation_misses(participation, reset_interval, at_most, seed):
    rng, draws = np.random.default_rng(seed), 40_000
    gaps = rng.geometric(participation, draws)
    phases = rng.integers(0, reset_interval, draws)
    missed = np.minimum((phases + gaps) // reset_interval, at_most)

    expected = expected_missed_merges(participation, reset_interval=reset_interval, at_most=at_most)

    assert missed.mean() == pytest.approx(expected, abs=6 * missed.std() / draws**0.5 + 1e-12)
