"""The client of the FedMUD family through its real handlers, with the suite's own strategies on the other
side, against the plain loop of eqs. (3) to (9) of FedMUD, S. Li et al."""

import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from tests.clients.contexts import context
from tests.clients.training.cases import torch_seeded
from tests.oracles import fedmud as oracle
from torch import Tensor, nn

from hedgerow.clients import (
    LocalTask,
    LocalTaskFn,
    LocalWork,
    TrainingMode,
    cross_entropy,
    fedmud_client,
    local_sgd,
    wrap,
)
from hedgerow.clients.fedmud.factored_model import plan_for
from hedgerow.clients.training.batches import epoch_batches
from hedgerow.sim import InProcessGrid, flower_identity, through_the_wire
from hedgerow.strategies import EF21P, FedBAT, FedExLoRA, FedHM, FedLMT, FedMUD, FedPara, LoRA
from hedgerow.strategies.fedmud import CompressedLayers
from hedgerow.wire import Call, Factorisation, layers_of, to_record, to_state_dict

NODES, CLASSES = 6, 3
Make = Callable[..., CompressedLayers[Any]]


def third_party() -> nn.Module:
    """Normalisation, groups and biases."""
    return torch_seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, groups=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(6 * 16, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, CLASSES),
        )
    )


def samples(partition_id: int) -> int:
    return 6 + 2 * partition_id


def task_of(model: nn.Module) -> LocalTaskFn:
    stream = np.random.default_rng(3)
    x = torch.as_tensor(stream.normal(size=(NODES * 18, 1, 8, 8))).float()
    y = torch.as_tensor(stream.integers(0, CLASSES, len(x)))

    def task(context: Context) -> LocalTask:
        i = int(context.node_config["partition-id"])
        return LocalTask(model, x, y, np.arange(18 * i, 18 * i + samples(i)))

    return task


# A message that the handlers take, as the server makes it.

PLAN: dict[str, Any] = {
    "variant": "mud+aad",
    "ratio": 0.3,
    "budget": "layer",
    "init-a": 0.1,
    "layout": "flat",
    "tight": False,
}


def plan_of(model: nn.Module, config: Mapping[str, Any]) -> Factorisation:
    return plan_for(model, **{key.replace("-", "_"): config[key] for key in PLAN})


def config_of(model: nn.Module, **changes: Any) -> dict[str, Any]:
    config = {
        **PLAN,
        "method": "factored",
        "server-round": 1,
        "version": 0,
        "from-version": 0,
        "run-seed": 5,
        "seed": 5,
        "keep-base": True,
        "signs": 10_000,
        "learning-rate": 0.1,
        "local-epochs": 2,
        "batch-size": 4,
        **{key.replace("_", "-"): value for key, value in changes.items()},
    }
    dense = config["method"] == "dense"
    coded = [] if dense else [layer.key for layer in layers_of(model)[1:-1]]
    return {"fingerprint": plan_of(model, config).fingerprint, "layers": coded, **config}


def message(
    model: nn.Module, own: Context, kind: str = "train", drop: Sequence[str] = (), **changes: Any
) -> Call:
    """Everything that a node can be sent: drop what it is not."""
    config = config_of(model, **changes)
    method, variant = config["method"], config["variant"] if config["method"] == "factored" else "lmt"
    plan = plan_of(model, {**config, "variant": variant})
    keys = {layer.key for layer in plan.layers} if method != "dense" else set()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    records: dict[str, Any] = {
        "arrays": to_record({key: value for key, value in state.items() if key not in keys}),
        "base": to_record({key: value for key, value in state.items() if key in keys}),
        "config": ConfigRecord({key: value for key, value in config.items() if value is not None}),
    }
    if not plan.has_base and method == "factored":
        records["factors"] = to_record(plan.init(5, 0))
    return Call(RecordDict({key: r for key, r in records.items() if key not in drop}), own, kind)


def answers(model: nn.Module, calls: Sequence[Call], mode: TrainingMode = "loop") -> list[Any]:
    handler = fedmud_client(task_of(model), mode).batch_handler(calls[0].message_type)
    assert handler is not None
    return list(handler(calls))


def answer(model: nn.Module, one: Call) -> RecordDict:
    (only,) = answers(model, [one])
    assert isinstance(only, RecordDict), only
    return only


# Against the oracle: the suite's server and client on a linear regression.

FORMS = ("mud", "mud+f", "mud+aad", "mud+bkd", "mud+bkd+f", "mud+bkd+aad")
M, N = 4, 5


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(-1) / 2


@pytest.mark.parametrize(
    ("variant", "reset_interval"),
    [
        *itertools.product(FORMS, [1, 3, 100]),
        *itertools.product(["lora", "lora+f"], [3, 100]),
        ("fedex", 100),
    ],
)
def test_rounds_are_those_of_the_plain_loop(variant: str, reset_interval: int) -> None:
    stream = np.random.default_rng(8)
    data = [(stream.normal(size=(4 + i, N)), stream.normal(size=(4 + i, M))) for i in range(NODES)]
    x, y = (torch.as_tensor(np.concatenate(part)).float() for part in zip(*data, strict=True))
    ends = np.cumsum([0, *(len(x_i) for x_i, _ in data)])
    model = torch_seeded(lambda: nn.Linear(N, M))

    def task(own: Context) -> LocalTask:
        i = int(own.node_config["partition-id"])
        return LocalTask(model, x, y, np.arange(ends[i], ends[i + 1]))

    make: Make = partial(FedMUD.for_model, variant=variant)
    if variant.startswith("lora"):
        make = partial(LoRA.for_model, freeze=variant == "lora+f")
    elif variant == "fedex":
        make = FedExLoRA.for_model
    interval = {} if variant == "fedex" else {"reset_interval": reset_interval}
    strategy = make(
        model,
        ratio=0.9,
        budget="layer",
        init_a=0.5,
        skip_front=0,
        skip_back=0,
        **interval,
        min_available_nodes=NODES,
        num_clients_per_round=3,
        fraction_evaluate=0.0,
        learning_rate=0.1,
        local_epochs=4,
        batch_size=100,
        seed=2,
    )
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    with flower_identity(1):
        grid = InProcessGrid(fedmud_client(task, "loop", half_square), NODES)
        result = strategy.start(grid, to_record(initial), num_rounds=7)

    (layer,) = strategy.plan.layers
    form = oracle.Form(strategy.plan.variant.replace("+bkd", ""), M, N, layer.rank, layer.blocks, layer.side)
    expected = oracle.run(
        form,
        data,
        initial["weight"].double().numpy(),
        initial["bias"].double().numpy(),
        strategy.participants,
        rounds=7,
        reset_interval=reset_interval,
        eta=0.1,
        steps=4,
        a=0.5,
        seed=2,
        residual=variant == "fedex",
    )[-1]
    assert strategy.downlink.log.version == expected.version
    assert np.abs(expected.effective - initial["weight"].numpy()).max() > 0.1
    np.testing.assert_allclose(result.arrays["weight"].numpy(), expected.effective, rtol=0, atol=2e-5)
    np.testing.assert_allclose(result.arrays["bias"].numpy(), expected.b, rtol=0, atol=2e-5)


# Federations with each method.

METHODS: dict[str, tuple[Make, dict[str, Any]]] = {
    "mud": (FedMUD.for_model, {"variant": "mud", "ratio": 0.3}),
    "mud+bkd+aad": (FedMUD.for_model, {"variant": "mud+bkd+aad", "ratio": 0.3, "reset_interval": 2}),
    "lora": (LoRA.for_model, {"ratio": 0.3}),
    "ffa-lora": (LoRA.for_model, {"ratio": 0.3, "freeze": True, "reset_interval": 2}),
    "fedex-lora": (FedExLoRA.for_model, {"ratio": 0.3}),
    "fedavg": (FedMUD.for_model, {"variant": "dense"}),
    "fedlmt": (FedLMT.for_model, {"ratio": 0.3}),
    "fedpara": (FedPara.for_model, {"ratio": 0.4}),
    "fedhm": (FedHM.for_model, {"ratio": 0.3}),
    "ef21p": (EF21P.for_model, {"ratio": 0.3}),
    "fedbat": (FedBAT.for_model, {"ratio": 0.12}),
}


def federation(
    name: str, sync: str = "catchup", rounds: int = 6, strict: bool = False
) -> tuple[dict[str, Any], CompressedLayers[Any]]:
    make, options = METHODS[name]
    model = third_party()
    strategy = make(
        model,
        sync=sync,
        min_available_nodes=NODES,
        num_clients_per_round=2,
        learning_rate=0.05,
        local_epochs=2,
        batch_size=4,
        fraction_evaluate=0.0,
        **options,
    )
    initial = to_record(copy.deepcopy(model.state_dict()))
    with flower_identity(1):
        grid = InProcessGrid(fedmud_client(task_of(model), "loop"), NODES, strict=strict)
        result = strategy.start(grid, initial, num_rounds=rounds)
    assert not strategy.report.rejected
    return {key: array.numpy() for key, array in result.arrays.items()}, strategy


def same_arrays(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in b)


@pytest.mark.parametrize("name", METHODS)
def test_however_nodes_come_by_the_base_they_train_the_same_models(name: str) -> None:
    catchup, dense, broadcast = (federation(name, sync)[0] for sync in ("catchup", "dense", "broadcast"))
    assert same_arrays(catchup, dense)
    assert same_arrays(catchup, broadcast)


@pytest.mark.parametrize("name", METHODS)
def test_a_node_that_lost_its_state_is_sent_the_base_in_the_same_round(name: str) -> None:
    make, options = METHODS[name]
    model = third_party()
    strategy = make(
        model,
        min_available_nodes=2,
        local_epochs=1,
        batch_size=4,
        fraction_evaluate=0.0,
        max_repeats=0,
        **options,
    )
    forgetful = fedmud_client(task_of(model), "loop")
    inner = forgetful.batch_handler("train")
    assert inner is not None
    rounds = 0

    def train(calls: Sequence[Call]) -> Sequence[RecordDict | Exception]:
        nonlocal rounds
        rounds += 1
        for call in calls:
            if rounds == 2 and call.partition_id == 1:
                for key in list(call.context.state):
                    del call.context.state[key]
        return inner(calls)

    forgetful._handlers["train"] = train
    rejected = []
    strategy.on_round_end = [lambda end: rejected.append(dict(strategy.report.rejected))]
    with flower_identity(1):
        initial = to_record(copy.deepcopy(model.state_dict()))
        strategy.start(InProcessGrid(forgetful, 2), initial, num_rounds=3)
    assert rejected[1:] == [{}, {}, {}]
    # Once more than it was asked to train, to be sent the base.
    asked = 4 if strategy.downlink.log.base_bits else 3
    assert strategy.ledger.total("server->client").messages == 3 + asked


def newcomers(
    draw: bool = True, sync: str = "catchup", other: bool = False, forgets: bool = False, **options: Any
) -> tuple[Any, FedMUD, list[RecordDict], list[dict[str, int]]]:
    """Six rounds of one node of three each; nodes draw the initial model, or another one."""
    model = third_party()
    find = task_of(model)
    initial = copy.deepcopy(model)
    if other:
        initial.get_parameter("3.weight").data += 1.0
    start = to_record(copy.deepcopy(model.state_dict()))

    def task(own: Context) -> LocalTask:
        return replace(find(own), initial=(lambda: copy.deepcopy(initial)) if draw else None)

    app = fedmud_client(task, "loop")
    inner, sent = app.batch_handler("train"), list[RecordDict]()
    assert inner is not None

    def train(calls: Sequence[Call]) -> Sequence[RecordDict | Exception]:
        for call in calls:
            sent.append(call.content)
            if forgets:
                for key in list(call.context.state):
                    del call.context.state[key]
        return inner(calls)

    app._handlers["train"] = train
    lost = list[dict[str, int]]()
    strategy = FedMUD.for_model(
        model,
        variant="mud+aad",
        ratio=0.3,
        init_a=0.5,
        min_available_nodes=3,
        num_clients_per_round=1,
        local_epochs=1,
        fraction_evaluate=0.0,
        sync=sync,
        **{"seeded_base": True, **options},
    )
    strategy.on_round_end = [lambda end: lost.append(dict(end.rejected))]
    with flower_identity(1):
        result = strategy.start(InProcessGrid(app, 3), start, num_rounds=6)
    return {key: array.numpy() for key, array in result.arrays.items()}, strategy, sent, lost[1:]


@pytest.fixture(scope="module")
def drawn() -> Any:
    return newcomers()


def test_nodes_that_draw_the_initial_base_are_never_sent_one(drawn: Any) -> None:
    final, strategy, sent, lost = drawn
    assert not any("base" in content for content in sent)
    assert lost == [{}] * 6
    plain, unseeded, _, _ = newcomers(seeded_base=False)
    assert same_arrays(final, plain)
    assert strategy.traffic()["catchup"].bits < unseeded.traffic()["catchup"].bits
    assert strategy.traffic()["catchup"].messages == strategy.ledger.total("server->client").messages
    state = strategy.state_dict()
    unseeded.load_state_dict(state)
    assert unseeded.traffic() == strategy.traffic()
    told = state["parts"]["downlink"]["base-checksum"]
    assert unseeded.state_dict()["parts"]["downlink"]["base-checksum"] == told != ""


@pytest.mark.parametrize(
    "how",
    [{"sync": "dense"}, {"sync": "broadcast"}, {"forgets": True}, {"draw": False}, {"other": True}],
    ids=str,
)
def test_however_nodes_come_by_the_initial_base_it_is_in_the_same_round_and_the_same_model(
    how: dict[str, Any], drawn: Any
) -> None:
    final, strategy, sent, lost = newcomers(**how)
    assert lost == [{}] * 6
    assert same_arrays(final, drawn[0])
    sent_base = sum("base" in content for content in sent)
    if "sync" in how:
        assert sent_base == (len(sent) if how["sync"] == "dense" else 0)
    else:  # Who forgot draws it anew; who cannot draw it, or drew another, is sent it.
        assert (sent_base == 0) == ("forgets" in how)
        assert strategy.ledger.total("server->client").messages == len(sent) > 6


# What a node answers.


@pytest.mark.parametrize("variant", [*FORMS, "lmt", "para"])
def test_a_reply_holds_factors_what_is_not_compressed_and_its_metrics_and_nothing_else(variant: str) -> None:
    model = third_party()
    own = message(model, context(), variant=variant, version=3, from_version=3, batch_size=3)
    reply = answer(model, own)
    plan = plan_of(model, {**PLAN, "variant": variant})
    compressed = {layer.key for layer in plan.layers}
    assert compressed == {"3.weight", "6.weight"}
    assert reply["arrays"].keys() == plan.shapes.keys() | (model.state_dict().keys() - compressed)
    assert {key: reply["arrays"][key].shape for key in plan.shapes} == plan.shapes
    metrics = dict(reply["metrics"])
    assert 0.5 < metrics.pop("train-loss") < 3  # type: ignore[operator]
    assert metrics == {"num-examples": 8, "num-batches": 3, "base-version": 3, "need-base": 0}


@pytest.mark.parametrize("variant", ["mud", "mud+aad", "mud+bkd+aad", "lmt", "dense"])
def test_a_node_trains_its_wrapped_model_by_plain_local_sgd_and_leaves_the_message(variant: str) -> None:
    model, dense = third_party(), variant == "dense"
    task = task_of(model)(context(2))
    how: dict[str, Any] = {"method": "dense", "drop": ["base"]} if dense else {}
    one = message(model, context(2), variant=variant, **how)
    before = {name: to_state_dict(record) for name, record in one.content.array_records.items()}
    sent = to_state_dict(answer(model, one)["arrays"])
    after = {name: to_state_dict(record) for name, record in one.content.array_records.items()}
    assert all(torch.equal(after[n][key], value) for n, part in before.items() for key, value in part.items())
    trains: Any = third_party()
    if not dense:
        trains = wrap(trains, plan_of(model, {**PLAN, "variant": variant}), run_seed=5)
    batches = epoch_batches(task.part, seed=5, round=1, partition_id=2, epochs=2, batch_size=4)
    work = LocalWork(copy.deepcopy(trains.state_dict()), task.x, task.y, batches, 0.1)
    (trained,) = local_sgd(trains, [work], cross_entropy, "loop")
    expected = trained.state
    if not dense:
        expected = trains.factors_of(trained.state) | trains.rest_of(trained.state)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[key], value) for key, value in expected.items())


@pytest.mark.parametrize("variant", ["mud+aad", "lmt", "dense"])
@pytest.mark.parametrize(
    ("drop", "size", "batches"),
    [("auto", 5, 1), ("auto", 4, 2), ("auto", 6, 1), ("auto", 7, 1), ("always", 4, 1), ("always", 5, 1),
     ("always", 7, 1), ("never", 4, 2), ("never", 5, None), ("auto", 1, None)],
)  # fmt: skip
def test_a_last_batch_that_the_model_cannot_train_on_is_left_out(
    variant: str, drop: str, size: int, batches: int | None
) -> None:
    """Six samples: batches of five leave one, for which batch normalisation has no variance."""
    model = third_party()
    how: dict[str, Any] = {"method": "dense", "drop": ["base"]} if variant == "dense" else {}
    own = context(0, run_config={"drop-last": drop})
    (reply,) = answers(model, [message(model, own, variant=variant, batch_size=size, **how)])
    if batches is None:
        assert isinstance(reply, ValueError)
        assert "more than 1 value per channel" in str(reply)
    else:
        assert reply["metrics"]["num-batches"] == batches


def test_what_is_left_out_is_logged_once_a_run(caplog: pytest.LogCaptureFixture) -> None:
    model, own = third_party(), context(0, run_id=77)
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        answer(model, message(model, own, batch_size=5))
        assert "drop-last: each epoch leaves out one of node 0's 6 samples" in caplog.text
        caplog.clear()
        answer(model, message(model, own, batch_size=5, server_round=2))
        assert "drop-last" not in caplog.text
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)


def test_factors_in_the_message_are_where_training_starts() -> None:
    model = third_party()
    plan = plan_of(model, PLAN)
    fresh, later = message(model, context()), message(model, context())
    later.content["factors"] = to_record({key: value + 0.1 for key, value in plan.init(5, 0).items()})
    drawn = message(model, context())
    drawn.content["factors"] = to_record(plan.init(5, 0))
    sent = [to_state_dict(answer(model, one)["arrays"]) for one in (fresh, later, drawn)]
    assert all(torch.equal(sent[0][key], value) for key, value in sent[2].items())
    assert not any(torch.equal(sent[0][key], sent[1][key]) for key in plan.shapes)


def test_the_base_of_who_trains_and_who_only_listens_follows_the_servers_merges_bit_for_bit() -> None:
    model = third_party()
    plan, trains, listens = plan_of(model, PLAN), context(1), context(2)
    answer(model, message(model, trains))
    answer(model, message(model, listens, "query.merge"))
    factors = {key: value + 0.1 for key, value in plan.init(5, 0).items()}
    for own, kind in ((trains, "train"), (listens, "query.merge")):
        one = message(model, own, kind, version=1, drop=["base"])
        one.content["merges"] = to_record({f"0/{key}": value for key, value in factors.items()})
        reply = answer(model, one)
    assert reply.array_records == {}
    assert dict(reply["metrics"]) == {"num-examples": samples(2), "base-version": 1, "need-base": 0}
    first = to_state_dict(message(model, trains).content["base"])
    merged = plan.merge(first, factors, plan.frozen(5, 0))
    for own in (trains, listens):
        held = to_state_dict(own.state.array_records["base"])
        assert all(torch.equal(held[key], value) for key, value in merged.items())


@pytest.mark.parametrize("method", ["factored", "ef21p", "fedbat"])
def test_a_node_without_a_base_says_so(method: str) -> None:
    model, own = third_party(), context()
    variant = "mud" if method == "factored" else "dense"
    reply = answer(model, message(model, own, method=method, variant=variant, keep=3, drop=["base"]))
    assert len(reply["arrays"]) == 0
    assert (reply["metrics"]["need-base"], reply["metrics"]["num-examples"]) == (1, 0)
    one = message(model, own, "query.merge", method=method, variant=variant, keep=3, drop=["base"])
    assert answer(model, one)["metrics"]["need-base"] == 1
    assert not own.state
    assert (
        answer(model, message(model, own, method=method, variant=variant, keep=3))["metrics"]["need-base"]
        == 0
    )
    through_the_wire(reply, "reply")


# Errors: one clear message, of that node alone.


DENSE = {"variant": "dense"}
# How the message is made, what its config has then, and what is wrong.
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"method": "fedsgd"}, "method must be 'factored' or .*got 'fedsgd'"),
    ({}, {"variant": "svd"}, "variant must be .*got 'svd'"),
    ({}, {"ratio": 0.0}, "ratio must be .*got 0.0"),
    ({}, {"ratio": 1.5}, "ratio must be .*got 1.5"),
    ({}, {"budget": "all"}, "budget must be .*got 'all'"),
    ({}, {"init-a": -1.0}, "init-a must be .*got -1.0"),
    ({}, {"layout": "round"}, "layout must be .*got 'round'"),
    ({}, {"tight": 1}, "tight must be .*got 1"),
    ({}, {"layers": ["x.weight"]}, "layers must be different weights .*got 'x.weight'"),
    ({}, {"layers": 2 * ["3.weight"]}, "layers must be different weights .*got '3.weight'"),
    ({}, {"layers": ["1.weight"]}, r"1.weight must have the shape \(out, in\)"),
    ({}, {"layers": "3.weight"}, "layers must be a list of texts, got '3.weight'"),
    ({}, {"fingerprint": "0" * 16}, "fingerprint must be .*got '0000000000000000' .* different models"),
    ({"version": None}, {}, "version must be .*got None"),
    ({}, {"from-version": -1}, "from-version must be .*got -1"),
    ({}, {"keep-base": "yes"}, "keep-base must be .*got 'yes'"),
    ({}, {"run-seed": -1}, "run-seed must be .*got -1"),
    ({}, {"seed": 0.5}, "seed must be .*got 0.5"),
    ({"server_round": None}, {}, "server-round must be .*got None"),
    ({}, {"learning-rate": 0.0}, "learning-rate must be .*got 0.0"),
    (
        {},
        {"learning-rate": 1e30},
        "learning-rate must be smaller, got 1e[+]30: it makes the model not finite",
    ),
    ({}, {"local-epochs": 0}, "local-epochs must be .*got 0"),
    ({}, {"batch-size": 0}, "batch-size must be .*got 0"),
    # Batch normalisation refuses batches of one sample.
    ({}, {"batch-size": 1}, "Expected more than 1 value per channel"),
    ({"drop": ["arrays"]}, {}, r"must have the ArrayRecord 'arrays', got \['base'\]"),
    ({"drop": ["config"]}, {}, "exactly one ConfigRecord, got 0"),
    ({"variant": "lmt", "drop": ["factors"]}, {}, "must have the ArrayRecord 'factors'"),
    ({"method": "ef21p", **DENSE}, {}, "keep must be .*got None"),
    ({"method": "ef21p", **DENSE, "keep": 10**6}, {}, "keep must be from 1 to .*got 1000000"),
]


@pytest.mark.parametrize(("made", "config", "match"), BAD)
def test_a_bad_message_fails_that_node_with_one_clear_error(
    made: dict[str, Any], config: dict[str, Any], match: str
) -> None:
    model = third_party()
    bad = message(model, context(1), **made)
    for key, value in config.items():
        bad.content.config_records["config"][key] = value
    first, second = answers(model, [bad, message(model, context(2))])
    assert isinstance(first, ValueError)
    with pytest.raises(ValueError, match=match):
        raise first
    assert isinstance(second, RecordDict)


def test_factors_of_another_plan_and_arrays_of_another_model_are_refused() -> None:
    model = third_party()
    one, other = message(model, context(1)), message(model, context(2))
    one.content["factors"] = ArrayRecord()
    del other.content.array_records["arrays"]["1.running_mean"]
    first, second = answers(model, [one, other])
    assert "factor 3.weight:U is missing: there must be" in str(first)
    assert "the message's arrays must have the shapes" in str(second)
