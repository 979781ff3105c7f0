"""Mods of a user's own, between a node's training and what becomes of its update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.mod import arrays_size_mod
from flwr.clientapp.typing import ClientAppCallable
from tests.docs.pages import blocks
from tests.strategies.averaging import AVERAGING, CONFIG, NODES, OPTIONS, net, task
from torch import Tensor

from hedgerow.clients import (
    LinearRegression,
    NodeState,
    TrainingMod,
    TrainResult,
    UpdateMod,
    ceps_client,
    hsgd_client,
)
from hedgerow.sim import FaultModel, InProcessGrid, flower_identity
from hedgerow.strategies import (
    Acknowledgements,
    Compressed,
    FedAvg,
    Part,
    TooFewRepliesError,
)
from hedgerow.wire import Call

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


def method(name: str, around: str = "", **options: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a method's client, and how it is made, perhaps with a compressor around it."""
    make, client = AVERAGING[name]
    made = partial(make, **OPTIONS, **options)
    return client, (lambda **more: Compressed(made(**more), around)) if around else made


METHODS = {
    "sd-feel": method("SD-FEEL"),
    "fedavg, summed": method("FedAvg", secure_sum=True),
    "sd-feel, compressed": method("SD-FEEL", "topk(0.5)"),
    "similarity-free": method("fedavg"),
    "error feedback": method("ef-fedavg", compressor="topk(0.5)"),
    "fedmud": method("FedMUD"),
    "fedmud, dense": method("FedMUD's FedAvg"),
}


def start() -> ArrayRecord:
    return ArrayRecord(net().state_dict())


def learnt(
    name: str,
    mods: Sequence[Any],
    rounds: int = 3,
    more: Mapping[str, Any] | None = None,
    **engine: Any,
) -> list[np.ndarray]:
    """Return the model after some rounds."""
    client, make = METHODS[name]
    with InProcessGrid(client(task, mods=mods), NODES, **engine) as grid, flower_identity(1):
        result = make(**(more or {})).start(
            grid, start(), num_rounds=rounds, train_config=ConfigRecord(CONFIG)
        )
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
    make, client = AVERAGING["EF21-P"]
    strategy, app = make(**OPTIONS), client(task, mods=[Recorded(nothing)])
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


@pytest.mark.parametrize("name", WITH_MODELS)
def test_local_layers_stay_on_their_nodes_and_the_rest_is_learnt(name: str) -> None:
    mod = Kept()
    parts = {"parts": [Acknowledgements()]}
    model = learnt(name, [mod], more=parts)
    for (key, was), found in zip(start().items(), model, strict=True):
        assert np.array_equal(was.numpy(), found) == (key in LOCAL), key
    for own in mod.kept.values():
        assert own.keys() == set(LOCAL)
        assert all((own[key] != start()[key].numpy()).any() for key in LOCAL)
    assert (mod.kept[0]["2.weight"] != mod.kept[1]["2.weight"]).any()
    again = learnt(name, [Kept()], more=parts, strict=True)
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
    learnt("sd-feel", [mod], 6, {**options, "parts": [Acknowledgements(), Absorbed()]}, faults=faults)
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
    broken, plain = learnt(name, [Broken(2, when)]), learnt(name, [Broken(9, when)])
    assert any((one != other).any() for one, other in zip(broken, plain, strict=True))
    assert all(np.isfinite(values).all() for values in broken)


def test_nodes_evaluate_what_their_mods_receive() -> None:
    class Zero(TrainingMod):
        def received(self, call: Call) -> Call:
            zeros = {key: torch.zeros(array.shape) for key, array in call.content["arrays"].items()}
            return replace(call, content=RecordDict({**call.content, "arrays": ArrayRecord(zeros)}))

    make, client = AVERAGING["SD-FEEL"]
    with InProcessGrid(client(task, mods=[Zero()]), NODES) as grid, flower_identity(1):
        strategy = make(min_available_nodes=NODES)
        result = strategy.start(grid, start(), num_rounds=2, train_config=ConfigRecord(CONFIG))
    losses = [metrics["loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert losses == pytest.approx([np.log(3)] * len(losses))
