"""A training loop of the user's own in place of local SGD, through the clients that take one."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from tests.clients.contexts import context
from tests.clients.training.cases import torch_seeded
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hedgerow.clients import (
    BatchClientApp,
    LocalAdamW,
    LocalTask,
    TrainingConfig,
    TrainingData,
    TrainingLoop,
    cross_entropy,
    fedmud_client,
    sd_feel_client,
    similarity_free_client,
)
from hedgerow.global_draws import GlobalDraws
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import (
    EF21P,
    Diminishing,
    FedBAT,
    FedMUD,
    FedPara,
    SDFeel,
    SimilarityFree,
)
from hedgerow.wire import Call, to_record

NODES, SAMPLES, CLASSES = 4, 14, 3
SAMPLE_STREAM = np.random.default_rng(3)
X = torch.as_tensor(SAMPLE_STREAM.normal(size=(NODES * SAMPLES, 1, 8, 8))).float()
Y = torch.as_tensor(SAMPLE_STREAM.integers(0, CLASSES, len(X)))
# Samples of several nodes in no order.
PARTS = np.split(SAMPLE_STREAM.permutation(len(X)), NODES)


def network() -> nn.Module:
    def build() -> nn.Module:
        layers = [nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, CLASSES)]
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), *layers)

    return torch_seeded(build)


MODEL = network()
INITIAL = to_record({key: value.clone() for key, value in MODEL.state_dict().items()})


def task(own: Context) -> LocalTask:
    return LocalTask(MODEL, X, Y, PARTS[int(own.node_config["partition-id"])])


def plain_sgd(model: nn.Module, data: TrainingData, config: TrainingConfig) -> dict[str, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    losses = []
    for batch in config["batches"]:
        optimizer.zero_grad()
        loss = cross_entropy(model(data.x[batch]), data.y[batch]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return {"train-loss": float(torch.stack(losses).mean()), "secret": 7.0}


class Dicts(Dataset[dict[str, Tensor]]):
    def __init__(self, data: TrainingData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"image": self.data.x[i], "label": self.data.y[i]}


def adam(model: nn.Module, data: TrainingData, config: TrainingConfig) -> dict[str, float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    losses = []
    for _ in range(3):
        for batch in DataLoader(Dicts(data), config["batch_size"], shuffle=True, drop_last=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"], label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
    return {"train-loss": float(np.mean(losses))}


OPTIONS: dict[str, Any] = {"min_available_nodes": NODES, "fraction_evaluate": 0.0, "seed": 5}
STEPS: dict[str, Any] = {**OPTIONS, "batch_size": 4, "schedule": Diminishing(c=0.2, nu=0.51)}
LOW_RANK: dict[str, Any] = {
    **OPTIONS,
    "batch_size": 4,
    "learning_rate": 0.1,
    "local_epochs": 2,
    "ratio": 0.97,
}
Federated = tuple[Callable[..., BatchClientApp], Callable[[], Any]]
METHODS: dict[str, Federated] = {
    "sd-feel": (
        sd_feel_client,
        lambda: SDFeel(num_servers=2, clusters=[0, 0, 1, 1], topology="path", tau1=3, tau2=1, **OPTIONS),
    ),
    "fedavg": (similarity_free_client, lambda: SimilarityFree(local_iters=3, **STEPS)),
    "ef-fedavg": (
        similarity_free_client,
        lambda: SimilarityFree(local_iters=3, compressor="topk(0.2)", **STEPS),
    ),
    "secure-sum": (
        similarity_free_client,
        lambda: SimilarityFree(local_iters=3, secure_sum=True, **STEPS),
    ),
    "dense": (fedmud_client, lambda: FedMUD.for_model(MODEL, variant="dense", **LOW_RANK)),
    "mud+aad": (fedmud_client, lambda: FedMUD.for_model(MODEL, variant="mud+aad", **LOW_RANK)),
    "fedpara": (fedmud_client, lambda: FedPara.for_model(MODEL, **LOW_RANK)),
    "ef21p": (fedmud_client, lambda: EF21P.for_model(MODEL, **LOW_RANK)),
}


def learnt(
    name: str, train: TrainingLoop | None, optimiser: str = ""
) -> tuple[dict[str, Any], list[dict[str, Any]], Any]:
    client, make = METHODS[name]
    strategy = make()
    told = {"learning-rate": 0.1, "batch-size": 4, "seed": 5} if name == "sd-feel" else {}
    with flower_identity(1):
        asked = {"local-optimiser": optimiser}
        grid = InProcessGrid(client(task, "loop", train=train), NODES, run_config=asked)
        result = strategy.start(grid, INITIAL, num_rounds=3, train_config=ConfigRecord(told))
    arrays = {key: array.numpy() for key, array in result.arrays.items()}
    return arrays, [dict(m) for _, m in sorted(result.train_metrics_clientapp.items())], strategy


@pytest.mark.parametrize("name", METHODS)
def test_plain_sgd_over_the_same_batches_is_the_built_in_loop_to_the_bit(name: str) -> None:
    (own, own_metrics, _), (built_in, metrics, strategy) = learnt(name, plain_sgd), learnt(name, None)
    assert not strategy.report.rejected
    assert own_metrics == metrics
    assert own.keys() == built_in.keys()
    assert any(not np.array_equal(array, INITIAL[key].numpy()) for key, array in own.items())
    for key, array in own.items():
        np.testing.assert_array_equal(array, built_in[key])


@pytest.mark.parametrize("name", METHODS)
def test_adam_on_dict_batches_learns_and_repeats_to_the_bit(name: str) -> None:
    first, metrics, strategy = learnt(name, adam)
    assert not strategy.report.rejected
    assert metrics[-1]["train-loss"] < metrics[0]["train-loss"]
    before = torch.get_rng_state()
    again, _, _ = learnt(name, adam)
    assert torch.equal(before, torch.get_rng_state())
    for key, array in first.items():
        np.testing.assert_array_equal(array, again[key])


@pytest.mark.parametrize("name", METHODS)
def test_a_local_optimiser_works_in_every_method_and_plain_sgd_is_the_built_in_loop(name: str) -> None:
    (plain, plain_metrics, _), (built_in, metrics, _) = learnt(name, None, "sgd()"), learnt(name, None)
    assert plain_metrics == metrics
    for key, array in plain.items():
        np.testing.assert_array_equal(array, built_in[key])
    other, metrics, strategy = learnt(name, None, "adamw(warm_up=0.5)")
    assert not strategy.report.rejected
    looped, loop_metrics, _ = learnt(name, LocalAdamW(warm_up=0.5).loop(cross_entropy))
    assert metrics == loop_metrics
    assert all(np.array_equal(array, looped[key]) for key, array in other.items())
    assert any(not np.array_equal(array, built_in[key]) for key, array in other.items())


# One message to several nodes.

SD_FEEL = {
    "server-round": 6, "first-step": 5, "local-steps": 2, "learning-rate": 0.1, "batch-size": 4, "seed": 5,
}  # fmt: skip


def sent(
    train: TrainingLoop,
    nodes: Sequence[int] = range(NODES),
    client: Callable[..., BatchClientApp] = sd_feel_client,
    of: Callable[[Context], LocalTask] = task,
    run_config: Mapping[str, Any] | None = None,
    **changes: Any,
) -> list[Any]:
    config = ConfigRecord({**SD_FEEL, **{key.replace("_", "-"): value for key, value in changes.items()}})
    handler = client(of, train=train).batch_handler("train")
    assert handler is not None
    content = RecordDict({"arrays": INITIAL, "config": config})
    return list(handler([Call(content, context(i, run_config=run_config), "train") for i in nodes]))


def spoilt(how: Callable[[nn.Module], Any]) -> TrainingLoop:
    """Return a loop that goes wrong at node 1."""

    def train(model: nn.Module, data: TrainingData, config: TrainingConfig) -> Any:
        told = plain_sgd(model, data, config)
        return how(model) or told if config["partition_id"] == 1 else told

    return train


def fail(model: nn.Module) -> None:
    raise RuntimeError("no such column")


def overflow(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(torch.inf)


def grow(model: nn.Module) -> None:
    model.add_module("more", nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (fail, "RuntimeError: no such column"),
        (overflow, "1.weight of the trained model is not finite"),
        (grow, r"keys or shapes: \['more.bias', 'more.weight'\]"),
        (lambda model: {"train-loss": float("nan")}, "train-loss must be a finite number, got nan"),
        (lambda model: [1.0], "train must return a dict of metrics, or None, got a list"),
    ],
)
def test_a_loop_that_goes_wrong_costs_its_node_alone(how: Callable[[nn.Module], Any], says: str) -> None:
    found, good = sent(spoilt(how)), sent(plain_sgd)
    with pytest.raises(ValueError, match=says):
        raise found[1]
    for i in (0, 2, 3):
        assert found[i] == good[i]


def test_a_loop_is_given_its_own_samples_and_what_the_method_asks() -> None:
    seen: list[tuple[TrainingData, TrainingConfig]] = []
    sent(lambda model, data, config: seen.append((data, config)), [2])
    ((data, config),) = seen
    assert torch.equal(data.x, X[PARTS[2]])
    assert torch.equal(data.y, Y[PARTS[2]])
    batches = config.pop("batches")  # type: ignore[misc]
    assert [len(batch) for batch in batches] == [4, 4]
    assert all(set(batch.tolist()) <= set(range(SAMPLES)) for batch in batches)
    expected = {"steps": 2, "epochs": None, "lr": 0.1, "batch_size": 4, "seed": 5, "round": 6}
    assert config == {**expected, "partition_id": 2}


@pytest.mark.parametrize("returned", [None, {}, {"loss": 1.0}])
def test_of_what_a_loop_returns_the_training_loss_alone_is_told(returned: Any) -> None:
    (quiet,), (loud,) = sent(lambda *_: returned, [0]), sent(plain_sgd, [0])
    assert dict(quiet["metrics"]) == {"num-examples": SAMPLES, "num-steps": 2}
    assert set(loud["metrics"]) == {"num-examples", "num-steps", "train-loss"}


def test_what_a_node_learns_does_not_depend_on_the_nodes_beside_it() -> None:
    (alone,) = sent(adam, [3])
    assert alone == sent(adam)[3]


@pytest.mark.parametrize(
    "draw",
    [lambda: float(torch.rand(())), random.random, lambda: float(np.random.uniform())],  # noqa: NPY002
    ids=["torch", "python", "numpy"],
)
def test_what_a_loop_draws_is_a_function_of_seed_round_and_node(draw: Callable[[], float]) -> None:
    def drawn(nodes: Sequence[int], **changes: Any) -> list[float]:
        found: list[float] = []
        with GlobalDraws.restored():
            draw()  # Whatever the process drew before.
            before = GlobalDraws.now()
            sent(lambda *_: found.append(draw()), nodes, **changes)
            assert not before.moved
        return found

    first = drawn([0, 1, 2])
    assert drawn([2]) == first[2:]
    assert len({*first, *drawn([0], seed=6), *drawn([0], server_round=7)}) == 5


def test_a_loop_takes_the_place_of_exchanges_in_columns() -> None:
    for client in (sd_feel_client, similarity_free_client):
        assert client(task).column_handler("train") is not None
        assert client(task, train=plain_sgd).column_handler("train") is None


# What only the built-in loop does is refused.


@pytest.mark.parametrize("setting", [{"training-mode": "stack"}, {"precision": "bf16"}])
def test_settings_of_the_built_in_loop_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="with your own training loop, got"):
        sent(plain_sgd, run_config=setting)


def test_augmentation_is_refused() -> None:
    def flipped(own: Context) -> LocalTask:
        return LocalTask(MODEL, X, Y, PARTS[0], augmentation="flips")

    client = similarity_free_client
    rest = {"round_index": 0, "operator": "gradient", "local_step": 0.1, "local_iters": 2}
    compress = {"compressor": "identity", "error_feedback": False, "acknowledged": -1}
    (answer,) = sent(plain_sgd, [0], client, flipped, **rest, **compress)
    with pytest.raises(ValueError, match=r"augmentation must be 'none' .*got 'flips'"):
        raise answer


@pytest.mark.parametrize(
    ("client", "strategy"),
    [
        (similarity_free_client, lambda: SimilarityFree(operator="prox", local_iters=1, **STEPS)),
        (fedmud_client, lambda: FedBAT.for_model(MODEL, **{**LOW_RANK, "ratio": 1.0})),
    ],
)
def test_methods_whose_node_work_is_not_training_refuse_a_loop(
    client: Callable[..., BatchClientApp], strategy: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = strategy()
    with flower_identity(1), pytest.raises(RuntimeError):
        made.start(InProcessGrid(client(task, train=plain_sgd), NODES), INITIAL, num_rounds=1)
    assert "with a training loop of one's own, got" in caplog.text
