"""EF21-P: what the server has not sent yet is kept, and what it sent is what the nodes hold."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.linear_federation import COMPRESSED, E_UNC, MODEL, D, LinearFederation, run, same

from hedgerow.strategies import EF21P, FedMUD
from hedgerow.strategies.fedmud import DOWN, UP
from hedgerow.strategies.fedmud.ef21p import BroadcastIterate
from hedgerow.wire import LayerShape, PayloadError, decode_indices, index_bits, rand_k, to_record, view


def ef21p(**parameters: Any) -> EF21P:
    defaults = {
        "ratio": 0.25,
        "budget": "layer",
        "scale": False,
        "learning_rate": 0.1,
        "local_epochs": 2,
        "min_available_nodes": 5,
        "fraction_evaluate": 0.0,
    }
    return EF21P(**{**MODEL, **defaults, **parameters})


def iterate(size: int = 12, ratio: float = 0.25, scale: bool = True, seed: int = 0) -> BroadcastIterate:
    bits = 32 * math.ceil(ratio * size)
    method = BroadcastIterate([LayerShape("w", (size, 1))], bits, scale, seed)
    method.begin({"w": torch.zeros(size, 1)})
    return method


@pytest.mark.parametrize("scale", [True, False])
def test_every_way_of_sending_trains_the_same_model(scale: bool) -> None:
    def final(sync: Any) -> Any:
        strategy = ef21p(sync=sync, scale=scale, learning_rate=0.02, num_clients_per_round=2)
        return run(strategy, LinearFederation(), 7)[0]

    assert same(final("catchup"), final("dense"))
    assert same(final("catchup"), final("broadcast"))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 8))
def test_what_is_not_sent_is_remembered(seed: int, rounds: int) -> None:
    # x is the sum of all moves, w of all that was sent: x - w is what is left, in float32.
    method, rng = iterate(), np.random.default_rng(seed)
    moves = rng.standard_normal((rounds, 12))
    sent = np.zeros(12)
    for step, move in enumerate(moves):
        metrics = method.move(step + 1, move)
        update = method.log.since(step)
        values = view(update[f"{step}/values"])
        sent[decode_indices(view(update[f"{step}/indices"]), len(values), 12)] += values
    np.testing.assert_allclose(method._x, moves.sum(0), atol=1e-5)
    np.testing.assert_allclose(method._w, sent, atol=1e-5)
    assert metrics["memory-norm"] == pytest.approx(float(np.linalg.norm(method._x - method._w)))


def test_the_largest_entries_are_sent() -> None:
    method = iterate()
    method.move(1, np.arange(12.0))
    # Of three values' bits two are left where indices are paid for.
    assert view(method.log.since(0)["0/values"]).tolist() == [10.0, 11.0]
    assert decode_indices(view(method.log.since(0)["0/indices"]), 2, 12).tolist() == [10, 11]
    assert method._w.tolist() == [0.0] * 10 + [10.0, 11.0]
    assert method._x.tolist() == list(range(12))


def test_with_nothing_new_the_nodes_catch_up_with_the_server() -> None:
    method = iterate()
    method.move(1, np.arange(1.0, 13.0))
    for server_round in range(2, 7):
        metrics = method.move(server_round, np.zeros(12))
    assert metrics["memory-norm"] == 0.0
    assert np.array_equal(method._x, method._w)


def test_the_model_is_the_servers_iterate_and_the_base_is_what_was_broadcast() -> None:
    strategy, federation = ef21p(), LinearFederation()
    grid = federation.grid()
    final, ends = run(strategy, federation, 3, grid=grid)
    method = strategy.method
    assert all(np.array_equal(final[key], method.weights()[key].numpy()) for key in COMPRESSED)
    apart = np.concatenate([(final[key] - method.base()[key].numpy()).ravel() for key in COMPRESSED])
    assert ends[-1].train["memory-norm"] == pytest.approx(float(np.linalg.norm(apart)), rel=1e-5)
    assert ends[-1].train["memory-norm"] > 0


def test_nothing_compressed_is_fedavg() -> None:
    options = {"learning_rate": 0.1, "local_epochs": 2, "min_available_nodes": 5, "fraction_evaluate": 0.0}
    whole, _ = run(ef21p(ratio=1.0), LinearFederation(), 4)
    dense, _ = run(FedMUD(**MODEL, variant="dense", **options), LinearFederation(), 4)
    for key, value in dense.items():
        np.testing.assert_allclose(whole[key], value, atol=1e-5)


# Rand-K


def test_scaled_rand_k_is_unbiased() -> None:
    method, change = iterate(), np.linspace(-1, 1, 12, dtype=np.float32)
    total = np.zeros(12)
    for server_round in range(1, 4001):
        kept = rand_k(12, 3, seed=0, round=server_round, partition_id=0)
        total += method.read(server_round, 0, to_record({"values": change[kept]}))
    np.testing.assert_allclose(total / 4000, change, atol=0.1)


def test_an_unscaled_value_counts_once() -> None:
    method = iterate(scale=False)
    kept = rand_k(12, 3, seed=0, round=1, partition_id=2)
    read = method.read(1, 2, to_record({"values": np.ones(3, np.float32)}))
    assert read[kept].tolist() == [1.0] * 3
    assert read.sum() == 3.0


GARBAGE: dict[str, Callable[[Any], Any]] = {
    "missing key": lambda values: {},
    "unknown key": lambda values: {"values": values, "indices": np.arange(len(values))},
    "wrong shape": lambda values: {"values": values[1:]},
    "wrong dtype": lambda values: {"values": values.astype(np.int64)},
    "non-finite": lambda values: {"values": np.full_like(values, np.nan)},
}


@pytest.mark.parametrize("reason", GARBAGE)
def test_garbage_costs_that_reply_and_is_counted_by_reason(reason: str) -> None:
    def spoil(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if (client, server_round) != (3, 2):
            return reply
        arrays = dict(reply["arrays"].items())
        values = arrays.pop("values").numpy()
        spoilt = {key: Array(array) for key, array in GARBAGE[reason](values).items()}
        return RecordDict({**reply, "arrays": ArrayRecord({**arrays, **spoilt})})

    _, ends = run(ef21p(), LinearFederation(sabotage=spoil), 2)
    assert [end.rejected for end in ends[1:]] == [{}, {reason: 1}]


def test_a_value_that_overflows_when_scaled_is_garbage() -> None:
    values = np.full(3, np.finfo(np.float32).max, np.float32)
    with pytest.raises(PayloadError, match="non-finite"):
        iterate().read(1, 0, to_record({"values": values}))


# Counts and state


def test_values_and_coded_indices_are_counted_and_sent() -> None:
    strategy, federation = ef21p(), LinearFederation()
    run(strategy, federation, 3)
    keep = 22  # ceil(88 / 4)
    largest = strategy.method.largest
    indices = index_bits(D, largest)
    assert 32 * (keep - 4) < 32 * largest + indices <= 32 * keep
    assert strategy.ledger.total(DOWN).nominal_bits == 3 * 5 * (32 * (largest + E_UNC) + indices)
    assert strategy.ledger.total(UP).nominal_bits == 3 * 5 * 32 * (keep + E_UNC)
    first, second = (next(c for r, _, _, c in federation.seen if r == wanted) for wanted in (1, 2))
    assert "base" in first
    assert {key: array.shape for key, array in second["updates"].items()} == {
        "0/indices": (-(-indices // 8),),
        "0/values": (largest,),
    }
    per_node = E_UNC + 2  # an int64 buffer
    update = largest + -(-indices // 8) / 4
    assert strategy.traffic()["catchup"].parameters == 5 * (3 * per_node + D + 2 * update)


def test_summary_is_logged_without_a_run() -> None:
    ef21p().summary()
