"""The similarity-free family's client through its real handlers, Algorithms 1 to 4, Beikmohammadi et al.

Its rounds with the suite's strategy are golden in tests/strategies/similarity_free.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from tests.clients.contexts import context
from tests.oracles import similarity_free as oracle
from tests.oracles.similarity_free import Q2
from torch import nn

from hedgerow.clients import (
    LocalTask,
    Loss,
    TrainingMode,
    batch_indices,
    cross_entropy,
    similarity_free_client,
)
from hedgerow.clients.probes import probe, probe_stream
from hedgerow.clients.similarity_free.proximal import Proximal, ProximalWork, proximal_steps
from hedgerow.clients.training.sgd import LocalTraining
from hedgerow.wire import Call, Layout, parse_compressor, to_record, to_state_dict, unpack_update

GRADIENT = {
    "server-round": 1,
    "round-index": 0,
    "operator": "gradient",
    "local-step": 0.1,
    "local-iters": 2,
    "batch-size": 4,
    "seed": 5,
    "compressor": "identity",
    "error-feedback": False,
    "acknowledged": -1,
}
PROX = {
    **GRADIENT,
    "operator": "prox",
    "local-iters": 1,
    "inner-lr": "auto:1.0",
    "inner-steps": 100,
    "inner-tol": 0.0,
    "inner-batch": "fixed",
}


def call(
    arrays: Mapping[str, torch.Tensor] | ArrayRecord,
    config: Mapping[str, Any],
    own: Context,
    kind: str = "train",
) -> Call:
    record = arrays if isinstance(arrays, ArrayRecord) else to_record(arrays)
    held = ConfigRecord({key: value for key, value in config.items() if value is not None})
    return Call(RecordDict({"arrays": record, "config": held}), own, kind)


# The plain loop that the strategies' tests are held against


@pytest.mark.parametrize(
    ("operator", "fixed_point"),
    [
        (oracle.gradient_operator(Q2, 2), (-17 / 55, 38 / 55)),
        (oracle.gradient_operator(Q2, 1), (-1 / 3, 2 / 3)),
        (oracle.proximal_operator(Q2), (-5 / 17, 12 / 17)),
    ],
)
def test_the_oracles_long_run_fixed_points_are_golden(operator: oracle.Operator, fixed_point: Any) -> None:
    rounds = oracle.run(operator, np.zeros(2), 2, [0.1] * 400)
    np.testing.assert_allclose(rounds[-1].x, fixed_point, atol=1e-9)


@pytest.mark.parametrize(
    ("steps", "distance"),
    [
        ([0.1 / (k + 1) ** 0.51 for k in range(4000)], 4.7209e-4),
        ([0.1 / 2 ** (k // 500) for k in range(4000)], 3.3672e-4),
    ],
    ids=["diminishing", "step-decay"],
)
def test_the_oracles_distances_under_falling_steps_are_golden(steps: list[float], distance: float) -> None:
    rounds = oracle.run(oracle.gradient_operator(Q2, 2), np.zeros(2), 2, steps)
    assert np.linalg.norm(rounds[-1].x - np.array([-1 / 3, 2 / 3])) == pytest.approx(distance, rel=1e-4)


# The handlers, compressed


def test_identity_with_error_feedback_sends_the_model_and_keeps_nothing() -> None:
    one = node(1, error_feedback=True)
    assert "update" not in answer(one)
    assert not one.context.state


# Nodes of a small classification task

SIZES = (7, 3, 12, 5)
STARTS = np.cumsum([0, *SIZES])
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(sum(SIZES), 3, generator=GENERATOR)
Y = torch.randint(0, 2, (sum(SIZES),), generator=GENERATOR)
MODEL = nn.Linear(3, 2)
START = {"weight": torch.randn(2, 3, generator=GENERATOR), "bias": torch.randn(2, generator=GENERATOR)}


def task(own: Context) -> LocalTask:
    i = int(own.node_config["partition-id"])
    if i >= len(SIZES):
        raise FileNotFoundError(f"no data for partition {i}")
    return LocalTask(MODEL, X, Y, np.arange(STARTS[i], STARTS[i + 1]))


def node(
    i: int, config: Mapping[str, Any] = GRADIENT, kind: str = "train", arrays: Any = None, **own: Any
) -> Call:
    changes = {key.replace("_", "-"): value for key, value in own.items()}
    return call(START if arrays is None else arrays, {**config, **changes}, context(i), kind)


def answers(
    calls: Sequence[Call], mode: TrainingMode | None = None, loss: Loss = cross_entropy
) -> list[RecordDict | Exception]:
    handler = similarity_free_client(task, mode, loss).batch_handler(calls[0].message_type)
    assert handler is not None
    return list(handler(calls))


def answer(one: Call, **options: Any) -> RecordDict:
    (only,) = answers([one], **options)
    assert isinstance(only, RecordDict), only
    return only


def state(reply: RecordDict | Exception) -> dict[str, torch.Tensor]:
    assert isinstance(reply, RecordDict), reply
    return to_state_dict(reply["arrays"])


def assert_close(a: RecordDict | Exception, b: RecordDict | Exception) -> None:
    first, second = state(a), state(b)
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=1e-5, atol=1e-6)


def batch(i: int, step: int) -> Any:
    return task(context(i)).part[batch_indices(5, i, step, SIZES[i], 4)]


def descend(w: dict[str, torch.Tensor], index: Any, step: float) -> dict[str, torch.Tensor]:
    """One step of SGD, in float64."""
    w = {key: value.double().requires_grad_() for key, value in w.items()}
    loss = nn.functional.cross_entropy(X[index].double() @ w["weight"].T + w["bias"], Y[index])
    gradients = torch.autograd.grad(loss, list(w.values()))
    return {key: value.detach() - step * g for (key, value), g in zip(w.items(), gradients, strict=True)}


@pytest.mark.parametrize("partition_id", range(len(SIZES)))
def test_the_gradient_operator_is_sgd_on_the_batches_of_the_runs_steps(partition_id: int) -> None:
    w = START
    for step in (2 * 3 + 1, 2 * 3 + 2, 2 * 3 + 3):  # round k = 2 of T = 3
        w = descend(w, batch(partition_id, step), 0.1)
    ours = state(answer(node(partition_id, round_index=2, local_iters=3)))
    for key, value in w.items():
        torch.testing.assert_close(ours[key].double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("policy", "steps"), [("fixed", [4]), ("fresh", [3 * 6 + s for s in range(1, 7)])])
def test_the_proximal_operator_sees_one_batch_a_round_or_one_a_step(policy: str, steps: list[int]) -> None:
    sent = {"round_index": 3, "inner_steps": 6, "inner_batch": policy, "inner_lr": "fixed:0.04"}
    work = ProximalWork(START, X, Y, [batch(2, step) for step in steps], 0.1, 0.04, 6, tol=0.0)
    (expected,) = proximal_steps(MODEL, [work], LocalTraining())
    assert isinstance(expected, Proximal)
    reply = answer(node(2, PROX, **sent))
    assert all(torch.equal(value, expected.state[key]) for key, value in state(reply).items())
    assert reply["metrics"]["prox-residual"] == expected.relative_residual
    assert reply["metrics"]["inner-steps-taken"] == 6


def test_the_tolerance_stops_the_inner_solver_early() -> None:
    metrics = answer(node(0, PROX, inner_tol=1e-2))["metrics"]
    assert 0 < metrics["inner-steps-taken"] < 100
    assert metrics["prox-residual"] <= 1e-2


@pytest.mark.parametrize("config", [GRADIENT, PROX], ids=["gradient", "prox"])
def test_metrics_tell_of_the_part_the_loss_and_the_drift(config: Any) -> None:
    reply = answer(node(2, config))
    drift = sum(float((value - START[key]).double().square().sum()) for key, value in state(reply).items())
    metrics = reply["metrics"]
    assert metrics["num-examples"] == 12
    assert metrics["drift-norm"] == pytest.approx(drift**0.5, rel=1e-6)
    assert np.isfinite(metrics["train-loss"])
    extra = {"prox-residual", "inner-steps-taken"} if config is PROX else set()
    assert set(metrics) == {"num-examples", "train-loss", "drift-norm", *extra}


def test_nodes_with_different_operators_steps_and_compressors_are_answered_in_one_call() -> None:
    calls = [node(0), node(1, PROX), node(2, local_step=0.5, local_iters=4), node(3, PROX, local_step=0.3)]
    for together, one in zip(answers(calls), calls, strict=True):
        assert_close(together, answer(one))
    compressors = ["identity", "sign", "topk(2)", "sign"]
    calls = [node(i, compressor=compressor) for i, compressor in enumerate(compressors)]
    for together, one in zip(answers(calls), calls, strict=True):
        alone = answer(Call(one.content, context(one.partition_id), "train"))
        assert isinstance(together, RecordDict)
        (key,) = together.array_records
        assert key in alone
        assert together["metrics"]["train-loss"] == pytest.approx(alone["metrics"]["train-loss"], rel=1e-5)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs[:, 0] - targets).square()


def test_a_custom_loss_is_what_is_trained() -> None:
    reply = answer(node(1, local_iters=1), loss=squares)
    index = task(context(1)).part
    expected = (X[index] @ START["weight"][0] + START["bias"][0] - Y[index]).square().mean()
    assert reply["metrics"]["train-loss"] == pytest.approx(expected.item(), rel=1e-5)


# The uplink


@pytest.mark.parametrize("compressor", ["topk(0.5)", "topk(3)", "sign", "ternary"])
@pytest.mark.parametrize("config", [GRADIENT, PROX], ids=["gradient", "prox"])
def test_a_compressor_sends_the_code_of_the_models_change(config: Any, compressor: str) -> None:
    dense, reply = answer(node(2, config)), answer(node(2, config, compressor=compressor))
    change = np.concatenate([(state(dense)[key] - START[key]).flatten().numpy() for key in START])
    code, layout = parse_compressor(compressor), Layout.of(to_record(START))
    vector, _ = unpack_update(code, layout, reply["update"])
    payload = code.encode(change)
    np.testing.assert_array_equal(vector, code.decode(payload, 8))
    assert reply["metrics"]["payload-bits"] == code.bits(8, payload)
    assert set(reply["metrics"]) - set(dense["metrics"]) == {
        "message-norm",
        "memory-norm",
        "payload-bits",
        "memory-lost",
    }
    assert reply["metrics"]["drift-norm"] == pytest.approx(reply["metrics"]["message-norm"], rel=1e-6)


# Probes, evaluation, introductions


def test_a_probe_alone_or_beside_training_is_of_the_model_that_was_sent_and_changes_nothing_else() -> None:
    plain, probed = answer(node(2, round_index=3)), answer(node(2, round_index=3, probe=True))
    assert all(torch.equal(value, state(plain)[key]) for key, value in state(probed).items())
    MODEL.load_state_dict(START)
    stream = probe_stream(5, 3, 2)
    expected = probe(MODEL, X, Y, task(context(2)).part, batch_size=4, stream=stream)
    sent = {"round-index": 3, "seed": 5, "batch-size": 4}
    alone = answer(call(START, sent, context(2), "query.probe"))["metrics"]
    for metrics in (probed["metrics"], alone):
        assert metrics["curvature"] == expected.curvature > 0
        assert metrics["gradient-variance"] == expected.gradient_variance > 0
    assert set(probed["metrics"]) - set(plain["metrics"]) == {"curvature", "gradient-variance"}
    assert set(alone) == {"num-examples", "loss", "curvature", "gradient-variance"}
    assert alone["num-examples"] == 12


# Failures

MESSAGE = " in the message's config"
BAD: list[tuple[Mapping[str, Any], dict[str, Any], str]] = [
    *(
        (GRADIENT, bad, MESSAGE)
        for bad in (
            {"operator": None}, {"operator": "magic"}, {"local-step": 0.0}, {"local-step": float("nan")},
            {"local-iters": 0}, {"batch-size": True}, {"seed": -1}, {"round-index": None}, {"probe": 1},
        )
    ),
    *(
        (PROX, bad, MESSAGE)
        for bad in (
            {"local-iters": 2}, {"inner-lr": None}, {"inner-steps": 0}, {"inner-tol": -1.0},
            {"inner-tol": 1.0}, {"inner-batch": "stale"},
        )
    ),
    (PROX, {"inner-lr": "fast"}, ""),
    (GRADIENT, {"compressor": "zip"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("config", "bad", "where"), BAD, ids=[str(bad) for _, bad, _ in BAD])
def test_a_node_with_a_bad_config_fails_alone_and_names_it(config: Any, bad: Any, where: str) -> None:
    first, second, third = answers([node(0, config), node(1, {**config, **bad}), node(2, config)])
    ((key, value),) = bad.items()
    assert isinstance(second, ValueError)
    assert str(second).startswith(f"{key} must be ")
    assert f", got {value!r}{where}" in str(second)
    assert_close(first, answer(node(0, config)))
    assert_close(third, answer(node(2, config)))


@pytest.mark.parametrize(
    ("config", "bad", "words"),
    [
        (PROX, {"local_step": 1e-3, "inner_lr": "fixed:1.0"},
            "got eta = 1 with local-step (gamma) 0.001"),
        (GRADIENT, {"local_step": 1e20, "local_iters": 5}, "local-step must be smaller, got 1e+20"),
    ],
)  # fmt: skip
def test_a_step_that_overflows_fails_its_node_alone(config: Any, bad: dict[str, Any], words: str) -> None:
    first, second = answers([node(0, config), node(1, config, **bad)], loss=squares)
    assert isinstance(first, RecordDict)
    assert isinstance(second, ValueError)
    assert words in str(second)


@pytest.mark.parametrize("kind", ["train", "evaluate", "query.probe", "query.whoami"])
def test_a_node_without_data_or_that_was_sent_another_model_fails_alone(kind: str) -> None:
    wrong = {**START, "weight": torch.zeros(3, 2)}
    first, second, third = answers([node(0, kind=kind), node(9, kind=kind), node(1, kind=kind, arrays=wrong)])
    assert isinstance(first, RecordDict)
    assert isinstance(second, FileNotFoundError)
    assert kind == "query.whoami" or isinstance(third, ValueError)
