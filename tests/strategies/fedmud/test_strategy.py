"""FedMUD through real Flower messages: ways of sending, exactness of the mean, merges, losses, resumes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.fedmud.cases import fedmud, made
from tests.strategies.linear_federation import (
    COMPRESSED,
    E_UNC,
    D,
    LinearFederation,
    initial,
    run,
    same,
)
from torch import nn

from hedgerow.sim import flower_identity
from hedgerow.strategies import EF21P, FedBAT, FedMUD

EXACT = ["mud+f", "mud+aad", "mud+bkd+f", "mud+bkd+aad"]


def captured(replies: dict[tuple[int, int], RecordDict]) -> Callable[[int, int, RecordDict], RecordDict]:
    """Return a sabotage that changes nothing and keeps what nodes reply, by (round, client)."""

    def keep(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        replies[server_round, client] = reply
        return reply

    return keep


# Ways of sending


def test_a_rounds_contents_are_shared_by_the_nodes_that_lack_the_same() -> None:
    strategy, grid = fedmud(), LinearFederation().grid()
    with flower_identity(1):
        messages = strategy.configure_train(1, initial(), ConfigRecord(), grid)
    assert len({id(message.content) for message in messages}) == 1


def test_messages_hold_what_was_agreed_on() -> None:
    federation = LinearFederation()
    run(fedmud(reset_interval=2, num_clients_per_round=2), federation, 2)
    first, second = (next(c for r, _, _, c in federation.seen if r == wanted) for wanted in (1, 2))
    assert set(first) == {"arrays", "base", "config"}
    assert set(first["base"]) == set(COMPRESSED)
    assert set(first["arrays"]) == {"first.weight", "last.weight", "last.bias", "norm.num_batches_tracked"}
    assert {"a.weight:U", "a.weight:V", "b.weight:U", "b.weight:V"} == set(second["factors"])
    config = dict(first["config"])
    assert config.pop("fingerprint") == fedmud().plan.fingerprint
    assert config == {
        "server-round": 1,
        "method": "factored",
        "variant": "mud+aad",
        "version": 0,
        "from-version": 0,
        "run-seed": 0,
        "ratio": 0.3,
        "budget": "layer",
        "init-a": 0.5,
        "layout": "flat",
        "tight": False,
        "layers": ["a.weight", "b.weight"],
        "view": "buffer",
        "keep-base": True,
        "learning-rate": 0.1,
        "local-epochs": 2,
        "batch-size": 64,
        "seed": 0,
    }


def test_nodes_keep_no_base_when_they_are_always_sent_it() -> None:
    federation = LinearFederation()
    run(fedmud(sync="dense"), federation, 2)
    assert not any(content["config"]["keep-base"] for _, _, _, content in federation.seen)


# The mean


@pytest.mark.parametrize("variant", EXACT)
def test_a_mean_of_decoupled_factors_is_the_mean_of_the_updates(variant: str) -> None:
    _, ends = run(fedmud(variant=variant, measure_bias=True, ratio=0.4), LinearFederation(), 3)
    assert all(end.train["aggregation-bias"] < 1e-6 for end in ends[1:])


@pytest.mark.parametrize("variant", ["mud", "mud+bkd"])
def test_a_mean_of_coupled_factors_is_not(variant: str) -> None:
    _, ends = run(
        fedmud(variant=variant, measure_bias=True, ratio=0.4, local_epochs=20), LinearFederation(), 3
    )
    assert all(end.train["aggregation-bias"] > 1e-4 for end in ends[1:])


def test_the_bias_of_mud_is_the_covariance_of_its_factors() -> None:
    replies: dict[tuple[int, int], RecordDict] = {}
    federation = LinearFederation(sabotage=captured(replies))
    _, ends = run(fedmud(variant="mud", measure_bias=True, local_epochs=20), federation, 1)
    weights = np.array([federation.examples(i) for i in range(5)], float)
    p = weights / weights.sum()
    largest = 0.0
    for key in COMPRESSED:
        u, v = (
            np.array([replies[1, i]["arrays"][f"{key}:{name}"].numpy() for i in range(5)], np.float64)
            for name in ("U", "V")
        )
        u, v = u - np.tensordot(p, u, 1), v - np.tensordot(p, v, 1)
        covariance = np.einsum("i,imr,irn->mn", p, u, v)
        largest = max(largest, np.abs(covariance).max())
    assert ends[-1].train["aggregation-bias"] == pytest.approx(largest, abs=1e-7)
    assert largest > 1e-4


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [("num-examples", [6, 7, 8, 9, 10]), ("num-batches", [2, 2, 2, 3, 3]), ("uniform", [1] * 5)],
)
def test_weights_are_those_asked_for(weighting: Any, weights: list[int]) -> None:
    replies: dict[tuple[int, int], RecordDict] = {}
    final, _ = run(fedmud(weighting=weighting, batch_size=4), LinearFederation(sabotage=captured(replies)), 1)
    biases = [replies[1, i]["arrays"]["last.bias"].numpy() for i in range(5)]
    np.testing.assert_allclose(final["last.bias"], np.average(biases, axis=0, weights=weights), rtol=1e-6)


def test_counted_batches_are_averaged_and_stay_whole() -> None:
    final, _ = run(fedmud(weighting="uniform", batch_size=4), LinearFederation(), 1)
    assert final["norm.num_batches_tracked"].dtype == np.int64
    # Batches a node are 2, 2, 2, 3, 3; two epochs.
    assert final["norm.num_batches_tracked"] == round(2 * 12 / 5)


# Merges


def test_a_reset_does_not_change_the_model() -> None:
    strategy = fedmud(variant="mud", reset_interval=100)
    final, _ = run(strategy, LinearFederation(), 3)
    merging = fedmud(variant="mud", reset_interval=3)
    merged, _ = run(merging, LinearFederation(), 3)
    assert same(final, merged)
    assert (strategy.downlink.log.version, merging.downlink.log.version) == (0, 1)
    assert np.array_equal(merging.state.base, np.concatenate([merged[k].ravel() for k in COMPRESSED]))


def test_an_interval_that_does_not_divide_the_run_leaves_an_update_in_the_model() -> None:
    strategy = fedmud(reset_interval=3)
    final, _ = run(strategy, LinearFederation(), 5)
    assert strategy.downlink.log.version == 1
    base = strategy.by_layer(strategy.state.base)
    assert not np.array_equal(final["a.weight"], base["a.weight"].numpy())


def test_dense_is_fedavg() -> None:
    replies: dict[tuple[int, int], RecordDict] = {}
    federation = LinearFederation(sabotage=captured(replies))
    final, _ = run(fedmud(variant="dense"), federation, 1)
    for key in ("a.weight", "last.bias"):
        models = [replies[1, i]["arrays"][key].numpy().astype(np.float64) for i in range(5)]
        mean = np.average(models, axis=0, weights=[6, 7, 8, 9, 10])
        np.testing.assert_allclose(final[key], mean, rtol=1e-6)
    assert all(set(content) == {"arrays", "config"} for _, _, _, content in federation.seen)
    assert federation.seen[0][3]["config"]["method"] == "dense"


def test_the_result_is_the_plain_model() -> None:
    final, _ = run(fedmud(), LinearFederation(), 1)
    plain = {key: array.numpy() for key, array in initial().items()}
    assert list(final) == list(plain)
    assert {k: (v.dtype, v.shape) for k, v in final.items()} == {
        k: (v.dtype, v.shape) for k, v in plain.items()
    }


# Losses


def need_base(client: int, server_round: int, reply: RecordDict) -> RecordDict:
    metrics = {"num-examples": 0, "num-batches": 0, "base-version": 0, "need-base": 1}
    lost = RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord(metrics)})
    return lost if (client, server_round) == (3, 2) else reply


@pytest.mark.parametrize("sync", ["catchup", "broadcast"])
def test_a_node_that_lost_its_base_is_dropped_once_and_sent_the_base_next(sync: Any) -> None:
    federation = LinearFederation(sabotage=need_base)
    _, ends = run(fedmud(sync=sync), federation, 3)
    assert [end.rejected for end in ends[1:]] == [{}, {"need base": 1}, {}]
    sent = {client: content for r, client, _, content in federation.seen if r == 3}
    assert [client for client, content in sent.items() if "base" in content] == [3]


def _key(name: str) -> str:
    """Return the key of an array that Python names ``a__weight__bits``."""
    layer, _, part = name.rpartition("__") if name.count("__") == 2 else (name, "", "")
    return f"{layer.replace('__', '.')}:{part}" if part else name.replace("__", ".")


def with_arrays(reply: RecordDict, **changes: Any) -> RecordDict:
    arrays = {_key(name): value for name, value in changes.items()}
    kept = {key: array for key, array in reply["arrays"].items() if arrays.get(key, 0) is not None}
    new = {key: Array(np.asarray(value)) for key, value in arrays.items() if value is not None}
    return RecordDict({**reply, "arrays": ArrayRecord({**kept, **new})})


def with_metrics(reply: RecordDict, **changes: Any) -> RecordDict:
    changed = {key.replace("_", "-"): value for key, value in changes.items()}
    return RecordDict({**reply, "metrics": MetricRecord({**reply["metrics"], **changed})})


U = "a.weight:U"
# What is missing, of another shape or not finite is tests/contracts/test_methods.py's, for every method.
GARBAGE: list[tuple[str, str, Any, Callable[[RecordDict], RecordDict]]] = [
    ("dtype", "wrong dtype", FedMUD, lambda r: with_arrays(r, **{U: np.zeros((8, 2), np.int64)})),
    ("too large", "non-finite", FedMUD, lambda r: with_arrays(r, **{U: np.full((8, 2), 1e300)})),
    ("base", "unknown key", FedMUD, lambda r: with_arrays(r, a__weight=np.zeros((8, 6), np.float32))),
    ("two records", "bad arrays", FedMUD, lambda r: RecordDict({**r, "more": r["arrays"]})),
    ("batches", "bad metrics", FedMUD, lambda r: with_metrics(r, num_batches=1000)),
    ("old base", "wrong base", FedMUD, lambda r: with_metrics(r, base_version=0)),
    (
        "no version",
        "wrong base",
        FedMUD,
        lambda r: RecordDict({**r, "metrics": MetricRecord({"num-examples": 9})}),
    ),
    ("indices too", "unknown key", EF21P, lambda r: with_arrays(r, indices=np.arange(22))),
    ("fewer values", "wrong shape", EF21P, lambda r: with_arrays(r, values=np.zeros(21, np.float32))),
    ("more bits", "wrong shape", FedBAT, lambda r: with_arrays(r, a__weight__bits=np.zeros(7, np.uint8))),
    (
        "negative scale",
        "bad scale",
        FedBAT,
        lambda r: with_arrays(r, a__weight__alpha=np.full(1, -1, np.float32)),
    ),
    ("gamma", "unknown key", FedBAT, lambda r: with_arrays(r, a__weight__gamma=np.ones(1, np.float32))),
]


@pytest.mark.parametrize(("kind", "reason", "method", "spoil"), GARBAGE, ids=[row[0] for row in GARBAGE])
def test_garbage_costs_that_reply_and_is_counted_by_reason(
    kind: str, reason: str, method: Any, spoil: Callable[[RecordDict], RecordDict]
) -> None:
    replies: dict[tuple[int, int], RecordDict] = {}

    def spoilt(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        replies[server_round, client] = reply
        return spoil(reply) if (client, server_round) == (3, 2) else reply

    final, ends = run(made(method), LinearFederation(sabotage=spoilt), 2)
    assert [end.rejected for end in ends[1:]] == [{}, {reason: 1}]
    biases = [replies[2, i]["arrays"]["last.bias"].numpy() for i in (0, 1, 2, 4)]
    np.testing.assert_allclose(
        final["last.bias"], np.average(biases, axis=0, weights=[6, 7, 8, 10]), rtol=1e-6
    )


def test_a_value_that_overflows_when_scaled_is_garbage() -> None:
    def huge(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        values = np.full(22, np.finfo(np.float32).max, np.float32)
        return with_arrays(reply, values=values) if client == 3 else reply

    _, ends = run(made(EF21P, scale=True), LinearFederation(sabotage=huge), 1)
    assert ends[1].rejected == {"non-finite": 1}


def test_a_reply_that_was_not_used_does_not_move_what_its_node_is_taken_to_hold() -> None:
    def garbage(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        return with_arrays(reply, **{U: None}) if (client, server_round) == (3, 2) else reply

    federation = LinearFederation(sabotage=garbage)
    run(fedmud(ratio=7 / 24), federation, 3)
    third = next(content for r, client, _, content in federation.seen if (r, client) == (3, 3))
    assert {key.split("/")[0] for key in third["merges"]} == {"0", "1"}


def test_a_round_without_replies_neither_merges_nor_counts_towards_the_interval() -> None:
    failures = list(range(5))

    def fail_once(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if server_round == 2 and client in failures:
            failures.remove(client)
            raise RuntimeError("down")
        return reply

    flaky = fedmud(reset_interval=2, sync="dense")
    final, _ = run(flaky, LinearFederation(sabotage=fail_once), 3)
    assert flaky.downlink.log.version == 1
    assert same(final, run(fedmud(reset_interval=2, sync="dense"), LinearFederation(), 3)[0])


def test_a_round_that_may_be_empty_leaves_everything_as_it_is() -> None:
    def fail(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if server_round == 2:
            raise RuntimeError("down")
        return reply

    strategy = fedmud(min_train_nodes=0)
    run(strategy, LinearFederation(sabotage=fail), 2)
    assert (strategy.completed_rounds, strategy.downlink.log.version) == (2, 1)
    assert same(
        run(fedmud(), LinearFederation(), 1)[0],
        {key: array.numpy() for key, array in (strategy.current_arrays() or {}).items()},
    )


def test_faults_do_not_depend_on_the_way_of_sending_and_nor_does_the_model() -> None:
    def final(sync: Any) -> Any:
        strategy = fedmud(sync=sync, num_clients_per_round=3)
        return run(strategy, LinearFederation(sabotage=out_of_range), 6)[0]

    def out_of_range(client: int, server_round: int, reply: RecordDict) -> RecordDict:
        if (client + server_round) % 3 == 0 and len(reply.array_records):
            raise RuntimeError("out of range")
        return reply

    assert same(final("catchup"), final("dense"))
    assert same(final("catchup"), final("broadcast"))


# State


def test_nodes_that_lost_everything_between_two_runs_are_sent_the_base() -> None:
    final, _ = run(fedmud(num_clients_per_round=2), LinearFederation(), 6)
    first, second = fedmud(num_clients_per_round=2), fedmud(num_clients_per_round=2, min_train_nodes=2)
    run(first, LinearFederation(), 3)
    second.load_state_dict(first.state_dict())
    assert same(run(second, LinearFederation(), 6)[0], final)


def test_a_state_of_another_compression_is_refused() -> None:
    strategy = fedmud()
    run(strategy, LinearFederation(), 1)
    with pytest.raises(ValueError, match="fingerprint must be"):
        fedmud(variant="mud").load_state_dict(strategy.state_dict())


# Who takes part, and what is told


@settings(deadline=None)
@given(count=st.integers(1, 5), server_round=st.integers(1, 1000))
def test_a_round_takes_so_many_different_nodes(count: int, server_round: int) -> None:
    chosen = fedmud(num_clients_per_round=count).participants(server_round)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count


def test_every_node_takes_part_as_often() -> None:
    strategy = fedmud(num_clients_per_round=2)
    drawn = np.bincount([i for r in range(1, 1001) for i in strategy.participants(r)], minlength=5)
    np.testing.assert_allclose(drawn, 400, atol=60)


def test_progress_counts_the_mean_participants_iterations() -> None:
    _, ends = run(fedmud(batch_size=4), LinearFederation(), 2)
    # Batches a node are 2, 2, 2, 3, 3; two epochs a round.
    assert [end.iterations for end in ends] == [0, round(2 * 12 / 5), round(4 * 12 / 5)]


def test_bookkeeping_of_bases_is_no_metric() -> None:
    _, ends = run(fedmud(), LinearFederation(), 1)
    assert set(ends[-1].train) == {"num-batches", "train-loss", "uplink-ratio", "downlink-ratio"}


def test_evaluation_is_of_the_plain_model() -> None:
    federation = LinearFederation()
    final, ends = run(fedmud(fraction_evaluate=1.0), federation, 2)
    losses = [federation.loss(final, i) for i in range(5)]
    assert ends[-1].evaluate["loss"] == pytest.approx(np.average(losses, weights=range(6, 11)))


def test_the_ratio_told_is_what_is_sent() -> None:
    strategy = fedmud()
    assert strategy.uplink_bits == strategy.downlink_bits == 32 * (strategy.plan.count + E_UNC)
    assert strategy.uplink_ratio == strategy.downlink_ratio == strategy.plan.ratio
    assert fedmud(variant="dense").uplink_ratio == 1.0
    _, ends = run(strategy, LinearFederation(), 1)
    assert ends[-1].train["uplink-ratio"] == ends[-1].train["downlink-ratio"] == strategy.plan.ratio


def test_for_model_takes_layers_and_size_from_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    strategy = FedMUD.for_model(model, variant="mud", ratio=0.75)
    assert [layer.key for layer in strategy.coded] == ["1.weight"]
    assert strategy.plan.num_parameters == sum(p.numel() for p in model.parameters())


def test_the_log_is_never_larger_than_the_base() -> None:
    strategy = fedmud(ratio=0.3)
    run(strategy, LinearFederation(), 12)
    assert len(strategy.downlink.log) == D // strategy.plan.count


def test_a_model_without_a_compressed_layer_is_refused() -> None:
    arrays = initial()
    del arrays["a.weight"]
    with pytest.raises(ValueError, match=r"a.weight must have the shape \(8, 6\), got None"):
        run(fedmud(), LinearFederation(), 1, start=arrays)


def test_starting_again_starts_afresh() -> None:
    strategy = fedmud()
    first, _ = run(strategy, LinearFederation(), 3)
    assert same(run(strategy, LinearFederation(), 3)[0], first)
    assert strategy.completed_rounds == 3
