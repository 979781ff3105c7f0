"""Adapters of a pretrained transformer's shapes: bytes, exact and separate means, noise."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn

from hedgerow.clients import LocalTask, fedmud_client
from hedgerow.sim import InProcessGrid, flower_identity
from hedgerow.strategies import FedExLoRA, FedMUD, LoRA, ServerMomentum
from hedgerow.strategies.fedmud import CompressedLayers
from hedgerow.wire import Call, Layout, to_record, to_state_dict

NODES, SAMPLES, DIM, INNER, VOCABULARY = 4, 16, 384, 1536, 50


class Block(nn.Module):
    """The matrices of a layer of MiniLM, without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.intermediate, self.output = nn.Linear(DIM, INNER), nn.Linear(INNER, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.query(x)) * self.value(x)
        return self.norm(x + self.output(torch.relu(self.intermediate(x))))


class Net(nn.Module):
    """All is frozen but the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block = nn.Embedding(VOCABULARY, DIM), Block()
        self.register_buffer("positions", torch.arange(8))
        self.requires_grad_(False)
        self.head = nn.Linear(DIM, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)).mean(1))


NAMES = "*.query,*.value,*.intermediate,*.output"
RANK = 8
# r (m + n) of each matrix, the head, and the share that dense training of them would send.
FACTORS = RANK * (2 * (DIM + DIM) + 2 * (DIM + INNER))
HEAD = 3 * DIM + 3
WHOLE = 2 * DIM * DIM + 2 * DIM * INNER + HEAD
RATIO = (FACTORS + HEAD) / WHOLE

ADAPTERS: dict[str, Callable[..., CompressedLayers[Any]]] = {
    "lora": LoRA.for_model,
    "ffa-lora": partial(LoRA.for_model, freeze=True),
    "fedex-lora": FedExLoRA.for_model,
    "mud": partial(FedMUD.for_model, variant="mud"),
    "aad": partial(FedMUD.for_model, variant="mud+aad"),
}


def run(
    name: str, rounds: int = 1, epochs: int = 1, **options: Any
) -> tuple[CompressedLayers[Any], dict[str, Tensor], list[tuple[RecordDict, RecordDict]]]:
    """Return the strategy, its model, and the last round's messages and replies."""
    stream = np.random.default_rng(1)
    x = torch.as_tensor(stream.integers(0, VOCABULARY, (NODES * SAMPLES, 8)))
    y = torch.as_tensor(stream.integers(0, 3, NODES * SAMPLES))
    model = Net()

    def task(context: Context) -> LocalTask:
        i = int(context.node_config["partition-id"])
        return LocalTask(model, x, y, np.arange(SAMPLES * i, SAMPLES * (i + 1)), initial=Net)

    app = fedmud_client(task, "loop")
    inner = app.batch_handler("train")
    assert inner is not None
    seen = list[tuple[RecordDict, RecordDict]]()

    def train(calls: Sequence[Call]) -> Sequence[RecordDict | Exception]:
        replies = inner(calls)
        seen[:] = [
            (call.content, one)
            for call, one in zip(calls, replies, strict=True)
            if not isinstance(one, Exception)
        ]
        return replies

    app._handlers["train"] = train
    strategy = ADAPTERS[name](
        model, NAMES, ratio=RATIO, init_a=0.05, learning_rate=0.5, local_epochs=epochs, batch_size=4,
        seeded_base=True, min_available_nodes=NODES, fraction_evaluate=0.0, max_update_norm_ratio=0,
        **options,
    )  # fmt: skip
    with flower_identity(1), InProcessGrid(app, NODES) as grid:
        arrays = strategy.start(grid, to_record(Net().state_dict()), num_rounds=rounds).arrays
    assert not strategy.report.rejected
    return strategy, to_state_dict(arrays), seen


def changes(model: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: model[key].double() - value
        for key, value in Net().state_dict().items()
        if value.is_floating_point()
    }


@pytest.mark.parametrize("name", ADAPTERS)
def test_nothing_frozen_travels_and_what_travels_is_counted(name: str) -> None:
    strategy, model, seen = run(name, rounds=2)
    frozen = {key for key in Net().state_dict() if not key.startswith("head.")}
    named = {layer.key for layer in strategy.plan.layers}
    assert len(named) == 4
    for sent, reply in seen:
        keys = {
            key for content in (sent, reply) for record in content.array_records.values() for key in record
        }
        assert not {key for key in keys if key in frozen}
    assert {key for key, change in changes(model).items() if change.any()} == {
        *named,
        "head.weight",
        "head.bias",
    }
    up = strategy.ledger.total("client->server")
    assert up.nominal_bits == 2 * NODES * strategy.uplink_bits
    sent = strategy.plan.count + HEAD
    assert strategy.uplink_bits == 32 * sent
    assert sent == pytest.approx(FACTORS + HEAD, rel=0.05)
    # Headers of arrays, and names; 1.05 is the most that may travel beside the factors.
    assert up.nominal_bits / 8 <= up.payload_bytes <= 1.01 * up.nominal_bits / 8 + 2 * NODES * 4096
    assert up.payload_bytes <= 1.05 * 2 * NODES * 4 * sent


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_mean_update_is_exact_but_for_separate_means(name: str) -> None:
    strategy, model, seen = run(name, epochs=3)
    plan, layers = strategy.plan, strategy.plan.layers
    factors = Layout(tuple(plan.shapes), tuple(plan.shapes.values()), ("float32",) * len(plan.shapes))
    updates = list[dict[str, Tensor]]()
    for _, reply in seen:
        values = to_state_dict(reply.array_records["arrays"])
        trained = {key: values[key].double() for key in factors.keys}
        updates.append(plan.deltas(trained, {k: v.double() for k, v in plan.frozen(0, 0).items()}))
    found = changes(model)
    exact = {layer.key: sum(update[layer.key] for update in updates) / NODES for layer in layers}
    missed = sum(float((found[key] - value).norm() ** 2) for key, value in exact.items()) ** 0.5
    error = missed / sum(float(value.norm() ** 2) for value in exact.values()) ** 0.5
    if name in ("lora", "mud"):
        assert error > 1e-2
    else:
        assert error < 1e-6


def test_noise_on_factors_enters_an_exact_update_once_and_is_multiplied_in_separate_ones() -> None:
    options = {"ratio": RATIO, "init_a": 0.05, "min_available_nodes": NODES}
    plans = {name: ADAPTERS[name](Net(), NAMES, **options).plan for name in ("aad", "lora")}
    stream = torch.Generator().manual_seed(0)
    sizes: dict[str, list[float]] = {}
    for name, plan in plans.items():
        frozen = {key: value.double() for key, value in plan.frozen(0, 0).items()}
        start = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in plan.shapes.items()}
        if name == "lora":  # A after some rounds: of the size at which it was drawn.
            start |= {key: value.double() for key, value in plan.init(0, 0).items()}
        before = plan.deltas(start, frozen)
        for sigma in (0.05, 0.1, 0.2):
            noisy = {
                k: v + sigma * torch.randn(v.shape, generator=stream, dtype=v.dtype) for k, v in start.items()
            }
            after = plan.deltas(noisy, frozen)
            moved = sum(float((after[key] - value).norm() ** 2) for key, value in before.items()) ** 0.5
            sizes.setdefault(name, []).append(moved / sigma)
    aad, lora = sizes["aad"], sizes["lora"]
    assert max(aad) / min(aad) < 1.05  # in proportion to sigma
    assert lora[2] > 2 * lora[0]  # and to its square, where both factors carry noise


@pytest.mark.parametrize("name", ["lora", "ffa-lora"])
def test_adapters_are_summed_in_secret_without_the_base_on_the_way(name: str) -> None:
    plain, summed = (run(name, rounds=2, weighting="uniform", secure_sum=secret) for secret in (False, True))
    for key, value in plain[1].items():
        torch.testing.assert_close(summed[1][key], value, rtol=0, atol=1e-5)
    down = summed[0].ledger.total("server->client").payload_bytes
    assert down < 4 * plain[0].plan.dense_count


def test_what_moves_its_base_or_has_one_that_nodes_cannot_draw_is_summed_only_with_it() -> None:
    for name, seeded in (("aad", True), ("lora", False)):
        with pytest.raises(ValueError, match="sync must be 'dense' with secure_sum"):
            ADAPTERS[name](
                Net(), NAMES, ratio=RATIO, min_available_nodes=NODES, secure_sum=True, seeded_base=seeded
            )


@pytest.mark.parametrize(("option", "value"), [("buffer", 2), ("server_step", ServerMomentum())])
def test_a_residual_of_a_round_has_no_buffer_and_no_server_step(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must be None .* the residual belongs to the mean of one"):
        ADAPTERS["fedex-lora"](Net(), NAMES, ratio=RATIO, min_available_nodes=NODES, **{option: value})
