"""FedBAT: one bit a weight both ways, unbiased within the step size, and the same weights everywhere."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.linear_federation import COMPRESSED, E_UNC, MODEL, D, LinearFederation, run, same

from hedgerow.strategies import FedBAT
from hedgerow.strategies.fedmud import DOWN, UP
from hedgerow.strategies.fedmud.fedbat import SignUpdates, binarised, signed
from hedgerow.wire import LayerShape, payload_bytes, to_record, view
from hedgerow.wire.sign_shares import drawn_weights, signs_by_layer


def fedbat(**parameters: Any) -> FedBAT:
    defaults = {
        "budget": "layer",
        "learning_rate": 0.1,
        "local_epochs": 2,
        "min_available_nodes": 5,
        "fraction_evaluate": 0.0,
    }
    return FedBAT(**{**MODEL, **defaults, **parameters})


def signs(*sizes: int) -> SignUpdates:
    method = SignUpdates([LayerShape(f"w{i}", (size, 1)) for i, size in enumerate(sizes)], seed=3)
    method.begin({f"w{i}": torch.zeros(size, 1) for i, size in enumerate(sizes)})
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
    method, rounds = signs(4), 4000
    mean = np.array([0.1, -0.1, 0.05, 0.15])  # mean magnitude 0.1, which cuts the last entry off
    total = np.zeros(4)
    for server_round in range(1, rounds + 1):
        method.begin({"w0": torch.zeros(4, 1)})
        method.move(server_round, mean)
        total += method.weights()["w0"].numpy().ravel()
    np.testing.assert_allclose(total / rounds, [0.1, -0.1, 0.05, 0.1], atol=0.006)


def test_each_layer_has_its_own_step_size() -> None:
    method = signs(2, 3)
    method.move(1, np.array([1.0, -1.0, 2.0, -2.0, 2.0]))
    record = method.log.since(0)
    assert view(record["0/w0:alpha"]).tolist() == [1.0]
    assert view(record["0/w1:alpha"]).tolist() == [2.0]
    assert method.weights()["w1"].ravel().tolist() == [2.0, -2.0, 2.0]


def test_a_mean_of_zero_moves_nothing() -> None:
    method = signs(5)
    metrics = method.move(1, np.zeros(5))
    assert not method.weights()["w0"].any()
    assert metrics["quantisation-error"] == 0.0


@settings(deadline=None, max_examples=30)
@given(size=st.integers(2, 40), seed=st.integers(0, 999))
def test_what_is_logged_is_what_the_server_moved_by(size: int, seed: int) -> None:
    method = signs(size)
    mean = np.random.default_rng(seed).standard_normal(size)
    metrics = method.move(1, mean)
    record = method.log.since(0)
    up = np.unpackbits(view(record["0/w0:bits"]), count=size).view(bool)
    step = signed(up, view(record["0/w0:alpha"])[0])
    assert np.array_equal(method.weights()["w0"].numpy().ravel(), step)
    assert metrics["quantisation-error"] == pytest.approx(float(np.linalg.norm(mean - step)))


@pytest.mark.parametrize("sync", ["dense", "broadcast"])
def test_every_way_of_sending_trains_the_same_model(sync: Any) -> None:
    catchup, _ = run(fedbat(num_clients_per_round=2), LinearFederation(), 7)
    other, _ = run(fedbat(sync=sync, num_clients_per_round=2), LinearFederation(), 7)
    assert same(catchup, other)


def test_the_server_and_the_nodes_hold_the_same_weights() -> None:
    strategy = fedbat()
    final, _ = run(strategy, LinearFederation(), 3)
    assert all(np.array_equal(final[key], strategy.method.base()[key].numpy()) for key in COMPRESSED)


def test_replies_are_read_as_signs_times_step_sizes() -> None:
    method = signs(3, 9)
    coded = {
        "w0:bits": np.packbits([1, 0, 1]),
        "w0:alpha": np.array([0.5], np.float32),
        "w1:bits": np.packbits([0] * 9),
        "w1:alpha": np.array(0.25, np.float32),
    }
    read = method.read(1, 0, to_record(coded))
    assert read.tolist() == [0.5, -0.5, 0.5] + [-0.25] * 9


def test_bits_are_counted_one_a_weight_and_travel_as_such() -> None:
    strategy, federation = fedbat(), LinearFederation()
    run(strategy, federation, 3)
    nominal = 3 * 5 * (D + 32 * len(COMPRESSED) + 32 * E_UNC)
    assert strategy.ledger.total(DOWN).nominal_bits == strategy.ledger.total(UP).nominal_bits == nominal
    second = next(content for r, _, _, content in federation.seen if r == 2)
    assert payload_bytes(second["updates"]) == sum(
        128 + len(key) + size
        for key, size in {
            "0/a.weight:bits": 6,
            "0/a.weight:alpha": 4,
            "0/b.weight:bits": 5,
            "0/b.weight:alpha": 4,
        }.items()
    )


GARBAGE: dict[str, dict[str, Any]] = {
    "missing key": {"a.weight:bits": None},
    "wrong dtype": {"a.weight:bits": np.zeros(6, np.int64)},
    "wrong shape": {"a.weight:bits": np.zeros(7, np.uint8)},
    "bad scale": {"a.weight:alpha": np.array([-1.0], np.float32)},
    "unknown key": {"a.weight:gamma": np.array([1.0], np.float32)},
}


@pytest.mark.parametrize("reason", GARBAGE)
def test_garbage_costs_that_reply_and_is_counted_by_reason(reason: str) -> None:
    def spoil(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if (client, server_round) != (3, 2):
            return reply
        arrays = {key: array for key, array in reply["arrays"].items() if key not in GARBAGE[reason]}
        spoilt = {key: Array(array) for key, array in GARBAGE[reason].items() if array is not None}
        return RecordDict({**reply, "arrays": ArrayRecord({**arrays, **spoilt})})

    _, ends = run(fedbat(), LinearFederation(sabotage=spoil), 2)
    assert [end.rejected for end in ends[1:]] == [{}, {reason: 1}]


# A budget below one bit a weight


def test_below_one_bit_a_weight_a_share_of_each_layer_moves_another_one_each_round() -> None:
    method = SignUpdates([LayerShape("w0", (60, 1)), LayerShape("w1", (140, 1))], seed=3, bits=64 + 100)
    method.begin({"w0": torch.zeros(60, 1), "w1": torch.zeros(140, 1)})
    assert method.uplink_bits == method.downlink_bits == 64 + 100
    moved = []
    for t in range(2):
        before = {key: value.clone() for key, value in method.weights().items()}
        method.move(t + 1, np.linspace(1.0, 2.0, 200))
        moved.append({key: method.weights()[key] != before[key] for key in before})
        assert view(method.log.since(t)[f"{t}/w0:bits"]).shape == (4,)
    assert [[int(one[key].sum()) for key in ("w0", "w1")] for one in moved] == [[30, 70], [30, 70]]
    assert not torch.equal(moved[0]["w0"], moved[1]["w0"])


def test_a_reply_says_nothing_of_weights_that_were_not_drawn() -> None:
    method = SignUpdates([LayerShape("w0", (64, 1))], seed=1, bits=32 + 8)
    coded = {"w0:bits": np.full(1, 255, np.uint8), "w0:alpha": np.ones(1, np.float32)}
    read = method.read(1, 0, to_record(coded))
    kept = drawn_weights({"w0": 64}, 8, seed=1, version=0)["w0"]
    assert kept is not None
    assert np.flatnonzero(read).tolist() == kept.tolist()
    assert len(kept) == 8


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=5), share=st.floats(0, 2))
def test_layers_share_the_signs_by_size_and_each_has_one(sizes: list[int], share: float) -> None:
    signs, by_key = int(share * sum(sizes)), {str(i): size for i, size in enumerate(sizes)}
    counts = signs_by_layer(by_key, signs)
    assert all(1 <= counts[key] <= size for key, size in by_key.items())
    assert sum(counts.values()) <= max(signs, 0) + len(sizes)
    if signs >= sum(sizes):
        assert counts == by_key


def test_summary_is_logged_without_a_run() -> None:
    fedbat().summary()
