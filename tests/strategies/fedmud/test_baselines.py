"""What sets the baselines apart, through real messages: FedLMT, FedPara, FedHM, EF21-P and FedBAT."""

from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict
from tests.strategies.fedmud.cases import FAMILY, made
from tests.strategies.linear_federation import COMPRESSED, E_UNC, D, LinearFederation, initial, run, same

from hedgerow.sim import flower_identity
from hedgerow.strategies import EF21P, FedBAT, FedHM, FedLMT, FedMUD, FedPara
from hedgerow.strategies.fedmud import DOWN, UP
from hedgerow.wire import index_bits, payload_bytes, to_record, to_state_dict

OF_WEIGHTS = [FedLMT, FedPara, FedHM]


# Factors of the weights themselves


@pytest.mark.parametrize("kind", OF_WEIGHTS)
def test_nodes_are_sent_factors_alone_and_keep_nothing(kind: Any) -> None:
    federation = LinearFederation()
    strategy = made(kind, num_clients_per_round=2)
    run(strategy, federation, 4)
    for _, _, message_type, content in federation.seen:
        assert message_type == "train"
        assert set(content) == {"arrays", "factors", "config"}
        assert {key: array.shape for key, array in content["factors"].items()} == strategy.plan.shapes
        assert not content["config"]["keep-base"]


@pytest.mark.parametrize("kind", [FedLMT, FedPara])
def test_the_run_starts_from_random_factors_and_says_so_before_the_first_round(kind: Any) -> None:
    strategy = made(kind, seed=4)
    evaluated: list[dict[str, Any]] = []
    with flower_identity(1):
        strategy.start(
            LinearFederation().grid(),
            initial(),
            num_rounds=0,
            evaluate_fn=lambda r, arrays: evaluated.append({k: a.numpy() for k, a in arrays.items()}),
        )
    plan = strategy.plan
    expected = plan.merge({}, plan.init(4, 0), {})
    assert same({key: evaluated[0][key] for key in COMPRESSED}, {k: w.numpy() for k, w in expected.items()})
    assert np.array_equal(evaluated[0]["first.weight"], initial()["first.weight"].numpy())


def test_fedlmt_tells_the_bias_of_its_mean() -> None:
    _, ends = run(made(FedLMT, measure_bias=True, init_a=0.5, local_epochs=20), LinearFederation(), 2)
    assert all(end.train["aggregation-bias"] > 1e-4 for end in ends[1:])


def test_fedhm_averages_what_the_factors_give_exactly() -> None:
    replies: dict[int, RecordDict] = {}

    def keep(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        replies[client] = reply
        return reply

    final, _ = run(made(FedHM), LinearFederation(sabotage=keep), 1)
    for key in COMPRESSED:
        models = [
            replies[i]["arrays"][f"{key}:U"].numpy().astype(np.float64)
            @ replies[i]["arrays"][f"{key}:V"].numpy()
            for i in range(5)
        ]
        np.testing.assert_allclose(final[key], np.average(models, axis=0, weights=range(6, 11)), atol=1e-6)


def test_fedhm_at_full_rank_is_fedavg_where_nobody_trains() -> None:
    strategy = made(FedHM, ratio=1.0, learning_rate=1e-30)
    for layer in strategy.plan.layers:
        assert layer.rank < min(layer.m, layer.n)  # what a ratio of 1 leaves out
    state = to_state_dict(initial())
    for key in COMPRESSED:
        left, right = state[key][:, :1], state[key][:1, :]
        state[key] = left @ right  # rank one: nothing is cut off
    final, ends = run(strategy, LinearFederation(), 3, start=to_record(state))
    for key in COMPRESSED:
        np.testing.assert_allclose(final[key], state[key], atol=1e-6)
    assert ends[-1].train["truncation-error"] < 1e-6


# EF21-P


def test_the_model_is_the_servers_iterate_and_the_base_is_what_was_broadcast() -> None:
    strategy = made(EF21P)
    final, ends = run(strategy, LinearFederation(), 3)
    x = np.concatenate([final[key].ravel() for key in COMPRESSED])
    assert np.array_equal(x, strategy.state.x)
    apart = float(np.linalg.norm(x - strategy.state.w))
    assert ends[-1].train["memory-norm"] == pytest.approx(apart, rel=1e-5)
    assert apart > 0


def test_nothing_compressed_is_fedavg() -> None:
    whole, _ = run(made(EF21P, ratio=1.0), LinearFederation(), 4)
    dense, _ = run(made(FedMUD, variant="dense"), LinearFederation(), 4)
    for key, value in dense.items():
        np.testing.assert_allclose(whole[key], value, atol=1e-5)


def test_values_and_coded_indices_are_counted_and_sent() -> None:
    strategy, federation = made(EF21P), LinearFederation()
    run(strategy, federation, 3)
    keep, largest = 22, strategy.largest  # ceil(88 / 4)
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


# FedBAT


def test_bits_are_counted_one_a_weight_and_travel_as_such() -> None:
    strategy, federation = made(FedBAT), LinearFederation()
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


@pytest.mark.parametrize("budget", ["model", "layer"])
@pytest.mark.parametrize("kind", FAMILY)
def test_a_ratio_that_no_message_reaches_names_the_smallest_one(kind: Any, budget: str) -> None:
    with pytest.raises(ValueError, match=r"ratio must be at least .* for this model: .*got 1e-06") as refused:
        made(kind, ratio=1e-6, budget=budget)
    named = float(str(refused.value).split()[5])
    method = made(kind, ratio=named, budget=budget)
    if budget == "model":
        assert max(method.uplink_ratio, method.downlink_ratio) <= named + 0.001
