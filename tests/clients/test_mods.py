"""Mods of a user's own, between a node's training and what becomes of its update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import arrays_size_mod
from flwr.clientapp.typing import ClientAppCallable
from tests.docs.pages import blocks
from torch import Tensor, nn

from hedgerow.clients import (
    BatchClientApp,
    LinearRegression,
    LocalTask,
    NodeState,
    TrainingMod,
    TrainResult,
    UpdateMod,
    ceps_client,
    fedmud_client,
    hsgd_client,
    sd_feel_client,
    similarity_free_client,
)
from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import (
    EF21P,
    Acknowledgements,
    Compressed,
    FedAvg,
    FedMUD,
    Fixed,
    Part,
    SDFeel,
    SimilarityFree,
    TooFewRepliesError,
)
from hedgerow.wire import Call

NODES = 4
MODEL = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
X = torch.linspace(-1, 1, 60).reshape(10, 6)
TASK = LocalTask(MODEL, X, torch.arange(10) % 2, np.arange(10))
SGD = {"learning-rate": 0.1, "batch-size": 5, "seed": 0}


# The mods of the page on mods.
PAGE: dict[str, Any] = {}
for block in blocks(Path(__file__).parents[2] / "docs" / "architecture.md"):
    if block.title in ("clip_and_noise.py", "counted_rounds.py", "local_layers.py"):
        exec(compile(block.text, block.title, "exec"), PAGE)


def clip_and_noise(clip: float, deviation: float) -> Callable[[Tensor, Call], Tensor]:
    return PAGE["ClipAndNoise"](clip, deviation).changed  # type: ignore[no-any-return]


class Recorded(UpdateMod):
    """Notes the norms of what it was given and of what it made of it."""

    def __init__(self, change: Callable[[Tensor, Call], Tensor]) -> None:
        self.change = change
        self.seen: list[tuple[int, float, float]] = []

    def changed(self, update: Tensor, call: Call) -> Tensor:
        before, made = float(update.norm()), self.change(update, call)
        self.seen.append((call.partition_id, before, float(made.norm())))
        return made


def nothing(update: Tensor, call: Call) -> Tensor:
    return torch.zeros_like(update)


def sd_feel(**options: Any) -> SDFeel:
    return SDFeel(num_servers=2, topology="path", clusters=[0, 0, 1, 1], tau1=2, tau2=1, **options)


def similarity_free(**options: Any) -> SimilarityFree:
    return SimilarityFree(
        schedule=Fixed(0.1, num_rounds=3), local_iters=2, batch_size=5, min_available_nodes=NODES, **options
    )


def fedmud(**options: Any) -> FedMUD:
    return FedMUD.for_model(
        MODEL,
        learning_rate=0.1,
        local_epochs=1,
        batch_size=5,
        skip_front=0,
        skip_back=0,
        min_available_nodes=NODES,
        **options,
    )


METHODS: dict[str, tuple[Callable[..., BatchClientApp], Callable[..., Any]]] = {
    "sd-feel": (sd_feel_client, lambda **o: sd_feel(fraction_evaluate=0.0, **o)),
    "fedavg, summed": (
        sd_feel_client,
        lambda **o: FedAvg(
            local_steps=2, min_available_nodes=NODES, fraction_evaluate=0.0, **o, secure_sum=True
        ),
    ),
    "sd-feel, compressed": (
        sd_feel_client,
        lambda **o: Compressed(sd_feel(fraction_evaluate=0.0, **o), "topk(0.5)"),
    ),
    "similarity-free": (similarity_free_client, lambda **o: similarity_free(fraction_evaluate=0.0, **o)),
    "error feedback": (
        similarity_free_client,
        lambda **o: similarity_free(fraction_evaluate=0.0, **o, compressor="topk(0.5)"),
    ),
    "fedmud": (fedmud_client, lambda **o: fedmud(fraction_evaluate=0.0, **o, ratio=0.5)),
    "fedmud, dense": (fedmud_client, lambda **o: fedmud(fraction_evaluate=0.0, **o, variant="dense")),
}


def start() -> ArrayRecord:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return ArrayRecord(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).state_dict())


def learnt(name: str, mods: list[Any], **engine: Any) -> list[np.ndarray]:
    """Return the model after three rounds."""
    client, strategy = METHODS[name]
    app = client(lambda context: TASK, mods=mods)
    with InProcessGrid(app, NODES, **engine) as grid, flower_identity(1):
        result = strategy().start(grid, start(), num_rounds=3, train_config=ConfigRecord(dict(SGD)))
    return [values.numpy() for values in result.arrays.values()]


@pytest.mark.parametrize("name", METHODS)
def test_a_mod_that_leaves_nothing_of_updates_leaves_the_model_where_it_was(name: str) -> None:
    for found, was in zip(learnt(name, [Recorded(nothing)]), start().values(), strict=True):
        np.testing.assert_array_equal(found, was.numpy())
    assert any(
        (found != was.numpy()).any() for found, was in zip(learnt(name, []), start().values(), strict=True)
    )


@pytest.mark.parametrize("name", METHODS)
def test_mods_see_every_nodes_update_once_a_round_in_their_order(name: str) -> None:
    first, second = Recorded(clip_and_noise(0.01, 0.0)), Recorded(clip_and_noise(1.0, 0.01))
    learnt(name, [first, second])
    assert sorted(node for node, _, _ in first.seen) == sorted([*range(NODES)] * 3)
    assert all(after == pytest.approx(min(before, 0.01), rel=1e-4) for _, before, after in first.seen)
    assert [before for _, before, _ in second.seen] == [after for _, _, after in first.seen]
    assert any(before > 0.01 for _, before, _ in first.seen)


@pytest.mark.parametrize("name", METHODS)
def test_with_mods_bits_are_the_same_on_every_engine(name: str) -> None:
    noisy = PAGE["ClipAndNoise"](1.0, 0.01)
    fast, strict = learnt(name, [noisy]), learnt(name, [noisy], strict=True)
    assert [values.tobytes() for values in fast] == [values.tobytes() for values in strict]


@pytest.mark.parametrize("name", METHODS)
def test_a_mod_of_flowers_sees_each_message_and_the_model_is_the_same(name: str) -> None:
    seen: list[str] = []

    def watch(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    # A stack of factored models keeps to float tolerance of a node alone.
    for found, other in zip(learnt(name, [watch]), learnt(name, []), strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-5 if name == "fedmud" else 0, atol=1e-7)
    assert seen.count("train") == 3 * NODES


@pytest.mark.parametrize(
    "spoilt", [lambda update, call: update[:-1], lambda update, call: update / 0, lambda update, call: None]
)
def test_what_a_mod_makes_of_an_update_is_checked(spoilt: Any) -> None:
    with pytest.raises(TooFewRepliesError):
        learnt("sd-feel", [Recorded(spoilt)])


def test_signs_and_chosen_entries_are_not_put_through_mods() -> None:
    app = fedmud_client(lambda context: TASK, mods=[Recorded(nothing)])
    strategy = EF21P.for_model(
        MODEL,
        ratio=0.2,
        skip_front=0,
        skip_back=0,
        learning_rate=0.1,
        local_epochs=1,
        batch_size=5,
        min_available_nodes=NODES,
    )
    with InProcessGrid(app, NODES) as grid, flower_identity(1), pytest.raises(TooFewRepliesError):
        strategy.start(grid, start(), num_rounds=1)


def test_methods_without_updates_refuse_mods_of_them_with_the_reason() -> None:
    problem = LinearRegression(np.eye(3), np.ones(3))
    for client in (
        lambda mods: hsgd_client(lambda context: None, mods=mods),
        lambda mods: ceps_client(lambda context: problem, mods=mods),
    ):
        client([arrays_size_mod])
        with pytest.raises(ValueError, match="Recorded, which changes updates; this ClientApp sends none"):
            client([Recorded(nothing)])


LOCAL = ("2.weight", "2.bias")
WITH_MODELS = [name for name in METHODS if "summed" not in name and "fedmud" not in name]


class Kept(PAGE["LocalLayers"]):  # type: ignore[misc]
    """Notes what each node keeps."""

    def __init__(self) -> None:
        super().__init__(*LOCAL)
        self.kept: dict[int, Any] = {}

    def learnt(self, learnt: TrainResult, call: Call) -> TrainResult:
        found: TrainResult = super().learnt(learnt, call)
        self.kept[call.partition_id] = NodeState.of(call, "local-layers").after
        return found


def trained(
    name: str,
    mod: TrainingMod,
    parts: Sequence[Part] = (),
    rounds: int = 3,
    more: Mapping[str, Any] | None = None,
    **engine: Any,
) -> list[np.ndarray]:
    """Return the model after some rounds on nodes with different data."""
    client, strategy = METHODS[name]
    halves = [LocalTask(MODEL, X, torch.arange(10) % 2, np.arange(10)[i % 2 :: 2]) for i in range(NODES)]
    app = client(lambda context: halves[int(context.node_config["partition-id"])], mods=[mod])
    with InProcessGrid(app, NODES, **engine) as grid, flower_identity(1):
        result = strategy(parts=parts, **(more or {})).start(
            grid, start(), num_rounds=rounds, train_config=ConfigRecord(dict(SGD))
        )
    return [values.numpy() for values in result.arrays.values()]


@pytest.mark.parametrize("name", WITH_MODELS)
def test_local_layers_stay_on_their_nodes_and_the_rest_is_learnt(name: str) -> None:
    mod = Kept()
    model = trained(name, mod, [Acknowledgements()])
    for (key, was), found in zip(start().items(), model, strict=True):
        assert np.array_equal(was.numpy(), found) == (key in LOCAL), key
    for own in mod.kept.values():
        assert own.keys() == set(LOCAL)
        assert all((own[key] != start()[key].numpy()).any() for key in LOCAL)
    assert (mod.kept[0]["2.weight"] != mod.kept[1]["2.weight"]).any()
    again = trained(name, Kept(), [Acknowledgements()], strict=True)
    assert [values.tobytes() for values in model] == [values.tobytes() for values in again]


class Absorbed(Part):
    """Notes the nodes whose replies the rounds absorb, in a class that no round changes."""

    name = "absorbed"
    rounds: list[list[int]] = []  # noqa: RUF012

    def ended(self, run: Any) -> None:
        self.rounds.append(list(run.absorbed))


class Counted(PAGE["CountedRounds"]):  # type: ignore[misc]
    """Records each count that a node reports, and how many rounds had absorbed a reply of it before."""

    def __init__(self) -> None:
        self.reported: list[tuple[float, int]] = []

    def learnt(self, learnt: TrainResult, call: Call) -> TrainResult:
        found: TrainResult = super().learnt(learnt, call)
        before = sum(call.partition_id in nodes for nodes in Absorbed.rounds)
        self.reported.append((found.metrics["rounds"], before))
        return found


def test_node_state_counts_a_reply_that_was_absorbed_and_no_other() -> None:
    mod, faults = Counted(), FaultModel(corrupt="nan", corrupt_rate=0.4)
    Absorbed.rounds.clear()
    # Rounds with fewer than three replies are repeated.
    options = {"min_train_nodes": 3, "quarantine_after": 0, "max_repeats": 20}
    trained("sd-feel", mod, [Acknowledgements(), Absorbed()], 6, options, faults=faults)
    assert len(mod.reported) > 6 * NODES
    assert all(count == 1 + before for count, before in mod.reported)
    assert len({before for _, before in mod.reported}) > 3


def test_node_state_and_secure_sums_are_refused_together() -> None:
    with pytest.raises(
        ValueError, match=r"parts must work without single updates and node state .* got Ackn"
    ):
        FedAvg(min_available_nodes=NODES, secure_sum=True, parts=[Acknowledgements()])


class Broken(TrainingMod):
    """Fails on a node's calls, before or after its training."""

    def __init__(self, node: int, when: str) -> None:
        self.node, self.when = node, when

    def received(self, call: Call) -> Call:
        if self.when == "received" and call.partition_id == self.node:
            raise ValueError("broken")
        return call

    def learnt(self, learnt: TrainResult, call: Call) -> TrainResult:
        if self.when == "learnt" and call.partition_id == self.node:
            raise ValueError("broken")
        return learnt


@pytest.mark.parametrize("when", ["received", "learnt"])
@pytest.mark.parametrize("name", WITH_MODELS)
def test_a_mod_that_fails_at_a_node_costs_that_node_alone(name: str, when: str) -> None:
    broken, plain = trained(name, Broken(2, when)), trained(name, Broken(9, when))
    assert any((one != other).any() for one, other in zip(broken, plain, strict=True))
    assert all(np.isfinite(values).all() for values in broken)


def test_nodes_evaluate_what_their_mods_receive() -> None:
    class Zero(TrainingMod):
        def received(self, call: Call) -> Call:
            zeros = {key: torch.zeros(array.shape) for key, array in call.content["arrays"].items()}
            return replace(call, content=RecordDict({**call.content, "arrays": ArrayRecord(zeros)}))

    app = sd_feel_client(lambda context: TASK, mods=[Zero()])
    with InProcessGrid(app, NODES) as grid, flower_identity(1):
        result = sd_feel().start(grid, start(), num_rounds=2, train_config=ConfigRecord(dict(SGD)))
    losses = [metrics["loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert losses == pytest.approx([np.log(2)] * len(losses))
