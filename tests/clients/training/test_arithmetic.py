"""Products in bfloat16, compiled forward passes: what they change, and what happens without a compiler."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from tests.clients.training.cases import IMAGES, ragged_works, torch_seeded
from torch import Tensor, nn

from hedgerow.clients import LocalWork, Trained, local_sgd, wrap
from hedgerow.clients.training import arithmetic
from hedgerow.clients.training.arithmetic import Arithmetic
from hedgerow.clients.training.sgd import LocalTraining
from hedgerow.sim import SettingsError
from hedgerow.sim.runs.common_settings import StackSettings
from hedgerow.tasks import build_model

BF16 = Arithmetic("bf16")


def _normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(4 * 4 * 4, 10),
    )  # fmt: skip


MODELS = {
    "plain": lambda: torch_seeded(_normalised),
    "factors": lambda: wrap(build_model("cnn4", IMAGES, 10, 0), variant="mud+bkd+aad", ratio=1 / 16),
}


def works(model: nn.Module) -> list[LocalWork]:
    return ragged_works(model, [(8, 8, 5), (8,), ()])


def apart(some: list[Trained], others: list[Trained]) -> float:
    """Return the largest difference of what nodes learnt, of the norm of what they began with."""
    pairs = [(a.state[k], b.state[k]) for a, b in zip(some, others, strict=True) for k in a.state]
    return max(float((a - b).norm() / (a.norm() + 1)) for a, b in pairs if a.is_floating_point())


def same(some: list[Trained], others: list[Trained]) -> bool:
    return all(
        torch.equal(a.state[k], b.state[k]) and a.mean_loss == b.mean_loss
        for a, b in zip(some, others, strict=True)
        for k in a.state
    )


@pytest.fixture(autouse=True)
def _a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test finds out about the compiler is nothing to the next."""
    monkeypatch.setattr(arithmetic, "_usable", [True])
    yield
    arithmetic._compiler.cache_clear()


# Precision


@pytest.mark.parametrize("mode", ["loop", "stack"])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_rounded_and_all_else_is_float32(name: str, mode: str) -> None:
    model = MODELS[name]()
    some = works(model) if mode == "loop" else ragged_works(model, [(8, 8), (8,), ()])
    exact = local_sgd(model, some, mode=mode)
    rounded = local_sgd(model, some, mode=mode, arithmetic=BF16)
    assert 1e-6 < apart(rounded, exact) < 0.2
    for one in rounded:
        assert all(v.dtype == torch.float32 for v in one.state.values() if v.is_floating_point())
    assert same(rounded, local_sgd(model, some, mode=mode, arithmetic=BF16))


def test_a_loss_is_of_float32_outputs_and_an_update_of_float32_factors() -> None:
    seen = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(outputs.dtype)
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    model = MODELS["plain"]()
    for mode in ("loop", "stack"):
        local_sgd(model, ragged_works(model, [(8, 8)]), loss, mode=mode, arithmetic=BF16)
    assert set(seen) == {torch.float32}
    # A base plus an update in bfloat16 would be as coarse as the update's largest entries.
    wrapped = MODELS["factors"]()
    with torch.no_grad(), BF16.autocast(torch.device("cpu")):
        rounded = wrapped.train()._weights()
    with torch.no_grad():
        assert all(torch.equal(weight, rounded[key]) for key, weight in wrapped._weights().items())


def test_who_else_is_asked_changes_no_bit_of_a_rounded_loop() -> None:
    model = MODELS["factors"]()
    some = works(model)
    whole = local_sgd(model, some, arithmetic=BF16, mode="loop")
    assert same(whole, [local_sgd(model, [one], arithmetic=BF16, mode="loop")[0] for one in some])


# Compilation


def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have torch trace the forward pass and run it as it is; return the lengths of batches that it got."""
    lengths: list[int] = []
    program = torch.compile(arithmetic._called, dynamic=False, backend="eager")

    def counted(model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        lengths.append(len(x))
        return program(model, weights, x)

    monkeypatch.setattr(arithmetic, "_compiler", lambda: counted)
    monkeypatch.setattr(arithmetic._compiler, "cache_clear", lambda: None, raising=False)
    return lengths


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.slow), "factors"])
def test_batches_of_one_length_are_compiled_and_all_learn_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    some = works(model)
    plain = local_sgd(model, some, mode="loop")
    lengths = traced(monkeypatch)
    compiled = local_sgd(model, some, mode="loop", arithmetic=Arithmetic(compiled=8))
    assert apart(compiled, plain) < 1e-6
    assert lengths == [8, 8, 8]
    # Under auto too, where nodes would be a stack.
    assert same(local_sgd(model, some, arithmetic=Arithmetic(compiled=8)), compiled)


def test_without_a_compiler_one_line_says_so_and_nodes_train_as_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS["plain"]()
    some = works(model)
    plain = local_sgd(model, some, mode="loop")
    told: list[str] = []
    monkeypatch.setattr(arithmetic, "log", lambda level, text, *values: told.append(text % values))

    def broken(*_: object) -> Tensor:
        raise RuntimeError("\nno C++ compiler\nwas found")

    monkeypatch.setattr(arithmetic, "_compiler", lambda: broken)
    monkeypatch.setattr(arithmetic._compiler, "cache_clear", lambda: None, raising=False)
    for _ in range(2):
        assert same(local_sgd(model, some, mode="loop", arithmetic=Arithmetic(compiled=8)), plain)
    assert told == ["torch.compile does not work here, nodes train as without `compile`: no C++ compiler"]


def test_what_is_wrong_with_a_model_is_not_the_compilers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    traced(monkeypatch)
    model = nn.Sequential(nn.Flatten(), nn.Linear(7, 10))
    (work,) = ragged_works(build_model("logistic", IMAGES, 10, 0), [(4,)])
    work = LocalWork(model.state_dict(), work.x, work.y, work.batches, 0.1)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        local_sgd(model, [work], mode="loop", arithmetic=Arithmetic(compiled=4))
    assert arithmetic._usable == [True]


def test_a_stack_is_not_compiled() -> None:
    model = MODELS["plain"]()
    with pytest.raises(ValueError, match=r"must be 'loop' here, got 'stack': .*a stack is not compiled"):
        local_sgd(model, works(model), mode="stack", arithmetic=Arithmetic(compiled=8))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_compiled_for_this_processor_nodes_learn_the_same(precision: str) -> None:
    """Skipped where there is no compiler."""
    model = MODELS["factors"]()
    some = [LocalWork(w.start, w.x, w.y, [np.arange(8)] * 3, w.lr) for w in works(model)]
    how = Arithmetic(precision, compiled=8)  # type: ignore[arg-type]
    compiled = local_sgd(model, some, mode="loop", arithmetic=how)
    if not arithmetic._usable[0]:
        pytest.skip("torch.compile finds no compiler")
    plain = local_sgd(model, some, mode="loop", arithmetic=Arithmetic(precision))  # type: ignore[arg-type]
    assert apart(compiled, plain) < (1e-5 if precision == "float32" else 0.2)
    assert same(compiled, local_sgd(model, some, mode="loop", arithmetic=how))
    assert same(compiled[:1], local_sgd(model, some[:1], mode="loop", arithmetic=how))


def test_a_runs_settings_say_how_its_nodes_compute() -> None:
    config: dict[str, bool | int | str] = {"batch-size": 16, "precision": "bf16", "compile": True}
    asked = Context(0, 0, {}, RecordDict(), dict(config))
    assert LocalTraining.of(asked, None).arithmetic == Arithmetic("bf16", 16)
    plain = Context(0, 0, {}, RecordDict(), {"batch-size": 16, "compile": False})
    assert LocalTraining.of(plain, None).arithmetic == Arithmetic()


def test_settings_that_ask_for_a_compiled_stack_are_refused() -> None:
    asked = {**StackSettings.defaults(), "precision": "bf16", "compile": True}
    assert StackSettings.read({**asked, "training-mode": "loop"}).compile
    with pytest.raises(
        SettingsError, match=r"compile must be False with training-mode = 'stack'.*, got True"
    ):
        StackSettings.read({**asked, "training-mode": "stack"})
