"""SD-FEEL's client: mini-batch SGD, Sun et al., eq. (2), on batches that no setting but the seed moves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clients.contexts import context
from torch import nn

from hedgerow.clients import LocalTask, batch_indices, sd_feel_client
from hedgerow.wire import Call, to_record, to_state_dict

SIZES = (7, 3, 12, 5)
STARTS = np.cumsum([0, *SIZES])
WORK = {"first-step": 0, "local-steps": 2, "learning-rate": 0.1, "batch-size": 4, "seed": 5}
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(sum(SIZES), 3, generator=GENERATOR)
Y = torch.randint(0, 2, (sum(SIZES),), generator=GENERATOR)
MODEL = nn.Linear(3, 2)
START = {
    "weight": torch.randn(2, 3, generator=GENERATOR),
    "bias": torch.randn(2, generator=GENERATOR),
}


def task(context: Context) -> LocalTask:
    i = int(context.node_config["partition-id"])
    if i >= len(SIZES):
        raise FileNotFoundError(f"no data for partition {i}")
    return LocalTask(MODEL, X, Y, np.arange(STARTS[i], STARTS[i + 1]))


APP = sd_feel_client(task)


def call(
    partition_id: int, arrays: ArrayRecord | None = None, message_type: str = "train", **work: Any
) -> Call:
    config = {key: value for key, value in {**WORK, **work}.items() if value is not None}
    arrays = to_record(START) if arrays is None else arrays
    content = RecordDict({"arrays": arrays, "config": ConfigRecord(config)})
    return Call(content, context(partition_id), message_type)


def answers(calls: Sequence[Call]) -> list[RecordDict | Exception]:
    handler = APP.batch_handler(calls[0].message_type)
    assert handler is not None
    return list(handler(calls))


def answer(one: Call) -> RecordDict:
    (only,) = answers([one])
    assert isinstance(only, RecordDict), only
    return only


def assert_same_model(a: RecordDict, b: RecordDict) -> None:
    first, second = to_state_dict(a["arrays"]), to_state_dict(b["arrays"])
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=1e-5, atol=1e-6)


# Batches

KEYS = st.tuples(st.integers(0, 1000), st.integers(0, 50), st.integers(1, 1000))


@settings(deadline=None)
@given(key=KEYS, num_samples=st.integers(1, 40), batch_size=st.integers(1, 40))
def test_a_batch_is_drawn_without_replacement_from_the_clients_samples_or_is_all_of_them_in_order(
    key: tuple[int, int, int], num_samples: int, batch_size: int
) -> None:
    batch = batch_indices(*key, num_samples, batch_size)
    assert batch.dtype == np.int64
    assert len(batch) == len(set(batch.tolist())) == min(num_samples, batch_size)
    assert 0 <= batch.min() <= batch.max() < num_samples
    assert batch_size < num_samples or batch.tolist() == list(range(num_samples))


def test_a_batch_is_a_function_of_seed_client_and_iteration() -> None:
    def drawn(*key: int) -> frozenset[int]:
        return frozenset(batch_indices(*key, 1000, 10).tolist())

    assert drawn(1, 1, 1) == drawn(1, 1, 1)
    assert len({drawn(1, 1, 1), drawn(2, 1, 1), drawn(1, 2, 1), drawn(1, 1, 2)}) == 4


def test_batches_cover_the_samples_evenly() -> None:
    drawn = np.concatenate([batch_indices(0, 0, k, 20, 5) for k in range(1, 1001)])
    counts = np.bincount(drawn, minlength=20)
    # 1000 draws of 1/4 each: mean 250, standard deviation 13.7; five of them is far outside of chance.
    assert np.abs(counts - 250).max() < 5 * 13.7


# Training


@pytest.mark.parametrize("partition_id", range(len(SIZES)))
def test_training_is_the_plain_loop_of_mini_batch_sgd(partition_id: int) -> None:
    weight, bias = START["weight"].double(), START["bias"].double()
    part = task(call(partition_id).context).part
    losses = []
    for k in (4, 5, 6):
        batch = part[batch_indices(5, partition_id, k, len(part), 4)]
        w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        loss = nn.functional.cross_entropy(X[batch].double() @ w.T + b, Y[batch])
        loss.backward()
        assert w.grad is not None
        assert b.grad is not None
        weight, bias = weight - 0.1 * w.grad, bias - 0.1 * b.grad  # (2)
        losses.append(loss.item())
    reply = answer(call(partition_id, **{"first-step": 3, "local-steps": 3}))
    state = to_state_dict(reply["arrays"])
    torch.testing.assert_close(state["weight"].double(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["bias"].double(), bias, rtol=1e-5, atol=1e-6)
    assert reply["metrics"]["train-loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert reply["metrics"]["num-examples"] == SIZES[partition_id]


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (3, 2)])
def test_the_periods_do_not_move_the_batches(first: int, second: int) -> None:
    half = answer(call(0, **{"local-steps": first}))
    halves = answer(call(0, half["arrays"], **{"first-step": first, "local-steps": second}))
    assert_same_model(halves, answer(call(0, **{"local-steps": first + second})))


# Failures


@pytest.mark.parametrize(
    "bad",
    [
        {"local-steps": None}, {"local-steps": 0}, {"local-steps": 1.5}, {"first-step": -1},
        {"learning-rate": "fast"}, {"learning-rate": 0.0}, {"learning-rate": float("nan")},
        {"batch-size": 0}, {"batch-size": True}, {"seed": -1},
    ],
    ids=str,
)  # fmt: skip
def test_a_node_with_a_bad_config_fails_alone_and_names_it(bad: dict[str, Any]) -> None:
    first, second, third = answers([call(0), call(1, **bad), call(2)])
    (key, value) = next(iter(bad.items()))
    assert isinstance(second, ValueError)
    assert str(second).startswith(f"{key} must be ")
    assert f", got {value!r} in the message's config" in str(second)
    assert isinstance(first, RecordDict)
    assert isinstance(third, RecordDict)
    assert_same_model(first, answer(call(0)))
    assert_same_model(third, answer(call(2)))


@pytest.mark.parametrize("kind", ["train", "evaluate", "query.whoami"])
def test_a_node_without_data_or_that_was_sent_another_model_fails_alone(kind: str) -> None:
    others = {"weight": START["weight"]}, {**START, "extra": START["bias"]}, {**START, "weight": X}
    first, away, *wrong, last = answers(
        [call(0, None, kind), call(9, None, kind), *(call(1, to_record(o), kind) for o in others),
         call(2, None, kind)]
    )  # fmt: skip
    assert isinstance(away, FileNotFoundError)
    assert kind == "query.whoami" or all(isinstance(each, ValueError) for each in wrong)
    assert isinstance(first, RecordDict)
    assert isinstance(last, RecordDict)


# Evaluation, introductions, and Flower's own way in


@pytest.mark.parametrize("partition_id", range(len(SIZES)))
def test_evaluation_and_introduction_are_of_the_nodes_own_samples(partition_id: int) -> None:
    metrics = answer(call(partition_id, None, "evaluate"))["metrics"]
    part = task(call(partition_id).context).part
    logits = X[part] @ START["weight"].T + START["bias"]
    me = answer(call(partition_id, None, "query.whoami"))["whoami"]
    assert metrics["num-examples"] == me["num-examples"] == SIZES[partition_id]
    assert me["partition-id"] == partition_id
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(logits, Y[part]).item(), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx((logits.argmax(1) == Y[part]).float().mean().item())


# What the planner asks for


def test_a_client_tells_its_gradient_and_estimates_at_the_model_that_is_sent() -> None:
    content = answer(call(2, None, "train.gradient", **{"server-round": 3}))
    own = slice(int(STARTS[2]), int(STARTS[3]))
    model = nn.Linear(3, 2)
    model.load_state_dict(START)
    loss = nn.functional.cross_entropy(model(X[own]), Y[own])
    expected = torch.autograd.grad(loss, [model.weight, model.bias])
    told = to_state_dict(content["arrays"])
    torch.testing.assert_close(told["weight"], expected[0])
    torch.testing.assert_close(told["bias"], expected[1])
    metrics = content["metrics"]
    assert metrics["num-examples"] == SIZES[2]
    assert metrics["curvature"] > 0
    assert metrics["gradient-variance"] > 0
