"""Flower's own strategies and its server optimisers, in the methods that average."""

import gc
import random
import re
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord
from tests.strategies.averaging import AVERAGING, NODES, OPTIONS, ROUNDS, model, net, play, start, task
from tests.strategies.rounds_on_arrays import rounds

from hedgerow.clients import sd_feel_client
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import (
    FedAvg,
    FlowerAggregation,
    ServerAdagrad,
    ServerAdam,
    ServerMomentum,
    ServerStep,
    ServerYogi,
)
from hedgerow.strategies.parts import parse_server_step
from hedgerow.wire import Layout

# Of one pool, with an ordinary model.
ONE_POOL = ["FEEL", "FedAvg", "fedavg", "fedprox", "FedMUD's FedAvg"]
SINGLE: dict[str, Any] = {"min_train_nodes": 1, "min_available_nodes": 1}
SAME: Mapping[str, tuple[ServerStep, flower.FedAvg]] = {
    # Flower sums in float32; a larger tau keeps its rounding from growing.
    "adagrad": (ServerAdagrad(lr=0.1, tau=0.1), flower.FedAdagrad(eta=0.1, tau=0.1, **SINGLE)),
    "adam": (ServerAdam(lr=0.1, beta1=0.8, tau=0.1), flower.FedAdam(eta=0.1, beta_1=0.8, tau=0.1, **SINGLE)),
    "momentum": (
        ServerMomentum(lr=0.7, beta=0.6),
        flower.FedAvgM(server_learning_rate=0.7, server_momentum=0.6, **SINGLE),
    ),
    "yogi": (ServerYogi(lr=0.1, tau=0.1), flower.FedYogi(eta=0.1, tau=0.1, **SINGLE)),
}


@cache
def undisturbed(method: str) -> np.ndarray:
    return model(play(method, 4)[0])


@pytest.mark.parametrize("method", ONE_POOL)
@pytest.mark.parametrize("optimiser", SAME)
def test_a_server_optimiser_is_that_of_flowers_strategy(method: str, optimiser: str) -> None:
    ours, theirs = SAME[optimiser]
    stepped, _ = play(method, 4, server_step=ours)
    aggregated, _ = play(method, 4, aggregation=FlowerAggregation(theirs))
    np.testing.assert_allclose(model(stepped), model(aggregated), atol=1e-6)
    assert np.abs(model(stepped) - undisturbed(method)).max() > 1e-4


@pytest.mark.parametrize("method", ONE_POOL)
def test_flowers_fedavg_is_the_mean_of_the_method(method: str) -> None:
    same, ends = play(method, aggregation=FlowerAggregation(flower.FedAvg(**SINGLE)))
    plain, plain_ends = play(method)
    np.testing.assert_allclose(model(same), model(plain), atol=1e-6)
    assert [(end.payload_bytes, end.bits) for end in ends] == [
        (end.payload_bytes, end.bits) for end in plain_ends
    ]


class Instructed(flower.FedYogi):
    """Flower's, with what the client of SD-FEEL must be told."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        config.update({"local-steps": 2, "first-step": 2 * (server_round - 1)})
        return super().configure_train(server_round, arrays, config, grid)


def test_a_baseline_is_a_run_of_flowers_strategy_on_the_same_nodes() -> None:
    alone = Instructed(eta=0.02, fraction_evaluate=0.0, min_available_nodes=NODES)
    config = ConfigRecord({"learning-rate": 0.1, "batch-size": 5, "seed": 0})
    with InProcessGrid(sd_feel_client(task), NODES) as grid, flower_identity(1):
        found = alone.start(grid, ArrayRecord(net().state_dict()), num_rounds=ROUNDS, train_config=config)
    row = np.concatenate([array.numpy().ravel() for array in found.arrays.values()])
    ours, _ = play("FedAvg", aggregation=FlowerAggregation.parse("FedYogi(eta=0.02)"))
    np.testing.assert_allclose(model(ours), row, atol=1e-6)


class Frozen(flower.FedYogi):
    """Flower's, which notes whether the garbage collector searches all that exists."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        frozen.append(gc.get_freeze_count() > 10_000)
        return super().aggregate_train(server_round, replies)


frozen: list[bool] = []


def test_what_exists_is_not_searched_for_garbage_at_every_reply() -> None:
    gc.unfreeze()
    play("FedAvg", 2, aggregation=FlowerAggregation(Frozen(eta=0.02)))
    assert frozen
    assert all(frozen)
    assert gc.get_freeze_count() == 0
    gc.freeze()
    play("FedAvg", 2, aggregation=FlowerAggregation(Frozen(eta=0.02)))
    # What the program froze itself stays frozen.
    assert gc.get_freeze_count() > 10_000


@pytest.mark.parametrize("name", flower.__all__)
def test_each_of_flowers_strategies_runs_or_is_refused_in_a_sentence(name: str) -> None:
    needs = {"QFedAvg": "QFedAvg(client_learning_rate=0.1, train_loss_key='train-loss')"}
    runs = {
        "Bulyan", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedMedian", "FedTrimmedAvg", "FedYogi",
        "Krum", "MultiKrum", "QFedAvg",
    }  # fmt: skip
    with nullcontext() if name in runs else pytest.raises(ValueError, match=name):
        baseline = FlowerAggregation.parse(needs.get(name, name))
        strategy, _ = play("FedAvg", 2, aggregation=baseline)
        assert np.isfinite(model(strategy)).all()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "FedYogi(et=0.01)",
            "FedYogi takes eta, eta_l, beta_1, beta_2, tau here, got et; did you mean 'eta'?",
        ),
        ("FedYogi(fraction_train=0.5)", "here, got fraction_train"),
        ("FedYogy", "averages models is 'FedYogy'; did you mean 'FedYogi'?"),
        ("FedYogi(0.1)", "must be a name with named values"),
        ("FedYogi(eta=[1])", "must be a name with named values"),
        ("FedYogi(eta=None)", "must be a name with named values"),
        ("FedYogi(eta=open('x'))", "must be a name with named values"),
        ("FedYogi(eta=0.1", "must be a name with named values"),
        ("QFedAvg", "must be given client_learning_rate, got none"),
        ("FedTrimmedAvg(beta=0.6)", "must be in the range"),
        ("FedYogi(**{'eta': 1})", "must be a name with named values"),
        ("(" * 500, "must be a name with named values"),
        ("a" * 2000, "must be a name with named values"),
        ("x\0", "must be a name with named values"),
    ],
)
def test_a_wrong_text_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        FlowerAggregation.parse(text)


class Half(flower.FedAvg):
    """Trains half of the nodes."""

    def __init__(self) -> None:
        super().__init__(fraction_train=0.5, **SINGLE)


class Keeps(flower.FedAvg):
    """Keeps what no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__(**SINGLE)
        self.rows = (one for one in range(3))

    def __deepcopy__(self, memo: Any) -> "Keeps":
        return Keeps()


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (Half(), "sends messages to 3 of 6 nodes"),
        (flower.FedAvg(min_available_nodes=9), "waits for more than 6 nodes"),
        (flower.FedProx(proximal_mu=1.0, **SINGLE), "adds 'proximal-mu' to its messages"),
        (flower.QFedAvg(0.1, **SINGLE), "Missing or invalid training loss"),
        (flower.Bulyan(num_malicious_nodes=2, **SINGLE), "makes no model of 6 models"),
        (Keeps(), "keeps what a checkpoint cannot hold: rows"),
    ],
)
def test_a_strategy_that_is_no_aggregator_is_refused_before_a_round(strategy: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        play("FedAvg", aggregation=FlowerAggregation(strategy))


def test_a_method_with_several_pools_is_refused() -> None:
    with pytest.raises(ValueError, match="averages one pool of replies, got 2"):
        play("SD-FEEL", aggregation=FlowerAggregation(flower.FedAvg(**SINGLE)))


def test_a_baseline_resumes_bit_for_bit() -> None:
    make, client = AVERAGING["FedAvg"]
    new = partial(make, **OPTIONS)
    half, again, through = (new(aggregation=FlowerAggregation.parse("FedAdam")) for _ in range(3))
    with InProcessGrid(client(task), NODES) as grid, flower_identity(1):
        start(half, grid, 2)
        again.load_state_dict(half.state_dict())
        start(again, grid, 4)
    with InProcessGrid(client(task), NODES) as grid, flower_identity(1):
        start(through, grid, 4)
        first = model(through)
        start(through, grid, 4)  # A second run starts anew.
    np.testing.assert_array_equal(model(again), first)
    np.testing.assert_array_equal(model(through), first)


def test_what_python_draws_elsewhere_stays_as_it_is() -> None:
    random.seed(3)
    before = random.getstate()
    play("FedAvg", aggregation=FlowerAggregation.parse("FedMedian"))
    assert random.getstate() == before


@pytest.mark.parametrize("step", [ServerAdam(lr=0.1), ServerMomentum(lr=0.5)])
def test_statistics_and_counters_take_the_mean(step: ServerStep) -> None:
    keys = {"a.weight": (3,), "a.running_mean": (2,), "a.num_batches_tracked": (), "b": (2,)}
    layout = Layout(tuple(keys), tuple(keys.values()), ("float32", "float32", "int64", "float32"))
    steps, plain = (
        FedAvg(min_available_nodes=2, max_weight_ratio=0, server_step=one) for one in (step, None)
    )
    made = [
        next(
            rounds(one, np.zeros(8, np.float32), [1, 1], lambda i, ask, _: ask.model + i + 1.0, 1, layout)
        ).servers[0]
        for one in (steps, plain)
    ]
    np.testing.assert_array_equal(made[0][3:6], made[1][3:6])
    assert (made[0][[0, 1, 2, 6, 7]] != made[1][[0, 1, 2, 6, 7]]).all()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("adam", "must be given lr"),
        ("adam(lr=0)", "lr must be a finite number > 0, got 0"),
        ("adam(lr=0.1, beta1=1.0)", "beta1 must be a number in [0, 1), got 1.0"),
        ("adam(rate=0.1)", "has no 'rate'"),
        ("momentum(beta=-1)", "beta must be a number in [0, 1), got -1"),
        ("adagrad(lr=0.1, beta2=0.9)", "adagrad has no 'beta2'"),
        ("adm(lr=0.1)", "there is no 'adm'; did you mean 'adam'?"),
    ],
)
def test_a_wrong_server_step_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_server_step(text)


def test_a_text_names_a_server_step() -> None:
    assert parse_server_step("") is None
    assert parse_server_step("yogi(lr=0.1)") is not None
    momentum = parse_server_step("momentum")
    assert isinstance(momentum, ServerMomentum)
    assert (momentum.lr, momentum.beta) == (1.0, 0.9)
